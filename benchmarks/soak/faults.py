"""The kinds of faults. Each function injects one fault, observes its effect, repairs it and returns
what it observed.

What a function returns begins with the variant of the fault: "replica: it refused a write". If
there was no target or no effect, it raises `NotObserved`, or an error of a process, of the broker
or of the database."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import psycopg
import redis

from benchmarks.soak.hosts import LEASE_S, Host, NotObserved, Site, ended, kill, until
from benchmarks.soak.jobs import Jobs
from tasks.app import app
from tasks.message_filter import CONTROL_QUEUE
from tasks.queues import PASS_KEY, card_queue, publish_groups
from tests.clock import set_server_clock_back
from tests.farms import kill_all_of

#: Longer than a lease, shorter than the time limit of an item.
STOPPED_S = (1.2 * LEASE_S, 2 * LEASE_S)
NOBODY = 65534
DATE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.MULTILINE)


@dataclass
class Scene:
    """What a fault may affect and draw from. A fault of the broker or the database has a host too,
    for its messages.
    """

    site: Site
    jobs: Jobs
    host: Host
    chance: Random

    def hold(self, least_s: float, most_s: float) -> None:
        time.sleep(self.chance.uniform(least_s, most_s))


@dataclass(frozen=True)
class Kind:
    """A kind of fault. Faults on the same place ("host", "broker", "database") follow one another;
    others overlap.
    """

    name: str
    place: str
    inject: Callable[[Scene], str]
    needs: str = ""  # "network" or "disk": see `Site.without`


KINDS: dict[str, Kind] = {}


def kind(
    name: str, place: str, needs: str = ""
) -> Callable[[Callable[[Scene], str]], Callable[[Scene], str]]:
    def register(inject: Callable[[Scene], str]) -> Callable[[Scene], str]:
        KINDS[name] = Kind(name, place, inject, needs)
        return inject

    return register


# -----------------------------------------------------------------------------------------------
# processes


@kind("benchmark killed", "host")
def benchmark_killed(scene: Scene) -> str:
    return _killed(scene, "benchmark")


@kind("pool killed", "host")
def pool_killed(scene: Scene) -> str:
    return _killed(scene, "pool")


@kind("worker killed", "host")
def worker_killed(scene: Scene) -> str:
    if scene.chance.random() < 0.5:
        return _killed(scene, "worker")
    _, tree = scene.host.card_at_work(scene.chance)
    kill(*tree)
    return f"with its pool: {len(tree)} processes ended"


@kind("control killed", "host")
def control_killed(scene: Scene) -> str:
    return _killed(scene, "control")


@kind("host ended", "host")
def host_ended(scene: Scene) -> str:
    supervisor, host = scene.host.one("supervisor", scene.chance), scene.host
    how = scene.chance.choice(["SIGKILL", "SIGTERM", "all processes killed"])
    if how == "SIGKILL":
        kill(supervisor)
    elif how == "SIGTERM":
        supervisor.terminate()
        until(lambda: ended(supervisor), 60, "the supervisor did not stop")
    else:
        assert host.farm.worker is not None
        kill_all_of(host.farm.worker)
        kill(*host.processes())
    return f"{how}: supervisor {supervisor.pid} ended"


@kind("rank killed", "host")
def rank_killed(scene: Scene) -> str:
    """One process of a group."""
    if not scene.host.ranks():
        _submit_group(scene)
    ranks = until(scene.host.ranks, 60, "no group began")
    victim = scene.chance.choice(ranks)
    card = victim.cmdline()[victim.cmdline().index("--card") + 1]
    others = [one for one in ranks if one != victim and one.ppid() == victim.ppid()]
    kill(victim)
    until(lambda: all(map(ended, others)), 30, "the other ranks of the group go on")
    return f"of card {card.rpartition('-')[2]}: rank {victim.pid} and {len(others)} others ended"


def _submit_group(scene: Scene) -> str:
    """Submit a job of one item on two cards of the host; it is the next item in the queue. Return
    the id of the job.
    """
    job_id = scene.jobs.submit("side", 1, scene.chance, bad=0, cards=2, to=scene.host.cards)
    with closing(scene.site.connect(connect_timeout=5)) as connection:
        rows = connection.execute("SELECT id FROM item WHERE job_id = %s", (job_id,)).fetchall()
    publish_groups(scene.site.database, [item_id for (item_id,) in rows])
    return job_id


@kind("publisher killed", "host")
def publisher_killed(scene: Scene) -> str:
    """A publisher is killed half-way. Its job has bad items, too."""
    with scene.site.client() as client:
        until(
            lambda: _works(client), 20, "the broker does not work"
        )  # it would keep the publisher waiting
        client.set(
            PASS_KEY, "soak", ex=40
        )  # no reconciler publishes first, however slowly the publisher starts
        try:
            job_id = scene.jobs.submit("side", 6, scene.chance, bad=1)
            code = _publish_and_die(scene, job_id)
        finally:
            client.delete(PASS_KEY)
    if code != -9:
        raise NotObserved(f"the publisher ended with {code}")
    return f"half-way: the publisher of job {job_id} ended"


def _publish_and_die(scene: Scene, job_id: str) -> int:
    with scene.host.inside():
        publisher = scene.host.farm.publish_and_die(job_id)
    try:
        return publisher.wait(40)
    finally:
        publisher.kill()


@kind("measurement stopped", "host")
def measurement_stopped(scene: Scene) -> str:
    role = scene.chance.choice(["benchmark", "pool"])
    return _stopped(scene, role, [scene.host.one(role, scene.chance)])


@kind("worker stopped", "host")
def worker_stopped(scene: Scene) -> str:
    what = scene.chance.choice(["worker", "worker with its pool", "control"])
    if what == "worker with its pool":
        return _stopped(scene, what, scene.host.card_at_work(scene.chance)[1])
    return _stopped(scene, what, [scene.host.one(what, scene.chance)])


@kind("supervisor stopped", "host")
def supervisor_stopped(scene: Scene) -> str:
    """While the supervisor is stopped, one of its workers is killed: it starts again when the
    supervisor goes on.
    """
    supervisor = scene.host.one("supervisor", scene.chance)
    role = scene.chance.choice(["worker", "control"])
    with _suspended([supervisor]):
        before = {process.pid for process in scene.host.processes(role)}
        kill(scene.host.one(role, scene.chance))
        scene.hold(*STOPPED_S)
        if (
            supervisor.status() != psutil.STATUS_STOPPED
            or {p.pid for p in scene.host.processes(role)} - before
        ):
            raise NotObserved("the supervisor went on")
    until(
        lambda: {p.pid for p in scene.host.processes(role)} - before,
        60,
        f"the {role} did not start again",
    )
    return f"{role} killed meanwhile: it started again after SIGCONT"


def _works(client: redis.Redis) -> bool:
    with suppress(redis.RedisError):
        return bool(client.set("soak.probe", "1"))
    return False


def _killed(scene: Scene, role: str) -> str:
    victim = scene.host.one(role, scene.chance)
    kill(victim)
    return f"alone: process {victim.pid} ended"


def _stopped(scene: Scene, what: str, processes: list[psutil.Process]) -> str:
    for_s = scene.chance.uniform(*STOPPED_S)
    with _suspended(processes):
        time.sleep(for_s)
        if any(process.status() != psutil.STATUS_STOPPED for process in processes):
            raise NotObserved("it did not stay stopped")
    return f"{what}: {len(processes)} stopped for {for_s:.1f} s"


@contextmanager
def _suspended(processes: list[psutil.Process]) -> Iterator[None]:
    try:
        for process in processes:
            process.suspend()
        time.sleep(0.05)
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


# -------------------------------------------------------------------------------------------- the
# host


@kind("network cut", "host", needs="network")
def network_cut(scene: Scene) -> str:
    cable = scene.host.network
    assert cable is not None
    if not _reaches(scene):
        raise NotObserved("the host was cut off before")
    for_s = scene.chance.uniform(1, 2 * LEASE_S)
    cable.cut()
    try:
        time.sleep(for_s)
        if _reaches(scene):
            raise NotObserved("the host was not cut off")
    finally:
        cable.join()
    until(lambda: _reaches(scene), 10, "the host is still cut off")
    return f"both ways: no connection for {for_s:.1f} s"


def _reaches(scene: Scene) -> bool:
    with suppress(OSError), scene.host.inside(), socket.create_connection(scene.site.beacon, 1):
        return True
    return False


@kind("link to the broker half-open", "host")
def link_half_open(scene: Scene) -> str:
    """A NAT or a load balancer has forgotten the connections: no packet gets through, and nobody is
    told.
    """
    link, least = scene.host.link, len(scene.host.cards) + 1
    frozen = link.freeze(scene.chance.choice([0, 0, 100, 10_000]))
    if frozen < least:
        raise NotObserved("the workers were not connected")
    until(lambda: link.open_number() >= least, 120, "the workers did not connect again")
    return f"all: {frozen} connections froze, and the workers connected again"


@kind("clock jump", "host")
def clock_jump(scene: Scene) -> str:
    ahead_s = scene.chance.choice([-7, -1, 1, 7]) * 86400
    size = scene.host.log_size()

    def jumped() -> bool:
        dates = DATE.findall(scene.host.log_since(size))
        return any(
            abs(datetime.fromisoformat(date).timestamp() - time.time()) > 43200 for date in dates
        )

    scene.host.set_clock(ahead_s)
    try:
        until(jumped, 20, "no process logged the other time")
        scene.hold(0, 4)
    finally:
        scene.host.set_clock(0)
    return f"{'ahead' if ahead_s > 0 else 'back'}: the log is {ahead_s / 86400:+g} days off"


@kind("disk full", "host", needs="disk")
def disk_full(scene: Scene) -> str:
    disk, probe = scene.host.disk, scene.host.state / "probe"
    assert disk is not None
    size = scene.host.log_size()
    disk.fill()
    try:
        probe.write_bytes(bytes(8192))
        raise NotObserved("the disk took a file")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        scene.hold(2, 8)
    finally:
        disk.make_room()
        probe.unlink(missing_ok=True)
    waited = scene.host.log_since(size).count("waits in memory")
    return f"{'a reading waited in memory' if waited else 'no reading came'}: a write was refused"


def _spool_file(path: Path, how: str) -> None:
    match how:
        case "not UTF-8":
            path.write_bytes(b'{"card_id": "\xff\xfe"}')
        case "nested too deep":
            path.write_text("[" * 200_000)
        case "cut off":
            path.write_text('{"card_id": "SIM-')
        case "a directory":
            path.mkdir()
        case "a FIFO":
            os.mkfifo(path)
        case "a link to nothing":
            path.symlink_to(path.with_name("nothing"))


@kind("spool file unreadable", "host")
def spool_file_unreadable(scene: Scene) -> str:
    how = scene.chance.choice(
        ["not UTF-8", "nested too deep", "cut off", "a directory", "a FIFO", "a link to nothing"]
    )
    spool = scene.host.spool
    spool.mkdir(mode=0o700, exist_ok=True)
    # With the id of an item: its next claim also looks at the file first.
    path = (
        spool
        / f"{scene.jobs.item_id(scene.chance)}-{uuid.UUID(int=scene.chance.getrandbits(128)).hex}.json"
    )
    aside = spool / "unreadable" / path.name
    _spool_file(path, how)
    until(
        lambda: os.path.lexists(aside) and not os.path.lexists(path),
        30,
        f"{how}: it is not moved aside",
    )
    return f"{how}: it was moved aside"


@kind("lock file is a FIFO", "host")
def lock_file_is_a_fifo(scene: Scene) -> str:
    card, tree = scene.host.card_at_work(scene.chance)
    lock, size = scene.host.lock_of(card), scene.host.log_size()
    fifo = lock.with_suffix(".fifo")
    os.mkfifo(fifo)
    fifo.replace(
        lock
    )  # before the worker ends: otherwise the next one may lock the file that is replaced
    try:
        kill(*tree)
        until(
            lambda: f"{lock} is not a regular file" in scene.host.log_since(size),
            60,
            "no worker met the FIFO",
        )
        scene.hold(0, 2)
    finally:
        kill(*tree)
        lock.unlink()
    return "at its next start: the worker of the card was refused"


HOLD_LOCK = """
import fcntl, os, sys, time
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
fcntl.flock(0, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(120)
"""


@contextmanager
def _held_by_another_user(lock: Path) -> Iterator[int]:
    """Context manager: a process of another user waits for a lock and then holds it. Its process
    id.
    """
    with lock.open("rb") as file:
        words = [sys.executable, "-I", "-S", "-c", HOLD_LOCK, str(NOBODY)]
        other = subprocess.Popen(words, stdin=file, stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        yield other.pid
    finally:
        other.kill()
        other.wait()
        other.stdout.close()


def _holds(process: int, lock: Path) -> bool:
    file = lock.stat()
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(
        line[1] == "FLOCK" and line[4] == str(process) and line[5] == place for line in lines
    )


@kind("lock held by another user", "host")
def lock_held_by_another_user(scene: Scene) -> str:
    card, tree = scene.host.card_at_work(scene.chance)
    lock, size = scene.host.lock_of(card), scene.host.log_size()
    with _held_by_another_user(lock) as other:
        time.sleep(1)  # until it waits for the lock
        kill(*tree)
        user = re.escape(psutil.Process(other).username())
        taken = re.compile(rf"card {card} is in use by .*, user {user}")
        until(lambda: taken.search(scene.host.log_since(size)), 60, "no worker met the lock")
        scene.hold(0, 3)
    return "at its next start: the worker of the card was refused"


@kind("heartbeat lock held", "host")
def heartbeat_lock_held(scene: Scene) -> str:
    """Another user's process holds the lock of the host's common heartbeats: each worker renews its
    leases alone.
    """
    lock = scene.host.locks / "heartbeats.lock"
    with _held_by_another_user(lock) as other:
        until(lambda: _holds(other, lock), 20, "the lock was not free")
        begin_s = time.monotonic()
        for_s = scene.chance.uniform(*STOPPED_S)
        before = _last_seen(scene)
        time.sleep(for_s)
        until(
            lambda: all(before[card] != at_s for card, at_s in _last_seen(scene).items()),
            20,
            "a card was not seen",
        )
        held_s = time.monotonic() - begin_s
        if not _holds(other, lock):
            raise NotObserved("the lock was not held")
    return f"by another user: for {held_s:.1f} s, and all cards were seen meanwhile"


def _last_seen(scene: Scene) -> dict[str, float]:
    with closing(scene.site.connect(connect_timeout=5)) as connection:
        query = "SELECT id, last_seen_at_s FROM card WHERE host = %s"
        return dict(connection.execute(query, (scene.host.name,)).fetchall())


@kind("group folder locked", "host")
def group_folder_locked(scene: Scene) -> str:
    """Another user's process holds the lock and a folder of groups. A group of the host begins
    nevertheless.
    """
    lock = scene.host.locks / "folders_of_groups.lock"
    lock.touch()
    unnamed = Path(tempfile.mkdtemp(prefix="soak-"))
    folder = unnamed.with_name(f"farm-group-{scene.chance.getrandbits(64):016x}")
    owned = unnamed / "owned"
    owned.touch()
    try:
        for path in (owned, unnamed):
            os.chown(path, NOBODY, NOBODY)
        with _held_by_another_user(lock) as first, _held_by_another_user(owned) as second:
            until(partial(_holds, first, lock), 20, "the lock was not free")
            until(partial(_holds, second, owned), 20, "the folder was not locked")
            unnamed.rename(
                folder
            )  # with its lock: a start of a group removes folders of groups that have ended
            job_id = _submit_group(scene)
            until(lambda: _states(scene, job_id) == ["done"], 60, "no group was measured")
            if not folder.exists():
                raise NotObserved("the folder of another user was removed")
    finally:
        for path in (unnamed, folder):
            shutil.rmtree(path, ignore_errors=True)
    return "by another user: an item on two cards was measured meanwhile"


def _states(scene: Scene, job_id: str) -> list[str]:
    with suppress(psycopg.Error), closing(scene.site.connect(connect_timeout=5)) as connection:
        rows = connection.execute("SELECT state FROM item WHERE job_id = %s", (job_id,)).fetchall()
        return [state for (state,) in rows]
    return []


# ---------------------------------------------------------------------------------------------- the
# broker


def _restarted(
    scene: Scene,
    stops: Mapping[str, Callable[[], None]],
    start: Callable[[], None],
    check_refused: Callable[[], None],
) -> str:
    """Stop a server in one of these ways, see that it refuses connections, and start it again after
    a while.
    """
    how = scene.chance.choice(list(stops))
    scene.site.serve(stops[how])
    try:
        check_refused()
        scene.hold(0, 4)
    finally:
        scene.site.serve(start)
    return f"{how}: it refused connections"


@kind("broker restarted", "broker")
def broker_restarted(scene: Scene) -> str:
    broker = scene.site.broker
    with scene.site.client() as client:
        check = partial(_refused, client.ping, redis.ConnectionError, "")
        return _restarted(
            scene, {"SIGKILL": broker.kill, "SIGTERM": broker.stop}, broker.start, check
        )


@kind("broker wiped", "broker")
def broker_wiped(scene: Scene) -> str:
    with scene.site.client() as client:
        before, _, after = client.pipeline().dbsize().flushall().dbsize().execute()
    if not before or after:
        raise NotObserved("it had nothing to forget")
    return f"FLUSHALL: {before} keys are gone"


@kind("broker full", "broker")
def broker_full(scene: Scene) -> str:
    with scene.site.client() as client:
        client.config_set("maxmemory", 1)
        try:
            _refused(
                partial(client.set, "soak.probe", "1"),
                redis.exceptions.OutOfMemoryError,
                "maxmemory",
            )
            scene.hold(2, 8)
        finally:
            client.config_set("maxmemory", 0)
    return "maxmemory: it refused a write"


@kind("broker takes no writes", "broker")
def broker_takes_no_writes(scene: Scene) -> str:
    """It answers PING."""
    how = scene.chance.choice(
        ["replica of nothing", "min-replicas-to-write", "no BRPOP", "no PUBLISH"]
    )
    with scene.site.client() as client:
        write: Callable[[], Any] = partial(client.set, "soak.probe", "1")
        refused: tuple[type[Exception], str] = (redis.exceptions.NoPermissionError, "permissions")
        match how:
            case "replica of nothing":
                begin, end = ("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")
                refused = (redis.ReadOnlyError, "")
            case "min-replicas-to-write":
                begin, end = (
                    ("CONFIG", "SET", "min-replicas-to-write", number) for number in ("1", "0")
                )
                refused = (redis.ResponseError, "NOREPLICAS")
            case "no BRPOP":
                begin, end = (("ACL", "SETUSER", "default", f"{sign}brpop") for sign in "-+")
                write = partial(client.brpop, ["soak.probe"], 0.01)
            case _:
                begin, end = (("ACL", "SETUSER", "default", f"{sign}publish") for sign in "-+")
                write = partial(client.publish, "soak.probe", "1")
        client.execute_command(*begin)
        try:
            _refused(write, *refused)
            client.ping()
            scene.hold(2, 8)
        finally:
            client.execute_command(*end)
    return f"{how}: it refused a write and answered PING"


@kind("message repeated", "broker")
def message_repeated(scene: Scene) -> str:
    with scene.site.client() as client:
        entries = until(lambda: client.hvals("unacked"), 20, "no message was in work")
        copies = [
            _copy(json.loads(entry)[0])
            for entry in scene.chance.sample(entries, min(3, len(entries)))
        ]
        for queue, copy in copies:
            client.rpush(queue, copy)  # workers take messages from this end
        until(
            lambda: not any(_waits(client, queue, copy) for queue, copy in copies),
            40,
            "nobody took the copies",
        )
    return f"of items in work: {len(copies)} copies were taken"


def _copy(message: dict[str, Any], queue: str = "") -> tuple[str, bytes]:
    """A copy of a message with a tag of its own, for a queue or its own one."""
    message["properties"]["delivery_tag"] = str(uuid.uuid4())
    information = message["properties"]["delivery_info"]
    information["routing_key"] = queue = queue or information["routing_key"]
    return queue, json.dumps(message).encode()


def _waits(client: redis.Redis, queue: str, message: bytes) -> bool:
    return client.lpos(queue, message) is not None


@kind("message in another queue", "broker")
def message_in_another_queue(scene: Scene) -> str:
    """A message of one task in the queue of the other task."""
    task, host = scene.chance.choice(["measure", "aggregate"]), scene.host
    argument = scene.jobs.item_id(scene.chance) if task == "measure" else f"{scene.jobs.main_id}/1"
    queue = CONTROL_QUEUE if task == "measure" else card_queue(scene.chance.choice(host.cards))
    sizes = [(one, one.log_size()) for one in scene.site.hosts]
    app.signature(task, (argument,), immutable=True, app=app).apply_async(queue="soak.letters")
    with scene.site.client() as client:
        letter = until(lambda: client.rpop("soak.letters"), 5, "the message was not published")
        client.rpush(*_copy(json.loads(letter), queue))
    dropped = f"Dropped a message from queue {queue}: its task belongs to another queue"
    until(
        lambda: any(dropped in one.log_since(size) for one, size in sizes),
        40,
        "no worker dropped the message",
    )
    return (
        f"{task} in the queue {'of a card' if task == 'aggregate' else 'control'}: a worker "
        "dropped it"
    )


def _refused(write: Callable[[], Any], kind: type[Exception], words: str) -> None:
    try:
        write()
    except kind as error:
        if words not in str(error):
            raise
        return
    raise NotObserved("a write was accepted")


# -------------------------------------------------------------------------------------------- the
# database


@kind("database restarted", "database")
def database_restarted(scene: Scene) -> str:
    postgres = scene.site.postgres
    connect = partial(scene.site.connect, connect_timeout=2)
    check = partial(_refused, connect, psycopg.OperationalError, "")
    return _restarted(
        scene,
        {"immediate shutdown": postgres.kill, "fast shutdown": postgres.stop},
        postgres.start,
        check,
    )


@kind("database sessions ended", "database")
def database_sessions_ended(scene: Scene) -> str:
    others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with closing(scene.site.connect()) as connection:
        rows = connection.execute(
            f"SELECT pid, backend_start, pg_terminate_backend(pid) {others}"
        ).fetchall()
        gone = {(pid, began) for pid, began, done in rows if done}
        if not gone:
            raise NotObserved("there were no sessions")
        until(
            lambda: (
                not gone & set(connection.execute(f"SELECT pid, backend_start {others}").fetchall())
            ),
            10,
            "a session goes on",
        )
    return f"all: {len(gone)} sessions ended"


@kind("idle transaction timeout", "database")
def idle_transaction_timeout(scene: Scene) -> str:
    log = scene.site.postgres.log
    size = log.stat().st_size

    def ended_sessions() -> int:
        return log.read_bytes()[size:].count(b"due to idle-in-transaction timeout")

    scene.site.alter_system("SET idle_in_transaction_session_timeout = '1ms'")
    try:
        until(ended_sessions, 20, "no transaction was idle for 1 ms")
        scene.hold(0, 3)
    finally:
        scene.site.alter_system("RESET idle_in_transaction_session_timeout")
    return f"of 1 ms: {ended_sessions()} sessions ended"


@kind("database takes no writes", "database")
def database_takes_no_writes(scene: Scene) -> str:
    scene.site.alter_system("SET default_transaction_read_only = on")
    try:
        with closing(scene.site.connect()) as connection:
            write = partial(connection.execute, "UPDATE item SET state = state WHERE false")
            until(
                lambda: (
                    connection.execute("SHOW default_transaction_read_only").fetchone() == ("on",)
                ),
                5,
                "not read",
            )
            _refused(write, psycopg.errors.ReadOnlySqlTransaction, "")
        scene.hold(2, 8)
    finally:
        scene.site.alter_system("RESET default_transaction_read_only")
    return "read-only: it refused a write"


#: Longer than a lease, and than a card may be unseen.
FROZEN_S = (8.0, 25.0)


@kind("database frozen", "database")
def database_frozen(scene: Scene) -> str:
    """Its sessions get no error and no answer."""
    for_s = scene.chance.uniform(*FROZEN_S)
    what = scene.chance.choice(
        ["processes stopped", "item locked", "card locked", "job_round locked"]
    )
    if what != "processes stopped":
        return (
            f"{what}: {_waits_for(scene, what.split()[0], for_s)} sessions waited, for "
            f"{for_s:.1f} s"
        )
    with scene.site.postgres.frozen():
        began_s = time.monotonic()
        _refused(
            partial(scene.site.connect, connect_timeout=2), psycopg.OperationalError, "timeout"
        )
        time.sleep(max(0.0, for_s - (time.monotonic() - began_s)))
    return f"{what}: it did not answer for {for_s:.1f} s"


def _waits_for(scene: Scene, table: str, for_s: float) -> int:
    """Lock a table; return the number of sessions that waited for it at the end."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND "
        "wait_event_type = 'Lock'"
    )
    with closing(scene.site.connect(connect_timeout=5)) as connection, connection.transaction():
        connection.execute("SET LOCAL lock_timeout = '10s'")
        connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        time.sleep(for_s)
        (number,) = connection.execute(waiting).fetchone()
    if not number:
        raise NotObserved("nobody waited for the table")
    return int(number)


@kind("database clock set back", "database")
def database_clock_set_back(scene: Scene) -> str:
    """It stays so: the next fault of this kind sets it back further."""
    name, most_s = scene.chance.choice(
        [("a minute", 60.0), ("ten minutes", 600.0), ("an hour", 3600.0)]
    )
    by_s = most_s * scene.chance.uniform(0.5, 1.0)
    clock = "SELECT extract(epoch FROM statement_timestamp())::float"
    with closing(scene.site.connect(connect_timeout=5)) as connection:
        (before_s,) = connection.execute(clock).fetchone()
        set_server_clock_back(connection, by_s)
        (after_s,) = connection.execute(clock).fetchone()
    if after_s > before_s - by_s / 2:
        raise NotObserved("it was not set back")
    return f"by up to {name}: by {before_s - after_s:.0f} s"
