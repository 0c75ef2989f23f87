"""Computes the verdict: the sum of the tuples' readings compared with the whole model. Needs no
database and no card.

    sum       = Σ count × reading              over the measured tuples of a model
    gap       = sum / whole - 1                signed; a sum may be too large or too small
    accuracy  = 1 - |sum - whole| / whole      for time, and for energy if every reading has it
    coverage  = Σ count × estimate (measured) / Σ count × estimate (all)

A verdict passes only if accuracy *and* coverage reach the target, so that errors cannot cancel
while half of the model is missing. Unmeasured tuples are listed with a reason. If the energy of one
tuple is missing, the energy of the sum is "not available", not zero.

**Intervals** (95 %): the n calls of a tuple share its error, so its half-width counts n times.
Errors of different tuples are independent and add in quadrature. Drift, differences between cards,
and the effect of neighbours affect all tuples alike: each of these errors adds linearly over the
tuples. The sources are independent of each other, so their totals add in quadrature. A gap also
includes how much the gaps of one model differ between jobs (`BETWEEN_JOBS`), or, with a replay in
order, how much the time depends on the addresses of the data."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from farm.benchmark.intervals import paired_half_width
from farm.types.collective import COLLECTIVES
from farm.types.format import TIME, count_of, percent, quantity
from farm.types.measured_constants import MEASURED
from farm.types.reading import Burst, Details, Place, Verification
from farm.verdict.figures import (
    NOT_IN_SCOPE,
    CanaryReading,
    Chosen,
    Figure,
    Part,
    ReadingView,
    Whole,
    figure_json,
    total_of,
)
from farm.verdict.judging import Circumstances, judge
from farm.verdict.verdict import (
    Adjustment,
    Comparison,
    TupleRow,
    Unmeasured,
    Verdict,
    audit_kernels,
    sums_of,
)

#: Half-width of a gap for what differs between jobs and no job can see itself.
BETWEEN_JOBS = {
    "time": MEASURED["between_jobs_time"].value,
    "energy": MEASURED["between_jobs_energy"].value,
    "power": MEASURED["between_jobs_power"].value,
}

Measured = tuple[Part, ReadingView, Chosen]  # a part with a reading
Choice = tuple[Part, Chosen | None]  # a part, and the figures of its reading that the sum uses


def choices_of(parts: Iterable[Part], wholes: Iterable[Whole], launch: str) -> list[Choice]:
    """Choose the figures of each part for the sum. Only wholes with this `launch` are
    considered.
    """
    readings = [whole.reading for whole in wholes if whole.reading and whole.launch in ("", launch)]

    def chosen(waiting: Figure) -> list[Choice]:
        return [
            (one, choose(one.reading, readings, one.operator_id, waiting) if one.reading else None)
            for one in parts
        ]

    parts = tuple(parts)
    found = chosen(WAITING)
    waiting = waiting_share(found, readings)
    return found if waiting == WAITING else chosen(waiting)


def waiting_share(choices: Iterable[Choice], wholes: Sequence[ReadingView]) -> Figure:
    """Return where the power of a waiting kernel lies: 0 is the card without work, 1 the operator's
    own power.

    It follows from the energy of all calls, replayed in order from the tuples (`Details.in_order`):
    minus the energy of the loops, it is the energy of the waits. The model's own energy has no
    influence. `WAITING` if the replay is missing or too imprecise."""
    replay, figures = replayed(wholes), [(part.count, chosen) for part, chosen in choices]
    known = [
        (count, chosen, chosen.energy) for count, chosen in figures if chosen and chosen.energy
    ]
    swing_mj = math.fsum(count * chosen.waiting_mj for count, chosen, _ in known)
    if replay is None or len(known) < len(figures) or not swing_mj:
        return WAITING
    scatter_mj = math.hypot(
        replay["energy"].half_width, *(count * energy.half_width for count, _, energy in known)
    )
    shared_mj = math.fsum(count * chosen.loop_unsure_mj for count, chosen, _ in known)
    half_width = max(LEAST_WAITING, math.hypot(scatter_mj, shared_mj) / abs(swing_mj))
    missing_mj = replay["energy"].value - math.fsum(
        count * energy.value for count, _, energy in known
    )
    found = WAITING.value + missing_mj / swing_mj
    if (
        wholes[0].details.ranks
    ):  # no upper limit: the share was 2.4 to 2.7 in four decodings on two H100s and two H200s
        return Figure(max(0.0, found), half_width + max(0.0, -found))
    if half_width >= WAITING.half_width:
        return WAITING
    share = min(1.0, max(0.0, found))
    return Figure(share, half_width + abs(found - share))


def replayed(wholes: Sequence[ReadingView]) -> dict[str, Figure] | None:
    """Return the time in us and the energy in mJ of all calls, replayed in order from the tuples;
    the energy at the temperature of the whole. None if not exactly one whole has it."""
    if len(wholes) != 1 or (found := wholes[0].details.in_order) is None:
        return None
    own_c, whole_c = found.temperature_c, wholes[0].temperature_c
    colder_c = whole_c - own_c if own_c is not None and whole_c is not None else 0.0
    unsure_mj = POWER_PER_C.half_width * abs(colder_c) * found.energy_mj
    energy = Figure(
        found.energy_mj * (1 + POWER_PER_C.value * colder_c),
        math.hypot(found.energy_half_width_mj, unsure_mj),
    )
    return {"time": Figure(found.time_us, found.time_half_width_us), "energy": energy}


def aggregate(
    parts: Sequence[Part],
    wholes: Sequence[Whole] = (),
    canaries: Sequence[CanaryReading] = (),
    *,
    target: float,
    launch: str,
    requested: Sequence[str] = (),
    seen: Verification | None = None,
) -> Verdict:
    """Compare the sum of the parts with the whole.

    Args:
        parts: every tuple of the model, measured or not.
        wholes: the whole model on each card of the job; each is weighted by the card's share of the
            sum. Wholes with the other launch are used only for the launch gap.
        canaries: readings of reference tuples on the cards.
        target: the least accuracy and coverage of a pass, as a fraction.
        launch: ``graph`` or ``eager``; the two are never mixed.
        requested: the operator types requested by name. If they are too few for the target, the
            outcome is "none".
        seen: the verification of the whole on a card; its kernels are compared with the kernels of
            the tuples.
    """
    readings = [whole.reading for whole in wholes if whole.reading and whole.launch in ("", launch)]
    choices = choices_of(parts, wholes, launch)
    measured = [(part, part.reading, chosen) for part, chosen in choices if part.reading and chosen]
    every = [reading for _, reading, _ in measured] + readings
    systematic, note = _systematic(every, canaries)
    with_context = any(reading.details.context is not None for _, reading, _ in measured)
    replay = (replayed(readings) if len(measured) == len(parts) else None) or {}
    compared = _comparisons(measured, readings, systematic, replay, with_context=with_context)
    found = Verdict(
        outcome="none",
        reasons=(),
        target=target,
        launch=launch,
        coverage=coverage_of(parts),
        **compared,
        systematic_time=systematic["time"],
        systematic_energy=systematic["energy"],
        systematic_note=note,
        parts=len(parts),
        measured=len(measured),
        wholes=tuple(wholes),
        unmeasured=_unmeasured(parts),
        adjustments=_adjustments(measured),
        flags=dict(Counter(flag for reading in every for flag in reading.flags).most_common()),
        launch_gap_us=launch_gap_us(wholes),
        kernels=audit_kernels(seen, parts) if seen and seen.kernels else None,
        context_time_us=_total(measured, "context_us") if with_context else None,
        context_energy_mj=_total(measured, "context_mj")
        if with_context and compared["energy"]
        else None,
        weights_in_cache=weights_in_cache(readings) if with_context else None,
        temperature_energy_mj=_total(measured, "warmth_mj") or None,
        host_steps=next(filter(None, map(_host_steps, readings)), ""),
        collectives_alone_us=_collectives_alone_us(measured, readings),
        tuples=tuple_rows(choices),
    )
    return judge(found, _circumstances(parts, measured, requested))


def _circumstances(
    parts: Iterable[Part], measured: Sequence[Measured], requested: Sequence[str]
) -> Circumstances:
    alone = sum(reading.details.context is None for _, reading, _ in measured)
    return Circumstances(
        without_energy=sum(chosen.energy is None for *_, chosen in measured),
        looped_alone=alone if alone < len(measured) else 0,
        requested=requested,
        requested_share=_share(parts, lambda part: part.in_scope),
    )


def _unseen(
    wholes: Sequence[ReadingView], with_context: bool, with_replay: bool
) -> tuple[Mapping[str, float], bool]:
    """Return the half-widths of gaps for what no reading shows, relative to the whole; and True if
    all of the rest is known from a replay in order. Then only the addresses of the data remain,
    whose effect was measured with it."""
    layouts_us = wholes[0].details.layouts_half_width_us if with_replay else None
    if layouts_us is not None:
        return dict.fromkeys(BETWEEN_JOBS, layouts_us / wholes[0].time_us), True
    # The differences between jobs were measured for tuples that are timed among other operators.
    return (BETWEEN_JOBS if with_context else dict.fromkeys(BETWEEN_JOBS, 0.0)), False


def added(a: Verdict, b: Verdict, most: int) -> Verdict:
    """Add the verdicts of two parts of a large sweep. Of each list the heaviest entries remain, at
    most ``most``.
    """
    sums = a.types or sums_of(a.tuples), sums_of(b.tuples)
    weights = [math.fsum(one["estimated_us"] for one in of_part.values()) for of_part in sums]
    parts, total = [*zip((a, b), weights, strict=True)], math.fsum(weights) or 1.0
    missing = [
        replace(entry, share=entry.share * weight / total)
        for one, weight in parts
        for entry in one.unmeasured
    ]
    both: dict[str, Any] = {
        name: _both(name, a, b) for name in ("time", "energy", "energy_above_idle")
    }
    return replace(
        a if a.measured else b,
        **both,
        power=both["energy"] and Comparison(_power(both["energy"].total, both["time"].total)),
        coverage=math.fsum((one.coverage or 0.0) * weight for one, weight in parts) / total,
        systematic_note="The intervals of a large sweep do not include differences of the canary.",
        **{name: getattr(a, name) + getattr(b, name) for name in ("parts", "measured")},
        unmeasured=tuple(sorted(missing, key=lambda entry: (-entry.share, entry.label))[:most]),
        adjustments=tuple(
            sorted(a.adjustments + b.adjustments, key=lambda entry: -abs(entry.effect_time_us))[
                :most
            ]
        ),
        flags=dict((Counter(a.flags) + Counter(b.flags)).most_common()),
        context_time_us=None,
        context_energy_mj=None,
        tuples=tuple(sorted(a.tuples + b.tuples, key=lambda row: -row.total_us)[:most]),
        types=sums_of(b.tuples, sums[0]),
    )


def _both(name: str, a: Verdict, b: Verdict) -> Comparison | None:
    """Add the sums of two parts: errors of single tuples in quadrature, errors that tuples share
    linearly.
    """
    found: list[Comparison] = [getattr(one, name) for one in (a, b) if one.measured] or [
        getattr(a, name)
    ]
    if None in found:
        return None
    common = math.fsum(one.common for one in found)
    own = (math.sqrt(max(0.0, one.total.half_width**2 - one.common**2)) for one in found)
    return Comparison(
        Figure(math.fsum(one.total.value for one in found), math.hypot(common, *own)), common=common
    )


def _total(measured: Sequence[Measured], name: str) -> float:
    """Return the sum over all calls of the field `name` of the chosen figures."""
    return math.fsum(getattr(chosen, name) * part.count for part, _, chosen in measured)


def _comparisons(
    measured: Sequence[Measured],
    wholes: Sequence[ReadingView],
    systematic: Mapping[str, float],
    replay: Mapping[str, Figure],
    *,
    with_context: bool,
) -> dict[str, Any]:
    """Compare the sums over all calls with the means of the wholes: time, energy, energy above
    idle, power.

    A replay of all calls in order has neither the scatter of the tuples nor the errors of their
    neighbours. So with a replay, the half-width of a sum is its difference from the replay, plus
    that of a replay at any addresses. If all of the rest is known (`_unseen`), the difference adds
    linearly to all other errors of a gap; else in quadrature, because the differences between jobs
    contain it."""
    between, linear = _unseen(wholes, with_context, bool(replay))
    weights = _weights(
        [(reading, part.count * chosen.time.value) for part, reading, chosen in measured], wholes
    )

    def compared(
        name: str,
        terms: Iterable[Figure | None],
        of_wholes: Sequence[Figure | None],
        common: float,
        of_replay: Figure | None = None,
    ) -> Comparison | None:
        total = total_of(
            (figure, part.count) for (part, *_), figure in zip(measured, terms, strict=True)
        )
        if total is None:
            return None
        own, off = math.hypot(total.half_width, common), 0.0
        others = between[name] if of_replay or not linear else BETWEEN_JOBS[name]
        if (
            of_replay and linear
        ):  # the addresses of the replay's data matter as much as those of the whole's
            off, others = abs(total.value - of_replay.value), others / math.sqrt(2)
            own = math.hypot(of_replay.half_width, others * total.value)
        elif of_replay:
            own = of_replay.half_width + abs(total.value - of_replay.value)
        half_width = off + math.hypot(own, systematic[name] * total.value)
        total = Figure(total.value, half_width)
        return Comparison(total, _mean(of_wholes, weights), min(half_width, common), others, off)

    chosen = [chosen for *_, chosen in measured]
    common_us, common_mj = _total(measured, "unsure_us"), _total(measured, "unsure_mj")
    times = [whole.time for whole in wholes]
    time = compared("time", [one.time for one in chosen], times, common_us, replay.get("time"))
    if time is not None:
        time = replace(time, paired=_timed_in_turn(measured, wholes))
    energy = above_idle = power = None
    if measured and all(one.energy for one in chosen):
        energies = [whole.energy for whole in wholes]
        energy = compared(
            "energy", [one.energy for one in chosen], energies, common_mj, replay.get("energy")
        )
        terms = (_above_idle(one.energy, one.time, reading) for _, reading, one in measured)
        of_wholes = [_above_idle(whole.energy, whole.time, whole) for whole in wholes]
        above_idle = compared("energy", terms, of_wholes, common_mj)
    if energy and time:
        of_whole = _power(energy.whole, time.whole) if energy.whole and time.whole else None
        # With a replay, the sums of time and energy already contain the effect of the addresses.
        power = Comparison(
            _power(energy.total, time.total), of_whole, between=0.0 if linear else between["power"]
        )
    found = {"time": time, "energy": energy, "energy_above_idle": above_idle, "power": power}
    return {**found, "between_jobs_time": between["time"], "between_jobs_energy": between["energy"]}


def _timed_in_turn(measured: Sequence[Measured], wholes: Sequence[ReadingView]) -> float | None:
    """Return the half-width of the time gap if all readings were timed in the same turns of a CPU,
    else None. The speed of a CPU drifts, but in each turn it is about the same for the tuples and
    the whole."""
    details = [reading.details for reading in (*(reading for _, reading, _ in measured), *wholes)]
    turns = {(one.turns_group, len(one.without_turn_us or ())) for one in details} or {(None, 0)}
    _, number = turns.pop()
    if (
        turns or len(wholes) != 1 or not measured or number < 3
    ):  # readings of another group, or no turns
        return None
    terms = [(part.count, reading.details.without_turn_us or ()) for part, reading, _ in measured]
    return paired_half_width(terms, wholes[0].details.without_turn_us or ())


def tuple_rows(choices: Iterable[Choice]) -> tuple[TupleRow, ...]:
    """Return the tuples with the figures that the sum uses, the most expensive first."""
    rows = []
    for part, chosen in choices:
        figures: dict[str, Any] = figure_json("time", "us", chosen.time if chosen else None)
        figures |= figure_json("energy", "mj", chosen.energy if chosen else None)
        row = TupleRow(
            **{name: getattr(part, name) for name in _OF_PART.split()},
            calls=part.count,
            **figures,
            used=chosen.used if chosen else "",
            reading_id=part.reading.reading_id if part.reading else None,
            flags=part.reading.flags if part.reading else (),
            context_us=chosen.context_us if chosen else None,
            bus=_bus(part.reading.details) if part.reading else "",
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.total_us))


def _bus(details: Details) -> str:
    """Text about a collective: its bus bandwidth, and how much of it a matrix product hides; "" for
    other operators.
    """
    text = []
    if bus := details.bus_bytes_per_s:
        share = (
            f" ({percent(bus / details.link_bytes_per_s)} of the link)"
            if details.link_bytes_per_s
            else ""
        )
        text.append(f"bus {count_of(bus, 'B/s')}{share}")
    if (overlap := details.overlap) is not None:
        text.append(
            f"{quantity(overlap.exposed_us, TIME)} exposed, {quantity(overlap.hidden_us, TIME)} "
            "hidden"
        )
    return ", ".join(text)


_OF_PART = "operator_id short_name label flops bytes_moved estimated_us card_id reused reason data"


def coverage_of(parts: Iterable[Part]) -> float | None:
    """Return the measured share of the estimated cost; None if the estimated cost is 0."""
    return _share(parts, lambda part: part.reading is not None)


def _share(parts: Iterable[Part], of: Callable[[Part], bool]) -> float | None:
    weights = [(part.weight_us, of(part)) for part in parts]
    total = math.fsum(weight for weight, _ in weights)
    return math.fsum(weight for weight, counts in weights if counts) / total if total else None


def next_operators(
    parts: Sequence[Part], significant: set[str], *, target: float = 0.95
) -> list[str]:
    """Return the operator types that the accuracy loop adds next, heaviest first; empty if none is
    left.

    The first round (no part in scope yet) adds the significant types of the model. If there are
    none, it adds the heaviest types until their share of the estimated cost reaches the target.
    Each later round adds types in the same way, at least one: if the share already reaches the
    target, the accuracy does not."""
    weight: dict[str, float] = defaultdict(float)
    chosen: set[str] = set()
    for part in parts:
        weight[part.short_name] += part.weight_us
        if part.in_scope:
            chosen.add(part.short_name)
    order = sorted(
        (name for name in weight if name not in chosen), key=lambda name: (-weight[name], name)
    )
    if not chosen and (known := [name for name in order if name in significant]):
        return known
    total = math.fsum(weight.values())
    reached = math.fsum(weight[name] for name in chosen)
    added: list[str] = []
    for name in order:
        if added and reached >= target * total:
            break
        added.append(name)
        reached += weight[name]
    return added


def _weights(
    given_us: Iterable[tuple[ReadingView, float]], wholes: Sequence[ReadingView]
) -> list[float]:
    """Return the weight of each card's whole: the card's share of the sum, or equal weights if it
    is unknown.
    """
    of_card: dict[str, float] = defaultdict(float)
    for reading, time_us in given_us:
        of_card[reading.card_id] += time_us
    number = Counter(whole.card_id for whole in wholes)
    weights = [of_card[whole.card_id] / number[whole.card_id] for whole in wholes]
    total = math.fsum(weights)
    return [weight / total if total else 1 / len(wholes) for weight in weights]


def _mean(figures: Sequence[Figure | None], weights: Sequence[float]) -> Figure | None:
    """Return the weighted mean over cards; its half-width includes their spread. None if a figure
    is missing.
    """
    known = [(figure, weight) for figure, weight in zip(figures, weights, strict=True) if figure]
    counted = [(figure, weight) for figure, weight in known if weight]
    if len(known) < len(figures) or not counted:
        return None
    mean = math.fsum(weight * figure.value for figure, weight in counted)
    own = math.hypot(*(weight * figure.half_width for figure, weight in counted))
    return Figure(mean, own + max(abs(figure.value - mean) for figure, _ in counted))


def _power(energy_mj: Figure, time_us: Figure) -> Figure:
    """Return the mean power in W. Energy is measured as power times time, so the errors count as
    independent.
    """
    if not time_us.value:
        return Figure(0.0)
    power_w = energy_mj.value / time_us.value * 1e3
    return Figure(power_w, power_w * math.hypot(energy_mj.relative, time_us.relative))


def _above_idle(energy: Figure | None, time: Figure, reading: ReadingView) -> Figure | None:
    """Return the energy in mJ minus the energy of the idle card in the same time."""
    if energy is None or reading.idle_power_w is None:
        return None
    return Figure(energy.value - reading.idle_power_w * time.value * 1e-3, energy.half_width)


def _systematic(
    readings: Iterable[ReadingView], canaries: Sequence[CanaryReading]
) -> tuple[dict[str, float], str]:
    """Return the largest relative deviation of a canary from its mean, for time and for energy; and
    a note.
    """
    by_subject: dict[str, list[CanaryReading]] = defaultdict(list)
    for canary in canaries:
        by_subject[canary.subject_id].append(canary)
    compared = [group for group in by_subject.values() if len(group) > 1]
    cards = {reading.card_id for reading in readings if reading.card_id}
    if not compared:
        note = (
            "No canary tuple was measured twice, so the intervals do not include drift of the card."
        )
        if len(cards) > 1:
            note = (
                f"No canary compares the {len(cards)} cards, so the intervals do not include "
                "their differences."
            )
        return {"time": 0.0, "energy": 0.0}, note
    time = max(_spread([canary.reading.time_us for canary in group]) for group in compared)
    energies = [
        [c.reading.energy_mj for c in group if c.reading.energy_mj is not None]
        for group in compared
    ]
    energy = max((_spread(values) for values in energies if len(values) > 1), default=0.0)
    places = {canary.card_id for group in compared for canary in group}
    on = f"{len(places)} cards" if len(places) > 1 else "one card"
    note = f"{len(compared)} canary tuple{'s' if len(compared) > 1 else ''}, measured on {on}."
    if others := sorted(cards - places):
        left_out = others[0] if len(others) == 1 else f"{len(others)} other cards"
        note += (
            f" No canary was measured on {left_out}, so the intervals do not include that "
            "difference."
        )
    return {"time": time, "energy": energy}, note


def _spread(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def _unmeasured(parts: Sequence[Part]) -> tuple[Unmeasured, ...]:
    total_us = math.fsum(part.weight_us for part in parts)
    missing = []
    for part in (part for part in parts if part.reading is None):
        share = part.weight_us / total_us if total_us else 0.0
        reason = part.reason or ("no reading" if part.in_scope else NOT_IN_SCOPE)
        missing.append(
            Unmeasured(part.operator_id, part.short_name, part.label, part.count, share, reason)
        )
    return tuple(sorted(missing, key=lambda entry: (-entry.share, entry.label)))


def _adjustments(measured: Iterable[Measured]) -> tuple[Adjustment, ...]:
    found = []
    for part, reading, chosen in measured:
        if chosen.used == "steady" and not chosen.why:
            continue
        time_us = part.count * (chosen.time.value - chosen.context_us - reading.time_us)
        energy_mj = None
        if chosen.energy and reading.energy:
            energy_mj = part.count * (
                chosen.energy.value - chosen.context_mj - reading.energy.value
            )
        found.append(
            Adjustment(
                part.operator_id,
                part.label,
                part.count,
                chosen.used,
                chosen.why,
                time_us,
                energy_mj,
            )
        )
    return tuple(sorted(found, key=lambda entry: -abs(entry.effect_time_us)))


def launch_gap_us(wholes: Sequence[Whole]) -> float | None:
    """Return the eager time minus the graph time in µs: the mean over the cards that have both."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for whole in wholes:
        if whole.reading is None:
            continue
        both = times[whole.reading.card_id or whole.card_id]
        if eager_us := whole.reading.details.eager_time_us:
            both["graph"] = whole.reading.time_us
            both.setdefault("eager", eager_us)
        if whole.launch:
            both[whole.launch] = whole.reading.time_us
    gaps = [
        both["eager"] - both["graph"]
        for both in times.values()
        if {"eager", "graph"} <= both.keys()
    ]
    return math.fsum(gaps) / len(gaps) if gaps else None


