"""The client of a benchmark process: it starts the process, sends requests, waits for answers and
cleans up. No torch.

If a process crashes, hangs or poisons its CUDA context, the client kills its process group. The
next request starts a new process."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from farm.benchmark_process.requests import (
    MeasureRequest,
    ProcessRequest,
    VerifyRequest,
    from_json,
    to_json,
)
from farm.devices.device import Card
from farm.devices.host import visible_only
from farm.devices.lock import host_lock
from farm.errors import CardBusy, HostBusy, SettingsError, Unmeasurable
from farm.settings import START_TIMEOUT_S, environment_of_children, settings
from farm.types.card_kind import is_gpu_id
from farm.types.protocol import OnPhase
from farm.types.reading import Reading
from farm.types.software import Software
from farm.types.verification import Verification

A = TypeVar("A")

KEPT_LINES = 40  # last lines of standard error
POLL_S = 0.005
#: The next step if a process is not ready in time.
_STARTS_LATE = (
    "Look for other programs that use the host or its disk: the start imports PyTorch and opens "
    "the card."
)


@dataclass(frozen=True)
class Rank:
    """The place of a benchmark process in a group (`farm.benchmark_process.group`)."""

    number: int
    of: int  # ranks in the group
    rendezvous: str  # a file in a private folder, through which the ranks find each other


@dataclass(frozen=True)
class CardReading:
    """A reading, with the card and the software that it was measured on.

    `verification`: of a variant; None if it was not verified."""

    reading: Reading
    software: Software
    card: Card
    verification: Verification | None = None


class BenchmarkProcess:
    """One benchmark process for one card. A request starts the process if it does not run.

    Use it from one thread at a time. Start it from a thread that outlives it: Linux kills the
    process when the thread that started it ends."""

    def __init__(
        self,
        card_id: str,
        env: Mapping[str, str] | None = None,
        *,
        verify_apart: bool | None = None,
        verifier: bool = False,
        also_visible: tuple[str, ...] = (),
        rank: Rank | None = None,
        program: str = "farm.benchmark_process.server",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """
        Args:
            env: environment variables for the process, added to this process's environment.
            verify_apart: verify variants in a second process, the verifier; the default is True on
                GPUs.
            verifier: this process is a verifier: it imports PyTorch, and creates no CUDA context
                before a request.
            also_visible: other GPUs that the process sees; the caller holds their locks.
            rank: the process is a rank of a group.
            program: the module to run: the server, or a module that calls its `main`.
            start_timeout_s: longest wait for each of its events until it is ready.
        """
        self.card_id, self._rank, self._program = card_id, rank, program
        on_gpu = is_gpu_id(card_id)
        self._gpus = [card_id, *also_visible] if on_gpu else []
        self.starts, self._start_timeout_s = 0, start_timeout_s
        self._env = dict(env or {})
        apart = on_gpu if verify_apart is None else verify_apart
        # Without this, the profiler unloads CUPTI after each use: this takes long and is known to
        # crash.
        verifier_env = {**self._env, "TEARDOWN_CUPTI": "0"}
        self._verifier = (
            BenchmarkProcess(card_id, verifier_env, verify_apart=False, verifier=True)
            if apart
            else None
        )
        self._is_verifier = verifier
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._complaints: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._ready: dict[str, Any] | None = None
        self._ids = itertools.count(1)

    @property
    def alive(self) -> bool:
        return self._process is not None and not _ended(self._process)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process and return at once. The process imports its modules in the
        background.
        """
        if self.alive:
            return
        self.kill()
        self._events = queue.Queue()
        self._complaints.clear()
        environment = environment_of_children({**self._env, "PYTHONUNBUFFERED": "1"})
        # Set this before Python starts. For a CPU it hides all GPUs, so that no library creates a
        # CUDA context.
        environment |= visible_only(self._gpus)
        command = [sys.executable, "-m", self._program, "--card", self.card_id]
        command += ["--parent", str(os.getpid())]
        command += ["--verifier"] if self._is_verifier else []
        if (rank := self._rank) is not None:
            command += [
                "--rank",
                str(rank.number),
                "--world",
                str(rank.of),
                "--rendezvous",
                rank.rendezvous,
            ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self.starts += 1
        for target, *arguments in (
            (_read_events, self._process.stdout, self._events),
            (_read_complaints, self._process.stderr, self._complaints),
        ):
            threading.Thread(
                target=target, args=arguments, name="benchmark-process", daemon=True
            ).start()
        self._start_verifier()

    def _start_verifier(self) -> None:
        """Start the verifier, if there is one: it imports its modules before a verification needs
        them.
        """
        if self._verifier is not None:
            with contextlib.suppress(OSError):  # a verification will try to start it again
                self._verifier.start()

    def wait_ready(self) -> Software:
        """Start the process if necessary, wait until it can measure, and return its software.
        Raises `Unmeasurable`: crashed, hung or not_available."""
        self.start()
        while not self.is_ready(time.monotonic() + self._start_timeout_s):
            pass
        assert self._ready is not None
        return Software.from_json(self._ready["software"])

    def is_ready(self, deadline_s: float, wait_s: float = math.inf) -> bool:
        """Handle one event of a process that has been started, or wait at most `wait_s`. True if it
        can measure. Raises as `wait_ready`."""
        if self._ready is None:
            event = self._next(deadline_s, "get ready", _STARTS_LATE, wait_s)
            if event.get("event") == "failed":
                self.kill()
                raise Unmeasurable("not_available", event["message"], event.get("next_step", ""))
            self._ready = event if event.get("event") == "ready" else None
        return self._ready is not None

    @property
    def unhealthy(self) -> str:
        """The fault that the health check found at the process's start; "" if the card passed."""
        return str(self._ready.get("unhealthy", "")) if self._ready is not None else ""

    @property
    def card(self) -> Card:
        """The description of the card that the process sent. Call `wait_ready` first."""
        if self._ready is None:
            raise RuntimeError("the benchmark process is not ready yet")
        card: Card = from_json(Card, self._ready["card"])
        return card

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the process's input, so that it ends. Kill it if it still runs after
        `timeout_s`.
        """
        if self._verifier is not None:
            self._verifier.close(timeout_s)
        if self._process is not None:
            _close_input(self._process)
            _wait_for_end(self._process, timeout_s)
            self.kill()

    def kill(self) -> None:
        """Kill the process and all processes that it started, and reap it."""
        if self._verifier is not None:
            self._verifier.kill()
        process = self._process
        if process is None:
            return
        # Kill the group even if the process has ended: its children may still run. Reap the process
        # only afterwards: until then, the kernel gives its id to no other process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        self._process, self._ready = None, None
        _close_input(process)

    def __enter__(self) -> BenchmarkProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def item_timeout_s(self) -> float:
        """The setting ``item_timeout_s``: the longest time of one item. Unit: s."""
        return settings().item_timeout_s

    def call(
        self,
        request: ProcessRequest[A],
        *,
        timeout_s: float | None = None,
        on_phase: OnPhase | None = None,
    ) -> A:
        """Send a request and return its answer.

        Args:
            timeout_s: longest time for the request, without the start of the process. None: that
                of an item. A request that uses slow memory may before wait as long for the lock.
                Unit: s.
            on_phase: called at the begin of each phase. If it raises an exception, the process is
                killed.

        Raises:
            HostBusy: another process holds the lock of the host's slow memory, or it cannot be
                locked.
            Unmeasurable: the process sent a reason; or it crashed or hung, and has ended.
        """
        timeout_s = self.item_timeout_s if timeout_s is None else timeout_s
        self.wait_ready()
        with contextlib.ExitStack() as stack:
            if request.uses_slow_memory:
                # The cards of a host share slow memory: when two H200s used it at once, times rose
                # by up to 16 %.
                try:
                    stack.enter_context(host_lock("slow-memory", settings().lock_dir, timeout_s))
                except (CardBusy, SettingsError) as error:
                    raise HostBusy("not_available", error.message, error.next_step) from error
            deadline_s = time.monotonic() + timeout_s
            try:
                asked = self.ask(request, deadline_s, on_phase)
                while (answer := asked()) is None:
                    pass
                return answer
            except Unmeasurable:
                raise
            except BaseException:
                # a signal or a time limit: the process is still busy with the item
                self.kill()
                raise

    def ask(
        self,
        request: ProcessRequest[A],
        deadline_s: float,
        on_phase: OnPhase | None,
        wait_s: float = math.inf,
    ) -> Callable[[], A | None]:
        """Send a request to the process, which is ready. The result is a function to be called
        until it returns the answer, which is never None; each call handles one event of the
        process, or waits at most `wait_s` for one. Both raise as `call`."""
        request_id = next(self._ids)
        # the message about a crash must not quote an earlier item's output
        self._complaints.clear()
        self._send(request, request_id)

        def handle_event() -> A | None:
            event = self._next(deadline_s, request.doing, request.if_late, wait_s)
            if event.get("event") == "refused":  # no other line was sent since the last answer
                text = f"The benchmark process cannot read the request: {event.get('message')}."
                raise Unmeasurable("rejected", text, "Read the worker's log.")
            if event.get("id") != request_id:
                return None
            if event["event"] == "phase" and on_phase is not None:
                on_phase(event["phase"], event.get("details", {}))
            elif event["event"] == "answer":
                return from_json(request.answer, event["answer"])  # type: ignore[no-any-return]
            elif event["event"] == "unmeasurable":
                if event.get("poisoned"):
                    self.kill()
                raise Unmeasurable(event["reason"], event["message"], event.get("next_step", ""))
            return None

        return handle_event

    def measure(
        self,
        request: MeasureRequest,
        *,
        verify: bool = False,
        timeout_s: float | None = None,
        on_phase: OnPhase | None = None,
    ) -> CardReading:
        """Measure one item. Raises as `call`.

        Args:
            verify: first verify the item, which is a variant, against ``request.predicted``.
            timeout_s: longest time of the verification, and also of the measurement; see `call`.
            on_phase: see `call`.
        """
        software, card = self.wait_ready(), self.card
        verification: Verification | None = None
        failure = ""
        if verify:
            verifying = VerifyRequest(request.subject, request.protocol, request.predicted)
            try:
                verification = self.verify(verifying, timeout_s, on_phase)
            except Unmeasurable as error:
                if self._verifier is None or error.reason == "hung":
                    raise
                failure = f"{error.reason}: {error.message}"  # the variant can still be measured
        reading = self.call(request, timeout_s=timeout_s, on_phase=on_phase)
        if verification is None and not failure:
            return CardReading(reading, software, card)
        # start it now, so that its imports do not disturb the next measurement
        self._start_verifier()
        if failure:
            reading = reading.lacking("verification", failure)
        return CardReading(reading, software, card, verification)

    def verify(
        self, request: VerifyRequest, timeout_s: float | None, on_phase: OnPhase | None
    ) -> Verification:
        """Verify a variant on the card. Raises as `call`.

        On a GPU, a separate verifier process verifies and then ends. The reason: after a process
        has used PyTorch's profiler, each of its kernel launches takes 0.1 to 0.2 us longer. The
        verifier has less memory, because the measuring process uses the card, too; it fails if the
        card allows only one process."""
        if self._verifier is None:
            return self.call(request, timeout_s=timeout_s, on_phase=on_phase)
        try:
            return self._verifier.call(request, timeout_s=timeout_s, on_phase=on_phase)
        except Unmeasurable as error:
            if error.reason != "crashed":
                raise
            # The verifier may have crashed before the request: try once more.
            return self._verifier.call(request, timeout_s=timeout_s, on_phase=on_phase)
        finally:
            self._verifier.close()  # no other process may use the card during the measurement

    def _send(self, request: ProcessRequest[Any], request_id: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            line = json.dumps({"request": request.name, "id": request_id, **to_json(request)})
        except (RecursionError, ValueError):
            raise Unmeasurable(
                "rejected",
                "The item's description has too many levels.",
                "Capture the model again.",
            ) from None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost(request.doing) from None

    def _next(self, deadline_s: float, doing: str, if_late: str, wait_s: float) -> dict[str, Any]:
        """The next event of the process; {} if there is none within `wait_s`.

        Args:
            doing: what the process does: a verb phrase.
            if_late: the next step if it is not done at `deadline_s`.
        """
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            event = self._events.get(timeout=min(left_s, wait_s))
        except queue.Empty:
            if wait_s < left_s:
                return {}
            self.kill()
            raise Unmeasurable(
                "hung",
                f"The benchmark process did not {doing} within the time limit, so the farm ended "
                "it.",
                if_late,
            ) from None
        if event is None:
            raise self._lost(doing)
        return event

    def _lost(self, doing: str) -> Unmeasurable:
        process, how = self._process, "closed its output"
        if process is not None:
            ended = _wait_for_end(process, 5.0)
            self.kill()
            if ended and process.returncode < 0:
                how = f"signal {_signal_name(-process.returncode)}"
            elif ended:
                how = f"exit code {process.returncode}"
        last = next((line for line in reversed(self._complaints) if line.strip()), "")
        return Unmeasurable(
            "crashed",
            f"The benchmark process ended ({how}) before it could {doing}."
            + (f" Its last output: {last[:300]}" if last else ""),
            "Read the worker's log.",
        )


def _signal_name(number: int) -> str:
    names = {entry.value: entry.name for entry in signal.Signals}
    return names.get(number, str(number))


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """True if a child has ended. The child is not reaped, so that its process id and group id stay
    reserved.
    """
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _wait_for_end(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    while not (ended := _ended(process)) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return ended


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _read_events(stream: Any, events: queue.Queue[dict[str, Any] | None]) -> None:
    with contextlib.suppress(OSError, ValueError), stream:
        for line in stream:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.put(event)
    events.put(None)


def _read_complaints(stream: Any, complaints: collections.deque[str]) -> None:
    with contextlib.suppress(OSError, ValueError), stream:
        for line in stream:
            complaints.append(line.decode(errors="replace").rstrip())
