"""What an estimate says about the routing of a mixture of experts, which only a run of the model
shows.

Without a run, all experts have equal rows. The kernels of GPUs compute tiles of `TILE` rows. So the
number of tiles says how much more work the same rows are if a router distributes them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from farm.errors import TupleRejected
from farm.subjects.parsing import parse
from farm.types.deciding import DecidingInput, deciding_input
from farm.types.distribution import equal_lengths
from farm.types.format import percent, plural
from farm.types.tuple import NeededTuple, OperatorTuple

TILE = 128  # rows that the products of experts on Hopper compute together
DRAWS = 40  # routings over which the effect is averaged


def routing_note(needed: Sequence[NeededTuple], time_us: Mapping[str, float]) -> str:
    """Say which routing an estimate assumes, and what another one changes; "" if no operator
    depends on it.

    Args:
        time_us: tuple id -> time of all its calls in the estimate.
    """
    unknown: dict[str, DecidingInput] = {}
    recorded = 0
    for entry in needed:
        spec = _parsed(entry)
        deciding = deciding_input(spec) if spec else None
        if spec is None or deciding is None or not deciding.is_needed:
            continue
        if spec.tensors[deciding.index].values is None:
            unknown[entry.operator_id] = deciding
        else:
            recorded += 1

    if unknown:
        return _assumed(unknown, time_us)
    if recorded:
        return (
            f"The rows of each group in {recorded} {plural('tuple', recorded)} are those of a run "
            "on a card."
        )
    return ""


def _parsed(one: NeededTuple) -> OperatorTuple | None:
    try:
        return parse(one.spec)
    except TupleRejected:
        return None


def _assumed(unknown: Mapping[str, DecidingInput], time_us: Mapping[str, float]) -> str:
    total_us = sum(time_us.values()) or 1.0
    share = sum(time_us.get(id_, 0.0) for id_ in unknown) / total_us
    effects = []
    for router in (_equal_scores, _normal_scores):
        more_us = sum(
            time_us.get(id_, 0.0) * (_work(deciding, router) - 1)
            for id_, deciding in unknown.items()
        )
        effects.append(more_us / total_us)

    number = len(unknown)
    even, uneven = (f"{effect * 100:+z.0f} %" for effect in effects)
    return (
        f"The work of {number} {plural('tuple', number)} ({percent(share)} of the time) depends "
        "on the rows of each group, such as those of each expert. No card has shown them yet, so "
        "the estimate assumes equal rows. A random router changes the time of the model by "
        f"{even} (if it prefers no expert) to {uneven} (normal scores)."
    )


def _work(
    given: DecidingInput, router: Callable[[int, np.random.Generator], np.ndarray[Any, Any]]
) -> float:
    """The tiles of a random routing, relative to those of equal rows."""
    generator = np.random.default_rng(0)
    tiles = []
    for _ in range(DRAWS):
        rows = generator.multinomial(given.bound, router(given.parts, generator))
        tiles.append(float(np.ceil(rows / TILE).sum()))
    equal = sum(-(-length // TILE) for length in equal_lengths(given.parts, given.bound))
    return statistics.mean(tiles) / equal


def _equal_scores(experts: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    return np.full(experts, 1 / experts)


def _normal_scores(experts: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    weights = np.exp(generator.standard_normal(experts))
    shares: np.ndarray[Any, Any] = weights / weights.sum()
    return shares
