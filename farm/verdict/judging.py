"""Judge sums and wholes against a target: the outcome, and sentences that say what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from farm.verdict.audit import KernelAudit
from farm.verdict.figures import Whole
from farm.verdict.verdict import Comparison, Outcome

#: Flag of a disturbed reading -> what disturbed it.
DISTURBED = {"busy_host": "Other programs used the CPU", "shared": "Other processes computed on the card"}
REPEAT = "Repeat when it is idle, with --reuse none."
KERNELS_ALIKE = 0.98  # share of the kernel time below which a verdict says that other kernels run
APART = 3.0  # times their intervals: from this distance on, the wholes of two cards contradict each other


@dataclass(frozen=True)
class Sums:
    """What is judged. `wholes` have the launch of the verdict, with or without a reading."""

    time: Comparison
    energy: Comparison | None  # None: not available for all measured parts
    coverage: float | None
    parts: int
    measured: int
    without_energy: int  # of the measured parts
    looped_alone: int  # of the measured parts: not measured among other operators, although other parts were
    wholes: Sequence[Whole]
    systematic_time: float  # relative
    flags: Mapping[str, int]
    kernels: KernelAudit | None
    requested: Sequence[str]  # the operator types that were requested by name
    requested_share: float | None  # their share of the estimated cost

    @property
    def compared(self) -> tuple[tuple[str, Comparison], ...]:
        """The quantities that have a sum and a whole, time first."""
        both = (("time", self.time), ("energy", self.energy))
        return tuple((name, found) for name, found in both if found and found.accuracy is not None)


@dataclass(frozen=True)
class Judgement:
    """The outcome with its reasons: first why it does not pass, then what limits it.

    `asked_for` and `asked_share` are set only if the operator types requested by name cannot reach the target. `held` is
    False if the readings do not represent the model: the only reason says why, and there is no gap.
    """

    outcome: Outcome
    reasons: tuple[str, ...]
    asked_for: tuple[str, ...] = ()
    asked_share: float | None = None
    held: bool = True


def judge(sums: Sums, target: float) -> Judgement:
    """Judge the sums.

    Args:
        target: the least accuracy and coverage of a pass, as a fraction.
    """
    if sums.time.gap is None or not sums.measured:
        return Judgement("none", tuple(_nothing_to_judge(sums)))
    if why := _why_meaningless(sums, 1 - target):
        return Judgement("none", (why,), held=False)
    if sums.requested and sums.requested_share is not None and sums.requested_share < target:
        few = (
            f"Only {', '.join(sums.requested)} {'was' if len(sums.requested) == 1 else 'were'} requested: "
            f"{_percent(sums.requested_share)} of the estimated cost; a verdict needs {_percent(target)}."
        )
        limits = _limits(sums, target, judged=False)
        return Judgement("none", (few, *limits), tuple(sums.requested), sums.requested_share)
    shortfalls = tuple(_shortfalls(sums, target))
    return Judgement("fail" if shortfalls else "pass", (*shortfalls, *_limits(sums, target)))


def _nothing_to_judge(sums: Sums) -> Iterator[str]:
    if not sums.wholes:
        yield "There is no reading of the whole model to compare the sum with."
    elif sums.time.gap is None:
        failures = "; ".join(sorted({f"{whole.card_id}: {whole.reason or 'not measured'}" for whole in sums.wholes}))
        yield f"The whole model was not measured ({failures})."
    if sums.parts and not sums.measured:
        yield "None of the operators was measured."


def _shortfalls(sums: Sums, target: float) -> Iterator[str]:
    """The reasons why a verdict does not pass."""
    for name, found in sums.compared:
        if found.gap is not None and found.accuracy is not None and found.accuracy < target:
            off, allowed = f"{found.gap.value * 100:+.1f} %", _percent(1 - target)
            yield f"The {name} of the sum is {off} off the whole; {allowed} is allowed."
    if sums.coverage is None or sums.coverage < target:
        yield f"The coverage is {_percent(sums.coverage or 0)}; {_percent(target)} is required."


def _limits(sums: Sums, target: float, *, judged: bool = True) -> Iterator[str]:
    """What limits a verdict, for every outcome.

    Args:
        judged: False if the gaps decide nothing, because too little was requested.
    """
    yield from _not_converged(sums)
    if judged:
        for name, found in sums.compared:
            yield from _uncertain(name, found, 1 - target)
    if len(sums.compared) == 1:
        number = sums.without_energy
        without = f" for {number} of {sums.measured} tuples" if 0 < number < sums.measured else ""
        rests = "; the verdict uses time and coverage only" if judged else ""
        yield f"Energy is not available{without}{rests}."
    if sums.kernels and sums.kernels.explained < KERNELS_ALIKE:
        yield (
            f"The kernels of the tuples account for {_percent(sums.kernels.explained)} of the whole's kernel time: "
            "the model runs other kernels."
        )
    if sums.looped_alone:
        yield f"{sums.looped_alone} of {sums.measured} tuples were measured in loops only, not among other operators."
    if missing := [f"{whole.card_id} ({whole.reason or 'no reading'})" for whole in sums.wholes if not whole.reading]:
        yield f"The whole was not measured on {', '.join(missing)}."
    yield from _contradicting_wholes(sums, target)


def _why_meaningless(sums: Sums, allowed: float) -> str:
    """Why the readings do not represent the model; "" if they do.

    Either most of them, or a whole, were disturbed; or they did not converge, so that sum or whole are less certain than a
    gap may be wide. The size of the gap decides nothing, because the gap is what is in doubt.
    """
    for flag, what in DISTURBED.items():
        if which := _mostly(sums, flag):
            return f"{what} during {which}; the gap would not describe the model. {REPEAT}"
    pairs = [(found.total, found.whole) for _, found in sums.compared if found.whole]
    uncertainty = max((math.hypot(total.relative, whole.relative) for total, whole in pairs), default=0.0)
    if uncertainty > allowed and (why := next(_not_converged(sums), "")):
        return f"{why} The gap would be known to ± {_percent(uncertainty)} only."
    return ""


def _not_converged(sums: Sums) -> Iterator[str]:
    """Report that most readings, or a whole, ended at the time limit."""
    if which := _mostly(sums, "not_converged"):
        why = "other programs used this card or CPU, or windows were short"
        yield f"{which[0].upper()}{which[1:]} did not converge: {why}. {REPEAT}"


def _mostly(sums: Sums, flag: str) -> str:
    """The readings with a flag if most readings or a whole have it; else ""."""
    of_wholes = [whole.reading for whole in sums.wholes if whole.reading]
    total, flagged = sums.measured + len(of_wholes), sums.flags.get(flag, 0)
    if 2 * flagged > total:
        return f"{flagged} of {total} readings"
    return "the whole model's reading" if any(flag in reading.flags for reading in of_wholes) else ""


def _uncertain(name: str, found: Comparison, allowed: float) -> Iterator[str]:
    """Report a gap whose interval is wider than the limit, or contains the limit."""
    if (gap := found.gap) is None:
        return
    if gap.half_width > max(allowed, abs(gap.value)):
        whole = found.whole.value if found.whole else math.inf
        why = (
            "Most of this is the effect of neighbours in a model, or the power limit: longer windows do not narrow it."
            if found.common / whole > gap.half_width / 2
            else "Longer windows or an idle card narrow it."
        )
        yield f"The {name} gap is known to ± {_percent(gap.half_width)} only. {why}"
    elif abs(abs(gap.value) - allowed) < gap.half_width:
        yield f"The {name} gap is within its interval (± {_percent(gap.half_width)}) of the limit."


def _contradicting_wholes(sums: Sums, target: float) -> Iterator[str]:
    """Report two cards whose wholes differ by more than their intervals, and by more than a gap may be wide."""
    readings = sorted((whole.reading for whole in sums.wholes if whole.reading), key=lambda reading: reading.time_us)
    if not readings:
        return
    low, high = readings[0], readings[-1]
    apart_us = high.time_us - low.time_us
    explained_us = math.hypot(low.time_half_width_us, high.time_half_width_us) + sums.systematic_time * high.time_us
    if low.card_id != high.card_id and apart_us > max(APART * explained_us, (1 - target) * low.time_us):
        yield (
            f"The wholes contradict each other: {low.time_us:.4g} µs on {low.card_id}, "
            f"{high.time_us:.4g} µs on {high.card_id}."
        )


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"
