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
tuples. The sources are independent of each other, so their totals add in quadrature.
`farm.verdict.gap_errors` has the errors that no reading of a tuple contains."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType

from farm.types.collective import COLLECTIVES
from farm.types.figure import Figure, value_of
from farm.types.verification import Verification
from farm.verdict.canaries import CanaryReadings, systematic_of
from farm.verdict.checked_cards import CheckedCards
from farm.verdict.cost_line import CostLine, group
from farm.verdict.figures import NOT_IN_SCOPE, ReadingView, Whole
from farm.verdict.judging import judge
from farm.verdict.kernel_audit import audit_kernels
from farm.verdict.replay import measured_lines, of_launch, replayed
from farm.verdict.sum_and_whole import SumAndWhole, mean_power
from farm.verdict.verdict import (
    Adjustment,
    Comparison,
    Sums,
    Unmeasured,
    Verdict,
)


def aggregate(
    parts: Sequence[CostLine],
    wholes: Sequence[Whole] = (),
    canaries: CanaryReadings = MappingProxyType({}),
    *,
    target: float,
    launch: str,
    requested: Sequence[str] = (),
    verification: Verification | None = None,
    cards: CheckedCards | None = None,
) -> Verdict:
    """Compare the sum of the parts with the whole.

    Args:
        parts: every tuple of the model, measured or not.
        wholes: the whole model on each card of the job; each is weighted by the card's share of the
            sum. Wholes with the other launch are used only for the launch gap.
        canaries: readings of reference tuples on the cards, by the id of the tuple.
        target: the least accuracy and coverage of a pass, as a fraction.
        launch: ``graph`` or ``eager``; the two are never mixed.
        requested: the operator types requested by name. If they are too few for the target, the
            outcome is "none".
        verification: that of the whole on a card; its kernels are compared with the kernels of the
            tuples.
        cards: the differences between the cards, from their checks; None if they are unknown.
    """
    readings = of_launch(wholes, launch)
    measured = measured_lines(parts, wholes, launch, cards)
    every = [line.measured[0] for line in measured] + readings
    compared = cards.of_canaries(canaries) if cards else canaries
    systematic = systematic_of(every, compared, are_checked=cards is not None)
    complete = len(measured) == len(parts)
    replay = replayed(readings) if complete else None
    sums = SumAndWhole(measured, readings, systematic, replay, cards)
    energy = sums.energy()
    time = sums.time()
    verdict = Verdict(
        outcome="none",
        reasons=(),
        target=target,
        launch=launch,
        coverage=coverage_of(parts),
        time=time,
        energy=energy,
        energy_above_idle=sums.energy_above_idle() if energy else None,
        power=sums.power(time, energy) if energy else None,
        systematic_time=systematic.relative["time"],
        systematic_energy=systematic.relative["energy"],
        systematic_note=f"{systematic.note} {cards.note(measured)}" if cards else systematic.note,
        parts=len(parts),
        measured=len(measured),
        wholes=tuple(wholes),
        unmeasured=_unmeasured(parts),
        adjustments=_adjustments(measured),
        flags=_flags(every),
        launch_gap_us=launch_gap_us(wholes),
        kernels=audit_kernels(verification, parts) if verification else None,
        temperature_energy_mj=sums.total(lambda cost: cost.warmth_mj) or None,
        between_jobs_time=sums.sources.between_jobs("time"),
        between_jobs_energy=sums.sources.between_jobs("energy"),
        host_steps=next(filter(None, map(_host_steps, readings)), ""),
        collectives_alone_us=_collectives_alone_us(measured, readings),
        tuples=sum_lines(parts, measured),
    )
    requested_share = _share(parts, lambda part: part.in_scope)
    return judge(sums.with_neighbours(verdict), measured, requested, requested_share)


def _flags(readings: Iterable[ReadingView]) -> dict[str, int]:
    """Return flag -> number of readings, the most frequent first."""
    flags = Counter[str]()
    for reading in readings:
        flags.update(reading.flags)
    return dict(flags.most_common())


# ---- large sweeps


