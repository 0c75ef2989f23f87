"""The gates with which measurements that depend on the host pause its compilations."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from farm.devices import quiet as gates
from farm.devices.quiet import COMPILING, QUIET, HostGate, free_slot, quiet


def test_a_gate_is_held_by_many_or_by_one(tmp_path: Path) -> None:
    with closing(HostGate("a", tmp_path)) as first, closing(HostGate("a", tmp_path)) as second:
        first.hold()
        second.hold()
        assert not first.hold_alone()
        second.release()
        assert first.hold_alone()
        first.release()
        with second.alone() as succeeded:
            assert succeeded
            assert not first.hold_alone()
        assert first.hold_alone()


def test_a_measurement_waits_until_compilations_have_paused(tmp_path: Path) -> None:
    compiling = HostGate(COMPILING, tmp_path)
    compiling.hold()
    began = threading.Event()

    def measure() -> None:
        with quiet(tmp_path):
            began.set()

    thread = threading.Thread(target=measure)
    thread.start()
    with closing(HostGate(QUIET, tmp_path)) as gate:
        while gate.hold_alone():
            gate.release()
            time.sleep(0.001)
        assert not began.is_set()
        compiling.close()
        thread.join()
        assert began.is_set()
        assert gate.hold_alone(), "the measurement has ended"


def test_a_measurement_begins_beside_a_compilation_that_does_not_pause(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(gates, "PAUSED_WITHIN_S", 0.05)
    with closing(HostGate(COMPILING, tmp_path)) as compiling:
        compiling.hold()
        with quiet(tmp_path):
            pass


def test_a_folder_that_cannot_be_used_stops_no_measurement(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with quiet(file):
        pass
    assert free_slot(file, 1) is None


def test_the_places_of_a_host_are_free_again_after_the_end_of_a_process(tmp_path: Path) -> None:
    code = (
        "import sys; from farm.devices.quiet import free_slot; slot = free_slot(sys.argv[1], 2); "
        "print(slot is not None, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"True\n"
        mine = free_slot(tmp_path, 2)
        assert mine is not None
        assert free_slot(tmp_path, 2) is None
        process.kill()
        process.wait()
        other = free_slot(tmp_path, 2)
        assert other is not None
    mine.close()
    other.close()
