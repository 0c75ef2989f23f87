"""A trial of a call on meta, before it runs on a card.

The scalars of a tuple decide how large its outputs are and how much it computes: ``torch.full`` of
a size, a number of classes, an exponent. On meta the call computes nothing and allocates nothing,
so its outputs and FLOPs are known before any memory is used."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from farm.errors import FarmError, TupleRejected, Unmeasurable, told
from farm.operators.cost import new_bytes, run_on_meta
from farm.operators.rebuild import rebuild
from farm.operators.value_sizes import largest_outputs
from farm.subjects.encoding import storage_key, tensors_in
from farm.subjects.label import label_of
from farm.subjects.registry import kind_of
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
