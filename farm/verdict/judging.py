"""What sums and wholes come to against a target: an outcome, and in sentences why it is no pass and what limits it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from farm.verdict.audit import KernelAudit
from farm.verdict.figures import Whole
from farm.verdict.verdict import Comparison, Outcome

#: Flags of readings that were not left alone -> what happened to them.
DISTURBED = {"busy_host": "Other programs used the CPU", "shared": "Other processes computed on the card"}
REPEAT = "Repeat when it is quiet, with --reuse none."
KERNELS_ALIKE = 0.98  # share of the kernel time below which a verdict says that other kernels run
APART = 3.0  # times their intervals: from here on the wholes of two cards contradict each other


@dataclass(frozen=True)
class Sums:
    """What is judged. `wholes` are of the verdict's own launch, with or without a reading."""

    time: Comparison
    energy: Comparison | None  # None: not available for all measured parts
    coverage: float | None
    parts: int
    measured: int
    without_energy: int  # of the measured
    read_alone: int  # of the measured, in loops and not among other operators, where others were read so
    wholes: Sequence[Whole]
    systematic_time: float  # relative
    flags: Mapping[str, int]
    kernels: KernelAudit | None
    asked: Sequence[str]  # the operator types that were asked for by name
    asked_share: float | None  # of the estimated cost, theirs

    @property
    def compared(self) -> tuple[tuple[str, Comparison], ...]:
        """The quantities that have a sum and a whole, time first."""
        both = (("time", self.time), ("energy", self.energy))
        return tuple((name, held) for name, held in both if held and held.accuracy is not None)


@dataclass(frozen=True)
class Judgement:
    """The outcome with its reasons: first why it is no pass, then what limits it.

    `asked_for` and `asked_share` are told only where what was asked for by name cannot reach the target. `held` is False
    where the readings say nothing of the model: the one reason says why, and there is no gap to tell.
    """

    outcome: Outcome
    reasons: tuple[str, ...]
    asked_for: tuple[str, ...] = ()
    asked_share: float | None = None
    held: bool = True


def judge(sums: Sums, target: float) -> Judgement:
    """
    Args:
        target: the least accuracy and coverage of a pass, as a fraction.
    """
    if sums.time.gap is None or not sums.measured:
        return Judgement("none", tuple(_nothing_to_judge(sums)))
    if why := _why_meaningless(sums, 1 - target):
        return Judgement("none", (why,), held=False)
    if sums.asked and sums.asked_share is not None and sums.asked_share < target:
        few = (
            f"Only {', '.join(sums.asked)} {'was' if len(sums.asked) == 1 else 'were'} asked for: "
            f"{_percent(sums.asked_share)} of the estimated cost, where a verdict needs {_percent(target)}."
        )
        limits = _limits(sums, target, judged=False)
        return Judgement("none", (few, *limits), tuple(sums.asked), sums.asked_share)
    shortfalls = tuple(_shortfalls(sums, target))
    return Judgement("fail" if shortfalls else "pass", (*shortfalls, *_limits(sums, target)))


def _nothing_to_judge(sums: Sums) -> Iterator[str]:
    if not sums.wholes:
        yield "There is no whole to hold the sum against."
    elif sums.time.gap is None:
        failures = "; ".join(sorted({f"{whole.card_id}: {whole.reason or 'not measured'}" for whole in sums.wholes}))
        yield f"The whole model was not measured ({failures})."
    if sums.parts and not sums.measured:
        yield "None of the operators was measured."


def _shortfalls(sums: Sums, target: float) -> Iterator[str]:
    """What keeps a verdict from passing."""
    for name, held in sums.compared:
        if held.gap is not None and held.accuracy is not None and held.accuracy < target:
            off, allowed = f"{held.gap.value * 100:+.1f} %", _percent(1 - target)
            yield f"The sum's {name} is {off} off the whole; {allowed} is allowed."
    if sums.coverage is None or sums.coverage < target:
        yield f"The coverage is {_percent(sums.coverage or 0)}; {_percent(target)} is asked for."