def _collectives_alone_us(
    measured: Iterable[Measured], wholes: Iterable[ReadingView]
) -> float | None:
    """The time of all collectives in loops; None unless the sum has what they add to a pass
    instead.
    """
    if not any(whole.details.added for whole in wholes):
        return None
    return math.fsum(
        part.count * reading.time_us
        for part, reading, _ in measured
        if part.short_name in COLLECTIVES
    )


def _host_steps(whole: ReadingView) -> str:
    """Say what a graph does with the operators for which an eager pass waits
    (`farm.benchmark.host_steps`).
    """
    copied, left_out, text = whole.details.host_copies, whole.details.left_out_us, []
    if copied:
        text.append(
            f"{sum(copied.values())} copies between host and card, in the graph without waits of "
            "the host"
        )
    if left_out:
        text.append(f"sum and whole leave out {', '.join(sorted(left_out))}")
    return "; ".join(text)


# ---- the figures of a reading that belong in a sum


#: The power while a kernel waits for code or data, if it is not measured: between the card without
#: work (0) and the operator's own power (1).
WAITING = Figure(0.5, 0.5)
LEAST_WAITING = 0.1  # least half-width of that share, if it is measured
# per call: a CUDA event before a kernel prevents an early start of the kernel
PLACE_UNSURE_US = MEASURED["place"].value
#: Relative change of the power per degree (C) at constant work and clocks.
POWER_PER_C = Figure(MEASURED["power_per_c"].value, MEASURED["power_per_c"].half_width)
# share of the energy: error that rough readings share, because the chip is not yet warm
ROUGH_POWER = MEASURED["rough_power"].value
# fraction of the effect of a place in the model
PLACE_UNSURE = MEASURED["place_share"].value
#: Half-width of a time that differs each time the operator is built, for a time of 1 us; it grows
#: with the square root of the time.
BUILD_UNSURE_US = MEASURED["build"].value
# share of throttled samples from which a burst did not run at full clocks
BURST_THROTTLED_SHARE = 0.05


