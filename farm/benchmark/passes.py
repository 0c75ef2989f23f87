"""Build what a benchmark runs: an operator tuple, a chain of equal layers, a whole model or a
training step, with data.

A *pass* is one run of this subject. `farm.benchmark.workload` makes rounds of passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from farm.benchmark import ranks
from farm.benchmark.cache import InPlacePass, found_again, write_again
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.torch_device import capture_graph
from farm.errors import Unmeasurable
from farm.models.tensor_kinds import bytes_of, is_plain
from farm.operators.captured import CapturedPass
from farm.operators.deciding_values import with_values
from farm.operators.input_values import impose
from farm.operators.rebuild import Rebuilt, needed_bytes, rebuild, written_inputs
from farm.operators.trial import check_size
from farm.subjects import kernel as kernels
from farm.subjects.collective_calls import local_part
from farm.subjects.encoding import tensors_in
from farm.subjects.parsing import parse
from farm.subjects.registry import kind_of
from farm.types.protocol import Placement, Protocol, Subject, Variant
from farm.types.reading import Details
from farm.types.value_profiles import HeldFilling, fillings, held_fillings

if TYPE_CHECKING:
    from farm.operators.compiled import CompiledPass

Pass = Callable[[], object]

CHAIN_LAYERS = 8
MOST_CALL_S = 300.0  # one call; as the time limit of an item
MEMORY_SHARE = 0.8  # the share of the free memory that all copies together may use


@dataclass(frozen=True)
class Offloaded:
    """An operator with some of its tensors in slow memory."""

    rebuilt: Rebuilt  # the operator; the placement's inputs are in slow memory
    run: Callable[[Rebuilt], Pass]  # makes a pass of the operator or of its replica
    details: Details
    pool: Any  # the memory pool from which a graph of the operator must allocate; None: any pool
    memory: object  # owns the slow memory; keep it as long as the passes


#: Puts the tensors of a placement in slow memory.
Offload = Callable[[Rebuilt, Placement], Offloaded]


@dataclass
class Passes:
    """The passes of a subject, on its own tensors and on copies of them."""

    first: Pass
    # makes another pass on copies of the tensors; None: nothing to copy
    copy: Callable[[int], Pass] | None = None
    weight_bytes: int = 0
    activation_bytes: int = 0
    details: Details = field(default_factory=Details)
    inputs: list[torch.Tensor] = field(default_factory=list)
    written: list[torch.Tensor] = field(
        default_factory=list
    )  # inputs that the subject itself writes
    # captures the calls of a whole model, launched as in the window
    order: Callable[[], CapturedPass] | None = None
    pool: Any = None  # the memory pool from which graphs must allocate; None: they share a new pool
    keep: Any = None  # owns memory that the passes use


def operator_passes(
    subject: Subject, protocol: Protocol, device: torch.device, offload: Offload | None = None
) -> Passes:
    """Rebuild an operator tuple with the data class, the residency and the placement of the
    protocol.

    Raises:
        Unmeasurable: out_of_memory, rejected or not_available (the operator cannot be chained or
            offloaded).
        TupleRejected: the JSON is not a tuple.
    """
    spec = parse(subject.spec)
    kind = kind_of(spec)
    if kind.cards(spec) > 1:
        _check_cards("The collective", kind.cards(spec))
    compiled = compiled_pass_with(subject, device) if subject.compiled else None
    if protocol.data == "copied" and compiled is None:
        raise Unmeasurable(
            "not_available",
            "--data copied needs a compiled model.",
            "Give --data seen, or --compile.",
        )
    needed, free = needed_bytes(spec), free_bytes(device)
    if (
        needed > MEMORY_SHARE * free
    ):  # check now: on a CPU, Linux kills a process that uses too much memory
        most = f"{MEMORY_SHARE:.0%} of the {free / 2**30:.1f} GiB that are free"
        text = (
            f"The operator's inputs need {needed / 2**30:.1f} GiB of memory; they may use {most}."
        )
        raise Unmeasurable("out_of_memory", text, "Choose a smaller batch.")
    check_size(spec, device, MEMORY_SHARE * free - needed, MOST_CALL_S)
    rebuilt = rebuild(spec, device)
    if compiled is not None:
        _copy_values(rebuilt, compiled)
    else:
        set_values(rebuilt, protocol.data)
    placement = Placement.parse(protocol.placement)
    if protocol.residency == "chain":
        if placement:
            text = "--residency chain cannot use tensors in slow memory."
            raise Unmeasurable("not_available", text, "Use --residency resident.")
        return _chain(rebuilt)
    if not placement:
        offloaded = Offloaded(rebuilt, operator.attrgetter("run"), Details(), None, None)
    elif offload is None:
        raise Unmeasurable(
            "not_available",
            "This process cannot put tensors in slow memory: its host lacks the add-on 'memory'.",
            "Install the farm on this host again with all its files.",
        )
    else:
        offloaded = offload(rebuilt, placement)
    rebuilt, run = offloaded.rebuilt, offloaded.run
    if not kind.standalone:
        run = _restoring
    stream, copies_weights = protocol.residency == "stream", bool(rebuilt.weights)
    without = not kind.standalone or placement
    steps = HostSteps(device) if without else _host_steps(run(rebuilt), protocol, device)
    return Passes(
        first=steps.around(run(rebuilt)),
        copy=lambda index: steps.around(
            run(rebuilt.replica(weights=copies_weights, activations=stream, index=index))
        ),
        weight_bytes=rebuilt.weight_bytes,
        activation_bytes=rebuilt.activation_bytes,
        inputs=rebuilt.read_memory,
        written=[rebuilt.memory(index) for index in sorted(rebuilt.written)],
        details=dataclasses.replace(offloaded.details, **steps.details()),
        pool=offloaded.pool,
        keep=offloaded.memory,
    )


def _chain(rebuilt: Rebuilt) -> Passes:
    """Passes that are layers: each has its own weights and runs on the output of the layer before
    it, in a cycle.
    """
    start: torch.Tensor | None = None
    output: object = None
    match rebuilt.spec.arguments:
        case ({"tensor": number}, *_):
            start = rebuilt.tensors[number]
            output = None if rebuilt.written else rebuilt.run()
    if (
        start is None
        or not isinstance(output, torch.Tensor)
        or (output.shape, output.dtype, output.stride())
        != (start.shape, start.dtype, start.stride())
    ):
        other = "its output has another shape, dtype or layout than its input"
        why = "it writes its input" if rebuilt.written else other
        text = f"--residency chain cannot measure this operator: {why}."
        raise Unmeasurable("not_available", text, "Use --residency resident.")
    passed_on = [start]

    def layer(number: int) -> Pass:
        one = rebuilt if number == 0 else rebuilt.replica(weights=True)

        def run() -> object:
            passed_on[0] = one.run_on(start if number == 0 else passed_on[0])
            return passed_on[0]

        return run

    return Passes(
        first=layer(0),
        copy=layer,
        weight_bytes=rebuilt.weight_bytes,
        activation_bytes=rebuilt.activation_bytes,
    )


def variant_passes(subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
    """The passes of a whole model or step. Their `details` have its size and, if context is
    measured, `found_again`.
    """
    from farm.operators.capture import capture
    from farm.training.extract import capture_forward

    variant = Variant.from_json(subject.spec)
    if variant.compile:
        return _compiled_passes(subject, protocol, device)
    if variant.step:
        return step_passes(variant, protocol, device)
    _check_cards(str(variant), variant.cards)
    model, arguments = build_variant(variant, device)
    if protocol.data == "zeros":
        _zero(arguments)

    run = functools.partial(model, *arguments)
    steps = _host_steps(run, protocol, device)

    def observe() -> CapturedPass:
        if variant.cards > 1:
            return capture_forward(model, arguments, grad=protocol.grad, device_type=device.type)
        return capture(model, arguments, device_type=device.type, grad_enabled=protocol.grad)

    def copy(index: int) -> Pass:
        others = tuple(
            entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in arguments
        )
        return steps.around(functools.partial(model, *others))

    return Passes(
        first=steps.around(run),
        copy=copy if protocol.residency == "stream" else None,
        # No copies of weights: each pass of the whole model itself decides which weights the cache
        # still has.
        activation_bytes=bytes_of(entry for entry in arguments if isinstance(entry, torch.Tensor)),
        details=dataclasses.replace(_working_set(run, model, protocol, device), **steps.details()),
        order=lambda: as_launched(steps.around(observe), protocol, device),
    )


def _host_steps(run: Pass, protocol: Protocol, device: torch.device) -> HostSteps:
    # Passes of several cards have no host steps: their ranks would have to agree about them.
    graph = device.type == "cuda" and protocol.launch == "graph" and ranks.world() == 1
    return HostSteps.of(run, device) if graph else HostSteps(device)


def _check_cards(subject: str, cards: int) -> None:
    """Raise `Unmeasurable` if the group has another number of ranks than the subject needs."""
    if ranks.world() != cards:
        text = f"{subject} needs {cards} cards, and {ranks.world()} measure it."
        raise Unmeasurable("not_available", text, "Measure it on as many cards.")


def _compiled_passes(subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
    """The passes of a compiled model. The graph of its rounds contains the launches of the compiled
    pass.
    """
    compiled = compiled_pass(subject, device, launch=protocol.launch)
    if protocol.data == "zeros":
        _zero(compiled.inputs)
    model = compiled.model
    return Passes(
        first=compiled.run,
        activation_bytes=bytes_of(compiled.inputs),
        written=list(filter(is_plain, model.parameters())) if model.training else [],
        details=_working_set(compiled.run, model, protocol, device),
        order=lambda: as_launched(compiled.capture, protocol, device),
    )


def step_passes(variant: Variant, protocol: Protocol, device: torch.device) -> Passes:
    """The passes of a training step, from zero_grad to the optimizer's step. All passes use the
    same tensors.
    """
    from farm.training.capture import capture_step
    from farm.training.extract import build_step

    _check_cards(str(variant), variant.cards)
    elsewhere_bytes = _allocated_without_workspaces(device)
    step = build_step(variant, device, launch=protocol.launch)
    if protocol.data == "zeros":
        _zero(tensors_in(step.inputs))
    memory = _memory_of_step(step.run, elsewhere_bytes, device)
    details = _working_set(step.run, step.model, protocol, device)
    observe = functools.partial(capture_step, step, device_type=device.type, warmed_up=True)
    steps = _host_steps(step.run, protocol, device)
    return Passes(
        first=steps.around(step.run),
        activation_bytes=bytes_of(tensors_in(step.inputs)),
        details=dataclasses.replace(details, **memory, **steps.details()),
        written=[local_part(tensor) for tensor in step.model.parameters() if is_plain(tensor)],
        order=lambda: as_launched(steps.around(observe), protocol, device),
    )


def _allocated_without_workspaces(device: torch.device) -> int:
    """Free the workspaces of cuBLAS. Return the bytes that PyTorch's allocator has still allocated;
    0 on a CPU.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)


