"""What a call of a captured step computes and moves, told on meta tensors: nothing is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farm.operators.cost import Cost, flop_counter
from farm.operators.encoding import decode, dtype_of, tensors_in, written_arguments
from farm.training.recorded import StepCapture
from farm.words.tuple import OperatorTuple

META = torch.device("meta")
_READS_ROWS = ("aten.embedding.default", "aten.index.Tensor", "aten.gather.default", "aten.index_select.default")


def costs_of(capture: StepCapture) -> Mapping[str, Cost]:
    """The cost of each tuple of a step, by its id: FLOPs of products, convolutions and attention, and the bytes read and
    written at least once. What cannot run on meta has no FLOPs, and moves what it is given.
    """
    with torch.no_grad(), flop_counter() as counter:
        return {key: _cost(spec, counter) for key, spec in capture.tuples.items()}


def _cost(spec: OperatorTuple, counter: Any) -> Cost:
    tensors = [
        torch.empty_strided(one.shape, one.strides, dtype=dtype_of(one.dtype), device=META) for one in spec.tensors
    ]
    arguments = [decode(value, tensors, META) for value in spec.arguments]
    keywords = {name: decode(value, tensors, META) for name, value in spec.keywords.items()}
    function: Any = torch.ops
    for name in spec.operator.split("."):
        function = getattr(function, name)
    before = counter.get_total_flops()
    try:
        out = list(tensors_in(function(*arguments, **keywords)))
    except Exception:  # whatever an operator without an implementation on meta raises
        out = []
    sizes = {id(tensor): one.distinct_bytes for tensor, one in zip(tensors, spec.tensors, strict=True)}
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    made = sum(tensor.nbytes for tensor in out if tensor.untyped_storage()._cdata not in given)
    written = sum(
        sizes.get(id(tensor), 0)
        for position, name in written_arguments(function)
        for tensor in tensors_in(arguments[position] if position < len(arguments) else keywords.get(name))
    )
    read = sum(sizes.values())
    if spec.operator in _READS_ROWS and tensors:
        read = min(read, read - sizes[id(tensors[0])] + made)
    return Cost(counter.get_total_flops() - before, read + made + written)
