"""The client of a benchmark process: it starts the process, sends requests, waits for answers and cleans up. No torch.

A process that crashes, hangs or poisons its CUDA context is ended with its process group; the next request starts a new
one.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from farm.benchmark_process.requests import MeasureRequest, ProcessRequest, Verified, VerifyRequest, from_json, to_json
from farm.devices.device import Card
from farm.devices.lock import turn
from farm.errors import CardBusy, SettingsError, Unmeasurable
from farm.settings import environment_of_children, settings
from farm.types.protocol import OnPhase, Protocol, Software, Stopping, Subject
from farm.types.reading import Reading, Verification

A = TypeVar("A")

START_TIMEOUT_S = 180.0  # importing torch from a cold network disk takes minutes
KEPT_LINES = 40  # of standard error
POLL_S = 0.005


@dataclass(frozen=True)
class Measured:
    """One measured item. `observed` is the capture on the card, as JSON, of a verified variant."""

    reading: Reading
    software: Software
    card: Card
    observed: dict[str, Any] | None = None
    verification: Verification | None = None


class BenchmarkProcess:
    """One benchmark process for one card. It is started when needed, and again after it was lost.

    Use it from one thread at a time. Start it from a thread that lives as long as the process must: the kernel ends the
    child when the thread that started it ends.
    """

    def __init__(
        self,
        card_id: str,
        env: Mapping[str, str] | None = None,
        *,
        verify_apart: bool | None = None,
        verifier: bool = False,
        peer_id: str | None = None,
    ) -> None:
        """
        Args:
            env: environment variables for the process, added to this process's environment.
            verify_apart: verify variants in a process of its own; the default is True on GPUs.
            verifier: be that process: it imports PyTorch, and creates no CUDA context before the first request.
            peer_id: another GPU of the host, whose lock is held: its memory is the slow memory, instead of the host's.
        """
        self.card_id, self._peer_id = card_id, peer_id
        self.starts = 0
        self._env = dict(env or {})
        apart = card_id.startswith("GPU-") if verify_apart is None else verify_apart
        # Tearing down and setting up the profiler's driver part between uses takes long and is known to crash.
        verifier_env = {**self._env, "TEARDOWN_CUPTI": "0"}
        self._verifier = BenchmarkProcess(card_id, verifier_env, verify_apart=False, verifier=True) if apart else None
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

    @property
    def complaints(self) -> str:
        """The last lines that the process wrote to standard error."""
        return "\n".join(self._complaints)

    def start(self) -> None:
        """Start the process and return at once; it gets ready in the background."""
        if self.alive:
            return
        self.kill()
        self._events = queue.Queue()
        self._complaints.clear()
        environment = environment_of_children({**self._env, "PYTHONUNBUFFERED": "1"})
        # Set before Python starts. For a CPU card CUDA is hidden, so that no library creates a context.
        gpus = [self.card_id, *([self._peer_id] if self._peer_id else [])] if self.card_id.startswith("GPU-") else []
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        command = [sys.executable, "-m", "farm.benchmark_process.server", "--card", self.card_id]
        command += ["--parent", str(os.getpid())]
        command += ["--verifier"] if self._is_verifier else []
        command += ["--peer"] if self._peer_id else []
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
            threading.Thread(target=target, args=arguments, name="benchmark-process", daemon=True).start()
        self._start_verifier()

    def _start_verifier(self) -> None:
        """Let the verifier import its modules now, so that a verification need not wait for them."""
        if self._verifier is not None:
            with contextlib.suppress(OSError):  # the verification starts it again
                self._verifier.start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Software:
        """Start the process if necessary, wait until it can measure, and return its software.

        Raises:
            Unmeasurable: crashed, hung or not_available.
        """
        self.start()
        while self._ready is None:
            event = self._next(time.monotonic() + timeout_s, "get ready")
            if event["event"] == "failed":
                self.kill()
                raise Unmeasurable("not_available", event["message"], event.get("next_step", ""))
            self._ready = event if event["event"] == "ready" else None
        return Software.from_json(self._ready["software"])

    @property
    def unhealthy(self) -> str:
        """Why the card failed the health check at the process's start; "" if it passed."""
        return str(self._ready.get("unhealthy", "")) if self._ready is not None else ""

    @property
    def card(self) -> Card:
        """The card as the process found it; only after `wait_ready`."""
        if self._ready is None:
            raise RuntimeError("the benchmark process is not ready yet")
        return Card.from_json(self._ready["card"])

    def close(self, timeout_s: float = 5.0) -> None:
        """Close the process's input, which ends it; kill it if it still runs after `timeout_s`."""
        if self._verifier is not None:
            self._verifier.close(timeout_s)
        if self._process is not None:
            _close_input(self._process)
            _wait_for_end(self._process, timeout_s)
            self.kill()

    def kill(self) -> None:
        """Kill the process and everything that it started, and reap it."""
        if self._verifier is not None:
            self._verifier.kill()
        process = self._process
        if process is None:
            return
        # Kill its group even if the process has ended: its children may still run. It is reaped only afterwards, so
        # that its id cannot belong to another process yet.
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

    def call(self, request: ProcessRequest[A], *, timeout_s: float = 300.0, on_phase: OnPhase | None = None) -> A:
        """Send a request and return its answer.

        Args:
            timeout_s: for the request, without the start of the process. Unit: s.
            on_phase: called with each phase as it begins. An exception that it raises ends the process.

        Raises:
            Unmeasurable: with the process's own reason, or crashed or hung; then the process has ended.
        """
        self.wait_ready()
        with contextlib.ExitStack() as stack:
            if request.uses_slow_memory:
                # The cards of a host share it: on two H200s, readings beside each other took up to 16 % longer.
                try:
                    stack.enter_context(turn("slow-memory", settings().lock_dir, timeout_s))
                except (CardBusy, SettingsError) as error:
                    raise Unmeasurable("not_available", error.message, error.next_step) from error
            deadline_s = time.monotonic() + timeout_s
            request_id = next(self._ids)
            self._complaints.clear()  # a crash must not quote an earlier item
            try:
                self._send(request, request_id)
                while True:
                    event = self._next(deadline_s, request.doing)
                    if event.get("id") != request_id:
                        continue
                    if event["event"] == "phase" and on_phase is not None:
                        on_phase(event["phase"], event.get("details", {}))
                    elif event["event"] == "answer":
                        return from_json(request.answer, event["answer"])  # type: ignore[no-any-return]
                    elif event["event"] == "unmeasurable":
                        if event.get("poisoned"):
                            self.kill()
                        raise Unmeasurable(event["reason"], event["message"], event.get("next_step", ""))
            except Unmeasurable:
                raise
            except BaseException:  # a signal or a time limit: the item is half-done, so the process must go
                self.kill()
                raise

    def measure(
        self,
        subject: Subject,
        protocol: Protocol,
        stopping: Stopping,
        *,
        predicted: Mapping[str, int] | None = None,
        verify: bool | None = None,
        timeout_s: float = 300.0,
        on_phase: OnPhase | None = None,
    ) -> Measured:
        """Measure one item; verify a variant on the card first.

        Args:
            predicted: for a variant, the tuples that it is expected to have.
            verify: whether to verify; the default is to verify if there is a prediction.
            timeout_s: for verifying and for measuring, each. Unit: s.
            on_phase: see `call`.

        Raises:
            Unmeasurable: see `call`.
        """
        software, card = self.wait_ready(), self.card
        verified: Verified | str | None = None
        if predicted is not None if verify is None else verify:
            verified = self._verify(VerifyRequest(subject, protocol, predicted), timeout_s, on_phase)
        request = MeasureRequest(subject, protocol, stopping, predicted)
        reading = self.call(request, timeout_s=timeout_s, on_phase=on_phase)
        if verified is None:
            return Measured(reading, software, card)
        self._start_verifier()  # now, and not while the card measures
        if isinstance(verified, str):
            return Measured(reading.noting(unverified=verified), software, card)
        return Measured(reading, software, card, verified.observed, verified.verification)

    def _verify(self, request: VerifyRequest, timeout_s: float, on_phase: OnPhase | None) -> Verified | str:
        """Verify a variant on the card, or return why it cannot be verified; it can be measured nevertheless.

        On a GPU, a process of its own verifies and then ends. Verifying needs PyTorch's profiler; after that, each
        kernel that the process launches takes 0.1 to 0.2 us longer. Beside the measuring process the verifier has less
        memory, and a card that admits one process only refuses it.
        """
        if self._verifier is None:
            return self.call(request, timeout_s=timeout_s, on_phase=on_phase)
        lost = False
        try:
            while True:
                try:
                    return self._verifier.call(request, timeout_s=timeout_s, on_phase=on_phase)
                except Unmeasurable as error:
                    if error.reason == "hung":
                        raise
                    if error.reason != "crashed" or lost:
                        return f"{error.reason}: {error.message}"
                    lost = True  # it may have been lost before the request: try once more
        finally:
            self._verifier.close()  # only the measuring process may be on the card while it measures

    def _send(self, request: ProcessRequest[Any], request_id: int) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            line = json.dumps({"request": request.name, "id": request_id, **to_json(request)})
        except (RecursionError, ValueError):
            raise Unmeasurable("rejected", "Its description is nested too deep.", "Capture the model again.") from None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost(request.doing) from None

    def _next(self, deadline_s: float, doing: str) -> dict[str, Any]:
        try:
            event = self._events.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            self.kill()
            raise Unmeasurable(
                "hung",
                f"The benchmark process did not {doing} in time and was ended.",
                "Give it longer with FARM_ITEM_TIMEOUT_S, or leave the operator out.",
            ) from None
        if event is None:
            raise self._lost(doing)
        return event

    def _lost(self, doing: str) -> Unmeasurable:
        process, how = self._process, "it closed its output"
        if process is not None:
            ended = _wait_for_end(process, 5.0)
            self.kill()
            if ended:
                how = f"exit code {process.returncode}"
                with contextlib.suppress(ValueError):
                    how = f"signal {signal.Signals(-process.returncode).name}"
        last = next((line for line in reversed(self._complaints) if line.strip()), "")
        return Unmeasurable(
            "crashed",
            f"The benchmark process ended ({how}) while it should {doing}." + (f" Last: {last[:300]}" if last else ""),
            "Look at the worker's log.",
        )


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """True if a child has ended. It is not reaped: its id and its group's id stay its own until then."""
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