def _memory_of_step(run: Pass, elsewhere_bytes: int, device: torch.device) -> dict[str, Any]:
    """The memory of an eager step by PyTorch's allocator: its peaks, and the workspaces of
    libraries. {} on a CPU.

    `elsewhere_bytes` were allocated before the step was built; they do not count.
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


def as_launched(
    observe: Callable[[], CapturedPass], protocol: Protocol, device: torch.device
) -> CapturedPass:
    """Call `observe` in the same way as the measured run. If the protocol launches graphs, call it
    in a graph capture.

    The reason: a model may query whether a graph capture is running, and then call other operators.
    The host cannot read values meanwhile, so it calls `observe` again if values decide how much
    work a call does."""
    if device.type != "cuda" or protocol.launch != "graph":
        return observe()
    found: list[CapturedPass] = []
    capture_graph([lambda: found.append(observe())], device)
    return with_values(found[0], observe)


def _working_set(
    run: Pass, model: torch.nn.Module, protocol: Protocol, device: torch.device
) -> Details:
    """Measure the bytes that one pass of a model touches, and the share that the cache keeps until
    the next pass.
    """
    parameter_bytes = bytes_of([*model.parameters(), *model.buffers()])
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


@dataclass(frozen=True)
class _BuiltVariant:
    """A built model with its inputs, which waits for the next `build_variant`."""

    variant: Variant
    model: torch.nn.Module
    arguments: tuple[Any, ...]
    given: bool  # by a caller: this process cannot build the model itself


# At most one built variant. The verification puts it here if the same process measures next; so
# does a caller whose model is not in the catalog.
_handed_over: dict[tuple[str, str], _BuiltVariant] = {}


def build_variant(
    variant: Variant, device: torch.device, *, hand_over: bool = False
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Build a model variant and its inputs on a device, with seeded random weights.

    If `hand_over` is set, the next call for the same variant and device returns the same objects,
    once. A call for another variant frees them: the same seed builds them again. Raises
    `Unmeasurable` (rejected) if a caller gave a model for another variant (`given_variant`)."""
    from farm.models import catalog

    key = (variant.id, str(device))
    waiting = _handed_over.pop(key, None)
    if waiting is not None:
        return waiting.model, waiting.arguments

    _free_handed_over(variant)
    from farm.training.split import build

    model, arguments = build(variant, device), catalog.example_inputs(variant, device=device)
    if hand_over:
        _handed_over[key] = _BuiltVariant(variant, model, arguments, given=False)
    return model, arguments


