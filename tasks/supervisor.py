"""Start the worker processes of one host, restart them with increasing pauses, and stop them.

`farm worker` supervises the workers of a host (`run`); an embedded farm supervises the workers of
one command."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import psutil

from farm.devices.device import Card
from farm.devices.host import check_semaphores, visible_only
from farm.devices.lock import CardLock
from farm.errors import FarmError
from farm.jobs import cards, leases
from farm.jobs.spool import Spool
from farm.settings import Settings, environment_of_children, settings
from farm.store.database import Database
from farm.types.card_kind import card_kind_of
from tasks import logs
from tasks.app import configure

log = logging.getLogger("farm.worker")

#: The pauses before a dead worker is started again. If it ran for `STEADY_AFTER_S`, the first pause
#: is used. Unit: s.
BACK_OFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_AFTER_S = 60.0
#: Time to stop in addition to the time limit of an item. The service files in deploy/ allow a
#: little more. Unit: s.
STOP_MARGIN_S = 30.0


@dataclass
class Child:
    """One worker process of a supervisor. Its name is the card id, or "control"."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    deaths: int = 0
    not_before_s: float = 0.0
    last_exit: int | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Starts the workers of a host, restarts dead workers, and stops all workers.

    Each child has its own session, so that Ctrl-C reaches only the supervisor. A child ends with
    the supervisor."""

    def __init__(
        self,
        card_ids: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self.log_dir = log_dir
        gpus = [card_id for card_id in card_ids if card_kind_of(card_id) == "cuda"]
        self.children = [
            Child("control", ("control", *card_ids)),
            *(Child(card_id, ("card", card_id)) for card_id in card_ids),
        ]
        for child in self.children:
            visible = [child.name] if child.name in gpus else []
            child.environment = {**(environment or {}), **visible_only(visible)}

    def start(self) -> None:
        for child in self.children:
            self._start(child)

    def tend(self) -> list[Child]:
        """Restart dead workers whose pause is over; return the workers that have died since the
        last call.
        """
        now = time.monotonic()
        children = []
        for child in self.children:
            if child.running:
                continue
            if child.process is not None:
                child.last_exit = child.process.returncode
                child.deaths = 1 if now - child.started_s > STEADY_AFTER_S else child.deaths + 1
                pause_s = BACK_OFF_S[min(child.deaths, len(BACK_OFF_S)) - 1]
                child.not_before_s, child.process = now + pause_s, None
                children.append(child)
                log.warning(
                    "Worker %s ended with exit code %s; it starts again in %.1f s",
                    child.name,
                    child.last_exit,
                    pause_s,
                )
            elif now >= child.not_before_s:
                self._start(child)
        return children

    def stop(self, grace_s: float, at_once: Callable[[], bool] = lambda: False) -> None:
        """Send SIGTERM: each worker finishes its item. After `grace_s`, or if `at_once()` is True,
        kill all workers.
        """
        for child in self.children:
            if child.process is not None:
                child.process.terminate()
        deadline = time.monotonic() + grace_s
        try:
            while (
                any(child.running for child in self.children)
                and time.monotonic() < deadline
                and not at_once()
            ):
                time.sleep(0.05)
        finally:
            self.kill()

    def kill(self) -> None:
        for child in self.children:
            if child.process is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()

    def holders(self, host: str) -> dict[str, str]:
        """Return card id -> prefix of the holder names of the card's last worker process."""
        return {
            child.name: cards.holder_of_process(child.name, host, child.process.pid)
            for child in self.children
            if child.process is not None and child.name != "control"
        }

    def _start(self, child: Child) -> None:
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            if self.log_dir is not None:
                self.log_dir.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context((self.log_dir / f"{child.name}.log").open("ab"))
            child.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tasks.main",
                    *child.arguments,
                    "--parent",
                    str(os.getpid()),
                ],
                env=environment_of_children(child.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                start_new_session=True,
            )
        child.started_s = time.monotonic()


def state_of_supervisor(pid: int) -> Literal["running", "stopped", "ended"]:
    """Return the state of the supervisor of this process, the process ``pid`` that started it. A
    stopped one (SIGSTOP, Ctrl-Z) restarts no dead worker."""
    with contextlib.suppress(psutil.Error):
        if os.getppid() == pid:
            return "stopped" if psutil.Process(pid).status() == psutil.STATUS_STOPPED else "running"
    return "ended"


def run(
    chosen: Sequence[Card], *, json_logs: bool = False, check_every_s: float | None = None
) -> int:
    """Run `farm worker`: supervise the workers of this host until SIGTERM or Ctrl-C; return the
    exit code. Raises `CardBusy` before anything is started if another worker serves one of the
    cards.

    Args:
        check_every_s: in place of the setting.
    """
    current = settings()
    configure(current)
    check_semaphores()
    for card in chosen:
        with CardLock(card.id, current.lock_dir):
            pass
    logs.set_up(json_logs)
    # A list, not an Event: the signal handler may interrupt code that holds the lock of an Event.
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.append(number))
    environment = {logs.JSON_VARIABLE: "1"} if json_logs else {}
    if check_every_s is not None:
        environment["FARM_CHECK_EVERY_S"] = str(check_every_s)
    supervisor = Supervisor([card.id for card in chosen], environment=environment)
    supervisor.start()
    log.info("Serving %s", ", ".join(str(card) for card in chosen))
    try:
        while not signals:
            supervisor.tend()
            time.sleep(0.2)
        log.info("Stopping after the running measurements; a second signal stops at once")
        supervisor.stop(stop_grace_s(current), at_once=lambda: len(signals) > 1)
    finally:
        supervisor.kill()
    _hand_back(supervisor, current)
    return 0


def stop_grace_s(current: Settings) -> float:
    """Return how long a worker may continue its item after SIGTERM. Unit: s."""
    return current.item_timeout_s + STOP_MARGIN_S


def _hand_back(supervisor: Supervisor, current: Settings) -> None:
    """Let the unfinished items of the stopped workers wait again; the interrupted attempts do not
    count.
    """
    with contextlib.closing(Database(current.database)) as database:
        try:
            spooled = Spool(current.state_dir / "spool").items()
            for card_id, worker in supervisor.holders(current.host).items():
                if leases.hand_back(database, worker, spooled=spooled):
                    log.info("The unfinished item of card %s waits for a worker again", card_id)
                cards.stopped(database, worker)
        except FarmError as error:
            log.warning(
                "Unfinished items cannot be handed back now; they wait again when their leases "
                "have ended: %s",
                error.message,
            )
