"""Compares a verdict with its target: decides the outcome and writes sentences that say what limits
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from farm.types.card_kind import is_cpu_id
from farm.types.figure import Figure
from farm.types.format import TIME, percent, quantity
from farm.verdict.cost_line import CostLine
from farm.verdict.figures import ReadingView, Whole
from farm.verdict.verdict import Comparison, Outcome, Verdict

#: Flag of a disturbed reading -> the cause, as text.
DISTURBED = {
    "busy_host": "Other programs used the CPU",
    "shared": "Other processes computed on the card",
}
REPEAT = "Run the job again with --reuse none when the machine is idle."
# if tuples explain less of the kernel time, a verdict says that kernels differ
KERNELS_ALIKE = 0.98
# on a CPU, the work around calls that take less in the mean is a part of a pass that counts
SHORT_CALL_US = 100.0
APART = 3.0  # two cards' wholes contradict each other from this multiple of their intervals


def judge(
    verdict: Verdict,
    measured: Sequence[CostLine],
    requested: Sequence[str],
    requested_share: float | None,
) -> Verdict:
    """Return the verdict with its outcome and reasons: first why it does not pass, then what limits
    it.

    Args:
        measured: the lines with a reading.
        requested: the operator types that were requested by name.
        requested_share: their share of the estimated cost.

    `asked_for` and `asked_share` are set only if the operator types requested by name cannot reach
    the target. If the readings do not represent the model, there is one reason, which says why, and
    the comparisons have no gap."""
    if verdict.time.gap is None or not verdict.measured:
        return replace(verdict, reasons=tuple(_nothing_to_judge(verdict)))

    meaningless = _why_meaningless(verdict)
    if meaningless:
        return replace(
            verdict,
            reasons=(meaningless,),
            time=replace(verdict.time, representative=False),
            energy=_without_gap(verdict.energy),
            energy_above_idle=_without_gap(verdict.energy_above_idle),
            power=_without_gap(verdict.power),
        )

    share = requested_share
    if requested and share is not None and share < verdict.target:
        were = "was" if len(requested) == 1 else "were"
        too_few = (
            f"Only {', '.join(requested)} {were} requested, with {percent(share)} of the model's "
            f"estimated cost; a verdict needs {percent(verdict.target)}."
        )
        reasons = (too_few, *_limits(verdict, measured, judged=False))
        return replace(verdict, reasons=reasons, asked_for=tuple(requested), asked_share=share)

    shortfalls = tuple(_shortfalls(verdict, measured))
    outcome: Outcome = "fail" if shortfalls else "pass"
    reasons = (*shortfalls, *_limits(verdict, measured))
    return replace(verdict, outcome=outcome, reasons=reasons)


def _without_gap(comparison: Comparison | None) -> Comparison | None:
    return replace(comparison, representative=False) if comparison else None


def _compared(verdict: Verdict) -> list[tuple[str, Comparison, Figure]]:
    """Return (name, comparison, gap) of the quantities that have a gap, time first."""
    compared = []
    for name, comparison in (("time", verdict.time), ("energy", verdict.energy)):
        if comparison and comparison.gap:
            compared.append((name, comparison, comparison.gap))
    return compared


def _wholes(verdict: Verdict) -> list[Whole]:
    """Return the wholes that were measured with the launch of the verdict."""
    return [whole for whole in verdict.wholes if whole.launch in ("", verdict.launch)]


def _readings(verdict: Verdict) -> list[ReadingView]:
    return [whole.reading for whole in _wholes(verdict) if whole.reading]


def _nothing_to_judge(verdict: Verdict) -> Iterator[str]:
    wholes = _wholes(verdict)
    if not wholes:
        yield "There is no reading of the whole model to compare the sum with."
    elif verdict.time.gap is None:
        failures = {f"{whole.card_id}: {whole.short_reason or 'not measured'}" for whole in wholes}
        yield f"The whole model was not measured ({'; '.join(sorted(failures))})."
    if verdict.parts and not verdict.measured:
        yield "None of the operators was measured."


def _short_calls(verdict: Verdict, measured: Sequence[CostLine], gap: Figure) -> Iterator[str]:
    """Say why the sum of short calls on a CPU differs from the whole model, and what to do."""
    calls = sum(line.count for line in measured)
    mean_us = verdict.time.total.value / calls
    if mean_us > SHORT_CALL_US or not all(is_cpu_id(line.card_id) for line in measured):
        return
    why = "their time depends on what other calls leave in the caches"
    if gap.value < 0:
        why = (
            "views, Python code and, in a step, autograd between the calls belong to the whole "
            "model only"
        )
    yield (
        f"A call takes {quantity(mean_us, TIME)} in the mean: {why}. A larger batch makes the gap "
        "smaller."
    )


def _shortfalls(verdict: Verdict, measured: Sequence[CostLine]) -> Iterator[str]:
    """Yield the reasons why a verdict does not pass."""
    for name, _, gap in _compared(verdict):
        if not verdict.incomplete and 1 - abs(gap.value) < verdict.target:
            differs = f"differs by {gap.value * 100:+z.1f} % from the whole model"
            yield f"The {name} of the sum {differs}; {percent(1 - verdict.target)} is allowed."
            if name == "time":
                yield from _short_calls(verdict, measured, gap)
    if verdict.coverage is None or verdict.coverage < verdict.target:
        coverage = percent(verdict.coverage or 0)
        yield f"The coverage is {coverage}; {percent(verdict.target)} is required."


def _limits(
    verdict: Verdict, measured: Sequence[CostLine], *, judged: bool = True
) -> Iterator[str]:
    """Yield sentences that say what limits a verdict, for every outcome. Not `judged`: the gaps do
    not affect the outcome, because too few types were requested."""
    compared = _compared(verdict)
    allowed = 1 - verdict.target
    # The interval of a gap from turns includes what disturbed the single readings.
    precise_from_turns = any(
        comparison.gap_half_width is not None and gap.half_width <= allowed
        for _, comparison, gap in compared
    )
    if not precise_from_turns:
        yield from _not_converged(verdict)
    if judged and not verdict.incomplete:
        for name, comparison, gap in compared:
            yield from _uncertain(name, comparison, gap, allowed)
    if len(compared) == 1:
        number = sum(line.energy_mj is None for line in measured)
        some = (
            f" for {number} of {verdict.measured} tuples" if 0 < number < verdict.measured else ""
        )
        rests = "; the verdict uses time and coverage only" if judged else ""
        yield f"Energy is not available{some}{rests}."
    if verdict.kernels and verdict.kernels.explained < KERNELS_ALIKE:
        yield (
            f"The kernels of the tuples account for {percent(verdict.kernels.explained)} of the "
            "whole model's kernel time: the whole model also runs other kernels."
        )
    looped_alone = sum(line.measured[0].details.context is None for line in measured)
    if 0 < looped_alone < len(measured):
        yield (
            f"{looped_alone} of {verdict.measured} tuples were measured in loops only, not among "
            "other operators."
        )
    missing = []
    for whole in _wholes(verdict):
        if not whole.reading:
            missing.append(f"{whole.card_id} ({whole.short_reason or 'no reading'})")
    if missing:
        yield f"The whole model was not measured on {', '.join(missing)}."
    yield from _contradicting_wholes(verdict)


def _why_meaningless(verdict: Verdict) -> str:
    """Say why the readings do not represent the model; "" if they do.

    Either most readings, or a whole, were disturbed; or they did not converge, and the half-width
    of the sum or whole exceeds the allowed gap (the reason names the less precise side). The size
    of the gap itself is not considered, because it is uncertain."""
    for flag, cause in DISTURBED.items():
        disturbed = _mostly(verdict, flag)
        if disturbed:
            return f"{cause} during {disturbed}, so no gap is shown. {REPEAT}"

    uncertainty, widest = 0.0, None
    for _, comparison, gap in _compared(verdict):
        relative = gap.half_width / ((1 + gap.value) or 1.0)
        if widest is None or relative > uncertainty:
            uncertainty, widest = relative, comparison
    why = next(_not_converged(verdict, widest), "")
    if uncertainty > 1 - verdict.target and why:
        return f"{why} The gap would be uncertain by ± {percent(uncertainty)}."
    return ""


def _not_converged(verdict: Verdict, of: Comparison | None = None) -> Iterator[str]:
    """Report that most readings, or a whole, ended at the time limit. `of`: only those of its less
    precise side.
    """
    flag = "not_converged"
    readings = _mostly(verdict, flag)
    if readings and of and of.whole and of.gap_half_width is None:
        wholes = sum(flag in reading.flags for reading in _readings(verdict))
        tuples = verdict.flags[flag] - wholes
        readings = f"{tuples} of {verdict.measured} tuples" if tuples else ""
        if of.total.relative < of.whole.relative:
            readings = "the whole model's reading" if wholes else ""
    if readings:
        why = "other programs used this card or CPU, or the windows were too short"
        yield f"{readings[0].upper()}{readings[1:]} did not converge: {why}. {REPEAT}"


def _mostly(verdict: Verdict, flag: str) -> str:
    """Return text about the readings with a flag, if most readings or a whole have it; else ""."""
    readings = _readings(verdict)
    total, flagged = verdict.measured + len(readings), verdict.flags.get(flag, 0)
    if 2 * flagged > total:
        return f"{flagged} of {total} readings"
    return "the whole model's reading" if any(flag in reading.flags for reading in readings) else ""


def _uncertain(name: str, comparison: Comparison, gap: Figure, allowed: float) -> Iterator[str]:
    """Report a gap if its interval is wider than the limit or contains the limit."""
    uncertainty = percent(gap.half_width)
    if gap.half_width > max(allowed, abs(gap.value)):
        whole = comparison.whole.value if comparison.whole else math.inf
        why = "Longer windows or an idle card reduce it (option --window)."
        if math.hypot(comparison.common / whole, comparison.between_jobs) > gap.half_width / 2:
            why = (
                "Most of this comes from the neighbouring operators or the power limit, or differs "
                "between processes: longer windows do not reduce it."
            )
        yield f"The {name} gap is uncertain by ± {uncertainty}. {why}"
    elif abs(abs(gap.value) - allowed) < gap.half_width:
        yield (
            f"The limit lies inside the interval of the {name} gap (± {uncertainty}): a repetition "
            "may have another outcome."
        )


def _contradicting_wholes(verdict: Verdict) -> Iterator[str]:
    """Report two cards if their wholes differ by more than their intervals, and by more than the
    allowed gap.
    """
    readings = sorted(_readings(verdict), key=lambda reading: reading.time_us.value)
    if not readings or readings[0].card_id == readings[-1].card_id:
        return
    low, high = readings[0].time_us, readings[-1].time_us
    scatter_us = math.hypot(low.half_width, high.half_width)
    explained_us = scatter_us + verdict.systematic_time * high.value
    least_us = max(APART * explained_us, (1 - verdict.target) * low.value)
    if high.value - low.value > least_us:
        yield (
            f"The measurements of the whole model contradict each other: {low.value:.4g} µs on "
            f"{readings[0].card_id}, {high.value:.4g} µs on {readings[-1].card_id}."
        )