def _free_handed_over(variant: Variant) -> None:
    """Free what waits for another build. Raises `Unmeasurable` if a caller gave it."""
    for waiting in _handed_over.values():
        if waiting.given:
            raise Unmeasurable(
                "rejected",
                f"The model that was given for {waiting.variant} has not been measured, and "
                f"{variant} is to be built instead.",
                "Measure the given model first.",
            )
    _handed_over.clear()


@contextlib.contextmanager
def given_variant(
    variant: Variant, device: torch.device, model: torch.nn.Module, arguments: tuple[Any, ...]
) -> Iterator[None]:
    """Within the block, the next `build_variant` of this variant on this device returns this model
    and its arguments, once.
    """
    key = (variant.id, str(device))
    _handed_over.clear()
    _handed_over[key] = _BuiltVariant(variant, model, arguments, given=True)
    try:
        yield
    finally:
        _handed_over.pop(key, None)


_compiled: dict[tuple[str, str], CompiledPass] = {}  # at most one compiled variant


def compiled_pass(
    subject: Subject, device: torch.device, *, launch: str = "graph", again: bool = False
) -> CompiledPass:
    """Compile the variant of a subject, or return it if this process has just compiled it.

    Args:
        launch: of a training step, see `farm.training.extract.build_step`.
        again: compile it again, without the compiler's cache, with the choices of the subject.

    Raises:
        CaptureError: the compiler refuses the model.
        UsageError: no compiler is installed.
    """
    from farm.operators.compiled import CompiledPass, CompiledStep

    source = subject.compiled or {}
    variant = Variant.from_json(source.get("variant") or subject.spec)
    key = (variant.id, str(device))
    if again or key not in _compiled:
        _compiled.clear()
        kernels.forget_all()
        how: Any = {"mode": variant.compile, "choices": source.get("choices"), "cached": not again}
        if variant.step:
            from farm.training.extract import build_step

            _compiled[key] = CompiledStep(build_step(variant, device, launch=launch), device, **how)
        else:
            _compiled[key] = CompiledPass(*build_variant(variant, device), device, **how)
    return _compiled[key]


