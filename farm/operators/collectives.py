"""Calls collectives (`farm.types.collective`) in the process group of a rank, as DTensor and FSDP do: the collective
runs on the stream of the communication library, and the present stream waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from farm.types.collective import COLLECTIVES, PREFIX
from farm.types.tuple import OperatorTuple, TensorSpec

_REDUCTIONS = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "max": "MAX", "min": "MIN"}


def collective_tuple(name: str, elements: int, dtype: str, cards: int, reduction: str = "sum") -> OperatorTuple:
    """The tuple of a collective with ``elements`` in the input of each rank."""
    parameters: dict[str, Any] = {"cards": cards}
    if COLLECTIVES[name].reduces:
        parameters["reduction"] = reduction
    tensors = (TensorSpec("activation", "", (elements,), dtype),)
    return OperatorTuple(f"{PREFIX}{name}", "collective", parameters, ({"tensor": 0},), {}, tensors)


def output_elements(spec: OperatorTuple) -> int:
    """The number of elements in the output of a rank."""
    return round(COLLECTIVES[spec.short_name].output(spec.parameters["cards"]) * spec.tensors[0].numel)


def written(spec: OperatorTuple) -> frozenset[int]:
    """Indices of the tensors that a collective changes at each call. The others keep their values."""
    changes = spec.short_name == "all_reduce" and spec.parameters["reduction"] in ("sum", "product")
    return frozenset({0} if changes else ())


def call_of(spec: OperatorTuple) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that runs a collective on the input of this rank and returns its output."""
    cards, name, elements = spec.parameters["cards"], spec.short_name, output_elements(spec)
    reduction = getattr(dist.ReduceOp, _REDUCTIONS[spec.parameters.get("reduction", "sum")])

    def run(sent: torch.Tensor) -> torch.Tensor:
        out = sent if name in ("all_reduce", "broadcast") else sent.new_empty(elements)
        works: list[Any]
        if name == "all_reduce":
            works = [dist.all_reduce(sent, reduction, async_op=True)]
        elif name == "broadcast":
            works = [dist.broadcast(sent, 0, async_op=True)]
        elif name == "all_gather":
            works = [dist.all_gather_into_tensor(out, sent, async_op=True)]
        elif name == "reduce_scatter":
            works = [dist.reduce_scatter_tensor(out, sent, reduction, async_op=True)]
        elif name == "all_to_all":
            works = [dist.all_to_all_single(out, sent, async_op=True)]
        else:
            rank = dist.get_rank()
            peers = (dist.isend, sent, (rank + 1) % cards), (dist.irecv, out, (rank - 1) % cards)
            works = dist.batch_isend_irecv([dist.P2POp(*peer) for peer in peers])
        for work in works:
            work.wait()
        return out

    return run
