"""Each use of a folder that other users can change: what they put there changes nothing else and
stops nothing.

The fixture `victim` fails if a file of root has changed, the fixture `shared` if the farm waits for
ever."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from farm.addons.pages.page import write_whole
from farm.benchmark_process.group import BenchmarkGroup
from farm.devices.lock import CardLock, host_lock, register_process, registered_processes
from farm.devices.simulated import SOFTWARE
from farm.errors import CardBusy, DatabaseUnreachable, SettingsError, UsageError
from farm.jobs.spool import Spool
from farm.operators import compiler
from farm.settings import settings
from farm.store.database import Database
from tasks.doctor.host import host_checks
from tasks.flower import _check_folder
from tasks.heartbeats import HostHeartbeat
from tasks.servers import BrokerServer
from tasks.watchdog import Pulse
from tests.other_user import (
    IN_PLACE_OF_A_FILE,
    PLANTED,
    USER,
    Victim,
    as_other_user,
    needs_root,
    plant,
    running_as_other_user,
    shared,
    victim,
)
from tests.planned import READING, claim, items_of, plan, register

__all__ = ["shared", "victim"]  # fixtures
pytestmark = needs_root

CARD = "GPU-1234"


@pytest.fixture
def use(monkeypatch):
    """Set settings of this test."""

    def change(**values: object):
        for name, value in values.items():
            monkeypatch.setenv(f"FARM_{name.upper()}", str(value))
        settings.cache_clear()
        return settings()

    return change


def problems(name: str) -> str:
    return "\n".join(
        check.message
        for check in host_checks(settings())
        if check.name == name and check.level != "ok"
    )


# ---- the lock folder


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("below", ["", "locks"])
def test_the_lock_folder_is_not_followed_through_a_link(
    shared: Path, victim: Victim, use, kind: str, below: str
):
    if kind == "folder":
        pytest.skip("another user's folder can be the lock folder")
    locks = shared / "farm-card-locks" / below
    plant(kind, shared / "farm-card-locks", victim)
    with pytest.raises(
        SettingsError, match=f"The card {CARD} cannot be locked: .*farm-card-locks"
    ) as caught:
        CardLock(CARD, locks).acquire()
    assert caught.value.next_step
    with pytest.raises(SettingsError), host_lock("slow-memory", locks, 0.1):
        pass
    register_process(CARD, {1}, locks)
    assert registered_processes(locks) == frozenset()
    use(lock_dir=locks)
    assert "farm-card-locks" in problems("lock folder")


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o755])
def test_the_lock_folder_of_another_user_is_used_as_it_is(shared: Path, mode: int) -> None:
    locks = shared / "locks"

    def act() -> None:
        locks.mkdir()
        locks.chmod(mode)

    as_other_user(act)
    with CardLock(CARD, locks), pytest.raises(CardBusy):
        CardLock(CARD, locks).acquire()
    status = locks.stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (mode, USER.pw_uid)


# ---- lock files


@pytest.mark.parametrize("kind", IN_PLACE_OF_A_FILE)
def test_what_is_no_file_at_the_name_of_a_lock_is_refused_and_named(
    shared: Path, victim: Victim, use, kind: str
):
    plant(kind, shared / f"{CARD}.lock", victim)
    plant(kind, shared / "slow-memory.lock", victim)
    with pytest.raises(
        SettingsError, match=rf"cannot be locked: {shared}/{CARD}\.lock is "
    ) as caught:
        CardLock(CARD, shared).acquire()
    assert caught.value.next_step.startswith(f"Delete {shared}/{CARD}.lock")
    with pytest.raises(SettingsError), host_lock("slow-memory", shared, 0.1):
        pass
    use(lock_dir=shared)
    assert f"{CARD}.lock cannot be a lock" in problems("locks")


def test_a_lock_file_of_another_user_is_a_lock_for_both(shared: Path) -> None:
    as_other_user(lambda: CardLock(CARD, shared).acquire())
    path = shared / f"{CARD}.lock"
    assert path.stat().st_uid == USER.pw_uid
    with CardLock(CARD, shared):

        def act() -> None:
            with pytest.raises(CardBusy, match=f"process {os.getppid()} on .*, user root"):
                CardLock(CARD, shared).acquire()

        as_other_user(act)
    with (
        running_as_other_user(lambda: CardLock(CARD, shared).acquire()) as pid,
        pytest.raises(CardBusy, match=rf"process {pid} on .*, user nobody\."),
    ):
        CardLock(CARD, shared).acquire()
    assert path.stat().st_uid == USER.pw_uid


@pytest.mark.parametrize("mode", [0o666, 0o600, 0o000])
def test_a_huge_lock_file_of_another_user_is_a_lock(shared: Path, use, mode: int) -> None:
    def act() -> None:
        with (shared / f"{CARD}.lock").open("wb") as file:
            file.write(b"[" * 100_000)
            file.truncate(1 << 40)
        (shared / f"{CARD}.lock").chmod(mode)

    as_other_user(act)
    use(lock_dir=shared)
    assert problems("locks") == ""
    with CardLock(CARD, shared), pytest.raises(CardBusy, match=f"process {os.getpid()} on"):
        CardLock(CARD, shared).acquire()


def locked(path: Path):
    """A program that is not of the farm holds a lock."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR if path.exists() else os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