def compiled_pass_with(subject: Subject, device: torch.device) -> CompiledPass:
    """As `compiled_pass`, for a tuple. If the cache of the compiler has other kernels, the variant
    is compiled again. Raises `Unmeasurable` (rejected) if the compiler does not generate the kernel
    on this host."""
    compiled = compiled_pass(subject, device)
    if not compiled.runs(subject.id) and compiled.cached:
        compiled = compiled_pass(subject, device, again=True)
    if not compiled.runs(subject.id):
        text = "The compiler on this host does not generate this kernel for the model."
        raise Unmeasurable(
            "rejected",
            text,
            "Measure the model again; another list of kernels is stored for the card.",
        )
    return compiled


def _restoring(rebuilt: Rebuilt) -> Pass:
    """A pass of a generated kernel or a collective. If it changes its inputs, they get their
    present values again before each run. Before other collectives a small kernel runs, because long
    graphs of collectives alone stall: an all-gather of 32 KB took 37 us on two H100s, and 11 us
    with a kernel between any two."""
    kept = [(base, base.clone()) for base in rebuilt.changed_memory]
    if not kept and kind_of(rebuilt.spec).cards(rebuilt.spec) > 1:
        return InPlacePass(rebuilt.run, functools.partial(write_again, [rebuilt.storages[0][:1]]))
    if not kept:
        return rebuilt.run

    def restore() -> None:
        for base, value in kept:
            base.copy_(value)

    return InPlacePass(rebuilt.run, restore)


