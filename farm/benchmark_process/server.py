"""The benchmark process: it imports torch and owns the CUDA context of a card.

    python -m farm.benchmark_process.server --card ID

With --verifier, the process only verifies variants. It creates no CUDA context before its first
request, and the client ends it after the verification (`farm.benchmark_process.client`). With
--rank, --world and --rendezvous it is a rank of a group, which measures subjects that need several
cards (`farm.benchmark_process.group`).

The process reads JSON objects from standard input and writes events as JSON to its original
standard output, one object per line. It redirects standard output to standard error, so that the
output of a model cannot be mistaken for an event. The process ends when its input ends, even during
a measurement, and when its parent dies.

    in   {"request": name, "id", and the fields of the request}     `requests` and add-ons
    out  {"event": "ready", "pid", "card", "software", "capabilities", "unhealthy"}
         {"event": "failed", "message", "next_step"}                it cannot get ready
         {"event": "phase", "id", "phase", "details"}               verify | canary | rebuild |
                                                                    warm-up | window | burst |
                                                                    eager | places | context
         {"event": "answer", "id", "answer"}
         {"event": "unmeasurable", "id", "reason", "message", "next_step", "poisoned"}
         {"event": "refused", "message"}                            the line is not a request
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import platform
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any, TextIO

import psutil

from farm.benchmark.host_code import check_versions, import_libraries, with_revision
from farm.benchmark_process.handlers import HANDLERS, Handler, OpenCard
from farm.benchmark_process.requests import (
    CompiledAhead,
    CompileRequest,
    FingerprintRequest,
    MeasureRequest,
    ProcessRequest,
    SubjectRequest,
    TurnsRequest,
    VerifyRequest,
    from_json,
    to_json,
)
from farm.devices import simulated
from farm.devices.device import Card, Device
from farm.devices.host import find_card, open_device
from farm.devices.lock import register_process
from farm.errors import FarmError, Unmeasurable, error_text
from farm.extensions import handlers as handlers_of_add_ons
from farm.extensions import offload
from farm.settings import die_with_parent, settings, user_models
from farm.types.protocol import OnPhase
from farm.types.reading import Reading
from farm.types.software import Software
from farm.types.subject import Subject
from farm.types.tokens import Tokens
from farm.types.verification import Verification

#: The process checks the card before an item if the last health check is older than this. Unit: s.
CHECK_EVERY_S = 60.0
#: The process of a CPU may take this share of the host's memory.
MEMORY_LIMIT_SHARE = 0.8

#: The niceness of a compilation ahead: an item that compiles in its turn comes first.
COMPILES_WITH_NICENESS = 5

#: Called with the request and the function that announces phases.
Answering = Callable[[Any, OnPhase], Any]


class EventWriter:
    """Writes events to the process's original standard output. Any thread may use it: lines never
    mix.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def send(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, **values}, allow_nan=False)
        try:
            with self._lock:
                self._out.write(line + "\n")
                self._out.flush()
        except (BrokenPipeError, ValueError):
            os._exit(0)  # the parent has closed its end


def main(measuring: type[TorchRunner] | None = None) -> None:
    """Serve requests; on a real card with `measuring`, by default a `TorchRunner`."""
    options = _parsed_options()
    gc.disable()  # imports create no garbage: collections would take a seventh of the start time
    events = EventWriter(_private_output())
    _end_only_with_parent(options.parent)
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(requests, events), name="listener", daemon=True).start()

    try:
        runner = _runner(options, measuring or TorchRunner)
        gc.freeze()  # exclude a few hundred thousand permanent objects from garbage collections
        gc.enable()
        unhealthy = "" if options.verifier else runner.check()
    except Exception as error:
        _send_failed(events, error)
        os._exit(2)
    events.send(
        "ready",
        pid=os.getpid(),
        card=to_json(runner.device.card),
        software=runner.software.to_json(),
        capabilities=sorted(runner.device.capabilities),
        unhealthy=unhealthy,
    )

    for prepare in runner.preparations:
        if requests.empty():
            with contextlib.suppress(Exception):  # an item that needs it reports the error
                prepare()
    while _serve(requests.get(), runner, events):
        pass
    # Do not use sys.exit: the destructors of a poisoned CUDA context may hang.
    sys.stderr.flush()
    os._exit(0)


