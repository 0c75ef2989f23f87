"""One pass of a subject: a rebuilt operator, a chain of equal layers, a whole model or a training step, with its data.

A *pass* is one run of the subject. `farm.benchmark.workload` makes rounds of passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from farm.benchmark.cache import found_again
from farm.benchmark.torch_device import capture_graph
from farm.errors import Unmeasurable
from farm.types.protocol import Placement, Protocol, Subject, Variant
from farm.types.reading import Details
from farm.types.tuple import parse
from farm.types.value_profiles import HeldFilling, fillings, held_fillings

if TYPE_CHECKING:
    from farm.operators.captured import CapturedPass
    from farm.operators.rebuild import Rebuilt

Pass = Callable[[], object]
Seen = TypeVar("Seen")  # a capture

CHAIN_LAYERS = 8
MEMORY_SHARE = 0.8  # of the free memory, for all copies together


@dataclass(frozen=True)
class Offloaded:
    """An operator with some of its tensors in slow memory (`farm.slow_memory.offload.offload`)."""

    rebuilt: Rebuilt  # with the inputs of the placement in slow memory
    run: Callable[[Rebuilt], Pass]  # makes a pass of the operator or of a replica of it
    details: Details
    pool: Any  # the memory pool that a graph of it must allocate from; None: any pool
    memory: object  # owns the slow memory; keep it as long as the passes


#: Puts the tensors of a placement in slow memory.
Offload = Callable[["Rebuilt", Placement], Offloaded]


@dataclass
class Passes:
    """A subject as passes."""

    first: Pass
    copy: Callable[[int], Pass] | None  # makes another pass on copies of the tensors; None: nothing to copy
    weight_bytes: int
    activation_bytes: int
    details: Details = field(default_factory=Details)
    inputs: list[torch.Tensor] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)  # inputs that the subject itself writes
    order: Callable[[], CapturedPass] | None = None  # captures the calls of a whole model, as launched
    pool: Any = None  # that graphs must allocate from; None: they share a new one
    keep: Any = None  # owns memory that the passes use


def operator_passes(
    subject: Subject, protocol: Protocol, device: torch.device, offload: Offload | None = None
) -> Passes:
    """Rebuild an operator tuple with the data and the memory that the protocol names.

    Args:
        offload: puts the tensors of the protocol's placement in slow memory.

    Raises:
        Unmeasurable: out_of_memory, rejected or not_available (the operator cannot be chained or offloaded).
        TupleRejected: the JSON is not a tuple.
    """
    from farm.operators.rebuild import rebuild

    spec = parse(subject.spec)
    storages_bytes: dict[int, int] = {}
    for tensor in spec.tensors:
        size_bytes = (tensor.extent + tensor.offset) * tensor.itemsize_bytes
        storages_bytes[tensor.storage] = max(storages_bytes.get(tensor.storage, 0), size_bytes)
    needed_bytes, free = sum(storages_bytes.values()), free_bytes(device)
    if needed_bytes > MEMORY_SHARE * free:  # now: on a CPU the kernel would kill the process instead of refusing memory
        text = f"Its inputs need {needed_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free."
        raise Unmeasurable("out_of_memory", text, "Choose a smaller batch.")
    rebuilt = rebuild(spec, device)
    set_values(rebuilt, protocol.data)
    placement = Placement.parse(protocol.placement)
    if protocol.residency == "chain":
        if placement:
            raise Unmeasurable("not_available", "A chain cannot use slow memory.", "Use --residency resident.")
        return _chain(rebuilt)
    if not placement:
        offloaded = Offloaded(rebuilt, operator.attrgetter("run"), Details(), None, None)
    elif offload is None:
        raise Unmeasurable("not_available", "This process cannot put tensors in slow memory.")
    else:
        offloaded = offload(rebuilt, placement)
    rebuilt, run = offloaded.rebuilt, offloaded.run
    stream, copies_weights = protocol.residency == "stream", bool(rebuilt.weights)
    return Passes(
        first=run(rebuilt),
        copy=lambda index: run(rebuilt.replica(weights=copies_weights, activations=stream, index=index)),
        weight_bytes=rebuilt.weight_bytes,
        activation_bytes=rebuilt.activation_bytes,
        inputs=rebuilt.activation_memory,
        written=[rebuilt.memory(index) for index in sorted(rebuilt.written)],
        details=offloaded.details,
        pool=offloaded.pool,
        keep=offloaded.memory,
    )


def _chain(rebuilt: Rebuilt) -> Passes:
    """Equal layers, each with weights of its own, each on the output of the one before; the first follows the last."""
    start: torch.Tensor | None = None
    output: object = None
    match rebuilt.spec.arguments:
        case ({"tensor": number}, *_):
            start = rebuilt.tensors[number]
            output = None if rebuilt.in_place else rebuilt.run()
    if (
        start is None
        or not isinstance(output, torch.Tensor)
        or (output.shape, output.dtype, output.stride()) != (start.shape, start.dtype, start.stride())
    ):
        why = "it writes its input" if rebuilt.in_place else "its output differs in form from its input"
        raise Unmeasurable("not_available", f"This operator cannot be chained: {why}.", "Use --residency resident.")
    passed_on = [start]

    def layer(number: int) -> Pass:
        one = rebuilt if number == 0 else rebuilt.replica(weights=True)

        def run() -> object:
            passed_on[0] = one.run_on(start if number == 0 else passed_on[0])
            return passed_on[0]

        return run

    return Passes(
        first=layer(0), copy=layer, weight_bytes=rebuilt.weight_bytes, activation_bytes=rebuilt.activation_bytes
    )


def variant_passes(subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
    """A whole model. `details` have its size and, if the protocol measures context, the share that the cache keeps."""
    from farm.operators.capture import capture

    variant = Variant.from_json(subject.spec)
    if variant.step:
        return step_passes(variant, protocol, device)
    model, arguments = build_variant(variant, device)
    if protocol.data == "zeros":
        _zero(arguments)
    parameter_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    def copy(index: int) -> Pass:
        others = tuple(entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in arguments)
        return lambda: model(*others)

    return Passes(
        first=lambda: model(*arguments),
        copy=copy if protocol.residency == "stream" else None,
        # The weights of a whole model are as cold as the model itself leaves them: there is nothing to copy.
        weight_bytes=0,
        activation_bytes=sum(entry.nbytes for entry in arguments if isinstance(entry, torch.Tensor)),
        details=_working_set(lambda: model(*arguments), parameter_bytes, protocol, device),
        order=lambda: as_launched(
            lambda: capture(model, arguments, device_type=device.type, grad_enabled=protocol.grad), protocol, device
        ),
    )


def step_passes(variant: Variant, protocol: Protocol, device: torch.device) -> Passes:
    """A training step of a model, from zero_grad to the optimizer; its weights are not copied."""
    from farm.operators.encoding import tensors_in
    from farm.training.capture import capture_step
    from farm.training.extract import build_step

    elsewhere_bytes = _allocated_without_workspaces(device)
    with torch.enable_grad():
        step = build_step(variant, device, launch=protocol.launch)
    if protocol.data == "zeros":
        _zero(tensors_in(step.inputs))

    def run() -> None:
        with torch.enable_grad():
            step.run()

    def observe() -> CapturedPass:
        with torch.enable_grad():
            return capture_step(step, device_type=device.type, warmed_up=True)

    parameter_bytes = sum(tensor.nbytes for tensor in (*step.model.parameters(), *step.model.buffers()))
    memory = _memory_of_step(run, elsewhere_bytes, device)
    details = _working_set(run, parameter_bytes, protocol, device)
    return Passes(
        first=run,
        copy=None,
        weight_bytes=0,
        activation_bytes=sum(tensor.nbytes for tensor in tensors_in(step.inputs)),
        details=dataclasses.replace(details, **memory),
        written=list(step.model.parameters()),
        order=lambda: as_launched(observe, protocol, device),
    )


def _allocated_without_workspaces(device: torch.device) -> int:
    """Allocated bytes of the process, without cuBLAS's workspaces, which PyTorch's allocator holds between calls."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)


