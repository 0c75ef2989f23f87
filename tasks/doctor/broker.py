"""The checks of ``farm doctor`` for the broker: it works, it keeps messages, workers listen,
versions are equal.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from celery.exceptions import OperationalError as CeleryError
from kombu.exceptions import OperationalError
from redis import RedisError

from farm.devices.software import program_versions
from farm.errors import BrokerUnreachable, FarmError, SettingsError
from farm.errors.safe_text import shown_url
from farm.settings import Settings
from farm.store.database import Database
from farm.types.format import plural
from tasks.app import app, check_broker
from tasks.broker_probe import check_broker_works
from tasks.doctor import Check, ok, problem, warning
from tasks.doctor.database import is_local, waiting_items
from tasks.queues import reconciler_works
from tasks.servers import broker_program

#: The name of the remote command that returns versions. `tasks.worker` implements it; only workers
#: may import that.
QUESTION = "farm_versions"
#: The key of the state of a worker's supervisor in the answer
#: (`tasks.supervisor.state_of_supervisor`).
SUPERVISOR = "supervisor"
#: How often the workers are pinged. Each ping waits one second for answers.
PINGS = 3
#: The longest wait for a sign that the reconciler works. Unit: s.
LONGEST_WAIT_S = 15.0
#: The check warns if the broker uses more than this share of its memory.
NEARLY_FULL = 0.9


def broker_checks(current: Settings) -> Iterator[Check]:
    """Check the configured broker; without one, the broker program that `farm run` would start."""
    if not current.broker_url:
        try:
            yield ok(
                "broker",
                f"no broker is configured; `farm run` starts its own ({broker_program().name})",
            )
        except BrokerUnreachable as error:
            yield problem("broker", error.message, error.next_step)
        return
    try:
        check_broker(current)
    except (BrokerUnreachable, SettingsError) as error:
        yield problem("broker", error.message, error.next_step)
        return
    yield _transport(current.broker_url)
    try:
        check_broker_works(current)
        works = True
    except BrokerUnreachable as error:
        yield problem("broker", error.message, error.next_step)
        works = False
    try:
        with app.connection_for_read() as connection:
            yield _memory(connection.default_channel.client.info("memory"))
    except (OperationalError, RedisError) as error:
        message = f"{shown_url(current.broker_url)} does not describe its memory: {error}"
        yield warning(
            "broker memory", message, "Let the user execute INFO, as deploy/make-secrets does."
        )
    if works:
        yield from _listeners(current)


def _transport(url: str) -> Check:
    parts = urlsplit(url)
    local = is_local(url)
    if not local and not (parts.scheme.startswith("rediss") and _checks_certificate(parts.query)):
        return warning(
            "broker",
            f"{shown_url(url)} is on another host, and its certificate is not checked",
            "Use rediss:// with ssl_cert_reqs=required and ssl_ca_certs (docs/operate.md).",
        )
    if not local and not parts.password:
        return warning(
            "broker",
            f"{shown_url(url)} is used without a password: everyone who reaches the broker can "
            "send work to the farm",
            "Add the users that deploy/make-secrets writes to the broker (docs/operate.md).",
        )
    return ok("broker", shown_url(url))


def _checks_certificate(query: str) -> bool:
    """True if a URL's query leaves certificate checks on. To turn them off, Redis uses "none",
    Celery "CERT_NONE".
    """
    options = {name.lower(): values[-1].lower() for name, values in parse_qs(query).items()}
    requirement = options.get("ssl_cert_reqs", "required").removeprefix("cert_")
    return requirement == "required" and options.get("ssl_check_hostname", "true") not in (
        "0",
        "f",
        "false",
        "n",
        "no",
    )


def _memory(memory: dict[str, Any]) -> Check:
    policy = memory.get("maxmemory_policy", "noeviction")
    used_bytes, most_bytes = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
    used = f"{used_bytes / 2**20:.1f} MiB used" + (
        f" of {most_bytes / 2**20:.1f}" if most_bytes else ""
    )
    if policy != "noeviction" and most_bytes:
        message = f"{used}; with the policy '{policy}' a full broker drops messages"
        return problem(
            "broker memory", message, "Set `maxmemory-policy noeviction` (deploy/redis/redis.conf)."
        )
    if most_bytes and used_bytes > NEARLY_FULL * most_bytes:
        full = used_bytes >= most_bytes
        result = problem if full else warning
        return result(
            "broker memory",
            f"{used}: the broker {'accepts no more messages' if full else 'is nearly full'}",
            "Raise `maxmemory` of the broker (deploy/redis/redis.conf), or wait until the queues "
            "are empty.",
        )
    return ok("broker memory", f"{used}, {policy}")


def _listeners(current: Settings) -> Iterator[Check]:
    """Check which workers answer over the broker: a worker with heartbeats in the database may not
    read its queue.
    """
    listeners: set[str] = set()
    try:
        for _ in range(PINGS):
            for answer in app.control.ping(timeout=1.0) or ():
                listeners.update(answer)
            if any(name.startswith("control@") for name in listeners):
                break  # a busy host answers late, so only the last ping decides that nobody answers
    except (OperationalError, CeleryError, RedisError) as error:
        yield problem(
            "workers", f"the workers cannot be queried: {error}", "Read the log of the broker."
        )
        return
    controls = sum(name.startswith("control@") for name in listeners)
    if not listeners:
        waiting = _waiting(current)
        items = f", but {waiting} {plural('item', waiting)} must be measured" if waiting else ""
        result = problem if waiting else warning
        step = "Start `farm worker` on a host with cards, or read its log."
        yield result("workers", f"no worker listens to the broker{items}", step)
    elif not controls:
        yield problem(
            "workers",
            f"{len(listeners)} {plural('card worker', len(listeners))} listen, but no control "
            "worker: no job ends, and lost messages are not published again",
            "Every `farm worker` starts a control worker: look for its errors in the logs of the "
            "hosts.",
        )
    else:
        of_cards, of_control = (
            plural("card worker", len(listeners) - controls),
            plural("control worker", controls),
        )
        yield ok(
            "workers",
            f"{len(listeners) - controls} {of_cards} and {controls} {of_control} listen to the "
            "broker",
        )
        yield _reconciler(current)
    if listeners:
        yield from _answers()


def _reconciler(current: Settings) -> Check:
    """Check that a control worker repairs jobs: it may answer, but wait in its repairs, or fail at
    each of them.
    """
    deadline_s = time.monotonic() + min(2 * current.reconcile_s, LONGEST_WAIT_S)
    while not reconciler_works():
        if time.monotonic() > deadline_s:  # until then, a control worker may just have started
            return problem(
                "reconciler",
                "control workers listen, but none of them repairs jobs: items of lost cards do "
                "not move, and lost "
                "messages are not published again",
                "Correct the other problems, then read the logs of the control workers "
                "(`journalctl -u farm-worker`).",
            )
        time.sleep(0.2)
    return ok(
        "reconciler",
        f"a control worker looks for lost messages and cards every {current.reconcile_s:g} s",
    )


def _waiting(current: Settings) -> int:
    """Return the number of items that wait; 0 if the database does not answer, which another check
    reports.
    """
    with contextlib.suppress(FarmError), contextlib.closing(Database(current.database)) as database:
        if not database.missing:
            database.check_schema()
            with database.read() as session:
                return sum(waiting_items(session).values())
    return 0


def _answers() -> Iterator[Check]:
    """Check that supervisors run, and that all workers and this host have the same versions of the
    programs.
    """
    versions = {"this host": program_versions()}
    try:
        for answer in app.control.broadcast(QUESTION, reply=True, timeout=1.0) or ():
            versions |= {
                name: program
                for name, program in answer.items()
                if isinstance(program, dict) and "farm" in program
            }
    except (OperationalError, CeleryError, RedisError) as error:
        yield Check("programs", "warning", f"the workers' versions cannot be queried: {error}")
        return
    if len(versions) > 1:
        yield programs(versions)
    hosts = sorted(
        {
            name.rpartition("@")[2]
            for name, program in versions.items()
            if program.get(SUPERVISOR) == "stopped"
        }
    )
    for host in hosts:
        yield problem(
            f"supervisor {host}",
            f"`farm worker` on {host} is stopped (SIGSTOP or Ctrl-Z): it restarts no worker that "
            "ends",
            "Continue it: `kill -CONT` with its process id, or `fg` in its shell.",
        )


def programs(found: Mapping[str, Mapping[str, str]]) -> Check:
    """Compare versions of programs: "this host" or name of a worker -> program -> version. A
    missing program is not a difference, since the broker's host may have no torch."""
    names = ("farm", "torch", "torchvision", "Python")
    differing = [
        name
        for name in names
        if len({program[name] for program in found.values() if name in program}) > 1
    ]
    if not differing:
        return ok(
            "programs",
            f"the same versions of {', '.join(names)} here and on all workers that answer",
        )
    hosts: dict[str, set[str]] = {}
    for worker, program in found.items():
        if versions := " ".join(f"{name} {program[name]}" for name in differing if name in program):
            hosts.setdefault(versions, set()).add(worker.rpartition("@")[2])
    return warning(
        "programs",
        "; ".join(f"{', '.join(sorted(where))}: {versions}" for versions, where in hosts.items()),
        "Install the same versions on all hosts and restart their workers: another torchvision "
        "may build other models.",
    )
