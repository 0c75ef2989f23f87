"""The benchmark process: it imports torch and owns the CUDA context of a card.

With --verifier it stands by beside the one that measures, makes no context until it is asked to verify a variant,
and is ended after that (`farm.benchmark_process.client`). With --peer it sees a second GPU, in whose memory lies what is slow.

    python -m farm.benchmark_process.server --card ID

It reads one JSON object a line from standard input and writes one a line to what was standard output when it began;
after that, standard output *is* standard error, so that nothing a model prints can pass for an answer. It ends when its
input ends, also in the middle of a measurement, and when its parent dies.

    in   {"request": "measure", "id", "subject", "protocol", "predicted": {tuple id: count} | null, "stopping"}
         {"request": "verify", "id", "subject", "protocol", "predicted"}
         {"request": "in_place", "id", "subject", "protocol", "most"}
         {"request": "step", "id", "subject", "protocol"}
         {"request": "wire", "id", "subject", "protocol"}
         {"request": "planned_step", "id", "subject", "protocol", "calls": [tuple id], "plans": [[number of a tensor]],
          "moves": [[the numbers of a move]]}
         {"request": "fingerprint", "id"}
    out  {"event": "ready", "pid", "card", "software", "capabilities"}
         {"event": "phase", "id", "phase": verify | canary | rebuild | warm-up | window | burst | eager | places | context,
          "details"}
         {"event": "reading", "id", "reading"}
         {"event": "verified", "id", "observed": capture | null, "verification": {...}}
         {"event": "in_place", "id", "found"}
         {"event": "step", "id", "step": a training step as it is run}
         {"event": "wire", "id", "found"}
         {"event": "planned_step", "id", "found"}
         {"event": "fingerprint", "id", "fingerprint"}
         {"event": "unmeasurable", "id", "reason", "message", "next_step", "poisoned"}
         {"event": "refused", "message"}     a line that is no request; nothing is done
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, TextIO

from farm.benchmark.health import AGAIN_AFTER_S, HealthCheck
from farm.devices.device import Card, Device
from farm.devices.host import find_card, open_device
from farm.errors import FarmError, Unmeasurable
from farm.models.texts.known import know
from farm.settings import settings
from farm.types.protocol import Protocol, Software, Stopping, Subject
from farm.types.reading import Reading, Verification
from farm.types.tokens import Tokens

PR_SET_PDEATHSIG = 1
END = object()
NO_SLOW_MEMORY = "This card has no slow memory."


class Answers:
    """The private way out. Whole lines only, whichever thread writes."""

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
            os._exit(0)  # nobody listens any more


def main() -> None:
    parser = argparse.ArgumentParser(prog="farm.benchmark_process.server")
    parser.add_argument("--card", required=True)
    parser.add_argument("--verifier", action="store_true", help="make no context until a request to verify comes")
    parser.add_argument("--peer", action="store_true", help="slow memory is that of the second GPU that is visible")
    parser.add_argument("--parent", type=int, default=0, help="the process whose end is this one's end")
    options = parser.parse_args()
    gc.disable()  # what is imported is no garbage: looking for some would be a seventh of the start
    answers = Answers(_private_output())
    _die_with_parent(options.parent)
    _be_the_first_to_go()
    requests: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=_listen, args=(requests, answers), name="listener", daemon=True).start()
    try:
        card = find_card(options.card, settings())
        runner = _make_runner(card, open_device(card), options.verifier, options.peer)
        gc.freeze()  # some hundred thousand objects that never go: leave them out of collections
        gc.enable()
        unhealthy = "" if options.verifier else runner.check()
    except FarmError as error:
        answers.send("failed", message=error.message, next_step=error.next_step)
        os._exit(2)
    except Exception as error:
        traceback.print_exc()
        answers.send("failed", message=f"{type(error).__name__}: {error}"[:600], next_step="")
        os._exit(2)
    answers.send(
        "ready",
        pid=os.getpid(),
        card=card.to_json(),
        software=runner.software.to_json(),
        capabilities=sorted(runner.device.capabilities),
        unhealthy=unhealthy,
    )
    while (request := requests.get()) is not END:
        if not _serve(request, runner, answers):
            break
    _leave()


def _serve(request: Mapping[str, Any], runner: Runner, answers: Answers) -> bool:
    """Answer one request; False when this process must not measure any more."""
    item_id = request["id"]
    poisoned = False

    def on_phase(phase: str, details: dict[str, Any]) -> None:
        answers.send("phase", id=item_id, phase=phase, details=details)

    try:
        if request["request"] == "fingerprint":
            answers.send("fingerprint", id=item_id, fingerprint=runner.fingerprint())
            return True
        subject = Subject.from_json(request["subject"])
        if subject.tokens is not None:
            know(Tokens.from_json(subject.tokens), alone=True)
        protocol = Protocol.from_json(request["protocol"])
        predicted = request.get("predicted")
        if request["request"] == "verify":
            on_phase("verify", {})
            observed, verification = runner.verify(subject, protocol, predicted)
            answers.send("verified", id=item_id, observed=observed, verification=verification.to_json())
            return True
        if request["request"] == "in_place":
            answers.send("in_place", id=item_id, found=runner.in_place(subject, protocol, request["most"]))
            return True
        if request["request"] == "step":
            answers.send("step", id=item_id, step=runner.step(subject, protocol))
            return True
        if request["request"] == "wire":
            answers.send("wire", id=item_id, found=runner.wire(subject, protocol))
            return True
        if request["request"] == "planned_step":
            found = runner.planned_step(subject, protocol, request["calls"], request["plans"], request["moves"])
            answers.send("planned_step", id=item_id, found=found)
            return True
        if runner.check_due and (unfit := runner.check()):
            # As if it had died of it: the process that comes next begins with the same check, and that one decides.
            raise Unmeasurable("crashed", f"The card failed its health check between two items: {unfit}")
        reading = runner.measure(subject, protocol, Stopping.from_json(request["stopping"]), predicted, on_phase)
        answers.send("reading", id=item_id, reading=reading.to_json())
        return True
    except Unmeasurable as error:
        if error.reason == "raised":
            traceback.print_exc()  # for the worker's log; the row keeps one line
        poisoned = error.reason == "crashed" or (error.reason in ("raised", "not_capturable") and runner.poisoned())
        reason, message, next_step = error.reason, error.message, error.next_step
    except FarmError as error:
        reason, message, next_step = "rejected", error.message, error.next_step
    except (KeyError, TypeError, ValueError) as error:
        traceback.print_exc()
        reason, message, next_step = "rejected", f"{type(error).__name__}: {error}"[:400], ""
        poisoned = runner.poisoned()
    except Exception as error:
        traceback.print_exc()
        reason, message, next_step = "raised", f"{type(error).__name__}: {error}"[:400], ""
        poisoned = runner.poisoned()
    answers.send("unmeasurable", id=item_id, reason=reason, message=message, next_step=next_step, poisoned=poisoned)
    return not poisoned


class Runner:
    """What measures: with torch on a real card, without on a simulated one."""

    device: Device
    software: Software
    check_again_after_s = AGAIN_AFTER_S
    _checked_s = float("-inf")

    @property
    def check_due(self) -> bool:
        return time.monotonic() - self._checked_s >= self.check_again_after_s

    def check(self) -> str:
        """`unhealthy`, and note when that was."""
        found = self.unhealthy()
        self._checked_s = time.monotonic()
        return found

    def measure(
        self,
        subject: Subject,
        protocol: Protocol,
        stopping: Stopping,
        predicted: Mapping[str, int] | None,
        on_phase: Any,
    ) -> Reading:
        raise NotImplementedError

    def verify(
        self, subject: Subject, protocol: Protocol, predicted: Mapping[str, int] | None
    ) -> tuple[dict[str, Any] | None, Verification]:
        """Which tuples a variant has on this card, see `farm.benchmark.verification`."""
        raise NotImplementedError

    def in_place(self, subject: Subject, protocol: Protocol, most: int | None) -> dict[str, Any]:
        """What calls of a variant take with tensors in slow memory, see `farm.slow_memory.in_situ`."""
        raise Unmeasurable("not_available", NO_SLOW_MEMORY)

    def step(self, subject: Subject, protocol: Protocol) -> dict[str, Any]:
        """A training step as the card runs it, see `farm.slow_memory.planned_step`."""
        raise Unmeasurable("not_available", NO_SLOW_MEMORY)

    def wire(self, subject: Subject, protocol: Protocol) -> dict[str, Any]:
        """What copies get beside it, see `farm.slow_memory.planned_step`."""
        raise Unmeasurable("not_available", NO_SLOW_MEMORY)

    def planned_step(
        self,
        subject: Subject,
        protocol: Protocol,
        calls: list[str],
        plans: list[list[int]],
        moves: list[list[list[int]]],
    ) -> dict[str, Any]:
        """What it takes with all fast and under plans, see `farm.slow_memory.planned_step`."""
        raise Unmeasurable("not_available", NO_SLOW_MEMORY)

    def unhealthy(self) -> str:
        """What is wrong with the card (`farm.benchmark.health`), "" for nothing."""
        return ""

    def fingerprint(self) -> dict[str, Any]:
        """What the card is like (`farm.benchmark.fingerprinting`); {} where nothing is to be told."""
        return {}

    def poisoned(self) -> bool:
        """Whether the context is beyond use, so that only a fresh process can measure."""
        return False


class SimulatedRunner(Runner):
    check_again_after_s = 0.0

    def __init__(self, device: Device) -> None:
        from farm.benchmark import simulated

        self.device = device
        self.software = simulated.SOFTWARE
        self._measure = simulated.measure
        self._poisoned = False

    def measure(
        self,
        subject: Subject,
        protocol: Protocol,
        stopping: Stopping,
        predicted: Mapping[str, int] | None,
        on_phase: Any,
    ) -> Reading:
        try:
            return self._measure(subject, protocol, stopping, self.device, predicted, on_phase)  # type: ignore[arg-type]
        except RuntimeError:
            self._poisoned = True
            raise

    def verify(
        self, subject: Subject, protocol: Protocol, predicted: Mapping[str, int] | None
    ) -> tuple[dict[str, Any] | None, Verification]:
        return None, Verification(launch=protocol.launch, matches=True, differences=(), simulated=True)

    def unhealthy(self) -> str:
        from farm.benchmark import simulated

        return simulated.unhealthy(self.device.card.id)

    def poisoned(self) -> bool:
        return self._poisoned


class TorchVerifier(Runner):
    """Verifies with torch on "cuda:0" (the parent has set CUDA_VISIBLE_DEVICES to this card, at most a peer behind it) or on the CPU."""

    def __init__(self, device: Device) -> None:
        import torch

        from farm.benchmark import verification  # noqa: F401 - imported now, not inside the first item
        from farm.operators import capture, rebuild  # noqa: F401

        self.device = device
        self._torch = torch
        cuda = device.card.kind == "cuda"
        if cuda and not torch.cuda.is_available():
            raise Unmeasurable(
                "not_available",
                f"PyTorch {torch.__version__} cannot use the card {device.card}.",
                "Install a build of PyTorch for CUDA that suits the driver.",
            )
        self._torch_device = torch.device("cuda:0" if cuda else "cpu")
        self.software = _software(torch, device.card)

    def verify(
        self, subject: Subject, protocol: Protocol, predicted: Mapping[str, int] | None
    ) -> tuple[dict[str, Any] | None, Verification]:
        from farm.benchmark import verification

        return verification.verify(subject, protocol, self._torch_device, predicted)

    def poisoned(self) -> bool:
        if self._torch_device.type != "cuda":
            return False
        try:
            self._torch.cuda.synchronize()
            # A random number: after a graph that could not be captured the generator may think that one still is.
            self._torch.zeros(1, device=self._torch_device).normal_().item()
        except RuntimeError:
            return True
        return False


class TorchRunner(TorchVerifier):
    """Measures, too."""

    def __init__(self, device: Device, peer: bool = False) -> None:
        idle = _IdleWatch(device)  # the card rests while torch is imported: its idle power costs no time of its own
        super().__init__(device)
        from farm.benchmark import measure
        from farm.slow_memory.offload import offload

        idle_power_w = idle.stop()
        cuda = device.card.kind == "cuda"
        self._health: HealthCheck | None = None
        self._bench = measure.Bench(device, self._torch_device, idle_power_w if cuda else None, offload=offload)
        if peer:  # after the bench, which tells this process by its being new on the card, and chooses its stream
            from farm.slow_memory.memory_tier import take_from_peer

            take_from_peer(self._torch_device)

    def measure(
        self,
        subject: Subject,
        protocol: Protocol,
        stopping: Stopping,
        predicted: Mapping[str, int] | None,
        on_phase: Any,
    ) -> Reading:
        return self._bench.measure(subject, protocol, stopping, on_phase)

    def in_place(self, subject: Subject, protocol: Protocol, most: int | None) -> dict[str, Any]:
        from farm.slow_memory import in_situ

        return in_situ.compare(subject, protocol, self._torch_device, most)

    def step(self, subject: Subject, protocol: Protocol) -> dict[str, Any]:
        from farm.slow_memory import planned_step

        return planned_step.take_apart(subject, protocol, self._torch_device).to_json()

    def wire(self, subject: Subject, protocol: Protocol) -> dict[str, Any]:
        from farm.slow_memory import planned_step

        return planned_step.measure_wire(subject, protocol, self._torch_device).to_json()

    def planned_step(
        self,
        subject: Subject,
        protocol: Protocol,
        calls: list[str],
        plans: list[list[int]],
        moves: list[list[list[int]]],
    ) -> dict[str, Any]:
        from farm.slow_memory import planned_step
        from farm.slow_memory.transfers import Move

        moved = [[Move(*numbers) for numbers in of_plan] for of_plan in moves]
        return planned_step.compare(subject, protocol, self._torch_device, calls, plans, moved).to_json()

    def unhealthy(self) -> str:
        if self._health is None:
            self._health = HealthCheck(self._torch, self._torch_device)
        return self._health.run()

    def fingerprint(self) -> dict[str, Any]:
        from farm.benchmark import fingerprinting

        return fingerprinting.take(self._bench)


class _IdleWatch:
    """Reads the card's power in the background until stopped."""

    def __init__(self, device: Device) -> None:
        from farm.benchmark.sampler import Sampler

        self._sampler = Sampler(device).start()

    def stop(self) -> float | None:
        from farm.benchmark.power import average_power_w

        self._sampler.stop()
        # The later half: a card that worked a moment ago takes seconds to come to rest.
        began_s = (self._sampler.began_s + time.perf_counter()) / 2
        return average_power_w(self._sampler, began_s, least_ticks=5)


