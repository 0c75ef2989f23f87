"""Takes a model apart into operator tuples by watching one forward pass, and proves that nothing was missed.

What was seen goes to a recorder, which knows who owns it (`farm.operators.recorder`). An auditor at the dispatcher
sees every aten operator, so that none can go unnoticed.

Observing must not change what runs. An active ``TorchFunctionMode`` and any hook on a module switch off PyTorch's
fused attention path (other operators, other strides behind it). So no hooks: ``torch.nn.Module.__call__`` is
replaced while the pass runs, and inside a leaf the function mode is disabled; only the dispatch mode sees inside.
`verify_on_device` holds an observed pass against an unobserved one, by the profiler's account.

Which operators run depends on the device and the grad mode, so a capture carries both. `predict` runs without
computing anything, on fake tensors that claim to be on a device; meta tensors would take other paths.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx.experimental.proxy_tensor  # nn.MultiheadAttention asks for it when a dispatch mode is active
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from farm.errors import CaptureError
from farm.operators.known import nothing_computed
from farm.operators.profiled import Profiled
from farm.operators.recorder import Call, Capture, Recorder, StorageSpec, Trace, Watch
from farm.operators.repeats import Repeats

__all__ = [
    "Call",
    "Capture",
    "EagerRun",
    "Observed",
    "Record",
    "StorageSpec",
    "Trace",
    "capture",
    "predict",
    "run_with_owners",
    "verify_on_device",
]


#: Makes a run into what can be launched again, as the run that is measured is launched: a CUDA graph's replay, say.
Record = Callable[[Callable[[], object]], Callable[[], object]]


@dataclass(frozen=True)
class EagerRun:
    """What an eagerly launched pass is, where it runs something else than the one that is measured.

    The counters are those of `Observed`.
    """

    capture: Capture
    unobserved: Counter[str]
    unobserved_times_us: Counter[str]


@dataclass(frozen=True)
class Observed:
    """An observed pass held against an unobserved one on a real device, both launched as in the run that is measured.

    The counters hold the innermost aten operators with their input shapes on the CPU, and the kernels' names on
    CUDA. ``differences`` is empty when observing changed nothing. ``unobserved_times_us`` is how long the card ran
    each kernel in the unobserved pass, all launches summed; empty on the CPU. ``eager`` is None where an eager pass runs
    the same.
    """

    capture: Capture
    unobserved: Counter[str]
    observed: Counter[str]
    differences: list[str]
    unobserved_times_us: Counter[str]
    eager: EagerRun | None = None


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str = "cpu",
    grad_enabled: bool = False,
    watch: Watch | None = None,
) -> Capture:
    """Watches one forward pass of ``model`` on the tensors it holds (real or fake).

    ``watch`` is shown the activations of each call when it has run.

    Raises:
        CaptureError: the model is compiled or scripted, or raised.
    """
    _refuse_opaque(model)
    return _watched(Recorder(model, device_type, watch), model, args, kwargs, grad_enabled)


def _watched(
    recorder: Recorder, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, grad_enabled: bool
) -> Capture:
    grad = torch.enable_grad() if grad_enabled else torch.no_grad()
    try:
        with _observed_calls(recorder), grad, _Auditor(recorder), Functions(recorder):
            model(*args, **(kwargs or {}))
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        where = f" at '{recorder.path}'" if recorder.path else ""
        raise CaptureError(
            f"The model raised{where}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            "Run the model alone on this input first; data-dependent shapes cannot be captured.",
        ) from error
    return recorder.result(grad_enabled, model.training)


def predict(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str = "cpu",
    grad_enabled: bool = False,
    watch: Watch | None = None,
) -> Capture:
    """The capture that a pass would give, computed on fake tensors: no memory, no arithmetic.

    A leaf that is given the same again is not run again (`farm.operators.repeats`).

    ``model`` and its arguments are typically on meta; they are left as they were. Fake CUDA tensors open a CUDA
    context, so they are used only where this process already has one; elsewhere the prediction is the CPU's, and
    ``Capture.device_type`` says so. ``watch`` is shown the model's own tensors as they are, and fake ones else.
    """
    if device_type != "cpu" and not (device_type == "cuda" and torch.cuda.is_initialized()):
        device_type = "cpu"
    _refuse_opaque(model)
    with nothing_computed(model, args, kwargs, device_type) as (fakes, stand_ins, named):
        recorder = Recorder(model, device_type, watch and fakes.unmasked(watch), Repeats(fakes))
        return _watched(recorder, model, stand_ins, named, grad_enabled)


def verify_on_device(
    model: nn.Module,
    args: tuple[Any, ...],
    device: torch.device | str,
    kwargs: dict[str, Any] | None = None,
    *,
    grad_enabled: bool = False,
    record: Record | None = None,
) -> Observed:
    """Captures ``model``, which is on ``device`` already, and holds the pass against an unobserved one.

    All passes run after one warm-up pass, so that one-time work of cuDNN and cuBLAS does not count.

    Args:
        record: how the run that is measured is made, where that is not a plain pass. The operators are then those that
            are called while it is made, and what is counted is what runs when it is launched; an eager pass is held against it.
    """
    device = torch.device(device)
    Recorder(model, device.type)  # describing the leaves builds modules on meta; the next recorder finds them built
    return held_against(
        lambda: model(*args, **(kwargs or {})),
        lambda: capture(model, args, kwargs, device_type=device.type, grad_enabled=grad_enabled),
        device,
        grad_enabled=grad_enabled,
        record=record,
    )


def held_against(
    plainly: Callable[[], object],
    observe: Callable[[], Capture],
    device: torch.device,
    *,
    grad_enabled: bool,
    record: Record | None = None,
) -> Observed:
    """A run that is observed, held against one that is not.

    Args:
        plainly: runs it once.
        observe: runs it once and tells what it consists of.
        record: as for `verify_on_device`.
    """
    grad = torch.enable_grad if grad_enabled else torch.no_grad
    found: list[Capture] = []

    def observed() -> None:
        found.append(observe())

    with grad():
        plainly()
    with grad(), Profiled(device) as plain:
        plainly()
    eager = plain
    if record is None:
        with grad(), Profiled(device) as watched:
            observed()
    else:
        with grad():
            unobserved, launched = record(plainly), record(observed)
            with Profiled(device) as plain:
                unobserved()
            with Profiled(device) as watched:
                launched()
    seen = found[0]
    otherwise = None
    if eager.counts != plain.counts:
        with grad():
            eagerly = observe()
        otherwise = EagerRun(eagerly, eager.counts, eager.times_us)
    differences = [
        f"{name}: {plain.counts[name]} unobserved, {watched.counts[name]} observed"
        for name in sorted(plain.counts.keys() | watched.counts.keys())
        if plain.counts[name] != watched.counts[name]
    ]
    return Observed(seen, plain.counts, watched.counts, differences, plain.times_us, otherwise)


def run_with_owners(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device_type: str,
    grad_enabled: bool = False,
    around: Callable[[int], contextlib.AbstractContextManager[Any]],
) -> None:
    """Runs one pass with ``around(number)`` entered around all that takes the owner's slot, in that order.

    Nothing is described and no operator is audited, so that a call takes about the time that it takes unobserved.
    The numbers are positions in `Capture.owners` of a capture of the same pass.
    """
    recorder = Recorder(model, device_type)
    recorder.around = around
    grad = torch.enable_grad() if grad_enabled else torch.no_grad()
    with _observed_calls(recorder), grad, Functions(recorder):
        model(*args, **(kwargs or {}))


class CallsFunctions(Protocol):
    def call_function(self, func: Any, args: Any, kwargs: Any) -> Any: ...


class Functions(TorchFunctionMode):
    """Tells a recorder of each call of a public function; the recorder runs it."""

    def __init__(self, recorder: CallsFunctions) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.call_function(func, args, kwargs or {})


class _Auditor(TorchDispatchMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # what fake tensors are asked most often; it runs nothing
            return args[0].device
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.recorder.aten(func, args, kwargs, out)
        return out


@contextlib.contextmanager
def _observed_calls(recorder: Recorder) -> Iterator[None]:
    original = nn.Module.__call__
    script_function: Any = torch.jit.ScriptFunction
    scripted = script_function.__call__

    def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(original, module, args, kwargs)

    def inlined(function: Any, *args: Any, **kwargs: Any) -> Any:
        # Inside a scripted function no public function is called: what it was made of runs instead.
        return getattr(function, "_torchdynamo_inline", functools.partial(scripted, function))(*args, **kwargs)

    nn.Module.__call__ = observed  # type: ignore[method-assign]
    script_function.__call__ = inlined
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        script_function.__call__ = scripted


def _refuse_opaque(model: nn.Module) -> None:
    for path, module in model.named_modules():
        scripted = isinstance(module, torch.jit.ScriptModule)
        compiled = type(module).__module__.startswith("torch._dynamo") or module._compiled_call_impl is not None
        if scripted or compiled:
            kind = "scripted" if scripted else "compiled"
            raise CaptureError(
                f"The module '{path or type(module).__name__}' is {kind}: its operators cannot be seen.",
                "Give the model as it is before torch.compile or torch.jit.",
            )
