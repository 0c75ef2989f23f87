"""Does the sum of the parts explain the whole? The sums of a verdict, apart from database and cards.

    sum       = Σ count × reading              over the measured tuples of a model
    gap       = sum / whole - 1                signed; too large fails as well as too small
    accuracy  = 1 - |sum - whole| / whole      for time, and for energy where every reading has it
    coverage  = Σ count × estimate (measured) / Σ count × estimate (all)

A verdict passes with accuracy *and* coverage at the target: errors that cancel while half of the model was left
out do not pass. What was not measured is listed with its reason; energy that is missing anywhere is "not
available", never zero.

**Intervals** (95 %): the n calls of one tuple share its error, so it counts n times; different tuples are
independent and add in quadrature; what differs between cards, or drifts, is common to all tuples and is added
linearly, as large as the canaries show it. Quadrature alone would give absurdly narrow sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from farm.types.reading import Verification
from farm.verdict.audit import audit_kernels
from farm.verdict.choice import choose, weights_in_cache
from farm.verdict.figures import NOT_IN_SCOPE, Canary, Chosen, Figure, Part, ReadingView, Whole
from farm.verdict.judging import Sums, judge
from farm.verdict.verdict import Adjustment, Comparison, Unmeasured, Verdict

__all__ = [
    "NOT_IN_SCOPE",
    "Adjustment",
    "Canary",
    "Chosen",
    "Comparison",
    "Figure",
    "Part",
    "ReadingView",
    "Unmeasured",
    "Verdict",
    "Whole",
    "aggregate",
    "coverage_of",
    "launch_gap_us",
    "next_operators",
]


def aggregate(
    parts: Sequence[Part],
    wholes: Sequence[Whole] = (),
    canaries: Sequence[Canary] = (),
    *,
    target: float,
    launch: str,
    asked: Sequence[str] = (),
    seen: Verification | None = None,
) -> Verdict:
    """Hold the sum of the parts against the whole.

    Args:
        parts: every tuple of the model, measured or not.
        wholes: the whole model on each card that contributed, which count by what their cards gave to the sum;
            those of another launch only give the launch gap.
        canaries: readings of reference tuples over the cards.
        target: the least accuracy and coverage of a pass, as a fraction.
        launch: ``graph`` or ``eager``; the two are never mixed.
        asked: the operator types that were asked for by name; where these alone cannot reach the target, the outcome
            is "none".
        seen: what verifying the whole on a card found; its kernels are held against those of the tuples.
    """
    own = [whole for whole in wholes if whole.launch in ("", launch)]
    readings = [whole.reading for whole in own if whole.reading]
    measured = [(part, choose(part.reading, readings, part.operator_id)) for part in parts if part.reading]
    weights = _weights(measured, readings)
    systematic_time, systematic_energy, note = _systematic(measured, readings, canaries)

    with_energy = bool(measured) and all(chosen.energy for _, chosen in measured)
    whole_energy = bool(readings) and all(reading.energy for reading in readings)
    common_us = _over_calls(measured, lambda chosen: chosen.unsure_us)
    time = Comparison(
        _sum((chosen.time.times(part.count) for part, chosen in measured), systematic_time, common_us),
        _mean([reading.time for reading in readings], weights),
        common_us,
    )
    energy = above_idle = power = None
    if with_energy:
        common_mj = _over_calls(measured, lambda chosen: chosen.unsure_mj)
        energy = Comparison(
            _sum(
                (chosen.energy.times(part.count) for part, chosen in measured if chosen.energy),
                systematic_energy,
                common_mj,
            ),
            _mean([reading.energy for reading in readings if reading.energy], weights) if whole_energy else None,
            common_mj,
        )
        power = Comparison(
            _power(energy.total, time.total),
            _power(energy.whole, time.whole) if energy.whole and time.whole else None,
        )
        above_idle = _above_idle(measured, readings if whole_energy else [], weights, systematic_energy, common_mj)

    apart = sum(part.reading is not None and part.reading.details.context is None for part, _ in measured)
    among = apart < len(measured)
    sums = Sums(
        time=time,
        energy=energy,
        coverage=coverage_of(parts),
        parts=len(parts),
        measured=len(measured),
        without_energy=sum(chosen.energy is None for _, chosen in measured),
        read_alone=apart if among else 0,
        wholes=own,
        systematic_time=systematic_time,
        flags=dict(Counter(flag for reading in _all(measured, readings) for flag in reading.flags).most_common()),
        kernels=audit_kernels(seen, parts) if seen else None,
        asked=asked,
        asked_share=_share(parts, lambda part: part.in_scope),
    )
    judgement = judge(sums, target)

    def hold(comparison: Comparison) -> Comparison:
        return dataclasses.replace(comparison, held=judgement.held)

    return Verdict(
        outcome=judgement.outcome,
        target=target,
        launch=launch,
        reasons=judgement.reasons,
        coverage=sums.coverage,
        time=hold(time),
        energy=energy and hold(energy),
        energy_above_idle=above_idle and hold(above_idle),
        power=power and hold(power),
        systematic_time=systematic_time,
        systematic_energy=systematic_energy,
        systematic_note=note,
        parts=len(parts),
        measured=len(measured),
        wholes=tuple(wholes),
        unmeasured=_unmeasured(parts),
        adjustments=_adjustments(measured),
        flags=dict(sums.flags),
        launch_gap_us=launch_gap_us(wholes),
        kernels=sums.kernels,
        context_time_us=_over_calls(measured, lambda chosen: chosen.context_us) if among else None,
        context_energy_mj=_over_calls(measured, lambda chosen: chosen.context_mj) if among and energy else None,
        weights_in_cache=weights_in_cache(readings) if among else None,
        asked_for=judgement.asked_for,
        asked_share=judgement.asked_share,
    )


def coverage_of(parts: Iterable[Part]) -> float | None:
    """Share of the estimated cost that was measured; None where nothing has a cost."""
    return _share(parts, lambda part: part.reading is not None)


def _share(parts: Iterable[Part], of: Callable[[Part], bool]) -> float | None:
    weights = [(part.weight_us, of(part)) for part in parts]
    everything = math.fsum(weight for weight, _ in weights)
    return math.fsum(weight for weight, counts in weights if counts) / everything if everything else None


def next_operators(parts: Sequence[Part], significant: set[str], *, target: float = 0.95) -> list[str]:
    """The operator types that the accuracy loop adds next, heaviest first; empty when nothing is left.

    The first round (no part in scope yet) takes the significant types that the model has, or, where there are
    none, the heaviest until their share of the estimated cost reaches the target. Each later round fills up to
    the target in the same way, and adds at least one type: when the share is there already, the accuracy is not.
    """
    weight: dict[str, float] = defaultdict(float)
    chosen: set[str] = set()
    for part in parts:
        weight[part.short_name] += part.weight_us
        if part.in_scope:
            chosen.add(part.short_name)
    order = sorted((name for name in weight if name not in chosen), key=lambda name: (-weight[name], name))
    if not chosen and (known := [name for name in order if name in significant]):
        return known
    everything = math.fsum(weight.values())
    reached = math.fsum(weight[name] for name in chosen)
    added: list[str] = []
    for name in order:
        if added and reached >= target * everything:
            break
        added.append(name)
        reached += weight[name]
    return added


def _sum(figures: Iterable[Figure], systematic: float, common: float = 0.0) -> Figure:
    """The sum: own errors in quadrature; what is common to all linearly, relative (systematic) and in the figures' unit."""
    listed = list(figures)
    total = math.fsum(figure.value for figure in listed)
    return Figure(total, math.hypot(*(figure.half_width for figure in listed)) + systematic * abs(total) + common)


