"""The parent's side of a benchmark process: ask, wait, and clean up after whatever becomes of it.

No torch. A process that crashes, hangs or poisons its context is ended with its whole group, and the next item gets a
fresh one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.devices.device import Card
from farm.devices.lock import turn
from farm.errors import CardBusy, SettingsError, Unmeasurable
from farm.settings import environment_of_children, settings
from farm.types.protocol import OnPhase, Protocol, Software, Stopping, Subject
from farm.types.reading import Reading, Verification

if TYPE_CHECKING:
    from farm.slow_memory.transfers import Move

START_TIMEOUT_S = 180.0  # importing torch from a cold network disk takes minutes
KEPT_LINES = 40


@dataclass(frozen=True)
class Answer:
    """What came back for one item. `observed` is the capture on the card, as JSON, of a verified variant."""

    reading: Reading
    software: Software
    card: Card
    observed: dict[str, Any] | None = None
    verification: Verification | None = None


class BenchmarkProcess:
    """One benchmark process for one card, started when needed and started again after it was lost.

    Not for several threads at once. Start it from a thread that lives as long as the process is wanted: the kernel
    ends the child when the thread that made it ends.
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
            env: environment variables for the process, beside this one's.
            verify_apart: verify variants in a process of its own; without it, on GPUs.
            verifier: be that process: it imports PyTorch and makes no context on the card until it is asked.
            peer_id: another GPU of the host, whose lock is held: slow is its memory, not the host's.
        """
        self.card_id, self._peer_id = card_id, peer_id
        self.starts = 0
        self._env = dict(env or {})
        apart = card_id.startswith("GPU-") if verify_apart is None else verify_apart
        # The profiler's driver part, taken down and set up again between uses, takes long and is known to crash.
        verifier_env = {**self._env, "TEARDOWN_CUPTI": "0"}
        self._verifier = BenchmarkProcess(card_id, verifier_env, verify_apart=False, verifier=True) if apart else None
        self._is_verifier = verifier
        self._process: subprocess.Popen[bytes] | None = None
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._complaints: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._ready: dict[str, Any] | None = None
        self._count = 0

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
        """Start the process and return at once: it gets ready in the background."""
        if self.alive:
            return
        self.kill()
        self._events = queue.Queue()
        self._complaints.clear()
        environment = environment_of_children({**self._env, "PYTHONUNBUFFERED": "1"})
        # Pinned before Python starts. On a CPU card CUDA is hidden, so that nothing makes a context.
        gpus = [self.card_id, *([self._peer_id] if self._peer_id else [])] if self.card_id.startswith("GPU-") else []
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "farm.benchmark_process.server",
                "--card",
                self.card_id,
                "--parent",
                str(os.getpid()),
                *(["--verifier"] if self._is_verifier else []),
                *(["--peer"] if self._peer_id else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self.starts += 1
        for target, arguments in (
            (_read_events, (self._process.stdout, self._events)),
            (_read_complaints, (self._process.stderr, self._complaints)),
        ):
            threading.Thread(target=target, args=arguments, name="benchmark-process", daemon=True).start()
        self._stand_by()

    def _stand_by(self) -> None:
        """Have the verifier import what it needs, so that verifying need not wait for that."""
        if self._verifier is not None:
            with contextlib.suppress(OSError):  # it is tried again when it is needed
                self._verifier.start()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Software:
        """Start if need be, wait until it can measure, and say with what software.

        Raises:
            Unmeasurable: it did not get ready (crashed, hung or not_available).
        """
        self.start()
        if self._ready is None:
            event = self._next(time.monotonic() + timeout_s, "get ready")
            while event["event"] != "ready":
                if event["event"] == "failed":
                    self.kill()
                    raise Unmeasurable("not_available", event["message"], event.get("next_step", ""))
                event = self._next(time.monotonic() + timeout_s, "get ready")
            self._ready = event
        return Software.from_json(self._ready["software"])

    @property
    def unhealthy(self) -> str:
        """Why the card must not measure (it failed the check at the process's start), "" if it may."""
        return str(self._ready.get("unhealthy", "")) if self._ready is not None else ""

    @property
    def card(self) -> Card:
        """The card as the process found it; only after `wait_ready`."""
        if self._ready is None:
            raise RuntimeError("the benchmark process is not ready yet")
        return Card.from_json(self._ready["card"])

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
    ) -> Answer:
        """Have one item measured.

        Args:
            predicted: for a variant, the tuples it is expected to have; it is then verified on the card first.
            verify: verify even without a prediction (True) or not in spite of one (False).
            timeout_s: for verifying and for measuring each, not for getting ready. Unit: s.
            on_phase: called with each phase as it begins; what it raises ends the process and comes through.

        Raises:
            Unmeasurable: with the process's own reason, or crashed or hung; the process is then gone.
        """
        software = self.wait_ready()
        card = self.card
        about = {
            "subject": subject.to_json(),
            "protocol": protocol.to_json(),
            "predicted": dict(predicted) if predicted is not None else None,
        }
        found: dict[str, Any] = {}
        if (predicted is not None) if verify is None else verify:
            found = self._verify(about, timeout_s, on_phase)
        request = {"request": "measure", **about, "stopping": stopping.to_json()}
        with self._alone_on_the_wire(timeout_s) if protocol.placement else contextlib.nullcontext():
            event = self._ask(request, "reading", "measure", time.monotonic() + timeout_s, on_phase)
        reading = Reading.from_json(event["reading"])
        if found:
            self._stand_by()  # now, not while the card measures
        if why := found.get("unverified"):
            reading = reading.noting(unverified=why)
        seen = found.get("verification")
        verification = None if seen is None else Verification.from_json(seen)
        return Answer(reading, software, card, found.get("observed"), verification)

    def _verify(self, about: dict[str, Any], timeout_s: float, on_phase: OnPhase | None) -> dict[str, Any]:
        """Have a variant verified on the card.

        On a GPU in a process of its own, which then ends: verifying needs PyTorch's profiler, and once a process has
        used that, each kernel that it launches takes 0.1 to 0.2 us longer. Beside the measuring process it has less
        memory, and on a card that admits one process only it has no place. A variant that cannot be verified there is
        measured all the same, and `unverified` says why.
        """
        request = {"request": "verify", **about}
        if self._verifier is None:
            return self._ask(request, "verified", "verify", time.monotonic() + timeout_s, on_phase)
        lost = False
        try:
            while True:
                try:
                    self._verifier.wait_ready()
                    return self._verifier._ask(request, "verified", "verify", time.monotonic() + timeout_s, on_phase)
                except Unmeasurable as error:
                    if error.reason == "hung":
                        raise
                    if error.reason != "crashed" or lost:
                        return {"unverified": f"{error.reason}: {error.message}"}
                    lost = True  # it may have been lost while it stood by: once more
        finally:
            self._verifier.close()  # nothing but this process may be on the card when it measures

    def in_place(
        self, subject: Subject, protocol: Protocol, *, most: int | None = None, timeout_s: float = 300.0
    ) -> dict[str, Any]:
        """What calls of a variant take with tensors in slow memory: `farm.slow_memory.in_situ.compare`.

        Args:
            most: at most so many configurations.

        Raises:
            Unmeasurable: with the process's own reason, or crashed or hung; the process is then gone.
        """
        self.wait_ready()
        request = {"request": "in_place", "subject": subject.to_json(), "protocol": protocol.to_json(), "most": most}
        with self._alone_on_the_wire(timeout_s):
            event = self._ask(
                request, "in_place", "time calls in their model", time.monotonic() + timeout_s, on_phase=None
            )
        return dict(event["found"])

    def step(self, subject: Subject, protocol: Protocol, *, timeout_s: float = 300.0) -> dict[str, Any]:
        """A training step as the card runs it, as JSON: `farm.slow_memory.planned_step.take_apart`.

        Raises:
            Unmeasurable: with the process's own reason, or crashed or hung; the process is then gone.
        """
        self.wait_ready()
        request = {"request": "step", "subject": subject.to_json(), "protocol": protocol.to_json()}
        event = self._ask(request, "step", "take the step apart", time.monotonic() + timeout_s, on_phase=None)
        return dict(event["step"])

    def wire(self, subject: Subject, protocol: Protocol, *, timeout_s: float = 300.0) -> dict[str, Any]:
        """What copies get of the wire beside a step, as JSON: `farm.slow_memory.planned_step.measure_wire`.

        Raises:
            Unmeasurable: with the process's own reason, or crashed or hung; the process is then gone.
        """
        self.wait_ready()
        request = {"request": "wire", "subject": subject.to_json(), "protocol": protocol.to_json()}
        with self._alone_on_the_wire(timeout_s):
            event = self._ask(request, "wire", "time copies", time.monotonic() + timeout_s, on_phase=None)
        return dict(event["found"])

    def planned_step(
        self,
        subject: Subject,
        protocol: Protocol,
        calls: Sequence[str],
        plans: Sequence[Collection[int]],
        moves: Sequence[Sequence[Move]] = (),
        *,
        timeout_s: float = 300.0,
    ) -> dict[str, Any]:
        """What a step takes with all fast, and under plans, as JSON: `farm.slow_memory.planned_step.compare`.

        Args:
            calls: the tuple ids of the step's.
            plans: of each the numbers of the tensors that are slow.
            moves: of each.

        Raises:
            Unmeasurable: with the process's own reason, or crashed or hung; the process is then gone.
        """
        self.wait_ready()
        request = {
            "request": "planned_step",
            "subject": subject.to_json(),
            "protocol": protocol.to_json(),
            "calls": list(calls),
            "plans": [sorted(slow) for slow in plans],
            "moves": [[dataclasses.astuple(move) for move in of_plan] for of_plan in moves],
        }
        with self._alone_on_the_wire(timeout_s):
            event = self._ask(request, "planned_step", "run the step", time.monotonic() + timeout_s, on_phase=None)
        return dict(event["found"])

    @contextlib.contextmanager
    def _alone_on_the_wire(self, timeout_s: float) -> Iterator[None]:
        """The cards of a host share its memory: slow readings beside each other took up to 16 % longer on two H200s.

        Raises:
            Unmeasurable: not_available: others were at it all that time, or there can be no lock.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(turn("slow-memory", settings().lock_dir, timeout_s))
            except (CardBusy, SettingsError) as error:
                raise Unmeasurable("not_available", error.message, error.next_step) from error
            yield

    def fingerprint(self, timeout_s: float = 60.0) -> dict[str, Any]:
        """What the card is like: rates, levels, sensors (`farm.benchmark.fingerprinting`).

        Raises:
            Unmeasurable: with the process's own reason, or crashed or hung; the process is then gone.
        """
        self.wait_ready()
        deadline_s = time.monotonic() + timeout_s
        event = self._ask(
            {"request": "fingerprint"}, "fingerprint", "take the card's fingerprint", deadline_s, on_phase=None
        )
        return dict(event["fingerprint"])

    def _ask(
        self, request: dict[str, Any], wanted: str, doing: str, deadline_s: float, on_phase: OnPhase | None
    ) -> dict[str, Any]:
        """Send a request and wait for the event that answers it."""
        self._count += 1
        request_id = self._count
        self._complaints.clear()  # so that a crash quotes nothing of an item before
        try:
            self._send({**request, "id": request_id})
            while True:
                event = self._next(deadline_s, doing)
                if event.get("id") != request_id:
                    continue
                if event["event"] == "phase" and on_phase is not None:
                    on_phase(event["phase"], event.get("details", {}))
                elif event["event"] == wanted:
                    return event
                elif event["event"] == "unmeasurable":
                    if event.get("poisoned"):
                        self.kill()
                    raise Unmeasurable(event["reason"], event["message"], event.get("next_step", ""))
        except Unmeasurable:
            raise
        except BaseException:  # a signal, a time limit: the item is half-done, and its process with it
            self.kill()
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """End it: its input ends, and so does it; by force if it does not."""
        if self._verifier is not None:
            self._verifier.close(timeout_s)
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        patience_s = time.monotonic() + timeout_s
        while not _ended(process) and time.monotonic() < patience_s:
            time.sleep(0.005)
        self.kill()

    def kill(self) -> None:
        """End it and all that it started, at once, and reap it."""
        if self._verifier is not None:
            self._verifier.kill()
        process = self._process
        if process is None:
            return
        # Also after it died by itself, what it started must go. It is reaped only afterwards, so its id is still its
        # own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        self._discard()

    def __enter__(self) -> BenchmarkProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _discard(self) -> None:
        process, self._process, self._ready = self._process, None, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._lost("measure") from None
        except RecursionError:
            raise Unmeasurable("rejected", "Its description is nested too deep.", "Capture the model again.") from None

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
        process = self._process
        code = None
        if process is not None:
            patience_s = time.monotonic() + 5
            while not (ended := _ended(process)) and time.monotonic() < patience_s:
                time.sleep(0.005)
            self.kill()
            code = process.returncode if ended else None
        last = next((line for line in reversed(self._complaints) if line.strip()), "")
        return Unmeasurable(
            "crashed",
            f"The benchmark process ended ({_how(code)}) while it should {doing}."
            + (f" Last: {last[:300]}" if last else ""),
            "Look at the worker's log.",
        )


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended, without reaping it: its id, and its group's, stay its own until then."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _how(code: int | None) -> str:
    if code is None:
        return "it closed its output"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


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