def _parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="farm.benchmark_process.server")
    parser.add_argument("--card", required=True)
    parser.add_argument(
        "--verifier",
        action="store_true",
        help="create a CUDA context only at the first request to verify",
    )
    parser.add_argument("--rank", type=int, default=0, help="number of this rank in a group")
    parser.add_argument("--world", type=int, default=1, help="number of ranks in the group")
    parser.add_argument(
        "--rendezvous", default="", help="a private file through which the ranks find each other"
    )
    parser.add_argument("--parent", type=int, default=0, help="end when this process ends")
    return parser.parse_args()


def _end_only_with_parent(parent: int) -> None:
    """Ignore Ctrl-C, and a SIGTERM to all processes of a service: the parent finishes its item,
    then ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent=parent)
    # If the host runs out of memory, the kernel should end this process, not the worker or the
    # database.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _runner(options: argparse.Namespace, measuring: type[TorchRunner]) -> Runner:
    """Open the card, and return what answers requests on it; a rank has joined its group."""
    card = find_card(options.card, settings())
    device = open_device(card)
    runner: Runner
    if card.is_simulated:
        runner = SimulatedRunner(device)
    elif options.verifier:
        runner = TorchVerifier(device)
    else:
        runner = measuring(device)
    if options.world > 1:
        runner.join(options.rank, options.world, options.rendezvous)
    return runner


def _send_failed(events: EventWriter, error: Exception) -> None:
    """Report that the process cannot get ready."""
    if isinstance(error, FarmError):
        events.send("failed", message=error.message, next_step=error.next_step)
        return
    traceback.print_exc()
    message = f"{type(error).__name__}: {error_text(error)}"[:600]
    events.send("failed", message=message, next_step="")


def _serve(data: dict[str, Any], runner: Runner, events: EventWriter) -> bool:
    """Answer one request. Return False if the CUDA context is poisoned: the process must then
    end.
    """
    item_id = data.pop("id")
    poisoned, next_step = False, ""

    def on_phase(phase: str, details: dict[str, Any]) -> None:
        events.send("phase", id=item_id, phase=phase, details=details)

    try:
        request = from_json(_request_class(data.pop("request"), runner), data)
        user_models.forget_texts()
        for subject in _subjects(request):
            if subject.tokens is not None:
                tokens = Tokens.from_json(subject.tokens)
                user_models.add_text(tokens.id, tokens)
        events.send("answer", id=item_id, answer=to_json(runner.answer(request, on_phase)))
        return True
    except Unmeasurable as error:
        if error.reason == "raised":
            traceback.print_exc()  # for the worker's log; the item stores only one line
        poisoned = error.reason == "crashed" or (
            error.reason in ("raised", "not_capturable") and runner.poisoned()
        )
        reason, message, next_step = error.reason, error.message, error.next_step
    except FarmError as error:
        reason, message, next_step = "rejected", error.message, error.next_step
    except Exception as error:
        traceback.print_exc()
        reason = "rejected" if isinstance(error, KeyError | TypeError | ValueError) else "raised"
        message = f"{type(error).__name__}: {error_text(error)}"[:400]
        poisoned = runner.poisoned()
    events.send(
        "unmeasurable",
        id=item_id,
        reason=reason,
        message=message,
        next_step=next_step,
        poisoned=poisoned,
    )
    return not poisoned


@functools.cache
def registered_handlers() -> tuple[Handler, ...]:
    """The handlers of the core and of this host's add-ons."""
    return (*HANDLERS, *handlers_of_add_ons())


def _request_class(name: str, runner: Runner) -> type[ProcessRequest[Any]]:
    """Return the class of requests with a name. Raises `Unmeasurable` if this host has none."""
    for kind in (*runner.handlers, *(handler.request for handler in registered_handlers())):
        if kind.name == name:
            return kind
    raise Unmeasurable(
        "not_available",
        f"This host has no add-on that answers the request '{name[:80]}'.",
        "Install the add-on on this host, or name its distribution in the setting 'addons'.",
    )


def _subjects(request: ProcessRequest[Any]) -> tuple[Subject, ...]:
    if isinstance(request, SubjectRequest):
        return (request.subject,)
    return request.subjects if isinstance(request, TurnsRequest) else ()