def _over_calls(measured: Sequence[tuple[Part, Chosen]], of: Callable[[Chosen], float]) -> float:
    """One figure of what was chosen, over all calls of all tuples."""
    return math.fsum(of(chosen) * part.count for part, chosen in measured)


def _weights(measured: Sequence[tuple[Part, Chosen]], wholes: Sequence[ReadingView]) -> list[float]:
    """How much each card's whole counts: as much as the card gave to the sum, all alike where that is unknown."""
    given: dict[str, float] = defaultdict(float)
    for part, chosen in measured:
        if part.reading:
            given[part.reading.card_id] += part.count * chosen.time.value
    there = Counter(whole.card_id for whole in wholes)
    weights = [given[whole.card_id] / there[whole.card_id] for whole in wholes]
    total = math.fsum(weights)
    return [weight / total if total else 1 / len(wholes) for weight in weights]


def _mean(figures: Sequence[Figure], weights: Sequence[float]) -> Figure | None:
    """The mean of one quantity over cards: their own errors, and how far the cards lie apart."""
    counted = [(figure, weight) for figure, weight in zip(figures, weights, strict=True) if weight]
    if not counted:
        return None
    mean = math.fsum(weight * figure.value for figure, weight in counted)
    own = math.hypot(*(weight * figure.half_width for figure, weight in counted))
    return Figure(mean, own + max(abs(figure.value - mean) for figure, _ in counted))