LEFT = '{"pid": 1, "host": "h", "started_by": 1, "command": "farm run", "since": "now"}'


@pytest.mark.parametrize(
    "left", ["", LEFT], ids=["empty", "of a process of the farm that has ended"]
)
def test_a_foreign_holder_of_a_lock_is_named_and_no_one_else(shared: Path, use, left: str) -> None:
    path = shared / "slow-memory.lock"
    path.write_text(left)
    path.chmod(0o666)
    use(lock_dir=shared)
    with running_as_other_user(lambda: locked(path)) as pid:
        with (
            pytest.raises(
                CardBusy, match=rf"last by another process \({pid}, .*\), user nobody\."
            ) as caught,
            host_lock("slow-memory", shared, 0.05),
        ):
            pass
        assert "farm run" not in caught.value.message
        assert f"another process ({pid}" in problems("locks")
        assert "user nobody holds the lock" in problems("locks")
    with host_lock("slow-memory", shared, 0.05):
        assert problems("locks") == "", "a process of the farm holds it"


def test_a_lock_file_that_was_deleted_is_not_taken_for_the_lock(shared: Path) -> None:
    """Its owner deletes it while another process waits for it; a third one could lock a new
    file.
    """
    import threading

    with CardLock(CARD, shared) as first:
        waits = threading.Thread(target=lambda: results.append(_held_after(shared)))
        results: list[bool] = []
        waits.start()
        first.path.unlink()
    waits.join()
    assert results == [True]


def _held_after(shared: Path) -> bool:
    with host_lock(CARD, shared, 10.0):
        return (shared / f"{CARD}.lock").exists()


# ---- the ids of the farm's processes on a card


@pytest.mark.parametrize("kind", IN_PLACE_OF_A_FILE)
def test_what_is_no_file_among_the_ids_is_left_out(shared: Path, victim: Victim, kind: str) -> None:
    plant(kind, shared / "x.ids", victim)
    register_process(CARD, {77, 78}, shared)
    assert registered_processes(shared) == {77, 78}
    assert (shared / "x.ids").is_symlink() or (shared / "x.ids").exists()


def test_the_ids_of_another_user_do_not_count(shared: Path) -> None:
    with running_as_other_user(lambda: register_process(CARD, {77}, shared)):
        assert registered_processes(shared) == frozenset()
        assert [path.stat().st_uid for path in shared.glob("*.ids")] == [USER.pw_uid]


@pytest.mark.parametrize(
    "written", ["[" * 100_000, '{"a": 1}', "[[1], 2.5, null, true]", "9" * 10_000]
)
def test_damaged_ids_are_left_out(shared: Path, written: str) -> None:
    import fcntl

    with (shared / "x.ids").open("w") as file:
        file.write(written)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert registered_processes(shared) == frozenset()