def choose(
    reading: ReadingView,
    wholes: Sequence[ReadingView],
    operator_id: str = "",
    waiting: Figure = WAITING,
) -> Chosen:
    """Choose the figures of one call for the sum. They depend on the clocks at which the card ran
    the whole model, whose readings store by `operator_id` how much the neighbouring operators
    change the tuple's time. `waiting`: see `waiting_share`."""
    wholes = [whole for whole in wholes if whole.card_id == reading.card_id] or wholes
    loops = [
        us
        for whole in wholes
        if (us := (whole.details.looped_us or {}).get(operator_id)) is not None
    ]
    looped_us, limited = (
        sum(loops) / len(loops) if loops else None,
        reading.details.burst is not None,
    )
    if looped_us is not None and limited:
        reading = _with_bursts_of(reading, looped_us)
    chosen = _at_model_temperature(_at_model_clocks(reading, wholes), reading, wholes)
    in_cache = weights_in_cache(wholes) or 0.0
    if added := _mean_place((whole.details.added for whole in wholes), operator_id):
        longer = replace(added, value=added.value - chosen.time.value)
        return _among_others(chosen, reading, 0.0, waiting, longer, hidden=longer.value < 0)
    if not (effect := _mean_place((whole.details.places for whole in wholes), operator_id)):
        return _among_others(chosen, reading, in_cache, waiting)
    effect = _bounded(effect, reading, in_cache)
    # The effect was measured with weights as cold as in the model, so it contains the time to fetch
    # them. The loops in the ranks had their weights in the cache.
    fetches = 0.0 if looped_us is not None and limited else 1.0
    if looped_us is not None and not limited and reading.details.context:
        effect = replace(effect, value=effect.value + looped_us - reading.details.context.alone_us)
    return _among_others(chosen, reading, fetches, waiting, effect)