def _make_runner(card: Card, device: Device, verifier: bool, peer: bool) -> Runner:
    if card.kind == "simulated":
        return SimulatedRunner(device)
    return TorchVerifier(device) if verifier else TorchRunner(device, peer)


def _software(torch: Any, card: Card) -> Software:
    import platform
    from importlib import metadata

    torchvision = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        torchvision = metadata.version("torchvision")
    cuda = card.kind == "cuda"
    cudnn = torch.backends.cudnn.version() if cuda else None
    return Software(
        torch=torch.__version__,
        torchvision=torchvision,
        cuda=(torch.version.cuda or "") if cuda else "",
        cudnn=str(cudnn or ""),
        driver=card.driver if cuda else "",
        python=platform.python_version(),
        platform=platform.platform(),
    )


def _private_output() -> TextIO:
    """Keep standard output for answers alone, and send everything else that is printed to standard error."""
    private = os.dup(1)
    os.set_inheritable(private, False)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(private, "w", encoding="utf-8", newline="\n")


_VERIFY = {"id": int, "subject": dict, "protocol": dict}
_NEEDED: dict[str, dict[str, type]] = {
    "fingerprint": {"id": int},
    "in_place": _VERIFY,
    "step": _VERIFY,
    "wire": _VERIFY,
    "planned_step": {**_VERIFY, "calls": list, "plans": list, "moves": list},
    "verify": _VERIFY,
    "measure": {**_VERIFY, "stopping": dict},
}


def _listen(requests: queue.Queue[Any], answers: Answers) -> None:
    """Hand on requests; the end of the input ends the process at once, whatever the card is doing."""
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            needed = _NEEDED.get(str(request.get("request"))) if isinstance(request, dict) else None
            if needed is None:
                raise ValueError("not a request")
            for name, kind in needed.items():
                if not isinstance(request.get(name), kind):
                    raise ValueError(f"{name} is missing or of a wrong type")
            if not isinstance(request.get("predicted"), (dict, type(None))):
                raise ValueError("predicted is of a wrong type")
        except (ValueError, RecursionError) as error:
            answers.send("refused", message=str(error)[:200])
            continue
        requests.put(request)
    os._exit(0)


def _die_with_parent(parent: int) -> None:
    # Ctrl-C, and a SIGTERM to all processes of a service, are the parent's to answer: it ends its item first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)  # it died before the line above


def _be_the_first_to_go() -> None:
    # When the host runs out of memory, the kernel should end this process, not the worker or the database.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _leave() -> None:
    # Not sys.exit: a poisoned context may hang in its destructors.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