def _limits(sums: Sums, target: float, *, judged: bool = True) -> Iterator[str]:
    """What limits a verdict, whatever its outcome.

    Args:
        judged: False where gaps decide nothing, because too little was asked for.
    """
    yield from _unsettled(sums)
    if judged:
        for name, held in sums.compared:
            yield from _unsure(name, held, 1 - target)
    if len(sums.compared) == 1:
        blind = sums.without_energy
        without = f" for {blind} of {sums.measured} tuples" if 0 < blind < sums.measured else ""
        rests = "; the verdict rests on time and coverage alone" if judged else ""
        yield f"Energy is not available{without}{rests}."
    if sums.kernels and sums.kernels.explained < KERNELS_ALIKE:
        yield (
            f"Of the whole's kernel time the tuples' kernels account for {_percent(sums.kernels.explained)}: "
            "in the model other kernels run."
        )
    if sums.read_alone:
        yield f"{sums.read_alone} of {sums.measured} tuples were read in loops alone, not among other operators."
    if missing := [f"{whole.card_id} ({whole.reason or 'no reading'})" for whole in sums.wholes if not whole.reading]:
        yield f"The whole was not measured on {', '.join(missing)}."
    yield from _contradicted(sums, target)


def _why_meaningless(sums: Sums, allowed: float) -> str:
    """Why the readings say nothing of the model, "" where they do.

    Most of them, or a whole, were not left alone; or they did not converge and leave sum or whole more unsure than a gap
    may be. How large the gap is decides nothing: it is what is in doubt.
    """
    for flag, what in DISTURBED.items():
        if which := _mostly(sums, flag):
            return f"{what} during {which}, which says nothing of the model then. {REPEAT}"
    pairs = [(held.total, held.whole) for _, held in sums.compared if held.whole]
    unsure = max((math.hypot(total.relative, whole.relative) for total, whole in pairs), default=0.0)
    if unsure > allowed and (told := next(_unsettled(sums), "")):
        return f"{told} The gap would be known to ± {_percent(unsure)} only."
    return ""


def _unsettled(sums: Sums) -> Iterator[str]:
    """Whether most readings, or a whole, ended at the ceiling: then the figures say more of the moment than of the model."""
    if which := _mostly(sums, "not_converged"):
        why = "other programs used this card or CPU, or windows were short"
        yield f"{which[0].upper()}{which[1:]} did not converge: {why}. {REPEAT}"


def _mostly(sums: Sums, flag: str) -> str:
    """Which readings have a flag, where most have it or a whole does; else ""."""
    of_wholes = [whole.reading for whole in sums.wholes if whole.reading]
    total, flagged = sums.measured + len(of_wholes), sums.flags.get(flag, 0)
    if 2 * flagged > total:
        return f"{flagged} of {total} readings"
    return "the whole model's reading" if any(flag in reading.flags for reading in of_wholes) else ""


def _unsure(name: str, held: Comparison, allowed: float) -> Iterator[str]:
    """Whether a gap's interval leaves open on which side of the limit it is, or more than that."""
    if (gap := held.gap) is None:
        return
    if gap.half_width > max(allowed, abs(gap.value)):
        whole = held.whole.value if held.whole else math.inf
        why = (
            "Most of that is what neighbours in a model change, or the power limit: longer windows do not narrow it."
            if held.common / whole > gap.half_width / 2
            else "Longer windows or a quieter card tell more."
        )
        yield f"The {name} gap is known to ± {_percent(gap.half_width)} only. {why}"
    elif abs(abs(gap.value) - allowed) < gap.half_width:
        yield f"The {name} gap is within its interval (± {_percent(gap.half_width)}) of the limit."


def _contradicted(sums: Sums, target: float) -> Iterator[str]:
    """Two cards whose wholes no interval explains, and which are further apart than the gap may be wide."""
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