def _with_bursts_of(reading: ReadingView, looped_us: float) -> ReadingView:
    """A reading at the power limit whose time in bursts is that of short loops between the calls of
    a split model.

    Bursts of one operator alone take longer, probably because they reach the limit, too: 1,388 us
    instead of 1,210 us for a matrix product on H200s."""
    assert reading.details.burst is not None
    burst = replace(reading.details.burst, time_us=looped_us)
    return replace(reading, details=replace(reading.details, burst=burst))


def _mean_place(of_wholes: Iterable[Mapping[str, Place] | None], operator_id: str) -> Figure | None:
    found = [place for places in of_wholes if places and (place := places.get(operator_id))]
    if not found:
        return None
    return Figure(
        sum(one.effect_us for one in found) / len(found), max(one.half_width_us for one in found)
    )


def _at_model_clocks(reading: ReadingView, wholes: Sequence[ReadingView]) -> Chosen:
    """Choose the steady figures, the burst figures, or an interpolation between them. A tuple that
    hits the power limit in a loop runs faster in the model, because its neighbours draw less
    power."""
    rough_mj = (
        ROUGH_POWER * reading.energy.value if reading.energy and "rough" in reading.flags else 0.0
    )
    steady = Chosen(reading.time, reading.energy, "steady", unsure_mj=rough_mj)
    burst = reading.details.burst
    if burst is None or not burst.time_us:
        return steady
    if not wholes:
        return replace(
            steady, why="the clock in the model is unknown: the whole model has no reading"
        )
    burst_time = Figure(burst.time_us, burst.time_half_width_us or 0.0)
    energy_mj = burst.energy_mj
    burst_energy = (
        None if energy_mj is None else Figure(energy_mj, burst.energy_half_width_mj or 0.0)
    )
    clocks = [whole.sm_clock_mhz for whole in wholes if whole.sm_clock_mhz]
    clock = sum(clocks) / len(clocks) if clocks else None
    low, high = reading.sm_clock_mhz, burst.sm_clock_mhz
    if not any(whole.power_throttled for whole in wholes):
        chosen = Chosen(
            burst_time,
            burst_energy or reading.energy,
            "burst",
            "the whole model is below the power limit",
        )
        return _if_throttled(chosen, burst, clock)
    if clock is None or not low or not high or high <= low:
        return replace(
            steady,
            why="the whole model hits the power limit, but no recorded clocks show by how much",
        )
    share = min(1.0, max(0.0, (clock - low) / (high - low)))
    # The true relation is a curve. The error of linear interpolation is zero at both ends.
    bend = share * (1 - share)
    energy, unsure_mj = steady.energy, 0.0
    if steady.energy and burst_energy:
        energy = _between(steady.energy, burst_energy, share)
        unsure_mj = bend * abs(burst_energy.value - steady.energy.value)
    return Chosen(
        _between(steady.time, burst_time, share),
        energy,
        "interpolated",
        f"the whole model hits the power limit and runs at {clock:.0f} MHz; the tuple runs at "
        f"{low:.0f} MHz (steady) "
        f"and {high:.0f} MHz (burst)",
        unsure_us=bend * abs(burst_time.value - steady.time.value),
        unsure_mj=unsure_mj,
    )