class Runner:
    """Handles requests: with torch on a real card, without torch on a simulated card."""

    device: Device
    software: Software
    #: The kinds of requests that this runner supports.
    handlers: Mapping[type[ProcessRequest[Any]], Answering]
    preparations: tuple[
        Callable[[], object], ...
    ] = ()  # to run while no request waits; items then start sooner
    check_every_s = CHECK_EVERY_S
    _checked_s = float("-inf")

    def answer(self, request: ProcessRequest[Any], on_phase: OnPhase) -> Any:
        """Run the handler of a request and return its answer. Raises `Unmeasurable` if this runner
        does not support the request, or its handler failed."""
        if (handler := self.handlers.get(type(request))) is None:
            raise Unmeasurable(
                "not_available", f"A {self.device.card.kind} card cannot {request.doing}."
            )
        if isinstance(request, MeasureRequest) and self.check_due and (unfit := self.check()):
            # Report a crash: the farm starts a new process, which repeats the health check at its
            # start.
            raise Unmeasurable(
                "crashed", f"The card failed its health check between two items: {unfit}"
            )
        if isinstance(request, VerifyRequest):
            on_phase("verify", {})
        return handler(request, on_phase)

    @property
    def check_due(self) -> bool:
        return time.monotonic() - self._checked_s >= self.check_every_s

    def check(self) -> str:
        """Run the health check and store its time. Return the fault; "" if the card is healthy."""
        reason = self.unhealthy()
        self._checked_s = time.monotonic()
        return reason

    def unhealthy(self) -> str:
        """The fault that the health check finds (`farm.benchmark.checks`); "" if the card is
        healthy.
        """
        return ""

    def join(self, rank: int, world: int, rendezvous: str) -> None:
        """Become a rank of a group. Returns when all ranks have joined."""
        self.software = dataclasses.replace(self.software, communication="simulated")

    def poisoned(self) -> bool:
        """True if the CUDA context can no longer be used. Then only a new process can measure."""
        return False


class SimulatedRunner(Runner):
    check_every_s = 0.0

    def __init__(self, device: Device) -> None:
        assert isinstance(device, simulated.SimulatedDevice)
        self.device = self._simulated = device
        self.software = simulated.SOFTWARE
        self.handlers = {
            MeasureRequest: self._measure,
            VerifyRequest: lambda request, on_phase: Verification(
                launch=request.protocol.launch, matches=True, differences=(), simulated=True
            ),
            FingerprintRequest: lambda request, on_phase: {},
        }
        self._poisoned = False

    def _measure(self, request: MeasureRequest, on_phase: OnPhase) -> Reading:
        try:
            return simulated.measure(
                request.subject, request.protocol, self._simulated, request.predicted, on_phase
            )
        except RuntimeError:
            self._poisoned = True
            raise

    def unhealthy(self) -> str:
        return simulated.unhealthy(self.device.card.id)

    def poisoned(self) -> bool:
        return self._poisoned


class TorchVerifier(Runner):
    """Verifies with torch, on "cuda:0" or on the CPU. Only this card is visible to CUDA."""

    def __init__(self, device: Device) -> None:
        import torch

        from farm.benchmark import verification

        import_libraries()
        self.device = device
        self._torch = torch
        cuda = device.card.is_gpu
        if cuda and not torch.cuda.is_available():
            raise Unmeasurable(
                "not_available",
                f"PyTorch {torch.__version__} cannot use the card {device.card}.",
                "Install a build of PyTorch for CUDA that suits the driver.",
            )
        self._torch_device = torch.device("cuda:0" if cuda else "cpu")
        # for the first variant
        self.preparations = (functools.partial(import_module, "torchvision"),) if cuda else ()
        self.software = software_of(torch, device.card)
        self.handlers = {
            VerifyRequest: lambda request, on_phase: verification.verify(
                request.subject, request.protocol, self._torch_device, request.predicted
            ),
            CompileRequest: lambda request, on_phase: self._compile(request),
        }

    def _compile(self, request: CompileRequest) -> CompiledAhead:
        """Compile a variant without using the card. A context that PyTorch creates nevertheless is
        registered as the farm's own.
        """
        from farm.benchmark.bench import has_context, own_processes
        from farm.benchmark.subjects.compiled_model import fill_cache

        os.setpriority(os.PRIO_PROCESS, 0, COMPILES_WITH_NICENESS)
        _limit_memory(request.most_bytes)
        device = self._torch_device
        before = self.device.compute_processes() or frozenset()
        register_process(self.device.card.id, [os.getpid()], settings().lock_dir)
        try:
            fill_cache(request.subject, request.protocol, device)
        finally:
            created = device.type == "cuda" and has_context(device.index or 0)
            if created:
                after = self.device.compute_processes() or frozenset()
                ids, _ = own_processes(before, after, os.getpid())
                register_process(self.device.card.id, ids, settings().lock_dir)
        return CompiledAhead(created)

    def answer(self, request: ProcessRequest[Any], on_phase: OnPhase) -> Any:
        subjects = _subjects(request)
        check_versions(subjects)
        answer = super().answer(request, on_phase)
        return with_revision(answer, subjects) if isinstance(answer, Reading) else answer

    def join(self, rank: int, world: int, rendezvous: str) -> None:
        from farm.benchmark import ranks

        self.software = dataclasses.replace(
            self.software, communication=ranks.join(self._torch_device, rank, world, rendezvous)
        )

    def poisoned(self) -> bool:
        if self._torch_device.type == "cuda":
            try:
                self._torch.cuda.synchronize()
                # Draw a random number: after a failed graph capture the generator may still be in
                # capture mode.
                self._torch.zeros(1, device=self._torch_device).normal_().item()
            except RuntimeError:
                return True
        return False


