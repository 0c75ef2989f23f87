"""What calls take longer in the ranks of a split model than alone; no reading of a tuple contains
it.

In a process with an NCCL communicator each kernel starts later, and a collective between kernels
takes longer than in a loop. Whole split models store both (`Details.looped_us`, `Details.added`).
An estimate adds the medians over calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import sqlalchemy
from sqlmodel import Session

from farm.addons.predict.collectives import counted_us, on_several_cards
from farm.store.columns import OPERATOR, VARIANT
from farm.types.collective import COLLECTIVES
from farm.types.details import CallOrder, Details
from farm.types.figure import Figure
from farm.types.format import plural
from farm.types.protocol import Protocol
from farm.types.software import Software
from farm.types.tuple import NeededTuple
from farm.verdict.figures import ReadingView
from farm.verdict.model_readings import most_similar, newest_readings, protocols_like

#: Only shorter operators count, because the differences of longer ones scatter; shorter collectives
#: are mostly latency.
SMALL_US = 20.0
MIDDLE = 0.5  # of operators: 12 of 14 wholes have their median within the middle half of all calls
UNSURE = 0.2  # half-width of what a collective adds, relative to its loop, from which it is ignored
OPERATOR_CALL = "operator"
Effects = Mapping[str, Figure]  # kind of a call -> µs


def kind_of(short_name: str, loop_us: float) -> str:
    name = short_name if short_name in COLLECTIVES else OPERATOR_CALL
    return f"{name} {'below' if loop_us < SMALL_US else 'from'} {SMALL_US:g} µs"


def rank_effects(
    session: Session, card_model: str, protocol: Protocol, software: Software, overlaps: bool
) -> tuple[Effects, str] | None:
    """Return the effects and their origin, the whole split models of a card model with one method
    and one software, that of ``software`` or the most similar one. None if there are none.
    ``overlaps``: omit those of collectives."""
    cards = VARIANT.tensor_parallel * VARIANT.data_parallel * VARIANT.distributed
    query = sqlalchemy.select(VARIANT.id, VARIANT.tensor_parallel, cards.label("cards"))
    split = {row.id: row for row in session.execute(query.where(cards > 1))}
    conditions = card_model, list(protocols_like(session, protocol))
    sets: dict[tuple[int, str], dict[str, CallOrder]] = defaultdict(dict)
    for key, rows in newest_readings(session, list(split), *conditions).items():
        for (variant_id, _), row in rows.items():
            order = Details.from_json(row.details).order
            if order.looped_us:
                sets[key][variant_id] = order
    if not sets:
        return None
    key = most_similar(session, sets, software)
    wholes = sets[key]
    tuples: set[str] = set()
    for details in wholes.values():
        tuples.update(details.looped_us or (), details.added or ())
    rows = newest_readings(session, [*wholes, *tuples], *conditions)[key]
    loops = {subject: ReadingView.of(row) for (subject, _), row in rows.items()}
    query = sqlalchemy.select(OPERATOR.id, OPERATOR.short_name).where(on_several_cards())
    names = {row.id: row.short_name for row in session.execute(query)}
    added_us: dict[str, list[float]] = defaultdict(list)
    for variant_id, whole in wholes.items():
        for call_kind, us in _operators_added_us(whole, loops, names.keys()):
            added_us[call_kind].append(us)
        if split[variant_id].tensor_parallel > 1 and not overlaps:
            for call_kind, us in _collectives_added_us(whole, loops, names):
                added_us[call_kind].append(us)
    if not added_us:
        return None
    effects = {}
    for call_kind in sorted(added_us):
        middle = MIDDLE if call_kind.startswith(OPERATOR_CALL) else 1.0
        effects[call_kind] = _typical(added_us[call_kind], middle)
    numbers = sorted({split[variant_id].cards for variant_id in wholes})
    models = f"{len(wholes)} whole split {plural('model', len(wholes))}"
    return effects, f"medians of {models} on {', '.join(map(str, numbers))} cards"


def _operators_added_us(
    whole: CallOrder, loops: Mapping[str, ReadingView], collectives: Collection[str]
) -> Iterator[tuple[str, float]]:
    """Yield the kind of each short operator and the time that it takes longer in the ranks."""
    for operator_id, looped_us in (whole.looped_us or {}).items():
        loop = loops.get(operator_id)
        if loop is None or operator_id in collectives or loop.details.burst:
            continue
        alone = loop.details.context
        if alone and alone.alone_us < SMALL_US:
            yield kind_of("", alone.alone_us), looped_us - alone.alone_us


def _collectives_added_us(
    whole: CallOrder, loops: Mapping[str, ReadingView], names: Mapping[str, str]
) -> Iterator[tuple[str, float]]:
    """Yield the kind of each collective and the time that it takes longer between kernels."""
    for operator_id, place in (whole.added or {}).items():
        loop = loops.get(operator_id)
        if loop is None or not place.effect_us.value:
            continue
        if place.effect_us.half_width < UNSURE * loop.time_us.value:
            call_kind = kind_of(names[operator_id], loop.time_us.value)
            yield call_kind, place.effect_us.value - counted_us(loop)


def _typical(values: Sequence[float], middle: float) -> Figure:
    """The median, and its distance to the farther end of the middle values (a share); of one value
    all of it.
    """
    low, median, high = (
        float(value) for value in np.quantile(values, (0.5 - middle / 2, 0.5, 0.5 + middle / 2))
    )
    return Figure(median, max(median - low, high - median) if len(values) > 1 else abs(median))


def added_time(
    effects: Effects, needed: Iterable[NeededTuple], loops_us: Mapping[str, float]
) -> Figure:
    """The time that all calls with a known loop add. Half-widths add linearly: the calls share
    their errors.
    """
    calls_of_kinds = [
        (needed_tuple.all_calls, kind_of(needed_tuple.short_name, us))
        for needed_tuple in needed
        if (us := loops_us.get(needed_tuple.operator_id))
    ]
    terms = [
        (calls, effects[call_kind]) for calls, call_kind in calls_of_kinds if call_kind in effects
    ]
    return Figure(
        sum(calls * effect.value for calls, effect in terms),
        sum(calls * effect.half_width for calls, effect in terms),
    )
