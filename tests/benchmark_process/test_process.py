"""A benchmark process and its parent, on simulated cards: real processes, no torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from farm.addons.memory.requests import (
    PlannedStepRequest,
    StepCaptureRequest,
    WireRequest,
)
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import FingerprintRequest, MeasureRequest, SubjectRequest
from farm.devices.lock import host_lock
from farm.errors import Unmeasurable
from farm.settings import START_TIMEOUT_S, settings
from farm.types.fields import content_id
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.verification import Verification

CARD = "SIM-here-0"
PROTOCOL, STOPPING = Protocol(), Stopping()


def subject(kind: str = "operator", **parameters: Any) -> Subject:
    spec = {"operator": "torch.nn.ReLU", "parameters": parameters}
    return Subject(kind, content_id(spec), spec)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def process() -> Iterator[BenchmarkProcess]:
    """One for all tests; after a test that ends it, the next test starts it again."""
    with BenchmarkProcess(CARD, {"FARM_SIMULATED_CARDS": "1", "FARM_HOST": "here"}) as made:
        yield made


@pytest.fixture
def own_process() -> Iterator[BenchmarkProcess]:
    with BenchmarkProcess(CARD, {"FARM_SIMULATED_CARDS": "1", "FARM_HOST": "here"}) as made:
        yield made


def gone(pid: int, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_a_reading_comes_back_with_its_phases_card_and_software(process: BenchmarkProcess) -> None:
    phases: list[str] = []
    answer = process.measure(
        MeasureRequest(subject(), PROTOCOL, STOPPING),
        on_phase=lambda phase, _: phases.append(phase),
    )
    assert phases == ["rebuild", "warm-up", "window"]
    assert answer.reading.flags == ("simulated",)
    assert answer.reading.power_source == "simulated"
    assert answer.card.id == CARD
    assert answer.software.torch == "simulated"


def test_two_cards_agree_on_a_subject(process: BenchmarkProcess) -> None:
    with BenchmarkProcess(
        "SIM-here-1", {"FARM_SIMULATED_CARDS": "2", "FARM_HOST": "here"}
    ) as other:
        first = process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING)).reading
        second = other.measure(MeasureRequest(subject(), PROTOCOL, STOPPING)).reading
    assert (first.time_us, first.energy_mj) == (second.time_us, second.energy_mj)


def test_a_whole_is_the_sum_of_its_predicted_tuples(process: BenchmarkProcess) -> None:
    parts = [subject(number=number) for number in range(3)]
    sum_us = sum(
        2 * process.measure(MeasureRequest(part, PROTOCOL, STOPPING)).reading.time_us.value
        for part in parts
    )
    answer = process.measure(
        MeasureRequest(
            subject("variant"), PROTOCOL, STOPPING, predicted={part.id: 2 for part in parts}
        ),
        verify=True,
    )
    assert answer.reading.time_us.value == pytest.approx(sum_us)
    assert answer.verification is not None
    assert answer.verification == Verification(
        launch="graph", matches=True, differences=(), simulated=True
    )


@pytest.mark.parametrize(("behaviour", "reason"), [("oom", "out_of_memory"), ("raise", "raised")])
def test_what_the_card_refuses_is_a_reason_and_the_process_goes_on(
    process: BenchmarkProcess, behaviour: str, reason: str
) -> None:
    process.wait_ready()
    starts = process.starts
    with pytest.raises(Unmeasurable) as caught:
        process.measure(MeasureRequest(subject(simulate=behaviour), PROTOCOL, STOPPING))
    assert caught.value.reason == reason
    process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))
    assert process.starts == starts


@pytest.mark.parametrize("behaviour", ["crash", "exit"])
def test_a_crash_ends_the_process_and_the_next_item_gets_a_fresh_one(
    process: BenchmarkProcess, behaviour: str
) -> None:
    process.wait_ready()
    starts = process.starts
    with pytest.raises(Unmeasurable) as caught:
        process.measure(MeasureRequest(subject(simulate=behaviour), PROTOCOL, STOPPING))
    assert caught.value.reason == "crashed"
    assert ("SIGKILL" if behaviour == "crash" else "exit code 3") in caught.value.message
    assert not process.alive
    process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))
    assert process.starts == starts + 1


def test_a_card_without_slow_memory_runs_no_planned_step(process: BenchmarkProcess) -> None:
    about = subject("variant"), PROTOCOL
    for request in (
        StepCaptureRequest(*about),
        WireRequest(*about),
        PlannedStepRequest(*about, calls=(), plans=()),
    ):
        with pytest.raises(Unmeasurable, match="A simulated card cannot"):
            process.call(request)
    process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))


@dataclass(frozen=True)
class UnknownRequest(SubjectRequest[dict[str, Any]]):
    """A request that an add-on of another host answers."""

    name, answer, doing = "unknown", dict[str, Any], "answer"


def test_a_request_of_an_add_on_that_the_host_lacks_has_a_reason(process: BenchmarkProcess) -> None:
    with pytest.raises(Unmeasurable, match="no add-on that answers the request 'unknown'") as error:
        process.call(UnknownRequest(subject(), PROTOCOL))
    assert error.value.reason == "not_available"
    process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))


def test_slow_readings_of_a_host_take_turns(own_process: BenchmarkProcess) -> None:
    placed = Protocol(placement="in0")
    with host_lock("slow-memory", settings().lock_dir, 10.0):
        assert (
            own_process.measure(
                MeasureRequest(subject(), Protocol(), Stopping()), timeout_s=10.0
            ).reading.time_us.value
            > 0
        )
        with pytest.raises(Unmeasurable, match=r"slow-memory was in use for 0\.1 s"):
            own_process.measure(MeasureRequest(subject(), placed, Stopping()), timeout_s=0.1)
    assert (
        own_process.measure(
            MeasureRequest(subject(), placed, Stopping()), timeout_s=10.0
        ).reading.time_us.value
        > 0
    )


def test_a_crash_quotes_nothing_that_an_item_before_it_wrote(own_process: BenchmarkProcess) -> None:
    own_process.measure(MeasureRequest(subject(simulate="print"), PROTOCOL, STOPPING))
    deadline = time.monotonic() + 5
    while (
        not any("{not json" in line for line in own_process._complaints)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    with pytest.raises(Unmeasurable) as caught:
        own_process.measure(MeasureRequest(subject(simulate="crash"), PROTOCOL, STOPPING))
    assert "{not json" not in caught.value.message


@pytest.fixture
def verifying() -> Iterator[BenchmarkProcess]:
    env = {"FARM_SIMULATED_CARDS": "1", "FARM_HOST": "here"}
    with BenchmarkProcess(CARD, env, verify_apart=True) as made:
        yield made


def test_a_variant_is_verified_in_a_process_that_stands_by_and_ends(
    verifying: BenchmarkProcess,
) -> None:
    verifying.wait_ready()
    assert verifying._verifier is not None
    measures, verifies = verifying.pid, verifying._verifier.pid
    assert verifies is not None
    phases: list[str] = []
    whole = subject("variant")
    answer = verifying.measure(
        MeasureRequest(whole, PROTOCOL, STOPPING, predicted={"a": 1}),
        verify=True,
        on_phase=lambda one, _: phases.append(one),
    )
    assert phases == ["verify", "rebuild", "warm-up", "window"]
    assert answer.verification is not None
    assert gone(verifies)
    assert verifying.pid == measures
    stands_by = verifying._verifier.pid
    assert stands_by not in (None, verifies)
    verifying.close()
    assert gone(stands_by)


def test_the_verifier_outlives_a_thread_that_waited_for_both(verifying: BenchmarkProcess) -> None:
    waiting = threading.Thread(target=verifying.wait_ready)
    waiting.start()
    waiting.join()
    time.sleep(0.2)
    assert verifying._verifier is not None
    assert verifying.alive
    assert verifying._verifier.alive


def test_a_variant_that_cannot_be_verified_apart_is_measured_and_says_so(
    verifying: BenchmarkProcess,
) -> None:
    verifying.wait_ready()
    assert verifying._verifier is not None
    # as if the card admitted one process only
    verifying._verifier._env["FARM_SIMULATED_CARDS"] = "0"
    verifying._verifier.close()
    answer = verifying.measure(
        MeasureRequest(subject("variant"), PROTOCOL, STOPPING, predicted={"a": 1}), verify=True
    )
    assert answer.verification is None
    assert answer.reading.details.missing.get("verification").startswith("not_available: ")


def test_a_verifier_that_was_lost_is_started_again(verifying: BenchmarkProcess) -> None:
    verifying.wait_ready()
    assert verifying._verifier is not None
    assert verifying._verifier.pid is not None
    os.kill(verifying._verifier.pid, signal.SIGKILL)
    assert gone(verifying._verifier.pid)
    assert (
        verifying.measure(
            MeasureRequest(subject("variant"), PROTOCOL, STOPPING, predicted={}), verify=True
        ).verification
        is not None
    )


def test_a_hang_is_ended_after_its_time(process: BenchmarkProcess) -> None:
    process.wait_ready()
    pid = process.pid
    assert pid is not None
    with pytest.raises(Unmeasurable) as caught:
        process.measure(MeasureRequest(subject(simulate="hang"), PROTOCOL, STOPPING), timeout_s=0.3)
    assert caught.value.reason == "hung"
    assert gone(pid)
    process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))


def test_killed_from_outside_between_items_it_is_started_again(process: BenchmarkProcess) -> None:
    process.wait_ready()
    starts = process.starts
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    while process.alive:
        time.sleep(0.01)
    process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))
    assert process.starts == starts + 1


def test_a_poisoned_context_is_answered_and_not_used_again(process: BenchmarkProcess) -> None:
    with pytest.raises(Unmeasurable) as caught:
        process.measure(MeasureRequest(subject(simulate="poison"), PROTOCOL, STOPPING))
    assert caught.value.reason == "raised"
    assert not process.alive


def test_what_a_model_prints_is_no_answer(own_process: BenchmarkProcess) -> None:
    own_process.measure(MeasureRequest(subject(simulate="print"), PROTOCOL, STOPPING))
    deadline = time.monotonic() + 30
    while (
        not any("{not json" in line for line in own_process._complaints)
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    assert any("{not json" in line for line in own_process._complaints)


def test_an_exception_in_the_parent_ends_the_half_done_item(process: BenchmarkProcess) -> None:
    def interrupt(phase: str, details: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.measure(
            MeasureRequest(subject(simulate="hang"), PROTOCOL, STOPPING), on_phase=interrupt
        )
    assert not process.alive


def test_a_card_that_is_not_there_is_said_so() -> None:
    with BenchmarkProcess("GPU-nowhere") as process, pytest.raises(Unmeasurable) as caught:
        process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))
    assert caught.value.reason == "not_available"
    assert "no card 'GPU-nowhere'" in caught.value.message


def start_bare() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "farm.benchmark_process.server", "--card", CARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "FARM_SIMULATED_CARDS": "1", "FARM_HOST": "here"},
    )


def request(item_id: int, chosen: Subject) -> bytes:
    data = {
        "request": "measure",
        "id": item_id,
        "subject": chosen.to_json(),
        "protocol": PROTOCOL.to_json(),
        "stopping": STOPPING.to_json(),
    }
    return json.dumps(data).encode() + b"\n"


def test_garbage_is_refused_line_by_line_and_does_no_harm() -> None:
    child = start_bare()
    assert child.stdin is not None
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["event"] == "ready"
    garbage = [
        b"\x00\xff\xfe\n",
        b"{\n",
        b"[]\n",
        b'{"request": "measure"}\n',
        b"[" * 100_000 + b"\n",
        b"1e999\n",
    ]
    for line in garbage:
        child.stdin.write(line)
    child.stdin.write(request(1, subject()).replace(b'"launch"', b'"lunch"'))
    child.stdin.write(request(2, subject()))
    child.stdin.flush()
    events = []
    while not events or events[-1]["event"] != "answer":
        events.append(json.loads(child.stdout.readline()))
    assert [event["event"] for event in events].count("refused") == len(garbage)
    assert [event["reason"] for event in events if event["event"] == "unmeasurable"] == ["rejected"]
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()


def test_the_end_of_the_input_ends_it_in_the_middle_of_a_measurement() -> None:
    child = start_bare()
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(request(1, subject(simulate="hang")))
    child.stdin.flush()
    while json.loads(child.stdout.readline())["event"] != "phase":
        pass
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()


def test_it_dies_with_its_parent() -> None:
    program = (
        "import os, sys, time\n"
        "from farm.benchmark_process.client import BenchmarkProcess\n"
        f"process = BenchmarkProcess({CARD!r}, "
        f"{{'FARM_SIMULATED_CARDS': '1', 'FARM_HOST': 'here'}})\n"
        "process.wait_ready()\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert gone(child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_the_parent_and_a_simulated_card_never_import_torch(process: BenchmarkProcess) -> None:
    process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))
    with open(f"/proc/{process.pid}/maps") as maps:
        assert "libtorch" not in maps.read()
    modules = "farm.benchmark_process.client, farm.devices.host, farm.types.intervals"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("slow_start", [True, False])
def test_each_time_limit_has_its_own_next_step(slow_start: bool) -> None:
    """Only the limit of an item is a setting."""
    environment = {"FARM_SIMULATED_CARDS": "1", "FARM_HOST": "here"}
    limit_s = 0.0 if slow_start else START_TIMEOUT_S
    with BenchmarkProcess(CARD, environment, start_timeout_s=limit_s) as process:
        if slow_start:
            with pytest.raises(Unmeasurable, match="did not get ready within") as start:
                process.wait_ready()
            assert "FARM_ITEM_TIMEOUT_S" not in start.value.next_step
            return
        with pytest.raises(Unmeasurable, match="did not take the card's fingerprint") as late:
            process.call(FingerprintRequest(), timeout_s=0.0)
        assert "other programs that use the card" in late.value.next_step
        with pytest.raises(Unmeasurable, match="did not measure the item") as item:
            process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING), timeout_s=0.0)
        assert "FARM_ITEM_TIMEOUT_S" in item.value.next_step


def test_a_request_that_the_process_cannot_read_is_rejected_at_once(
    own_process: BenchmarkProcess,
) -> None:
    own_process.wait_ready()
    own_process._ids = iter(["not a number"])  # type: ignore[assignment]
    with pytest.raises(Unmeasurable, match="request has no id") as no:
        own_process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING))
    assert no.value.reason == "rejected"
    own_process._ids = itertools.count(1)
    assert own_process.measure(MeasureRequest(subject(), PROTOCOL, STOPPING)).reading.flags == (
        "simulated",
    )