def _memory_of_step(run: Pass, elsewhere_bytes: int, device: torch.device) -> dict[str, Any]:
    """Memory of an eager step by PyTorch's allocator, with workspaces of libraries, which are in no operator's tensors.

    `elsewhere_bytes` were allocated before the step was built.
    """
    if device.type != "cuda":
        return {}
    run()  # libraries allocate their workspaces in the first run
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    after_bytes = torch.cuda.memory_allocated(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {
        "allocated_peak_bytes": peaks[0] - elsewhere_bytes,
        "reserved_peak_bytes": peaks[1],
        "workspace_bytes": after_bytes - _allocated_without_workspaces(device),
    }


def as_launched(observe: Callable[[], Seen], protocol: Protocol, device: torch.device) -> Seen:
    """Observe the run that is measured: with graph launch, the calls during graph capture.

    A model may ask whether it is being captured, and run something else.
    """
    if device.type != "cuda" or protocol.launch != "graph":
        return observe()
    found: list[Seen] = []
    capture_graph([lambda: found.append(observe())], device)
    return found[0]


def _working_set(run: Pass, parameter_bytes: int, protocol: Protocol, device: torch.device) -> Details:
    """The bytes that one pass of a model touches, and the share that the cache still holds at the next pass."""
    if device.type != "cuda" or not protocol.measures_context:
        return Details(parameter_bytes=parameter_bytes)
    run()  # libraries allocate their workspaces in the first run
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    share = found_again(parameter_bytes + activation_bytes, device)
    return Details(
        parameter_bytes=parameter_bytes,
        activation_peak_bytes=activation_bytes,
        found_again=None if share is None else round(share, 3),
    )


# One built variant for the measurement that follows: from the verification, if one process does both, or from a caller
# that has a model without a name.
_handed_over: dict[tuple[str, str], tuple[torch.nn.Module, tuple[Any, ...]]] = {}


def build_variant(
    variant: Variant, device: torch.device, *, hand_over: bool = False
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Build a model variant and its inputs on a device, with seeded random weights.

    With `hand_over` the next call for the same variant returns the same objects, once.
    """
    from farm.models import catalog

    key = (variant.id, str(device))
    known = _handed_over.pop(key, None)
    _handed_over.clear()
    if known is None:
        known = catalog.build(variant, device=device), catalog.example_inputs(variant, device=device)
        if hand_over:
            _handed_over[key] = known
    return known


def give_variant(variant: Variant, device: torch.device, model: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    """Let the next `build_variant` of this variant on this device return this model and its arguments, once."""
    _handed_over[variant.id, str(device)] = (model, arguments)


def grad_mode(protocol: Protocol) -> contextlib.AbstractContextManager[Any]:
    """The grad mode of a subject: the same as during its capture."""
    return torch.enable_grad() if protocol.grad else torch.no_grad()


@contextlib.contextmanager
def applied(protocol: Protocol) -> Iterator[None]:
    """The numeric flags and the grad mode of a protocol."""
    with numeric_flags(protocol), grad_mode(protocol):
        yield


@contextlib.contextmanager
def numeric_flags(protocol: Protocol) -> Iterator[None]:
    """Set TF32 and cuDNN's flags as in the protocol, and restore them at the end."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = protocol.tf32
        cudnn.benchmark, cudnn.deterministic = protocol.cudnn_benchmark, protocol.cudnn_deterministic
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def _zero(tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.detach().zero_()


def set_values(rebuilt: Rebuilt, data: str) -> None:
    """Fill the activations of a rebuilt operator with values of a data class, if the operator accepts any values."""
    if data == "normal":
        return
    from farm.operators.input_values import impose, may_be_zero, values_for
    from farm.operators.rebuild import written_inputs

    spec = rebuilt.spec
    written = written_inputs(spec)
    if data == "zeros":
        return _zero(
            rebuilt.tensors[index]
            for index, known in enumerate(spec.tensors)
            if known.role == "activation" and may_be_zero(spec, index, written)
        )
    indices = [index for index, tensor in enumerate(spec.tensors) if tensor.role == "activation"]
    try:
        wanted = fillings(data, len(indices))
        kept = held_fillings(data, sum(one.held for one in spec.tensors))
    except ValueError as error:
        raise Unmeasurable("rejected", f"{error}.") from error
    generator = torch.Generator(device=rebuilt.device).manual_seed(1)
    done: set[int] = set()
    with torch.no_grad():
        for index, filling in zip(indices, wanted, strict=True):
            storage = spec.tensors[index].storage
            values = _values(rebuilt, index)
            # Values that the operator writes, divides by or uses as indices stay as they are.
            how = values_for(spec, index, written)
            free = index not in written and how.form == "normal"
            if free and storage not in done and values.is_floating_point():
                done.add(storage)
                if how.scale != 1:  # a data class has a standard deviation of one
                    values.normal_(generator=generator)
                impose(values, filling.zeros, filling.positive, filling.channels, generator)
                if how.scale != 1:
                    values.mul_(how.scale)
        for index, held in zip([index for index, one in enumerate(spec.tensors) if one.held], kept, strict=True):
            values = _values(rebuilt, index)
            if values.is_floating_point() and index not in written:
                _hold(values, held, generator)
    return None


def _hold(values: torch.Tensor, held: HeldFilling, generator: torch.Generator) -> None:
    """Fill a buffer or parameter with values of a data class."""
    if held.same:
        values.fill_(1)
    elif held.zeros >= 1:
        values.zero_()
    elif held.dimension is not None and held.dimension < values.dim():
        used = round((1 - held.zeros) * values.shape[held.dimension])
        values.narrow(held.dimension, used, values.shape[held.dimension] - used).zero_()
    elif held.zeros:
        values.masked_fill_(torch.rand(values.shape, device=values.device, generator=generator) < held.zeros, 0)


def _values(rebuilt: Rebuilt, index: int) -> torch.Tensor:
    """The values of a tensor: its memory, or the tensor, which has channels, if its memory is flat and not shared."""
    memory, tensor, spec = rebuilt.memory(index), rebuilt.tensors[index], rebuilt.spec
    shared = sum(one.storage == spec.tensors[index].storage for one in spec.tensors) > 1
    overlaps = tensor.numel() > memory.numel() or 0 in tensor.stride()
    return memory if memory.dim() == tensor.dim() or shared or overlaps else tensor.detach()


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated, including those that PyTorch's allocator holds unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available