def test_another_user_cannot_change_the_ids(shared: Path) -> None:
    register_process(CARD, {77}, shared)
    (path,) = shared.glob("*.ids")

    def act() -> None:
        with pytest.raises(PermissionError):
            path.open("r+")

    as_other_user(act)


# ---- groups of processes


def test_groups_need_no_lock_that_another_user_can_hold(
    shared: Path, victim: Victim, use, monkeypatch
) -> None:
    use(lock_dir=shared, simulated_cards=2, host="here")
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    plant("link to a folder", shared / "farm-group-link", victim)
    with running_as_other_user(
        lambda: [locked(shared / f"{name}.lock") for name in ("folders_of_groups", "group")]
    ):
        group = BenchmarkGroup(["SIM-here-0", "SIM-here-1"])
        group.start()
        assert group.alive
        group.kill()
    assert sorted(path.name for path in shared.glob("farm-group-*")) == ["farm-group-link"]


# ---- the spool


@pytest.fixture
def held(database):
    (card,) = register(database, 0)
    (item,) = items_of(database, plan(database, [card]))
    return claim(database, item, lease_s=-1)


@pytest.mark.parametrize("kind", IN_PLACE_OF_A_FILE)
def test_what_is_no_file_in_the_spool_is_put_aside(
    database, held, shared: Path, victim: Victim, kind: str, caplog
):
    """The folder is one that another user could write to, although the farm does not create it like
    this.
    """
    spool = Spool(shared / "spool")
    spool.folder.mkdir()
    spool.folder.chmod(0o1777)
    plant(kind, spool.folder / "0-first.json", victim)
    spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    (closed,) = spool.flush(database, "SIM-0")
    assert closed.accepted
    assert [path.name for path in spool.put_aside()] == ["0-first.json"]
    assert "0-first.json cannot be read" in caplog.text


def test_a_huge_file_in_the_spool_is_put_aside(database, held, shared: Path, monkeypatch) -> None:
    monkeypatch.setattr("farm.jobs.spool.MOST_SPOOLED_BYTES", 1 << 20)
    spool = Spool(shared / "spool")
    spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    with (spool.folder / "0-huge.json").open("wb") as file:
        file.truncate(1 << 40)
    (closed,) = spool.flush(database, "SIM-0")
    assert closed.accepted
    assert len(spool.put_aside()) == 1


def test_a_spool_behind_a_link_is_not_used_and_said_once(
    database, held, shared: Path, victim: Victim, caplog
):
    plant("link to a folder", shared / "state", victim)
    spool = Spool(shared / "state")
    for _ in range(2):
        assert spool.flush(database, "SIM-0") == []
    assert sum("is not used" in line.getMessage() for line in caplog.records) == 1
    with pytest.raises(OSError, match="symbolic link"):
        spool.keep(held, READING, card_id="SIM-0", software_id=SOFTWARE.id)
    assert (len(spool), spool.items(), spool.put_aside()) == (0, set(), [])


def test_a_state_folder_behind_a_link_is_a_problem(shared: Path, victim: Victim, use) -> None:
    plant("link to a folder", shared / "state", victim)
    use(state_dir=shared / "state")
    assert "state is a symbolic link of user nobody" in problems("state folder")


# ---- other files of the state folder, and of other folders


@pytest.mark.parametrize("kind", IN_PLACE_OF_A_FILE)
def test_what_is_no_file_at_the_name_of_the_heartbeats_stops_no_heartbeat(
    database: Database, shared: Path, victim: Victim, use, kind: str
) -> None:
    (card,) = register(database, 0)
    (item,) = items_of(database, plan(database, [card]))
    claim(database, item, "holder-0", lease_s=-1)
    use(state_dir=shared, lock_dir=shared / "locks")
    worker = HostHeartbeat("holder-0", settings(), Pulse())
    plant(kind, worker.path, victim)
    worker.beat(database, [item.id])
    (item,) = items_of(database, item.job_id)
    assert item.lease_until_s > item.started_at_s + 30


