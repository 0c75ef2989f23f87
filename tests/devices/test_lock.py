"""One holder per card, across processes."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from farm.devices.lock import CardLock, host_lock, registered_processes
from farm.devices.simulated import simulated_cards
from farm.errors import CardBusy, SettingsError
from farm.settings import settings

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
        [sys.executable, "-c", HOLDER, CARD, str(tmp_path / "locks")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(
        CardBusy, match=rf"{CARD} is in use by `python\S* -c` \(process {holder.pid} on "
    ) as caught:
        CardLock(CARD, tmp_path / "locks").acquire()
    assert caught.value.exit_code == 4
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with CardLock(CARD, tmp_path / "locks") as lock:
        assert lock.held


@pytest.mark.parametrize(
    "words",
    [
        ["python", "/opt/bin/farm", "run", "resnet18"],
        ["python3.11", "-m", "cli", "run", "resnet18"],
    ],
)
def test_who_holds_a_card_for_a_command_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words
) -> None:
    monkeypatch.setattr(psutil.Process, "cmdline", lambda process: words)
    with CardLock(CARD, tmp_path, started_by=os.getppid()):
        told = rf"in use by `farm run resnet18` \(process {os.getppid()} on "
        with pytest.raises(CardBusy, match=told):
            CardLock(CARD, tmp_path).acquire()


@pytest.mark.parametrize(("cards", "offered"), [("1", False), ("2", True)])
def test_another_card_is_offered_where_there_is_one(
    tmp_path: Path, monkeypatch, cards, offered
) -> None:
    monkeypatch.setenv("FARM_SIMULATED_CARDS", cards)
    settings.cache_clear()
    card = simulated_cards(settings())[0].id
    with CardLock(card, tmp_path), pytest.raises(CardBusy) as caught:
        CardLock(card, tmp_path).acquire()
    assert ("--card" in caught.value.next_step) == offered


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
    with pytest.raises(SettingsError, match=f"{CARD} cannot be locked"):
        CardLock(CARD, tmp_path).acquire()
    assert victim.read_text() == "precious"


def test_a_pipe_in_its_place_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{CARD}.lock")
    with pytest.raises(
        SettingsError, match=rf"{CARD} cannot be locked: .*{CARD}\.lock is not a regular"
    ) as caught:
        CardLock(CARD, tmp_path).acquire()
    assert caught.value.next_step.startswith("Delete ")


@pytest.mark.parametrize("written", ["as it was", '{"user": "mallory"}', "[" * 100_000, "\x1b[31m"])
def test_who_holds_a_card_is_named_as_the_system_knows_the_user(tmp_path: Path, written) -> None:
    lock, user = CardLock(CARD, tmp_path), os.getuid()
    reader, writer = os.pipe()
    if (holder := os.fork()) == 0:
        lock.acquire()
        if user == 0:
            os.setuid(pwd.getpwnam("nobody").pw_uid)
        os.write(writer, b"held")
        signal.pause()
    try:
        assert os.read(reader, 4) == b"held"
        if written != "as it was":
            lock.path.write_text(written)
        with pytest.raises(CardBusy) as caught:
            CardLock(CARD, tmp_path).acquire()
        name = "nobody" if user == 0 else pwd.getpwuid(user).pw_name
        assert caught.value.message.endswith(f", user {name}.")
        assert ("another process" in caught.value.message) == (written != "as it was")
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(reader)
        os.close(writer)


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=f"{CARD} cannot be locked") as caught:
        CardLock(CARD, tmp_path / "file").acquire()
    assert "FARM_LOCK_DIR" in caught.value.next_step


def test_what_the_cards_of_a_host_share_is_used_by_one_at_a_time(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with host_lock("slow-memory", tmp_path, 10.0):
            order.append("second")

    waiting = threading.Thread(target=second)
    with host_lock("slow-memory", tmp_path, 10.0):
        waiting.start()
        waiting.join(0.1)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_no_turn_is_taken_where_there_can_be_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SettingsError, match="memory cannot be locked"),
        host_lock("slow-memory", tmp_path / "file", 0.0),
    ):
        pass


def test_who_waits_too_long_for_a_turn_is_told_who_had_it(tmp_path: Path) -> None:
    with (
        host_lock("slow-memory", tmp_path, 0.0),
        pytest.raises(CardBusy, match=rf"slow-memory .* 0.05 s, last by .*process {os.getpid()} "),
        host_lock("slow-memory", tmp_path, 0.05),
    ):
        pass


REGISTERED = """
import sys, time
from farm.devices.lock import register_process
register_process(sys.argv[1], {77, 78}, sys.argv[2])
print("registered", flush=True)
time.sleep(60)
"""


def test_the_processes_of_the_farm_on_the_cards_are_known_while_they_live(tmp_path: Path) -> None:
    assert registered_processes(tmp_path / "locks") == frozenset()
    command = [sys.executable, "-c", REGISTERED, CARD, str(tmp_path / "locks")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "registered\n"
    assert registered_processes(tmp_path / "locks") == {77, 78}
    process.kill()
    process.wait()
    assert registered_processes(tmp_path / "locks") == frozenset()
    assert list((tmp_path / "locks").iterdir()) == []
