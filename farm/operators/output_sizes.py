"""How large the outputs of a call are, and how much it computes, before it uses memory.

The scalars of a tuple decide both: ``torch.full`` of a size, a number of classes, an exponent. On
meta the call computes nothing and allocates nothing, so its outputs and FLOPs are known (`trial`).

PyTorch cannot run a call on meta whose output sizes depend on values. Its inputs, or the values
that its tuple describes (`farm.types.deciding`), bound its outputs (`largest_outputs`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from farm.errors import FarmError, TupleRejected, Unmeasurable, told
from farm.operators.cost import new_bytes, run_on_meta
from farm.operators.rebuild import rebuild
from farm.subjects.encoding import storage_key, tensors_in
from farm.subjects.label import label_of
from farm.subjects.registry import kind_of
from farm.types.deciding import deciding_input
from farm.types.tuple import OperatorTuple, plain, tensor_references

#: More tensors than a model splits one into; each takes memory of the host.
MOST_OUTPUTS = 100_000
#: A size of an empty tensor; some kernels count through it although there is nothing to do.
MOST_EMPTY = 2**24
#: FLOPs in a second that no card, and no core, computes.
FASTEST_FLOPS = {"cuda": 1e17, "cpu": 1e13}


@dataclass(frozen=True)
class Trial:
    """What a call on meta shows."""

    flops: int
    new_bytes: int  # of the tensors that it returns and that share no memory with an input


@functools.lru_cache(maxsize=8192)
def trial(spec: OperatorTuple) -> Trial | None:
    """Run a call on meta. If its output sizes depend on values, they count as the largest possible
    ones. None if PyTorch cannot run it without values for another reason.

    Raises:
        TupleRejected: it returns too many tensors, or changes the shape or the memory of an input.
        Unmeasurable: "raised": an overload of aten does not accept its arguments."""
    kind = kind_of(spec)
    if not kind.standalone or kind.cost(spec) is not None:
        return None
    parts = _parts(spec)
    if parts > MOST_OUTPUTS:
        raise TupleRejected(
            f"{label_of(spec)} returns {parts} tensors; at most {MOST_OUTPUTS} are measured.",
            "Choose fewer parts.",
        )
    largest = largest_outputs(spec)
    built = rebuild(spec, "meta")
    if largest is not None:
        return Trial(0, largest)
    before = _layouts(built.tensors)
    try:
        out, flops = run_on_meta(spec, built)
    except FarmError:
        raise
    except Exception as error:
        if kind.must_run_on_meta:
            raise _unknown_memory(spec, error) from error
        if isinstance(error, NotImplementedError) or kind.public or _reads_values(error):
            return None
        raise Unmeasurable("raised", f"{type(error).__name__}: {told(error)}"[:400]) from error
    if _layouts(built.tensors) != before:
        raise TupleRejected(
            f"{label_of(spec)} changes the shape or the memory of an input.",
            "Give an output of the right shape.",
        )
    for tensor in (*built.tensors, *tensors_in(out)):
        if not tensor.numel() and max(tensor.shape, default=0) > MOST_EMPTY:
            raise TupleRejected(
                f"{label_of(spec)} has an empty tensor of the shape {tuple(tensor.shape)}.",
                f"Choose sizes of at most {MOST_EMPTY}.",
            )
    inputs = {storage_key(tensor) for tensor in built.inputs}
    return Trial(flops, new_bytes(out, inputs))


def check_size(spec: OperatorTuple, device: torch.device, most_bytes: float, most_s: float) -> None:
    """Raise `Unmeasurable` if a call needs more memory or time than it may take.

    Args:
        most_bytes: of the inputs and outputs together.
        most_s: of one call."""
    shown = trial(spec)
    if shown is None:
        return
    at_once = 2 if device.type == "cpu" else 1  # the outputs of two calls, or Linux ends a process
    if at_once * shown.new_bytes > most_bytes:
        needed, left = shown.new_bytes / 2**30, max(0.0, most_bytes) / 2**30
        text = f"The operator's outputs need {needed:.1f} GiB of memory; {left:.1f} GiB are left."
        raise Unmeasurable("out_of_memory", text, "Choose a smaller batch.")
    least_s = shown.flops / FASTEST_FLOPS[device.type]
    if least_s > most_s:
        text = f"One call computes {shown.flops:.2g} FLOPs, which takes at least {least_s:.0f} s."
        raise Unmeasurable("rejected", text, "Choose smaller sizes.")


def _unknown_memory(spec: OperatorTuple, error: Exception) -> TupleRejected:
    return TupleRejected(
        f"The memory that {label_of(spec)} needs is unknown, because it does not run on meta: "
        f"{told(error)[:200]}.",
        "Give the operator a kernel for meta (torch.library.register_fake). If its output sizes "
        "depend on values, name it in the section [selects_from] of the library's list.",
    )


def _layouts(tensors: list[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [
        (tensor.shape, tensor.stride(), storage_key(tensor), tensor.untyped_storage().nbytes())
        for tensor in tensors
    ]


def _reads_values(error: Exception) -> bool:
    return "meta tensor" in str(error)


def _parts(spec: OperatorTuple) -> int:
    """The number of tensors that a call of a function that splits returns; 1 for others."""
    name = kind_of(spec).called_name(spec).removesuffix("_copy")
    split = next(tensor_references(spec.arguments), None)
    if name not in ("unbind", "split", "chunk", "tensor_split") or split is None:
        return 1
    shape = spec.tensors[split].shape
    numbers = [tree for tree in (*spec.arguments[1:], *spec.keywords.values()) if type(tree) is int]
    if name in ("chunk", "tensor_split"):
        return max(map(abs, numbers), default=1)
    longest = max(shape, default=1)
    if name == "unbind":
        dimension = plain(spec.keywords.get("dim", numbers[0] if numbers else 0))
        is_valid = type(dimension) is int and -len(shape) <= dimension < len(shape)
        return shape[dimension] if is_valid else longest
    return math.ceil(longest / max(1, min(map(abs, numbers), default=longest)))


# ---- outputs whose sizes depend on values

_INDEX_BYTES = 8  # of one 64-bit index


def is_sized_by_values(spec: OperatorTuple) -> bool:
    """True if another input of the same shapes can give an output of another size."""
    return _rule(spec) is not None or kind_of(spec).largest_outputs(spec) is not None


def largest_outputs(spec: OperatorTuple) -> int | None:
    """The most bytes that the outputs of a call can take; None if its shapes decide that."""
    rule = _rule(spec)
    return kind_of(spec).largest_outputs(spec) if rule is None else rule(spec)


def _rule(spec: OperatorTuple) -> Callable[[OperatorTuple], int] | None:
    name = kind_of(spec).called_name(spec)
    rule = _RULES.get(name)
    if rule is None or not spec.tensors:
        return None
    if name in _INDEXING:
        is_selected = any(tensor.dtype in ("bool", "uint8") for tensor in spec.tensors[1:])
        return rule if is_selected else None
    deciding = deciding_input(spec)
    if name == "where" and len(spec.arguments) > 1:
        return None
    if name == "one_hot" and deciding is None:
        return None
    if name == "repeat_interleave":
        is_open = deciding is not None and deciding.fixed is None
        return rule if is_open else None
    return rule


def _entries(spec: OperatorTuple) -> int:
    """The elements of the shape to which all tensors of a call expand."""
    rank = max(len(tensor.shape) for tensor in spec.tensors)
    shapes = [(1,) * (rank - len(tensor.shape)) + tensor.shape for tensor in spec.tensors]
    return math.prod(map(max, zip(*shapes, strict=True)))


def _places(spec: OperatorTuple) -> int:
    return _INDEX_BYTES * spec.tensors[0].numel * max(1, len(spec.tensors[0].shape))


def _selected(spec: OperatorTuple) -> int:
    return spec.tensors[0].itemsize_bytes * _entries(spec)


def _distinct(spec: OperatorTuple) -> int:
    tensor = spec.tensors[0]
    return (tensor.itemsize_bytes + 2 * _INDEX_BYTES) * tensor.numel


def _repeated(spec: OperatorTuple) -> int:
    """The rows that the counts ask for; one count is that of all rows."""
    deciding = deciding_input(spec)
    assert deciding is not None
    values = spec.tensors[deciding.index].values
    total = deciding.parts if values is None else values.numbers[0]
    first = spec.tensors[next(tensor_references(spec.arguments))]
    if len(spec.tensors) == 1:
        return _INDEX_BYTES * total
    rows = first.numel if _dimension(spec) is None else first.shape[_dimension(spec)]
    each = total * (rows if deciding.parts == 1 else 1)
    return first.itemsize_bytes * each * (first.numel // max(1, rows)) + _INDEX_BYTES * each


def _dimension(spec: OperatorTuple) -> Any:
    more = spec.arguments[2:3]
    return plain(more[0] if more else spec.keywords.get("dim"))


def _encoded(spec: OperatorTuple) -> int:
    values = spec.tensors[0].values
    return _INDEX_BYTES * spec.tensors[0].numel * (values.numbers[0] if values else 128)


def _bins(spec: OperatorTuple) -> int:
    numbers = [*spec.arguments[1:], spec.keywords.get("minlength")]
    least = max((number for number in numbers if type(number) is int), default=0)
    return _INDEX_BYTES * max(least, spec.tensors[0].numel + 1)


def _combinations(spec: OperatorTuple) -> int:
    """PyTorch selects them from all pairs, triples and so on."""
    numbers = [*spec.arguments[1:2], spec.keywords.get("r")]
    size = next((number for number in numbers if type(number) is int), 2)
    return _INDEX_BYTES * max(0, size) * spec.tensors[0].numel ** max(0, min(size, 64))


_INDEXING = ("__getitem__", "index")
_RULES: dict[str, Callable[[OperatorTuple], int]] = {
    **dict.fromkeys(("nonzero", "argwhere", "where"), _places),
    **dict.fromkeys(("masked_select", *_INDEXING), _selected),
    **dict.fromkeys(("unique", "unique_consecutive", "_unique2", "unique_dim"), _distinct),
    "unique_dim_consecutive": _distinct,
    "repeat_interleave": _repeated,
    "one_hot": _encoded,
    "bincount": _bins,
    "combinations": _combinations,
}


def sizes_in_words(specs: Iterable[OperatorTuple], *, with_values: bool) -> str:
    """Say which calls decide by values how large other calls are, or which calls there are; "" if
    none does.

    Args:
        with_values: the pass ran with values, because it reads them on the host."""
    from farm.subjects.allow_list import RETURNS_TO_HOST

    deciding = [
        spec.short_name
        for spec in specs
        if is_sized_by_values(spec) or (with_values and spec.operator in RETURNS_TO_HOST)
    ]
    names = ", ".join(dict.fromkeys(deciding))
    if not names and not with_values:
        return ""
    how = "The pass was captured with values on the CPU: sizes" if with_values else "Sizes"
    calls = f" ({names})" if names else ""
    return (
        f"{how} or branches depend on values{calls}. They are those of the example input; another "
        "input may have others (--compare-inputs)."
    )
