"""The cost of collectives without a reading, from readings of the same collective with other sizes
or on fewer cards.

Between two measured sizes, time and energy are linear in the size: a latency and a bandwidth. Below
the smallest size they are constant, above the largest they are proportional to the size. The
interval is the error of this rule at the neighbouring sizes if each is left out; outside the
measured sizes it is twice as wide.

For another number of cards, the rule of the ring algorithm is used: the time of the smallest
measured size grows with the number of steps, the rest with the bytes on the wire. No reading checks
this rule, so the interval is wide."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy
from sqlalchemy import ColumnElement
from sqlmodel import Session

from farm.addons.predict.stored_predictor import CallPrediction, PredictedValue
from farm.errors import NoReadings
from farm.store.columns import OPERATOR, READING
from farm.store.reuse import sound_readings
from farm.subjects.registry import kinds_on_several_cards
from farm.types.collective import COLLECTIVES
from farm.types.figure import Figure, PassCost, value_of
from farm.types.format import plural
from farm.types.software import Software
from farm.types.tuple import DTYPES, NeededTuple
from farm.verdict.figures import VIEW_COLUMNS, ReadingView
from farm.verdict.model_readings import most_similar

# factor between the ends of the interval and the value for another number of cards
EXTRAPOLATED = 2.0


UNREAD = PassCost(Figure(0.0))  # the cost of a size without a reading


@dataclass(frozen=True)
class Size:
    """One collective, with the reading of one size: time among operators, energy of all cards."""

    name: str
    cards: int
    dtype: str
    input_bytes: int
    cost: PassCost = UNREAD

    @classmethod
    def of(cls, spec: Mapping[str, Any], cost: PassCost = UNREAD) -> Size:
        """``spec``: the description of a tuple."""
        (tensor,) = spec["tensors"]
        size = math.prod(tensor["shape"]) * DTYPES[tensor["dtype"]][0]
        name = spec["operator"].rpartition(".")[2]
        return cls(name, spec["parameters"]["cards"], tensor["dtype"], size, cost)


def on_several_cards() -> ColumnElement[bool]:
    """SQL condition: the tuple is of a kind whose calls several cards run together."""
    return OPERATOR.kind.in_(kinds_on_several_cards())  # type: ignore[no-any-return]


def measured_sizes(
    session: Session,
    names: Collection[str],
    card_model: str,
    protocol_ids: Collection[str],
    software: Software,
) -> list[Size]:
    """Return the newest readings of these collectives, all with one method and one software (see
    `most_similar`).
    """
    query = sqlalchemy.select(OPERATOR.id, OPERATOR.spec).where(OPERATOR.short_name.in_(names))
    specs = {row.id: row.spec for row in session.execute(query.where(on_several_cards()))}
    columns = (*VIEW_COLUMNS, "subject_id", "method", "software_id")
    chosen = READING.subject_id.in_(list(specs)), READING.protocol_id.in_(protocol_ids)
    sets: dict[tuple[int, str], dict[str, Any]] = defaultdict(dict)
    for row in sound_readings(session, card_model, columns, *chosen):
        if "beside" not in specs[row.subject_id]["parameters"]:
            sets[row.method, row.software_id][row.subject_id] = row

    if not sets:
        return []
    sizes = []
    for operator_id, row in sets[most_similar(session, sets, software)].items():
        view = ReadingView.of(row)
        counted = counted_us(view)
        time_us = Figure(counted, counted * view.time_us.relative)
        sizes.append(Size.of(specs[operator_id], PassCost(time_us, view.energy_mj)))
    return sizes


def counted_us(reading: ReadingView) -> float:
    """The time that one call adds to a sum: that of its loop, and the effect of unrelated
    operators.
    """
    context = reading.details.context
    return reading.time_us.value + (context.effect_us.value if context else 0.0)


def predicted(
    wanted: Sequence[NeededTuple], sizes: Sequence[Size], card_model: str
) -> tuple[dict[str, CallPrediction], list[str]]:
    """Predict collectives without a reading. Return tuple id -> prediction, and notes. Raises
    `NoReadings` if a collective has readings of fewer than two sizes."""
    predictions: dict[str, CallPrediction] = {}
    origins = set[tuple[int, int]]()  # numbers of cards: measured, wanted
    for needed in wanted:
        asked = Size.of(needed.spec)
        alike: dict[tuple[int, bool], list[Size]] = defaultdict(list)
        for size in sizes:
            if size.name == asked.name:
                alike[size.cards, True].append(size)
                alike[size.cards, False].extend([size] * (size.dtype == asked.dtype))
        usable = [
            key for key, sizes in alike.items() if len({size.input_bytes for size in sizes}) > 1
        ]
        if not usable:
            raise NoReadings(
                f"{asked.name} has no readings of several sizes on {card_model}, so {needed.label} "
                "cannot be estimated.",
                "Measure a sweep on cards of one host: "
                f"{{sweep: {asked.name}, grid: {{dtype: {asked.dtype}, "
                "elements: [4096, 2097152, 134217728]}} in a file for `farm run -f`.",
            )
        # The nearest number of cards; readings of the same dtype, if there are any.
        cards, any_dtype = min(
            usable, key=lambda key: (abs(math.log(key[0] / asked.cards)), key[0], key[1])
        )
        predictions[needed.operator_id] = _prediction(alike[cards, any_dtype], asked)
        origins.add((cards, asked.cards))
    notes = []
    for origin in sorted(origins):
        notes += _notes(*origin, number=len(predictions))
    return predictions, notes


def _notes(measured: int, asked: int, *, number: int) -> list[str]:
    if measured == asked:
        return [
            f"{number} {plural('collective', number)} without a reading: from readings of other "
            "sizes."
        ]
    rule = (
        "the latency grows with the steps of the ring algorithm, the rest with the bytes on the "
        "wire"
    )
    shares = "(an all-reduce of K cards: 2 (K - 1) steps, 2 (K - 1) / K of its input)"
    return [
        f"Collectives on {asked} cards are extrapolated from readings on {measured} cards: {rule} "
        f"{shares}. No reading "
        f"checks this rule: the interval is a factor of {EXTRAPOLATED:g} in both directions."
    ]


def _prediction(sizes: Sequence[Size], asked: Size) -> CallPrediction:
    """Predict a collective from readings of several sizes, all on one number of cards."""
    in_order = sorted(sizes, key=lambda size: size.input_bytes)
    measured = list({size.input_bytes: size for size in in_order}.values())
    smallest, largest = measured[0], measured[-1]

    time_us, error = _at(
        measured, [size.cost.time_us.value for size in measured], asked.input_bytes
    )
    energy_mj, energy_error = None, 0.0
    energies_mj = [value_of(size.cost.energy_mj) or 0.0 for size in measured]
    if all(energies_mj):
        energy_mj, energy_error = _at(measured, energies_mj, asked.input_bytes)

    wider, cards = 0.0, smallest.cards
    if cards != asked.cards:
        wider = math.log(EXTRAPOLATED)
        collective = COLLECTIVES[asked.name]
        latency_us = min(smallest.cost.time_us.value, time_us)
        wire_us = time_us - latency_us
        extrapolated_us = latency_us * collective.steps(asked.cards) / collective.steps(cards)
        extrapolated_us += wire_us * collective.bus(asked.cards) / collective.bus(cards)
        energy_mj = energy_mj and energy_mj * extrapolated_us / time_us * asked.cards / cards
        time_us = extrapolated_us

    far = not smallest.input_bytes <= asked.input_bytes <= largest.input_bytes
    time = PredictedValue.around(time_us, error * (1 + far) + wider)
    energy = None
    if energy_mj:
        energy = PredictedValue.around(energy_mj, energy_error * (1 + far) + wider)
    return CallPrediction(time, energy, far=far)


def _at(measured: Sequence[Size], values: Sequence[float], size: int) -> tuple[float, float]:
    """Return the value at a size, and the half-width of the interval of its logarithm."""
    sizes = [entry.input_bytes for entry in measured]
    value = float(np.interp(size, sizes, values)) * max(1.0, size / sizes[-1])
    errors = [max(entry.cost.time_us.relative for entry in measured)]
    if len(sizes) == 2:
        errors.append(abs(math.log(values[1] / values[0])))
    elif size not in sizes:
        for position in _neighbours(sizes, size):
            expected = _without(sizes, values, position)
            errors.append(abs(math.log(expected / values[position])))
    return value, max(errors)


def _neighbours(sizes: Sequence[int], size: int) -> set[int]:
    """The positions of the sizes next to a size; not the first and the last position."""
    after = bisect.bisect_left(sizes, size)
    return {max(1, after - 1), min(after, len(sizes) - 2)}


def _without(sizes: Sequence[int], values: Sequence[float], position: int) -> float:
    """The value at a measured size that the rule gives if that size is left out."""
    other_sizes = [*sizes[:position], *sizes[position + 1 :]]
    other_values = [*values[:position], *values[position + 1 :]]
    return float(np.interp(sizes[position], other_sizes, other_values))
