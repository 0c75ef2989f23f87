"""Collectives: operators that exchange data between the cards of one host. Their names, sizes and bandwidth; no torch.

A collective is a tuple of kind `collective` with one tensor, the input of each rank. Its parameters are the number of
cards and, for `all_reduce` and `reduce_scatter`, the reduction. Rank 0 is the root of a broadcast. In `send_recv` each
rank sends to the next one and receives from the previous one, in a ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from farm.types.tuple import DTYPES, OperatorTuple, TensorSpec

PREFIX = "collective."
REDUCTIONS = ("sum", "avg", "product", "max", "min")


class Collective(NamedTuple):
    """``output`` and ``bus`` are multiples of the input's size for n cards: the output of a rank, and the traffic by
    which nccl-tests computes the bus bandwidth. It is comparable with the peak of a link for any n."""

    output: Callable[[int], float]
    bus: Callable[[int], float]
    reduces: bool = False
    parts: bool = False  # the input is divided by the number of cards


COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": Collective(lambda n: 1, lambda n: 2 * (n - 1) / n, reduces=True),
    "all_gather": Collective(lambda n: n, lambda n: n - 1),
    "reduce_scatter": Collective(lambda n: 1 / n, lambda n: (n - 1) / n, reduces=True, parts=True),
    "all_to_all": Collective(lambda n: 1, lambda n: (n - 1) / n, parts=True),
    "broadcast": Collective(lambda n: 1, lambda n: 1),
    "send_recv": Collective(lambda n: 1, lambda n: 1),
}


def collective_tuple(name: str, elements: int, dtype: str, cards: int, reduction: str = "sum") -> OperatorTuple:
    """The tuple of a collective with ``elements`` in the input of each rank."""
    parameters: dict[str, Any] = {"cards": cards}
    if COLLECTIVES[name].reduces:
        parameters["reduction"] = reduction
    tensors = (TensorSpec("activation", "", (elements,), dtype),)
    return OperatorTuple(f"{PREFIX}{name}", "collective", parameters, ({"tensor": 0},), {}, tensors)


def problem_of(operator: str, parameters: Mapping[str, Any], shapes: list[tuple[int, ...]]) -> str:
    """Why this is no collective; "" if it is one."""
    about = COLLECTIVES.get(operator.removeprefix(PREFIX)) if operator.startswith(PREFIX) else None
    if about is None:
        return "is not the name of a collective"
    cards = parameters.get("cards")
    if set(parameters) != {"cards"} | ({"reduction"} if about.reduces else set()):
        return "has other parameters than a collective"
    if type(cards) is not int or not 2 <= cards <= 1024:
        return "needs from 2 to 1024 cards"
    if about.reduces and parameters["reduction"] not in REDUCTIONS:
        return f"needs one of the reductions {', '.join(REDUCTIONS)}"
    if len(shapes) != 1 or len(shapes[0]) != 1:
        return "needs one tensor with one dimension"
    return "needs an input that can be divided by the number of cards" if about.parts and shapes[0][0] % cards else ""


def output_elements(spec: OperatorTuple) -> int:
    """The elements of the output of a rank."""
    return round(COLLECTIVES[spec.short_name].output(spec.parameters["cards"]) * spec.tensors[0].numel)


def bus_bytes(spec: Mapping[str, Any]) -> float | None:
    """The traffic of a collective as nccl-tests counts it, from the JSON of its tuple; None for other operators."""
    if spec.get("kind") != "collective":
        return None
    (tensor,) = spec["tensors"]
    size_bytes = math.prod(tensor["shape"]) * DTYPES[tensor["dtype"]][0]
    return COLLECTIVES[spec["operator"].removeprefix(PREFIX)].bus(spec["parameters"]["cards"]) * size_bytes
