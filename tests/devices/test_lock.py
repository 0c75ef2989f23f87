"""One holder per card, across processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farm.devices.lock import CardLock
from farm.errors import CardBusy

CARD = "GPU-1234"
HOLDER = """
import sys, time
from farm.devices.lock import CardLock
CardLock(sys.argv[1], sys.argv[2]).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_worker_refuses_and_names_the_first_until_it_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, CARD, str(tmp_path / "locks")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(CardBusy, match=f"{CARD} is taken by process {holder.pid} on ") as caught:
        CardLock(CARD, tmp_path / "locks").acquire()
    assert caught.value.exit_code == 4
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with CardLock(CARD, tmp_path / "locks") as lock:
        assert lock.held


def test_other_cards_are_free(tmp_path: Path) -> None:
    with CardLock(CARD, tmp_path), CardLock("GPU-5678", tmp_path) as other:
        assert other.held


def test_released_it_can_be_taken_again_and_names_nobody(tmp_path: Path) -> None:
    lock = CardLock(CARD, tmp_path).acquire()
    lock.release()
    assert lock.path.read_text() == ""
    with CardLock(CARD, tmp_path):
        pass


def test_the_directory_is_for_all_users(tmp_path: Path) -> None:
    with CardLock(CARD, tmp_path / "locks") as lock:
        assert lock.path.parent.stat().st_mode & 0o1777 == 0o1777
        assert lock.path.stat().st_mode & 0o666 == 0o666


def test_no_link_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"{CARD}.lock").symlink_to(victim)
    with pytest.raises(CardBusy, match="cannot be opened"):
        CardLock(CARD, tmp_path).acquire()
    assert victim.read_text() == "precious"


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CardBusy, match="cannot be opened") as caught:
        CardLock(CARD, tmp_path / "file").acquire()
    assert "FARM_LOCK_DIR" in caught.value.next_step