class TorchRunner(TorchVerifier):
    """Verifies and measures."""

    def __init__(self, device: Device) -> None:
        from farm.benchmark.sampler import Sampler

        with Sampler(
            device
        ) as idle:  # the card is idle during the import of torch: measure its idle power meanwhile
            super().__init__(device)
            from farm.benchmark import bench as benches
            from farm.benchmark import checks
        # Use the second half of the samples: after work, a card takes seconds to reach its idle
        # power.
        idle_power_w = idle.average_power_w((idle.began_s + time.perf_counter()) / 2, least_ticks=5)
        target = self._torch_device
        self._health = functools.cache(lambda: checks.HealthCheck(target))
        cuda = device.card.is_gpu
        bench = benches.Bench(device, target, idle_power_w if cuda else None, offload=offload())
        if bench.knows_processes and "compute_processes" in device.capabilities:
            register_process(device.card.id, bench.own_processes, settings().lock_dir)
        self.preparations += (bench.load_libraries,)
        open_card = OpenCard(device, target, bench)
        handlers = dict(self.handlers)
        for handler in registered_handlers():
            handlers[handler.request] = _on_card(handler, open_card)
        self.handlers = handlers

        if device.card.is_cpu:
            _limit_memory(int(MEMORY_LIMIT_SHARE * psutil.virtual_memory().total))

    def unhealthy(self) -> str:
        return self._health().run()


def _limit_memory(most: int) -> None:
    """Let Linux refuse memory beyond ``most`` bytes. Otherwise it ends processes, of which any may
    be the largest.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _on_card(handler: Handler, card: OpenCard) -> Answering:
    return lambda request, on_phase: handler.answer(request, card, on_phase)


def software_of(torch: Any, card: Card) -> Software:
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["torchvision"] = metadata.version("torchvision")
    if card.is_gpu:
        versions["cuda"], versions["driver"] = torch.version.cuda or "", card.driver
        versions["cudnn"] = str(torch.backends.cudnn.version() or "")
    return Software(**versions)


def _private_output() -> TextIO:
    """Redirect standard output to standard error. Return the original standard output, for events
    only.
    """
    private = os.dup(1)
    os.set_inheritable(private, False)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(private, "w", encoding="utf-8", newline="\n")


def _listen(requests: queue.Queue[dict[str, Any]], events: EventWriter) -> None:
    """Read requests from standard input and queue them. At the end of the input, end the process at
    once.
    """
    for line in sys.stdin.buffer:
        try:
            data = json.loads(line)
            if not isinstance(data, dict) or not isinstance(data.get("request"), str):
                raise ValueError("the line is not a request")
            if not isinstance(data.get("id"), int):
                raise ValueError("the request has no id")
        except (ValueError, RecursionError) as error:
            events.send("refused", message=str(error)[:200])
            continue
        requests.put(data)
    os._exit(0)


if __name__ == "__main__":
    main()