def added(a: Verdict, b: Verdict, most: int) -> Verdict:
    """Add the verdicts of two parts of a large sweep. Of each list the heaviest entries remain, at
    most ``most``.
    """
    sums_a, sums_b = a.types or sums_of(a.tuples), sums_of(b.tuples)
    weight_a, weight_b = _estimated_us(sums_a), _estimated_us(sums_b)
    total = math.fsum((weight_a, weight_b)) or 1.0

    missing = [replace(entry, share=entry.share * weight_a / total) for entry in a.unmeasured]
    missing += [replace(entry, share=entry.share * weight_b / total) for entry in b.unmeasured]
    missing.sort(key=lambda entry: (-entry.share, entry.label))
    adjustments = sorted(
        a.adjustments + b.adjustments, key=lambda entry: -abs(entry.effect_time_us)
    )
    lines = sorted(a.tuples + b.tuples, key=lambda line: -line.total_us)
    covered = ((a.coverage or 0.0) * weight_a, (b.coverage or 0.0) * weight_b)

    measured = [verdict for verdict in (a, b) if verdict.measured] or [a]
    time = _total_of_sweep([verdict.time for verdict in measured])
    energy = _total_of_sweep([verdict.energy for verdict in measured])
    assert time is not None
    return replace(
        a if a.measured else b,
        time=time,
        energy=energy,
        energy_above_idle=_total_of_sweep([verdict.energy_above_idle for verdict in measured]),
        power=energy and Comparison(mean_power(energy.total, time.total)),
        coverage=math.fsum(covered) / total,
        systematic_note="The intervals of a large sweep do not include differences of the canary.",
        parts=a.parts + b.parts,
        measured=a.measured + b.measured,
        unmeasured=tuple(missing[:most]),
        adjustments=tuple(adjustments[:most]),
        flags=dict((Counter(a.flags) + Counter(b.flags)).most_common()),
        context_time_us=None,
        context_energy_mj=None,
        tuples=tuple(lines[:most]),
        types=sums_of(b.tuples, sums_a),
    )


def sums_of(lines: Iterable[CostLine], before: Sums | None = None) -> Sums:
    """Sum tuples by operator type, and add them to the sums of other tuples."""
    return group(lines, lambda line: line.subject.short_name, before)


def _estimated_us(sums: Sums) -> float:
    return math.fsum(one_type.estimated_us for one_type in sums.values())


def _total_of_sweep(sums: Sequence[Comparison | None]) -> Comparison | None:
    """Add sums of parts of a sweep: errors of single tuples in quadrature, errors that tuples share
    linearly.
    """
    values, common, scatter = [], [], []
    for comparison in sums:
        if comparison is None:
            return None
        values.append(comparison.total.value)
        common.append(comparison.common)
        variance = comparison.total.half_width**2 - comparison.common**2
        scatter.append(math.sqrt(max(0.0, variance)))
    shared = math.fsum(common)
    return Comparison(Figure(math.fsum(values), math.hypot(shared, *scatter)), common=shared)


# ---- the tuples of the sum


def sum_lines(parts: Iterable[CostLine], measured: Iterable[CostLine]) -> tuple[CostLine, ...]:
    """Return all tuples without their readings, those of `measured` with their cost; the most
    expensive first.
    """
    lines = [replace(line, reading=None) for line in measured]
    lines += [line for line in parts if line.reading is None]
    return tuple(sorted(lines, key=lambda line: -line.total_us))


def _unmeasured(parts: Sequence[CostLine]) -> tuple[Unmeasured, ...]:
    total_us = math.fsum(part.weight_us for part in parts)
    missing = []
    for part in parts:
        if part.reading is not None:
            continue
        subject = part.subject
        share = part.weight_us / total_us if total_us else 0.0
        reason = part.reason or ("no reading" if part.in_scope else NOT_IN_SCOPE)
        missing.append(
            Unmeasured(
                subject.operator_id, subject.short_name, subject.label, part.count, share, reason
            )
        )
    return tuple(sorted(missing, key=lambda entry: (-entry.share, entry.label)))