def _copy_values(rebuilt: Rebuilt, compiled: CompiledPass) -> None:
    """Copy the values of the tensors from the running model, at the first launch of the tuple.

    An aten operator that changes its inputs keeps values that do not drift
    (`farm.subjects.values`)."""
    if kind_of(rebuilt.spec).standalone and rebuilt.changed_memory:
        return
    values = compiled.copies_of(rebuilt.spec.id)
    with torch.no_grad():
        for mine, value in zip(rebuilt.tensors, values or (), strict=bool(values)):
            if 0 not in mine.stride() and mine.numel():
                mine.detach().copy_(value)


@contextlib.contextmanager
def applied(protocol: Protocol) -> Iterator[None]:
    """Set the numeric flags and the grad mode of a protocol within the block: the mode of the
    subject's capture.
    """
    with numeric_flags(protocol), torch.set_grad_enabled(protocol.grad):
        yield


@contextlib.contextmanager
def numeric_flags(protocol: Protocol) -> Iterator[None]:
    """Set TF32 and cuDNN's flags as in the protocol, and restore them at the end."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = protocol.tf32
        cudnn.benchmark, cudnn.deterministic = (
            protocol.cudnn_benchmark,
            protocol.cudnn_deterministic,
        )
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def _zero(tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.detach().zero_()


def set_values(rebuilt: Rebuilt, data: str) -> None:
    """Fill a rebuilt operator's activations, buffers and parameters with values of a data class, if
    it accepts them.
    """
    if data == "normal":
        return
    spec = rebuilt.spec
    written = written_inputs(spec)
    if data == "zeros":
        return _zero(
            rebuilt.tensors[index]
            for index, known in enumerate(spec.tensors)
            if known.role == "activation" and kind_of(spec).may_be_zero(spec, index, written)
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
            # Do not change values that the operator writes, divides by or uses as indices.
            how = kind_of(spec).values(spec, index, written)
            free = index not in written and how.form == "normal"
            if free and storage not in done and values.is_floating_point():
                done.add(storage)
                if how.scale != 1:  # a data class has a standard deviation of one
                    values.normal_(generator=generator)
                impose(values, filling.zeros, filling.positive, filling.channels, generator)
                if how.scale != 1:
                    values.mul_(how.scale)
        for index, held in zip(
            [index for index, one in enumerate(spec.tensors) if one.held], kept, strict=True
        ):
            values = _values(rebuilt, index)
            if values.is_floating_point() and index not in written:
                _hold(values, held, generator)
    return None


def _hold(values: torch.Tensor, held: HeldFilling, generator: torch.Generator) -> None:
    if held.same:
        values.fill_(1)
    elif held.zeros >= 1:
        values.zero_()
    elif held.dimension is not None and held.dimension < values.dim():
        used = round((1 - held.zeros) * values.shape[held.dimension])
        values.narrow(held.dimension, used, values.shape[held.dimension] - used).zero_()
    elif held.zeros:
        values.masked_fill_(
            torch.rand(values.shape, device=values.device, generator=generator) < held.zeros, 0
        )


def _values(rebuilt: Rebuilt, index: int) -> torch.Tensor:
    """The values to fill: the tensor's memory; or the tensor itself, if its memory is flat and it
    alone uses that.
    """
    memory, tensor, spec = rebuilt.memory(index), rebuilt.tensors[index], rebuilt.spec
    shared = sum(one.storage == spec.tensors[index].storage for one in spec.tensors) > 1
    overlaps = tensor.numel() > memory.numel() or 0 in tensor.stride()
    return memory if memory.dim() == tensor.dim() or shared or overlaps else tensor.detach()


def free_bytes(device: torch.device) -> int:
    """The bytes that can still be allocated, including unused memory in PyTorch's allocator."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available