def _at_model_temperature(
    chosen: Chosen, reading: ReadingView, wholes: Sequence[ReadingView]
) -> Chosen:
    """Restate the energy to the temperature of the whole model: a warmer chip draws more power for
    the same work. Not at the power limit, which decides the power there, nor for a first step of
    the energy counter, which is compared with long runs as it is
    (`farm.benchmark.window.FIRST_STEP`). The uncertainty is common to all tuples."""
    model_c = [whole.temperature_c for whole in wholes if whole.temperature_c is not None]
    if not chosen.energy or not model_c or reading.temperature_c is None or chosen.used != "steady":
        return chosen
    first_step = "rough" in reading.flags and reading.details.ticks == 2
    if first_step or any(one.power_throttled for one in (reading, *wholes)):
        return chosen
    per_c = (math.fsum(model_c) / len(model_c) - reading.temperature_c) * chosen.energy.value
    return replace(
        chosen,
        energy=Figure(chosen.energy.value + POWER_PER_C.value * per_c, chosen.energy.half_width),
        warmth_mj=POWER_PER_C.value * per_c,
        unsure_mj=chosen.unsure_mj + POWER_PER_C.half_width * abs(per_c),
    )


def _if_throttled(chosen: Chosen, burst: Burst, whole_mhz: float | None) -> Chosen:
    """Widen the interval of a burst reading if its bursts reached the power limit too.

    This happens if one pass is longer than a burst. Such a reading is too slow by an unknown
    factor. The factor is at most the clock of the whole model divided by the clock of the bursts.
    """
    clock_mhz = burst.sm_clock_mhz
    limited = (burst.throttle_shares or {}).get("power_cap", 0.0) >= BURST_THROTTLED_SHARE
    if not limited or not clock_mhz or not whole_mhz or clock_mhz >= whole_mhz:
        return chosen
    unsure = 1 - clock_mhz / whole_mhz
    clocks = f"{clock_mhz:.0f} MHz instead of {whole_mhz:.0f} MHz"
    return replace(
        chosen,
        why=(
            f"{chosen.why}, but the bursts hit it ({clocks}): they are too slow by an unknown "
            "amount"
        ),
        unsure_us=unsure * chosen.time.value,
        unsure_mj=unsure * chosen.energy.value if chosen.energy else 0.0,
    )