def test_heartbeats_behind_a_held_lock_go_on(database: Database, shared: Path, use) -> None:
    (card,) = register(database, 0)
    (item,) = items_of(database, plan(database, [card]))
    claim(database, item, "holder-0", lease_s=-1)
    use(lock_dir=shared)
    with running_as_other_user(lambda: locked(shared / "heartbeats.lock")):
        HostHeartbeat("holder-0", settings(), Pulse()).beat(database, [item.id])
    (item,) = items_of(database, item.job_id)
    assert item.lease_until_s > item.started_at_s + 30


@pytest.mark.parametrize("kind", ["link to a folder", "folder"])
def test_no_code_is_loaded_from_a_folder_that_another_user_made(
    shared: Path, victim: Victim, use, kind: str
) -> None:
    plant(kind, shared / "folder", victim)
    use(compiler_cache_dir=shared / "folder", state_dir=shared / "folder")
    for load in (compiler.prepare_folder, lambda: _check_folder(settings())):
        with pytest.raises(UsageError, match="Another user can write to the folder"):
            load()


def test_no_code_is_loaded_below_a_folder_in_which_others_can_exchange_it(
    shared: Path, use
) -> None:
    (shared / "open").mkdir()
    (shared / "open").chmod(0o777)
    use(compiler_cache_dir=shared / "open" / "cache", state_dir=shared / "open" / "state")
    for load in (compiler.prepare_folder, lambda: _check_folder(settings())):
        with pytest.raises(UsageError, match="a folder above it"):
            load()


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "pipe", "hard link"])
def test_a_database_that_another_user_put_there_is_not_opened(
    shared: Path, victim: Victim, kind: str
) -> None:
    plant(kind, shared / "farm.db", victim)
    with pytest.raises(DatabaseUnreachable, match=r"farm\.db is ") as caught:
        Database(f"sqlite:///{shared / 'farm.db'}").upgrade()
    assert caught.value.next_step


def test_unfinished_files_have_names_that_nobody_can_foresee(shared: Path, victim: Victim) -> None:
    for name in (".page.html.part", f".page.html.{os.getpid()}"):
        plant("link to a file", shared / name, victim)
    write_whole(shared / "page.html", "a page")
    assert (shared / "page.html").read_text() == "a page"


def test_the_folders_of_servers_are_removed_and_no_others(
    shared: Path, victim: Victim, monkeypatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    plant("link to a folder", shared / "farm-link", victim)
    plant("pipe", shared / "farm-pipe", victim)
    (shared / "farm-open").mkdir()
    (shared / "farm-open").chmod(0o777)
    plant("pipe", shared / "farm-open" / "owned", victim)
    os.utime(shared / "farm-open", (0, 0))
    with BrokerServer() as server:
        assert server.folder.parent == shared
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in shared.iterdir()) == ["farm-link", "farm-open", "farm-pipe"]


# ---- shared memory


READ_ONLY = """
mount -t tmpfs -o ro tmpfs /dev/shm
exec "$@"
"""


DOCTOR = """
import json
from tasks.doctor.host import host_checks
from farm.settings import settings
print(json.dumps([check.level for check in host_checks(settings()) if check.name == "shared memory"]))
"""


@pytest.mark.skipif(
    not shutil.which("unshare"), reason="needs unshare, for a file system of its own"
)
def test_shared_memory_that_cannot_be_written_is_one_line_with_a_next_step(tmp_path: Path) -> None:
    alone = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow it to mount a file system")
    environment = {**os.environ, "FARM_SIMULATED_CARDS": "1"}
    about = {"env": environment, "capture_output": True, "text": True, "timeout": 300}
    command = [*alone, sys.executable, "-m", "cli", "run", "resnet18", "--card", "sim"]
    done = subprocess.run(command, **about)  # type: ignore[call-overload]
    assert done.returncode == 3
    assert "Workers cannot start: a semaphore cannot be created" in done.stderr
    assert "tmpfs" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    told = subprocess.run([*alone, sys.executable, "-c", DOCTOR], **about).stdout  # type: ignore[call-overload]
    assert json.loads(told) == ["problem"]
