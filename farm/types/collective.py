"""Collectives: operators that exchange data between the cards of one host. Their names, sizes and
bandwidth; no torch.

A collective is a tuple of kind `collective` with one tensor, the input of each rank. Its parameters
are the number of cards and, for `all_reduce` and `reduce_scatter`, the reduction. Rank 0 is the
root of a broadcast. In `send_recv` each rank sends to the next one and receives from the previous
one, in a ring. With the parameter `beside`, each card multiplies two square matrices with so many
rows at the same time: such a pair shows how much communication is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from farm.types.tuple import OperatorTuple

PREFIX = "collective."
MOST_CARDS = 1024
REDUCTIONS = ("sum", "avg", "product", "max", "min")


class CollectiveSizes(NamedTuple):
    """``output`` and ``bus`` are multiples of the input's size for n cards: the output of a rank,
    and the traffic by which nccl-tests computes the bus bandwidth. It is comparable with the peak
    of a link for any n."""

    output: Callable[[int], float]
    bus: Callable[[int], float]
    steps: Callable[[int], int] = lambda n: n - 1  # of the ring algorithm, one after the other
    reduces: bool = False
    parts: bool = False  # the input is divided by the number of cards


COLLECTIVES: Mapping[str, CollectiveSizes] = {
    "all_reduce": CollectiveSizes(
        lambda n: 1, lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1), reduces=True
    ),
    "all_gather": CollectiveSizes(lambda n: n, lambda n: n - 1),
    "reduce_scatter": CollectiveSizes(
        lambda n: 1 / n, lambda n: (n - 1) / n, reduces=True, parts=True
    ),
    "all_to_all": CollectiveSizes(lambda n: 1, lambda n: (n - 1) / n, parts=True),
    "broadcast": CollectiveSizes(lambda n: 1, lambda n: 1),
    "send_recv": CollectiveSizes(lambda n: 1, lambda n: 1, lambda n: 1),
}


def problem_of(
    operator: str, parameters: Mapping[str, Any], shapes: Sequence[Sequence[int]]
) -> str:
    """Why this is no collective; "" if it is one."""
    collective = COLLECTIVES.get(operator.removeprefix(PREFIX))
    if collective is None or not operator.startswith(PREFIX):
        return "is not the name of a collective"
    cards = parameters.get("cards")
    needed = {"cards", "reduction"} if collective.reduces else {"cards"}
    if set(parameters) - {"beside"} != needed:
        return "has other parameters than a collective"
    if type(cards) is not int or not 2 <= cards <= MOST_CARDS:
        return f"needs from 2 to {MOST_CARDS} cards"
    beside = parameters.get("beside", 1)
    if type(beside) is not int or not 1 <= beside <= 2**16:
        return "needs a matrix product beside it with 1 to 65536 rows"
    if collective.reduces and parameters["reduction"] not in REDUCTIONS:
        return f"needs one of the reductions {', '.join(REDUCTIONS)}"
    if len(shapes) != 1 or len(shapes[0]) != 1:
        return "needs one tensor with one dimension"
    if collective.parts and shapes[0][0] % cards:
        return "needs an input that can be divided by the number of cards"
    return ""


def bus_bytes(operator: str, cards: int, input_bytes: int) -> float:
    """The traffic of a collective as nccl-tests counts it."""
    return COLLECTIVES[operator.removeprefix(PREFIX)].bus(cards) * input_bytes


def output_elements(spec: OperatorTuple) -> int:
    """The number of elements of a collective's output on each rank."""
    multiple = COLLECTIVES[spec.short_name].output(spec.parameters["cards"])
    return round(multiple * spec.tensors[0].numel)
