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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from farm.types.collective import COLLECTIVES
from farm.types.details import SeveralCards
from farm.types.figure import Figure, PassCost, total_of, value_of
from farm.types.format import TIME, count_of, percent, quantity
from farm.types.intervals import paired_half_width
from farm.types.reading import Verification
from farm.verdict.corrections import weights_in_cache
from farm.verdict.cost_line import CostLine, group
from farm.verdict.figures import (
    NOT_IN_SCOPE,
    CallCost,
    CanaryReading,
    MeasuredPart,
    Part,
    ReadingView,
    Whole,
)
from farm.verdict.gap_errors import ErrorSources, GapErrors, errors_of_gap
from farm.verdict.judging import Circumstances, judge
from farm.verdict.kernel_audit import audit_kernels
from farm.verdict.replay import measured_parts, of_launch, replayed
from farm.verdict.verdict import (
    Adjustment,
    Comparison,
    Sums,
    Unmeasured,
    Verdict,
)


@dataclass(frozen=True)
class Systematic:
    """The largest relative deviation of a canary from its mean; errors that all readings share."""

    relative: Mapping[str, float]  # time or energy -> the deviation
    note: str


def aggregate(
    parts: Sequence[Part],
    wholes: Sequence[Whole] = (),
    canaries: Sequence[CanaryReading] = (),
    *,
    target: float,
    launch: str,
    requested: Sequence[str] = (),
    verification: Verification | None = None,
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
        verification: that of the whole on a card; its kernels are compared with the kernels of the
            tuples.
    """
    readings = of_launch(wholes, launch)
    measured = measured_parts(parts, wholes, launch)
    every = [entry.reading for entry in measured] + readings
    systematic = _systematic(every, canaries)
    complete = len(measured) == len(parts)
    sums = _Sums(measured, readings, systematic, replayed(readings) if complete else None)
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
        systematic_note=systematic.note,
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
        tuples=cost_lines(parts, measured),
    )
    return judge(sums.with_neighbours(verdict), _circumstances(parts, measured, requested))


def _flags(readings: Iterable[ReadingView]) -> dict[str, int]:
    """Return flag -> number of readings, the most frequent first."""
    flags = Counter[str]()
    for reading in readings:
        flags.update(reading.flags)
    return dict(flags.most_common())


def _circumstances(
    parts: Iterable[Part], measured: Sequence[MeasuredPart], requested: Sequence[str]
) -> Circumstances:
    alone = sum(entry.reading.details.context is None for entry in measured)
    return Circumstances(
        without_energy=sum(entry.cost.energy_mj is None for entry in measured),
        looped_alone=alone if alone < len(measured) else 0,
        requested=requested,
        requested_share=_share(parts, lambda part: part.in_scope),
    )


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
        power=energy and Comparison(_power(energy.total, time.total)),
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


# ---- sum and whole


class _Sums:
    """The sums over all calls, compared with the means of the wholes."""

    def __init__(
        self,
        measured: Sequence[MeasuredPart],
        wholes: Sequence[ReadingView],
        systematic: Systematic,
        replay: PassCost | None,
    ) -> None:
        self.measured, self.wholes, self.replay = measured, wholes, replay
        self.with_context = any(entry.reading.details.context is not None for entry in measured)
        self.weights = _weights(measured, wholes)

        layouts_us = wholes[0].details.order.layouts_half_width_us if replay else None
        self.sources = ErrorSources(
            among_others=self.with_context,
            addresses=None if layouts_us is None else layouts_us / wholes[0].time_us.value,
            canaries=systematic.relative,
        )

    def total(self, of: Callable[[CallCost], float]) -> float:
        """Return the sum over all calls of one quantity of their costs."""
        return math.fsum(of(entry.cost) * entry.count for entry in self.measured)

    def with_neighbours(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the effect of the neighbours, if it was measured."""
        if not self.with_context:
            return verdict
        context_mj = self.total(lambda cost: cost.context_mj) if verdict.energy else None
        return replace(
            verdict,
            context_time_us=self.total(lambda cost: cost.context_us),
            context_energy_mj=context_mj,
            weights_in_cache=weights_in_cache(self.wholes),
        )

    def time(self) -> Comparison:
        """Compare the times. Unit: us."""
        total = total_of((entry.cost.time_us, entry.count) for entry in self.measured)
        assert total is not None
        comparison = self._compared(
            "time",
            total,
            [whole.time_us for whole in self.wholes],
            common=self.total(lambda cost: cost.unsure_us),
            of_replay=self.replay.time_us if self.replay else None,
        )
        return replace(comparison, gap_half_width=_timed_in_turn(self.measured, self.wholes))

    def energy(self) -> Comparison | None:
        """Compare the energies; None if a part has none. Unit: mJ."""
        total = total_of((entry.cost.energy_mj, entry.count) for entry in self.measured)
        if not self.measured or total is None:
            return None
        return self._compared(
            "energy",
            total,
            [whole.energy_mj for whole in self.wholes],
            common=self.total(lambda cost: cost.unsure_mj),
            of_replay=self.replay.energy_mj if self.replay else None,
        )

    def energy_above_idle(self) -> Comparison | None:
        """Compare the energies minus those of the idle card; None if an idle power is unknown."""
        terms = []
        for entry in self.measured:
            cost = entry.cost
            above_idle = _above_idle(cost.energy_mj, cost.time_us, entry.reading)
            terms.append((above_idle, entry.count))
        total = total_of(terms)
        if total is None:
            return None
        return self._compared(
            "energy",
            total,
            [_above_idle(whole.energy_mj, whole.time_us, whole) for whole in self.wholes],
            common=self.total(lambda cost: cost.unsure_mj),
        )

    def power(self, time: Comparison, energy: Comparison) -> Comparison:
        """Compare the mean powers. Unit: W."""
        whole = None
        if energy.whole and time.whole:
            whole = _power(energy.whole, time.whole)
        # With a replay, the sums of time and energy already contain the effect of the addresses.
        between_jobs = 0.0
        if self.sources.addresses is None:
            between_jobs = self.sources.between_jobs("power")
        return Comparison(_power(energy.total, time.total), whole, between_jobs=between_jobs)

    def _compared(
        self,
        quantity: str,
        total: Figure,
        of_wholes: Sequence[Figure | None],
        *,
        common: float,
        of_replay: Figure | None = None,
    ) -> Comparison:
        """Compare a sum with the mean of the wholes.

        Args:
            total: the sum, with the scatter of the tuples.
            common: half-width of the errors that all tuples share.
            of_replay: the same quantity of the replay; None if it does not count here.
        """
        independent = math.hypot(total.half_width, common)
        errors = errors_of_gap(
            GapErrors(quantity, total.value, of_replay, independent), self.sources
        )
        return Comparison(
            total=replace(total, half_width=errors.half_width),
            whole=_mean(of_wholes, self.weights),
            common=min(errors.half_width, common),
            between_jobs=errors.between_jobs,
            replay_difference=errors.replay_difference,
        )


def _timed_in_turn(measured: Sequence[MeasuredPart], wholes: Sequence[ReadingView]) -> float | None:
    """Return the half-width of the time gap if all readings were timed in the same turns of a CPU,
    else None. The speed of a CPU drifts, but in each turn it is about the same for the tuples and
    the whole."""
    if len(wholes) != 1 or not measured:
        return None

    whole = wholes[0].details.timing
    of_whole = whole.without_turn_us or ()
    terms = []
    for entry in measured:
        timing = entry.reading.details.timing
        turns_us = timing.without_turn_us or ()
        if timing.turns_group != whole.turns_group or len(turns_us) != len(of_whole):
            return None
        terms.append((entry.count, turns_us))
    return paired_half_width(terms, of_whole) if len(of_whole) >= 3 else None


def _weights(measured: Iterable[MeasuredPart], wholes: Sequence[ReadingView]) -> list[float]:
    """Return the weight of each card's whole: the card's share of the sum, or equal weights if it
    is unknown.
    """
    of_card_us: dict[str, float] = defaultdict(float)
    for entry in measured:
        of_card_us[entry.reading.card_id] += entry.count * entry.cost.time_us.value
    number = Counter(whole.card_id for whole in wholes)
    weights = [of_card_us[whole.card_id] / number[whole.card_id] for whole in wholes]
    total = math.fsum(weights)
    return [weight / total if total else 1 / len(wholes) for weight in weights]


def _mean(figures: Sequence[Figure | None], weights: Sequence[float]) -> Figure | None:
    """Return the weighted mean over cards; its half-width includes their spread. None if a figure
    is missing.
    """
    counted = []
    for figure, weight in zip(figures, weights, strict=True):
        if figure is None:
            return None
        if weight:
            counted.append((figure, weight))
    if not counted:
        return None
    mean = math.fsum(weight * figure.value for figure, weight in counted)
    scatter = math.hypot(*(weight * figure.half_width for figure, weight in counted))
    return Figure(mean, scatter + max(abs(figure.value - mean) for figure, _ in counted))


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


# ---- differences of the canary


def _systematic(readings: Iterable[ReadingView], canaries: Sequence[CanaryReading]) -> Systematic:
    """Return the largest deviation of a canary, and a sentence about what the intervals include.
    ``readings``: those of the verdict; a card without a canary is named.
    """
    by_subject: dict[str, list[CanaryReading]] = defaultdict(list)
    for canary in canaries:
        by_subject[canary.subject_id].append(canary)
    compared = [repeated for repeated in by_subject.values() if len(repeated) > 1]
    cards = {reading.card_id for reading in readings if reading.card_id}
    if not compared:
        note = (
            "No canary tuple was measured twice, so the intervals do not include drift of the card."
        )
        if len(cards) > 1:
            note = (
                f"No canary compares the {len(cards)} cards, so the intervals do not include their "
                "differences."
            )
        return Systematic({"time": 0.0, "energy": 0.0}, note)

    time, energy = 0.0, 0.0
    places: set[str] = set()
    for repeated in compared:
        energies = [canary.reading.energy_mj for canary in repeated]
        time = max(time, _spread([canary.reading.time_us.value for canary in repeated]))
        energies_mj = [figure.value for figure in energies if figure]
        if len(energies_mj) > 1:
            energy = max(energy, _spread(energies_mj))
        places.update(canary.reading.card_id for canary in repeated)

    where = f"{len(places)} cards" if len(places) > 1 else "one card"
    note = f"{len(compared)} canary tuple{'s' if len(compared) > 1 else ''}, measured on {where}."
    others = sorted(cards - places)
    if others:
        where = others[0] if len(others) == 1 else f"{len(others)} other cards"
        note += (
            f" No canary was measured on {where}, so the intervals do not include that difference."
        )
    return Systematic({"time": time, "energy": energy}, note)


def _spread(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return max(abs(value - mean) for value in values) / mean if mean else 0.0


# ---- the tuples of the sum


def cost_lines(parts: Iterable[Part], measured: Iterable[MeasuredPart]) -> tuple[CostLine, ...]:
    """Return all tuples, those with a reading with the figures that the sum uses; the most
    expensive first.
    """
    lines = [_measured_line(entry) for entry in measured]
    for part in parts:
        if part.reading is None:
            lines.append(
                CostLine(
                    part.subject, part.count, "missing", reason=part.reason, card_id=part.card_id
                )
            )
    return tuple(sorted(lines, key=lambda line: -line.total_us))


def _measured_line(entry: MeasuredPart) -> CostLine:
    part, reading, cost = entry.part, entry.reading, entry.cost
    return CostLine(
        part.subject,
        part.count,
        origin="reused" if part.reused else "measured",
        time_us=cost.time_us,
        energy_mj=cost.energy_mj,
        flags=reading.flags,
        reading_id=reading.reading_id,
        card_id=part.card_id,
        used=cost.used,
        context_us=cost.context_us,
        bus=_bus(reading.details.cards),
    )


def _bus(cards: SeveralCards) -> str:
    """Text about a collective: its bus bandwidth, and how much of it a matrix product hides; "" for
    other operators.
    """
    texts = []
    bus, link, overlap = cards.bus_bytes_per_s, cards.link_bytes_per_s, cards.overlap
    if bus:
        share = f" ({percent(bus / link)} of the link)" if link else ""
        texts.append(f"bus {count_of(bus, 'B/s')}{share}")
    if overlap is not None:
        texts.append(f"{quantity(overlap.exposed_us, TIME)} exposed")
        texts.append(f"{quantity(overlap.hidden_us, TIME)} hidden")
    return ", ".join(texts)


def _unmeasured(parts: Sequence[Part]) -> tuple[Unmeasured, ...]:
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


def _adjustments(measured: Iterable[MeasuredPart]) -> tuple[Adjustment, ...]:
    adjustments = []
    for entry in measured:
        cost, reading = entry.cost, entry.reading
        if cost.used == "steady" and not cost.why:
            continue
        time_us = cost.time_us.value - cost.context_us - reading.time_us.value
        energy_mj = None
        if cost.energy_mj and reading.energy_mj:
            added_mj = cost.energy_mj.value - cost.context_mj - reading.energy_mj.value
            energy_mj = entry.count * added_mj
        adjustments.append(
            Adjustment(
                operator_id=entry.part.subject.operator_id,
                label=entry.part.subject.label,
                count=entry.count,
                used=cost.used,
                why=cost.why,
                effect_time_us=entry.count * time_us,
                effect_energy_mj=energy_mj,
            )
        )
    return tuple(sorted(adjustments, key=lambda entry: -abs(entry.effect_time_us)))


def _collectives_alone_us(
    measured: Iterable[MeasuredPart], wholes: Iterable[ReadingView]
) -> float | None:
    """The time of all collectives in loops; None unless the sum has what they add to a pass
    instead.
    """
    if not any(whole.details.order.added for whole in wholes):
        return None
    times_us = []
    for entry in measured:
        if entry.part.subject.short_name in COLLECTIVES:
            times_us.append(entry.count * entry.reading.time_us.value)
    return math.fsum(times_us)


# ---- the share of a model that is measured


def coverage_of(parts: Iterable[Part]) -> float | None:
    """Return the measured share of the estimated cost; None if the estimated cost is 0."""
    return _share(parts, lambda part: part.reading is not None)


def _share(parts: Iterable[Part], counts: Callable[[Part], bool]) -> float | None:
    weights_us, counted_us = [], []
    for part in parts:
        weights_us.append(part.weight_us)
        if counts(part):
            counted_us.append(part.weight_us)
    total_us = math.fsum(weights_us)
    return math.fsum(counted_us) / total_us if total_us else None


def next_operators(
    parts: Sequence[Part], significant: set[str], *, target: float = 0.95
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