def _power(energy_mj: Figure, time_us: Figure) -> Figure:
    """Average power in W; energy was read as power times time, so their errors are taken as independent."""
    if not time_us.value:
        return Figure(0.0)
    power_w = energy_mj.value / time_us.value * 1e3
    return Figure(power_w, power_w * math.hypot(energy_mj.relative, time_us.relative))


def _above_idle(
    measured: Sequence[tuple[Part, Chosen]],
    wholes: Sequence[ReadingView],
    weights: Sequence[float],
    systematic: float,
    common_mj: float,
) -> Comparison | None:
    """Energy beyond what the resting card draws in the same time; gross is this plus idle power × total time."""
    terms: list[Figure] = []
    for part, chosen in measured:
        figure = _beyond(chosen.energy, chosen.time, part.reading.idle_power_w if part.reading else None)
        if figure is None:
            return None
        terms.append(figure.times(part.count))
    above = [_beyond(whole.energy, whole.time, whole.idle_power_w) for whole in wholes]
    known = [figure for figure in above if figure]
    return Comparison(
        _sum(terms, systematic, common_mj), _mean(known, weights) if known and len(known) == len(above) else None
    )


def _beyond(energy: Figure | None, time: Figure, idle_power_w: float | None) -> Figure | None:
    if energy is None or idle_power_w is None:
        return None
    return Figure(energy.value - idle_power_w * time.value * 1e-3, energy.half_width)


def _systematic(
    measured: Sequence[tuple[Part, Chosen]], wholes: Sequence[ReadingView], canaries: Sequence[Canary]
) -> tuple[float, float, str]:
    """The largest deviation of any canary reading from its subject's mean, relative, for time and energy."""
    by_subject: dict[str, list[Canary]] = defaultdict(list)
    for canary in canaries:
        by_subject[canary.subject_id].append(canary)
    compared = [group for group in by_subject.values() if len(group) > 1]
    cards = {reading.card_id for reading in _all(measured, wholes) if reading.card_id}
    if not compared:
        if len(cards) > 1:
            return 0.0, 0.0, f"No canary compares the {len(cards)} cards; the intervals leave out how they differ."
        return 0.0, 0.0, "No canary was read twice; the intervals leave out what drifts."
    time = max(_spread([canary.reading.time_us for canary in group]) for group in compared)
    energies = [[c.reading.energy_mj for c in group if c.reading.energy_mj is not None] for group in compared]
    energy = max((_spread(values) for values in energies if len(values) > 1), default=0.0)
    places = {canary.card_id for group in compared for canary in group}
    what = f"{len(places)} cards" if len(places) > 1 else "one card"
    note = f"{len(compared)} canary tuple{'s' if len(compared) > 1 else ''}, read on {what}."
    if others := sorted(cards - places):
        left_out = others[0] if len(others) == 1 else f"{len(others)} of the cards"
        note += f" None on {left_out}: the intervals leave out how that differs."
    return time, energy, note


def _spread(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


def _all(measured: Sequence[tuple[Part, Chosen]], wholes: Sequence[ReadingView]) -> list[ReadingView]:
    return [part.reading for part, _ in measured if part.reading] + list(wholes)


def _unmeasured(parts: Sequence[Part]) -> tuple[Unmeasured, ...]:
    everything = math.fsum(part.weight_us for part in parts)
    missing = [
        Unmeasured(
            part.operator_id,
            part.short_name,
            part.label,
            part.count,
            part.weight_us / everything if everything else 0.0,
            part.reason or ("no reading" if part.in_scope else NOT_IN_SCOPE),
        )
        for part in parts
        if part.reading is None
    ]
    return tuple(sorted(missing, key=lambda entry: (-entry.share, entry.label)))


def _adjustments(measured: Sequence[tuple[Part, Chosen]]) -> tuple[Adjustment, ...]:
    found = []
    for part, chosen in measured:
        if chosen.used == "steady" and not chosen.why:
            continue
        assert part.reading is not None
        effect_energy = None
        if chosen.energy and part.reading.energy:
            effect_energy = part.count * (chosen.energy.value - chosen.context_mj - part.reading.energy.value)
        effect_time = part.count * (chosen.time.value - chosen.context_us - part.reading.time_us)
        found.append(
            Adjustment(part.operator_id, part.label, part.count, chosen.used, chosen.why, effect_time, effect_energy)
        )
    return tuple(sorted(found, key=lambda entry: -abs(entry.effect_time_us)))


def launch_gap_us(wholes: Sequence[Whole]) -> float | None:
    """Eager minus graph, the mean over the cards that have both: as readings, or the eager time beside a replayed one."""
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
    gaps = [both["eager"] - both["graph"] for both in times.values() if {"eager", "graph"} <= both.keys()]
    return math.fsum(gaps) / len(gaps) if gaps else None
