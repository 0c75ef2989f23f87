"""Compares a verdict with its target: decides the outcome and writes sentences that say what limits
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from farm.types.figure import Figure
from farm.types.format import percent
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
APART = 3.0  # two cards' wholes contradict each other from this multiple of their intervals


@dataclass(frozen=True)
class Circumstances:
    """The inputs of the judgement that are not in the verdict."""

    without_energy: int  # number of measured parts without energy
    looped_alone: (
        int  # measured parts without a measurement among other operators, if others have one
    )
    requested: Sequence[str]  # the operator types that were requested by name
    requested_share: float | None  # their share of the estimated cost


def judge(found: Verdict, about: Circumstances) -> Verdict:
    """Return the verdict with its outcome and reasons: first why it does not pass, then what limits
    it.

    `asked_for` and `asked_share` are set only if the operator types requested by name cannot reach
    the target. If the readings do not represent the model, there is one reason, which says why, and
    the comparisons have no gap."""
    if found.time.gap is None or not found.measured:
        return replace(found, reasons=tuple(_nothing_to_judge(found)))
    if why := _why_meaningless(found):
        names = ("time", "energy", "energy_above_idle", "power")
        pairs = {name: getattr(found, name) for name in names}
        without_gap = {name: pair and replace(pair, held=False) for name, pair in pairs.items()}
        return replace(found, reasons=(why,), **without_gap)
    share, requested = about.requested_share, tuple(about.requested)
    if requested and share is not None and share < found.target:
        few = (
            f"Only {', '.join(requested)} {'was' if len(requested) == 1 else 'were'} requested, "
            "with "
            f"{percent(share)} of the model's estimated cost; a verdict needs "
            f"{percent(found.target)}."
        )
        reasons = (few, *_limits(found, about, judged=False))
        return replace(found, reasons=reasons, asked_for=requested, asked_share=share)
    shortfalls = tuple(_shortfalls(found))
    outcome: Outcome = "fail" if shortfalls else "pass"
    return replace(found, outcome=outcome, reasons=(*shortfalls, *_limits(found, about)))


def _compared(found: Verdict) -> list[tuple[str, Comparison, Figure]]:
    """Return (name, comparison, gap) of the quantities that have a gap, time first."""
    both = (("time", found.time), ("energy", found.energy))
    return [(name, pair, pair.gap) for name, pair in both if pair and pair.gap]


def _wholes(found: Verdict) -> list[Whole]:
    """Return the wholes that were measured with the launch of the verdict."""
    return [whole for whole in found.wholes if whole.launch in ("", found.launch)]


def _readings(found: Verdict) -> list[ReadingView]:
    return [whole.reading for whole in _wholes(found) if whole.reading]


def _nothing_to_judge(found: Verdict) -> Iterator[str]:
    wholes = _wholes(found)
    if not wholes:
        yield "There is no reading of the whole model to compare the sum with."
    elif found.time.gap is None:
        failures = "; ".join(
            sorted({f"{whole.card_id}: {whole.short_reason or 'not measured'}" for whole in wholes})
        )
        yield f"The whole model was not measured ({failures})."
    if found.parts and not found.measured:
        yield "None of the operators was measured."


def _shortfalls(found: Verdict) -> Iterator[str]:
    """Yield the reasons why a verdict does not pass."""
    for name, _, gap in _compared(found):
        if 1 - abs(gap.value) < found.target:
            differs, allowed = f"differs by {gap.value * 100:+.1f} %", percent(1 - found.target)
            yield f"The {name} of the sum {differs} from the whole model; {allowed} is allowed."
    if found.coverage is None or found.coverage < found.target:
        coverage = percent(found.coverage or 0)
        yield f"The coverage is {coverage}; {percent(found.target)} is required."


def _limits(found: Verdict, about: Circumstances, *, judged: bool = True) -> Iterator[str]:
    """Yield sentences that say what limits a verdict, for every outcome. Not `judged`: the gaps do
    not affect the outcome, because too few types were requested."""
    compared = _compared(found)
    # The interval of a gap from turns includes what disturbed the single readings.
    if not any(
        pair.paired is not None and gap.half_width <= 1 - found.target for _, pair, gap in compared
    ):
        yield from _not_converged(found)
    if judged:
        for name, pair, gap in compared:
            yield from _uncertain(name, pair, gap, 1 - found.target)
    if len(compared) == 1:
        number = about.without_energy
        without = f" for {number} of {found.measured} tuples" if 0 < number < found.measured else ""
        rests = "; the verdict uses time and coverage only" if judged else ""
        yield f"Energy is not available{without}{rests}."
    if found.kernels and found.kernels.explained < KERNELS_ALIKE:
        yield (
            f"The kernels of the tuples account for {percent(found.kernels.explained)} of the "
            "whole model's kernel "
            "time: the whole model also runs other kernels."
        )
    if about.looped_alone:
        yield (
            f"{about.looped_alone} of {found.measured} tuples were measured in loops only, "
            "not among other operators."
        )
    missing = [
        f"{whole.card_id} ({whole.short_reason or 'no reading'})"
        for whole in _wholes(found)
        if not whole.reading
    ]
    if missing:
        yield f"The whole model was not measured on {', '.join(missing)}."
    yield from _contradicting_wholes(found)


def _why_meaningless(found: Verdict) -> str:
    """Say why the readings do not represent the model; "" if they do.

    Either most readings, or a whole, were disturbed; or they did not converge, and the half-width
    of the sum or whole exceeds the allowed gap (the reason names the less precise side). The size
    of the gap itself is not considered, because it is uncertain."""
    for flag, what in DISTURBED.items():
        if which := _mostly(found, flag):
            return f"{what} during {which}, so no gap is shown. {REPEAT}"
    wide = [(gap.half_width / ((1 + gap.value) or 1.0), pair) for _, pair, gap in _compared(found)]
    uncertainty, pair = max(wide, key=lambda one: one[0], default=(0.0, None))
    if uncertainty > 1 - found.target and (why := next(_not_converged(found, pair), "")):
        return f"{why} The gap would be uncertain by ± {percent(uncertainty)}."
    return ""


def _not_converged(found: Verdict, of: Comparison | None = None) -> Iterator[str]:
    """Report that most readings, or a whole, ended at the time limit. `of`: only those of its less
    precise side.
    """
    if (which := _mostly(found, flag := "not_converged")) and of and of.whole and of.paired is None:
        wholes = sum(flag in reading.flags for reading in _readings(found))
        tuples = found.flags[flag] - wholes
        which = f"{tuples} of {found.measured} tuples" if tuples else ""
        if of.total.relative < of.whole.relative:
            which = "the whole model's reading" if wholes else ""
    if which:
        why = "other programs used this card or CPU, or the windows were too short"
        yield f"{which[0].upper()}{which[1:]} did not converge: {why}. {REPEAT}"


def _mostly(found: Verdict, flag: str) -> str:
    """Return text about the readings with a flag, if most readings or a whole have it; else ""."""
    readings = _readings(found)
    total, flagged = found.measured + len(readings), found.flags.get(flag, 0)
    if 2 * flagged > total:
        return f"{flagged} of {total} readings"
    return "the whole model's reading" if any(flag in reading.flags for reading in readings) else ""


def _uncertain(name: str, pair: Comparison, gap: Figure, allowed: float) -> Iterator[str]:
    """Report a gap if its interval is wider than the limit or contains the limit."""
    if gap.half_width > max(allowed, abs(gap.value)):
        whole = pair.whole.value if pair.whole else math.inf
        why = (
            "Most of this comes from the neighbouring operators or the power limit, or differs "
            "between processes: "
            "longer windows do not reduce it."
            if math.hypot(pair.common / whole, pair.between) > gap.half_width / 2
            else "Longer windows or an idle card reduce it (option --window)."
        )
        yield f"The {name} gap is uncertain by ± {percent(gap.half_width)}. {why}"
    elif abs(abs(gap.value) - allowed) < gap.half_width:
        yield (
            f"The limit lies inside the interval of the {name} gap (± {percent(gap.half_width)}): "
            "a repetition may "
            "have another outcome."
        )


def _contradicting_wholes(found: Verdict) -> Iterator[str]:
    """Report two cards if their wholes differ by more than their intervals, and by more than the
    allowed gap.
    """
    readings = sorted(_readings(found), key=lambda reading: reading.time_us)
    if not readings:
        return
    low, high = readings[0], readings[-1]
    apart_us = high.time_us - low.time_us
    explained_us = (
        math.hypot(low.time_half_width_us, high.time_half_width_us)
        + found.systematic_time * high.time_us
    )
    if low.card_id != high.card_id and apart_us > max(
        APART * explained_us, (1 - found.target) * low.time_us
    ):
        yield (
            f"The measurements of the whole model contradict each other: {low.time_us:.4g} µs on "
            f"{low.card_id}, "
            f"{high.time_us:.4g} µs on {high.card_id}."
        )
