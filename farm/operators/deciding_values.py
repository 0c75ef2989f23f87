"""Records the values that decide how much work a call does, and makes such values for a rebuilt
operator.

`farm.types.deciding` says which inputs these are, and what a tuple keeps of them. Values of a
message are never used as they are: a distribution is checked against the call before an operator is
built, and all values that follow from it are clamped to the valid range."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

# this function itself: models of the catalog replace the attribute
from torch.cuda import (
    is_current_stream_capturing,
)
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import TupleRejected
from farm.operators.captured import CapturedPass
from farm.types.deciding import DecidingInput, deciding_input, may_decide
from farm.types.distribution import (
    MOST_NUMBERS,
    PARTS,
    Distribution,
    equal_lengths,
    lengths_of,
    ordered_lengths,
    segments_of,
)
from farm.types.tuple import OperatorTuple

#: Shares of neighbours that ascend by at most one, from which the order counts as short or long
#: runs.
_RUNS = (0.5, 0.9)
_BLOCK = 16  # length of a short run


# ----- recording


def recorded(
    spec: OperatorTuple, tensors: Sequence[torch.Tensor], known: Callable[[torch.Tensor], bool]
) -> OperatorTuple:
    """Return the tuple of a call with a description of the values that decide its work, if they can
    be read.

    Args:
        tensors: the inputs of the call, in the order of the tuple's tensors.
        known: returns whether the values of a real tensor are those of the model.
    """
    deciding = deciding_input(spec) if may_decide(spec.operator) else None
    if deciding is None:
        return spec
    tensor = tensors[deciding.index]
    if not _is_readable(tensor) or not known(tensor):
        return spec

    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        values = describe(deciding, tensor.detach().cpu().numpy())
    if values is None:
        return spec

    described = list(spec.tensors)
    described[deciding.index] = dataclasses.replace(described[deciding.index], values=values)
    return dataclasses.replace(spec, tensors=tuple(described))


def _is_readable(tensor: torch.Tensor) -> bool:
    """False also for a tensor that a kernel would have to copy first: watching must not change what
    runs.
    """
    if type(tensor) is FakeTensor or tensor.is_meta or not tensor.is_contiguous():
        return False
    return not is_recorded(tensor.device)


def is_recorded(device: torch.device) -> bool:
    """True while a CUDA graph is captured on a device: the host cannot read its memory."""
    return device.type == "cuda" and is_current_stream_capturing()


def describe(given: DecidingInput, values: np.ndarray[Any, Any]) -> Distribution | None:
    """Describe the values of an input; None if they are as those of a call without a description,
    or invalid.

    It uses NumPy: a profile of the pass counts the operators of PyTorch.
    """
    values = values.reshape(-1)
    if not given.is_described:
        return None
    if given.form == "selecting":
        return _marks(values != 0)
    if given.form in ("distinct", "runs"):
        return _distinct(given, values)
    values = values.astype(np.int64)
    if given.form == "classes":
        return Distribution("below", (int(values.max()) + 1,)) if values.min() >= 0 else None
    if given.form == "repeats":
        is_valid = values.min() >= 0 and given.fixed is None
        numbers = int(values.sum()), int((values > 0).sum())
        return Distribution("repeats", numbers) if is_valid else None
    if given.form in ("gathered", "binned"):
        return _places(given, values)

    if given.form == "ends":
        edges = np.concatenate([[0], values])
    else:
        edges = values if len(values) > given.parts else np.append(values, given.bound)
    lengths = np.diff(edges)
    if edges[0] != 0 or lengths.min() < 0 or edges[-1] > given.bound:
        return None
    if given.form == "ends" and len(lengths) <= MOST_NUMBERS:
        return ordered_lengths(lengths.tolist())
    return segments_of(lengths.tolist(), given.least_step)


def _places(given: DecidingInput, values: np.ndarray[Any, Any]) -> Distribution | None:
    if given.form == "gathered":
        values = np.where(values < 0, values + given.bound, values)
    most = min(len(values), given.bound)
    distinct = _parts(len(np.unique(values)), most)
    described = Distribution("places", (distinct, _order(values)))
    random_values = Distribution(
        "places", (_parts(_expected_distinct(len(values), given.bound), most), 0)
    )
    return None if described == random_values else described


def _parts(number: float, most: int) -> int:
    return max(1, round(PARTS * min(1.0, number / most)))


def _expected_distinct(number: int, bound: int) -> float:
    """The mean number of different values among so many random ones."""
    return float(bound * (1 - (1 - 1 / bound) ** number))


def _order(values: np.ndarray[Any, Any]) -> int:
    if len(values) < 2:
        return 0
    steps = np.diff(values)
    share = float(((steps == 0) | (steps == 1)).mean())
    return sum(share >= least for least in _RUNS)


def _distinct(given: DecidingInput, values: np.ndarray[Any, Any]) -> Distribution | None:
    number = len(np.unique(values))
    if given.form == "runs":
        number = 1 + int((values[1:] != values[:-1]).sum())
    return Distribution("distinct", (number,)) if number <= given.bound else None


def _marks(mask: np.ndarray[Any, Any]) -> Distribution:
    number = int(mask.sum())
    begins = int((mask[1:] & ~mask[:-1]).sum()) + int(mask[0])
    return Distribution("marks", (number, 2 if begins and number / begins >= _BLOCK else 0))


# ----- values of a rebuilt operator


def check_values(spec: OperatorTuple) -> None:
    """Raise `TupleRejected` if a tuple describes values that do not fit its call."""
    deciding = deciding_input(spec)
    is_said = type(spec.keywords.get("output_size")) is int
    if is_said and "repeat_interleave" in spec.operator and not _amount_to(spec, deciding):
        text = f"The counts of '{spec.operator}' have no rule, but must amount to its output_size."
        raise TupleRejected(
            text, "Leave output_size out, or give counts with a memory of their own."
        )
    described = [index for index, tensor in enumerate(spec.tensors) if tensor.values is not None]
    for index in described:
        values = spec.tensors[index].values
        assert values is not None
        if deciding is None or deciding.index != index:
            problem = "has values, although they do not decide the work of the call"
        else:
            problem = deciding.problem(values)
        if problem:
            text = f"The input {index} of '{spec.operator}' {problem}."
            raise TupleRejected(
                text, "Capture the model again with this version. Do not edit a tuple by hand."
            )


def _amount_to(spec: OperatorTuple, counts: DecidingInput | None) -> bool:
    """True if the counts of a `repeat_interleave` amount to its ``output_size``: those that a rule
    chooses, or a number that repeats each row equally often."""
    if counts is not None:
        return True
    number = spec.arguments[1] if len(spec.arguments) > 1 else spec.keywords.get("repeats")
    if type(number) is not int or len(spec.tensors) != 1:
        return False
    tensor = spec.tensors[0]
    dimension = spec.arguments[2] if len(spec.arguments) > 2 else spec.keywords.get("dim")
    if dimension is None:
        rows = tensor.numel
    elif type(dimension) is int and -len(tensor.shape) <= dimension < len(tensor.shape):
        rows = tensor.shape[dimension]
    else:
        return False
    return number >= 0 and rows * number == spec.keywords["output_size"]


def write_values(spec: OperatorTuple, tensors: Sequence[torch.Tensor]) -> None:
    """Write the values that a tuple describes into the tensors of a rebuilt operator; segments are
    equal if it does not describe them."""
    deciding = deciding_input(spec)
    if deciding is None:
        return
    values = values_of(deciding, spec.tensors[deciding.index].values)
    if values is not None:
        target = tensors[deciding.index]
        for dimension, step in enumerate(target.stride()):
            if not step:  # expanded: the memory has one element
                target = target.narrow(dimension, 0, 1)
        target.copy_(values[: target.numel()].view(target.shape))


def values_of(given: DecidingInput, described: Distribution | None) -> torch.Tensor | None:
    """Return flat values of an input, on the CPU, and for starts also the last end; None if any
    valid values do.
    """
    if given.form in ("ends", "starts"):
        return _edges(given, described)
    if given.form == "repeats":
        return _counts(given, described)
    if given.form == "placing" and given.fixed is not None:
        described = Distribution("marks", (given.fixed, 0))
    if described is None:
        return None
    generator = torch.Generator().manual_seed(0)
    if given.form in ("selecting", "placing"):
        return _mask(given.parts, described, generator)
    if given.form in ("distinct", "runs"):
        return _each_once(given, described, generator)
    if given.form == "classes":
        most = described.numbers[0] - 1
        classes = torch.randint(most + 1, (given.parts,), generator=generator)
        classes[-1] = most
        return classes
    return _indices(given, described, generator)


def _edges(given: DecidingInput, described: Distribution | None) -> torch.Tensor:
    segments, bound = given.parts, given.bound
    lengths = equal_lengths(segments, bound) if described is None else lengths_of(described, bound)
    ends = torch.tensor(lengths).cumsum(0).clamp_(0, bound)
    if given.form == "ends":
        return ends
    return torch.cat([torch.zeros(1, dtype=ends.dtype), ends])


def _indices(
    given: DecidingInput, described: Distribution, generator: torch.Generator
) -> torch.Tensor:
    """Return so many different values, each equally often: evenly spaced if their order is random,
    else neighbours.
    """
    parts, order = described.numbers
    number, most = given.parts, min(given.parts, given.bound)
    distinct = max(1, min(most, round(parts * most / PARTS)))
    values = torch.arange(number).mul_(distinct).div_(number, rounding_mode="floor")
    if order == 0:
        values.mul_(given.bound).div_(distinct, rounding_mode="floor")
    if order < 2:
        block = 1 if order == 0 else _BLOCK
        blocks = torch.randperm(-(-number // block), generator=generator)
        positions = (blocks[:, None] * block + torch.arange(block)).reshape(-1)
        values = values[positions[positions < number]]
    return values.clamp_(0, given.bound - 1)


def _counts(given: DecidingInput, described: Distribution | None) -> torch.Tensor:
    """Counts with the described sum, as equal as possible; by default, each row once."""
    total, used = described.numbers if described is not None else (given.parts, given.parts)
    if given.fixed is not None:
        total, used = given.fixed, min(given.fixed, used or given.parts)
    used = min(used, given.parts)
    counts = torch.zeros(given.parts, dtype=torch.int64)
    counts[:used] = torch.tensor(equal_lengths(used, total)) if used else 0
    return counts[torch.randperm(given.parts, generator=torch.Generator().manual_seed(0))]


def _each_once(
    given: DecidingInput, described: Distribution, generator: torch.Generator
) -> torch.Tensor:
    """So many different values, in runs of equal ones or scattered."""
    number = min(described.numbers[0], given.bound)
    values = torch.arange(given.parts).mul_(number).div_(given.parts, rounding_mode="floor")
    if given.form == "runs":
        return values
    return values[torch.randperm(given.parts, generator=generator)]


def _mask(number: int, described: Distribution, generator: torch.Generator) -> torch.Tensor:
    marks, order = min(described.numbers[0], number), described.numbers[1]
    positions = (
        torch.arange(marks) if order == 2 else torch.randperm(number, generator=generator)[:marks]
    )
    mask = torch.zeros(number, dtype=torch.bool)
    mask[positions] = True
    return mask


# ----- captures


def _may_be_described(spec: OperatorTuple) -> bool:
    """True if a tuple without values has an input whose values a capture describes."""
    deciding = deciding_input(spec)
    return spec.without_values is spec and deciding is not None and deciding.is_described


def with_values(captured: CapturedPass, again: Callable[[], CapturedPass]) -> CapturedPass:
    """Return a capture with the values that decide the work of its calls.

    While a CUDA graph is captured, the host cannot read them. If a call needs them, the pass is
    captured a second time, eagerly. Calls are matched by module, tuple and order.

    Args:
        again: captures the same pass eagerly.
    """
    deciding = {id_ for id_, spec in captured.tuples.items() if _may_be_described(spec)}
    if not deciding:
        return captured

    eager = again()
    waiting: defaultdict[tuple[str, str], list[OperatorTuple]] = defaultdict(list)
    for call in eager.calls:
        spec = eager.tuples[call.tuple_id]
        waiting[call.module_path, spec.without_values.id].append(spec)

    calls = []
    tuples: dict[str, OperatorTuple] = {}
    traces, mismatches = {}, {}
    for call in captured.calls:
        spec = captured.tuples[call.tuple_id]
        matches = waiting[call.module_path, spec.id] if spec.id in deciding else []
        if matches:
            spec = matches.pop(0)
        tuples.setdefault(spec.id, spec)
        if call.tuple_id in captured.traces:
            traces[spec.id] = captured.traces[call.tuple_id]
        if call.tuple_id in captured.mismatches:
            mismatches[spec.id] = captured.mismatches[call.tuple_id]
        calls.append(dataclasses.replace(call, tuple_id=spec.id))
    captured = dataclasses.replace(captured, traces=traces, mismatches=mismatches)
    return dataclasses.replace(captured, tuples=tuples, calls=tuple(calls))