def _bounded(place: Figure, reading: ReadingView, in_cache: float) -> Figure:
    """Limit the effect of a place, if all data of a pass fit in the cache, to the effect of
    unrelated operators.

    Unrelated operators evict all code of the operator and rewrite its inputs. CUDA events between
    the calls make a pass longer, so the cache loses some weights that a normal pass finds. The lost
    weights differ between processes."""
    context = reading.details.context
    excess = max(0.0, place.value - max(0.0, context.effect_us)) if context else 0.0
    return Figure(place.value - in_cache * excess, place.half_width)


def _among_others(
    chosen: Chosen,
    reading: ReadingView,
    in_cache: float,
    waiting: Figure,
    place: Figure | None = None,
    *,
    hidden: bool = False,
) -> Chosen:
    """Add the effect of the neighbours in a model. Subtract the time to fetch weights that are in
    the cache there.

    While a kernel waits for code or data, the card draws a power between idle power and the
    operator's power: `waiting` says where. If the effect was not measured at the call's place in
    the model, the real neighbours may act differently, so the uncertainty is as large as the
    effect. Both uncertainties are common to all tuples. ``hidden``: the call runs beside others for
    a part of its time, in which the power without work counts only once."""
    context, burst, effect = reading.details.context, reading.details.burst, place
    if effect is None and context is not None:
        effect = Figure(context.effect_us, context.effect_half_width_us or 0.0)
    if effect is None or (context is None and in_cache):
        return replace(chosen, loop_unsure_mj=chosen.unsure_mj)
    fetching_us = 0.0
    # With one copy, the weights stay in the cache in the loop, too.
    if context is not None and (reading.details.copies or 1) > 1:
        looped_us = (burst.time_us if burst else None) or reading.time_us
        fetching_us = looped_us - context.alone_us
    shift = Figure(effect.value - in_cache * fetching_us, effect.half_width)
    unsure_us = (
        abs(effect.value) if place is None else PLACE_UNSURE_US + PLACE_UNSURE * abs(shift.value)
    )
    build_us = BUILD_UNSURE_US * math.sqrt(reading.time_us)
    time = Figure(
        chosen.time.value + shift.value,
        math.hypot(chosen.time.half_width, shift.half_width, build_us),
    )
    energy, added_mj, unsure_mj, waiting_mj = chosen.energy, 0.0, 0.0, 0.0
    if energy is not None and chosen.time.value:
        own_w = energy.value / chosen.time.value * 1e3
        base_w = min(own_w, reading.base_power_w or reading.idle_power_w or own_w)
        swing_w = 0.0 if hidden else own_w - base_w
        waiting_w = base_w + waiting.value * swing_w
        added_mj = shift.value * waiting_w * 1e-3
        waiting_mj = shift.value * swing_w * 1e-3
        unsure_mj = abs(waiting_mj) * waiting.half_width + unsure_us * own_w * 1e-3
        noise_mj = shift.half_width * waiting_w * 1e-3
        energy = Figure(energy.value + added_mj, math.hypot(energy.half_width, noise_mj))
    return replace(
        chosen,
        time=time,
        energy=energy,
        context_us=shift.value,
        context_mj=added_mj,
        waiting_mj=waiting_mj,
        unsure_us=chosen.unsure_us + unsure_us,
        unsure_mj=chosen.unsure_mj + unsure_mj,
        loop_unsure_mj=chosen.unsure_mj,
    )


def weights_in_cache(wholes: Sequence[ReadingView]) -> float | None:
    """Return the share of a model's weights that the next pass finds in the card's cache, 0 to 1.
    It is measured with the whole (`farm.benchmark.cache`). None if no whole has it; then all
    weights count as cold."""
    shares = [share for whole in wholes if (share := whole.details.found_again) is not None]
    return sum(shares) / len(shares) if shares else None


def _between(low: Figure, high: Figure, share: float) -> Figure:
    return Figure(
        low.value + share * (high.value - low.value),
        low.half_width + share * (high.half_width - low.half_width),
    )