def _adjustments(measured: Iterable[CostLine]) -> tuple[Adjustment, ...]:
    adjustments = []
    for line in measured:
        reading, cost = line.measured
        if cost.used == "steady" and not cost.why:
            continue
        time_us = cost.time_us.value - cost.context_us - reading.time_us.value
        energy_mj = None
        if cost.energy_mj and reading.energy_mj:
            added_mj = cost.energy_mj.value - cost.context_mj - reading.energy_mj.value
            energy_mj = line.count * added_mj
        adjustments.append(
            Adjustment(
                operator_id=line.subject.operator_id,
                label=line.subject.label,
                count=line.count,
                used=cost.used,
                why=cost.why,
                effect_time_us=line.count * time_us,
                effect_energy_mj=energy_mj,
            )
        )
    return tuple(sorted(adjustments, key=lambda entry: -abs(entry.effect_time_us)))


def _collectives_alone_us(
    measured: Iterable[CostLine], wholes: Iterable[ReadingView]
) -> float | None:
    """The time of all collectives in loops; None unless the sum has what they add to a pass
    instead.
    """
    if not any(whole.details.order.added for whole in wholes):
        return None
    times_us = []
    for line in measured:
        if line.subject.short_name in COLLECTIVES:
            times_us.append(line.count * line.measured[0].time_us.value)
    return math.fsum(times_us)


# ---- the share of a model that is measured


def coverage_of(parts: Iterable[CostLine]) -> float | None:
    """Return the measured share of the estimated cost; None if the estimated cost is 0."""
    return _share(parts, lambda part: part.reading is not None)


def _share(parts: Iterable[CostLine], counts: Callable[[CostLine], bool]) -> float | None:
    weights_us, counted_us = [], []
    for part in parts:
        weights_us.append(part.weight_us)
        if counts(part):
            counted_us.append(part.weight_us)
    total_us = math.fsum(weights_us)
    return math.fsum(counted_us) / total_us if total_us else None


def next_operators(
    parts: Sequence[CostLine], significant: set[str], *, target: float = 0.95
) -> list[str]:
    """Return the operator types that the accuracy loop adds next, heaviest first; empty if none is
    left.

    The first round (no part in scope yet) adds the significant types of the model. If there are
    none, it adds the heaviest types until their share of the estimated cost reaches the target.
    Each later round adds types in the same way, at least one: if the share already reaches the
    target, the accuracy does not."""
    weights: dict[str, float] = defaultdict(float)
    in_scope: set[str] = set()
    for part in parts:
        name = part.subject.short_name
        weights[name] += part.weight_us
        if part.in_scope:
            in_scope.add(name)

    left = weights.keys() - in_scope
    order = sorted(left, key=lambda name: (-weights[name], name))
    first = [name for name in order if name in significant]
    if not in_scope and first:
        return first

    total = math.fsum(weights.values())
    reached = math.fsum(weights[name] for name in in_scope)
    added: list[str] = []
    for name in order:
        if added and reached >= target * total:
            break
        added.append(name)
        reached += weights[name]
    return added


# ---- the whole model


def launch_gap_us(wholes: Sequence[Whole]) -> float | None:
    """Return the eager time minus the graph time in µs: the mean over the cards that have both."""
    times: dict[str, dict[str, float]] = defaultdict(dict)
    for whole in wholes:
        reading = whole.reading
        if reading is None:
            continue
        of_card = times[reading.card_id or whole.card_id]
        eager_us = value_of(reading.details.timing.eager_time_us)
        if eager_us:
            of_card["graph"] = reading.time_us.value
            of_card.setdefault("eager", eager_us)
        if whole.launch:
            of_card[whole.launch] = reading.time_us.value

    gaps = []
    for of_card in times.values():
        if "eager" in of_card and "graph" in of_card:
            gaps.append(of_card["eager"] - of_card["graph"])
    return math.fsum(gaps) / len(gaps) if gaps else None


def _host_steps(whole: ReadingView) -> str:
    """Say what a graph does with the operators for which an eager pass waits
    (`farm.benchmark.host_steps`).
    """
    copied = whole.details.launching.host_copies
    omitted = whole.details.timing.left_out_us
    texts = []
    if copied:
        number = sum(copied.values())
        texts.append(
            f"{number} copies between host and card, in the graph without waits of the host"
        )
    if omitted:
        texts.append(f"sum and whole leave out {', '.join(sorted(omitted))}")
    return "; ".join(texts)
