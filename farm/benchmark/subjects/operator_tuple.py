"""Measured operator tuples: an operator, or a chain of equal layers, with data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from farm.benchmark.cache import InPlacePass, write_again
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import (
    MEMORY_SHARE,
    Pass,
    Passes,
    check_cards,
    free_bytes,
    host_steps,
    zero_out,
)
from farm.benchmark.phases.base import Phase, with_added
from farm.benchmark.phases.bursts import Bursts
from farm.benchmark.phases.context import Context
from farm.benchmark.phases.overlapping import Overlapping
from farm.benchmark.phases.restoring import Restoring
from farm.benchmark.policies import POLICIES, WindowPolicy
from farm.benchmark.subjects.base import SubjectKind
from farm.errors import Unmeasurable
from farm.operators.input_values import impose
from farm.operators.output_sizes import check_size
from farm.operators.rebuild import Rebuilt, needed_bytes, rebuild, written_inputs
from farm.subjects.parsing import parse
from farm.subjects.registry import kind_of
from farm.types.details import Details
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.tuple import OperatorTuple
from farm.types.value_profiles import HeldFilling, fillings, held_fillings

MOST_CALL_S = 300.0  # of one call; as the time limit of an item


class OperatorTupleKind(SubjectKind):
    """An operator tuple: hundreds belong to a model, so their windows are short."""

    def passes(self, subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
        rebuilt = rebuilt_tuple(subject, device)
        set_values(rebuilt, protocol.data)
        return passes_with_values(rebuilt, protocol, device)

    def policy(self, protocol: Protocol, stopping: Stopping) -> WindowPolicy:
        return POLICIES["rough" if stopping.rough else "operator"]

    def phases(self, subject: Subject) -> Sequence[Phase]:
        """Those of all tuples, and those that the kind of the tuple adds."""
        spec = parse(subject.spec)
        usual = (Bursts(), Context(), Restoring(), Overlapping())
        return with_added(usual, kind_of(spec).phases(spec))

    def has_canary(self, stopping: Stopping) -> bool:
        """Precise readings have one."""
        return not stopping.rough


def rebuilt_tuple(subject: Subject, device: torch.device) -> Rebuilt:
    """Rebuild an operator tuple, after a look at its memory and at the number of cards.

    Raises:
        Unmeasurable: out_of_memory, or rejected.
        TupleRejected: the JSON is not a tuple.
    """
    spec = parse(subject.spec)
    cards = kind_of(spec).cards(spec)
    if cards > 1:
        check_cards("The collective", cards)
    _check_memory(spec, device)
    return rebuild(spec, device)


def passes_with_values(rebuilt: Rebuilt, protocol: Protocol, device: torch.device) -> Passes:
    """The passes of a rebuilt operator that has its values.

    Raises:
        Unmeasurable: not_available: the operator cannot be chained.
    """
    if protocol.residency == "chain":
        return _chain(rebuilt)
    if kind_of(rebuilt.spec).standalone:
        steps = host_steps(rebuilt.run, protocol, device)
    else:
        steps = HostSteps(device)  # none
    return tuple_passes(rebuilt, protocol, pass_of, steps)


def pass_of(rebuilt: Rebuilt) -> Pass:
    """A pass of an operator on its tensors."""
    if kind_of(rebuilt.spec).standalone:
        return rebuilt.run
    return _restoring(rebuilt)


def tuple_passes(
    rebuilt: Rebuilt, protocol: Protocol, run: Callable[[Rebuilt], Pass], steps: HostSteps
) -> Passes:
    """The passes of an operator, and of its replicas if the residency needs copies.

    Args:
        run: makes a pass of the operator or of a replica.
        steps: the host steps of a pass.
    """
    copies_activations = protocol.residency == "stream"
    copies_weights = bool(rebuilt.weights)

    def copy(index: int) -> Pass:
        replica = rebuilt.replica(
            weights=copies_weights, activations=copies_activations, index=index
        )
        return steps.around(run(replica))

    return Passes(
        first=steps.around(run(rebuilt)),
        copy=copy,
        weight_bytes=rebuilt.weight_bytes,
        activation_bytes=rebuilt.activation_bytes,
        inputs=rebuilt.read_memory,
        rewritten=rebuilt.read_memory if protocol.residency == "resident" else [],
        written=[rebuilt.memory(index) for index in sorted(rebuilt.written)],
        details=steps.noted(Details()),
    )


def _check_memory(spec: OperatorTuple, device: torch.device) -> None:
    """Raise `Unmeasurable` if an operator needs too much memory or time. Check before it is
    rebuilt: on a CPU, Linux kills a process that uses too much memory.
    """
    needed, free = needed_bytes(spec), free_bytes(device)
    if needed > MEMORY_SHARE * free:
        most = f"{MEMORY_SHARE:.0%} of the {free / 2**30:.1f} GiB that are free"
        text = (
            f"The operator's inputs need {needed / 2**30:.1f} GiB of memory; they may use {most}."
        )
        raise Unmeasurable("out_of_memory", text, "Choose a smaller batch.")
    check_size(spec, device, MEMORY_SHARE * free - needed, MOST_CALL_S)


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
        operator = rebuilt if number == 0 else rebuilt.replica(weights=True)

        def run() -> object:
            passed_on[0] = operator.run_on(start if number == 0 else passed_on[0])
            return passed_on[0]

        return run

    return Passes(
        first=layer(0),
        copy=layer,
        weight_bytes=rebuilt.weight_bytes,
        activation_bytes=rebuilt.activation_bytes,
    )


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


def set_values(rebuilt: Rebuilt, data: str) -> None:
    """Fill a rebuilt operator's activations, buffers and parameters with values of a data class, if
    it accepts them.

    Raises:
        Unmeasurable: not_available or rejected: the operator has no values of this class.
    """
    if data == "normal":
        return
    if data == "copied":
        text = "--data copied needs a compiled model."
        raise Unmeasurable("not_available", text, "Give --data seen, or --compile.")
    spec = rebuilt.spec
    written = written_inputs(spec)
    if data == "zeros":
        return zero_out(
            rebuilt.tensors[index]
            for index, tensor in enumerate(spec.tensors)
            if tensor.role == "activation" and kind_of(spec).may_be_zero(spec, index, written)
        )
    indices = [index for index, tensor in enumerate(spec.tensors) if tensor.role == "activation"]
    try:
        filling_of = fillings(data, len(indices))
        kept = held_fillings(data, sum(tensor.held for tensor in spec.tensors))
    except ValueError as error:
        raise Unmeasurable("rejected", f"{error}.") from error
    generator = torch.Generator(device=rebuilt.device).manual_seed(1)
    done: set[int] = set()
    with torch.no_grad():
        for index, filling in zip(indices, filling_of, strict=True):
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
        for index, held_filling in zip(
            [index for index, tensor in enumerate(spec.tensors) if tensor.held], kept, strict=True
        ):
            values = _values(rebuilt, index)
            if values.is_floating_point() and index not in written:
                _hold(values, held_filling, generator)
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
    shared = sum(tensor.storage == spec.tensors[index].storage for tensor in spec.tensors) > 1
    overlaps = tensor.numel() > memory.numel() or 0 in tensor.stride()
    return memory if memory.dim() == tensor.dim() or shared or overlaps else tensor.detach()
