"""What is to be known of a report's figures, in sentences: at a terminal and on a page alike."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from farm.types.format import ENERGY, TIME, interval, percent, plural, quantity, span
from farm.types.value_profiles import holds_nothing

if TYPE_CHECKING:
    from farm.report.breakdowns import AllLayers
    from farm.report.report import Report
    from farm.types.reading import InModelTimes
    from farm.verdict.audit import KernelAudit
    from farm.verdict.verdict import Adjustment, Verdict

_MOST_EAGERLY = 4


def remarks(report: Report) -> Iterator[tuple[str, str]]:
    """What each is about, in a word or two that `farm help` knows, and what is said of it."""
    verdict = report.verdict
    if verdict.parts and report.kind == "model":
        measured = f"{percent(verdict.coverage)} of the estimated cost; {verdict.measured} of {verdict.parts} tuples"
        yield "coverage", measured
    if report.kind == "model":
        yield "intervals", f"95 %. {_systematic(verdict)}"
    if told := str(report.per_token):
        yield "tokens", told
    if report.all_layers is not None:
        yield "all layers", _all_layers(report.all_layers)
    if taken := [entry for entry in verdict.adjustments if entry.used != "steady"]:
        yield "power limit", _power_limit(taken)
    if verdict.context_time_us is not None:
        yield "neighbours", _neighbours(verdict)
    if verdict.launch_gap_us is not None:
        more = "more" if verdict.launch_gap_us >= 0 else "less"
        yield "launch gap", f"{quantity(abs(verdict.launch_gap_us), TIME)} {more} when launched eagerly"
    if report.capture_origin:
        yield "operators", _capture(report)
    if report.eagerly:
        yield "eagerly", _eagerly(report)
    if verdict.kernels:
        yield "kernels", _kernels(verdict.kernels, verdict.launch)
    if timed := report.verification.in_model:
        yield "in model", _in_model(timed, report.verification.read_at_s)
    if empty := sum(holds_nothing(row.data) for row in report.tuples):
        told = (
            f"{empty} {plural('tuple', empty)} read with buffers of zeros alone, as the model has them (empty caches)"
        )
        yield "data", f"{told}: filled ones take more energy"
    if verdict.flags:
        yield "flags", ", ".join(f"{name} ×{number}" for name, number in verdict.flags.items())


def _all_layers(found: AllLayers) -> str:
    """The sum for the whole model, which no whole is there for."""
    sums = [interval(found.time, TIME), *([interval(found.energy, ENERGY)] if found.energy else [])]
    told = f"all {found.layers} come to {', '.join(sums)}" if found.time else f"no reading is of all {found.layers}"
    told += "; not held against a whole"
    if each := str(found.per_token):
        told += f"; {each}"
    if found.lacking:
        number = found.tuples - found.covered_tuples
        told += f"; without {number} of {found.tuples} tuples ({percent(1 - found.coverage)} of the estimated cost), of which "
        told += f"there is no reading: {found.lacking[0].label}{', ...' if number > 1 else ''}"
    return told


def _power_limit(taken: Sequence[Adjustment]) -> str:
    """What the sum takes of tuples that hit the power limit when they are looped."""
    ways = {"burst": "as in bursts", "interpolated": "between steady and in bursts, by the whole's clock"}
    told = []
    for used, way in ways.items():
        if number := sum(entry.used == used for entry in taken):
            told.append(f"{number} {plural('tuple', number)} taken {way}")
    time_us = sum(entry.effect_time_us for entry in taken)
    return f"{', '.join(told)}, not steady: {time_us:+z.1f} µs on the sum"


def _neighbours(verdict: Verdict) -> str:
    """What the sum holds because its operators stand among others."""
    added_us = verdict.context_time_us or 0.0
    share = added_us / (verdict.time.total.value - added_us)
    weights = "what stays in the cache is not known"
    if verdict.weights_in_cache is not None:
        weights = f"{percent(verdict.weights_in_cache)} of the weights stay in the cache"
    return f"what the operators around them change: {share * 100:+z.1f} % on the looped sum; {weights}"


def _systematic(verdict: Verdict) -> str:
    if not verdict.systematic_time and not verdict.systematic_energy:
        return verdict.systematic_note
    spread = f"time by {percent(verdict.systematic_time, 2)}"
    if verdict.energy:
        spread += f", energy by {percent(verdict.systematic_energy, 2)}"
    return f"Added linearly: {spread} ({verdict.systematic_note.rstrip('.')})."


def _capture(report: Report) -> str:
    found = report.verification
    if found.matches is None:
        return f"{report.capture_origin}; not held against a run on the card"
    if (looked_at := found.launch or "eager") != report.verdict.launch:
        why = f" ({found.not_captured})" if found.not_captured else ""
        return f"{report.capture_origin}; held against an {looked_at} pass, not against the run that was measured{why}"
    if found.matches:
        return f"{report.capture_origin}; an unobserved run on the card has the same"
    differences = found.differences or ()
    number = len(differences) if found.difference_count is None else found.difference_count
    first = f", the first: {differences[0]}" if differences else ""
    return f"{report.capture_origin}; {number} {plural('difference', number)} between prediction and card{first}"


def _eagerly(report: Report) -> str:
    """Which operators an eager pass has otherwise, and what each costs."""
    told = []
    for row in report.eagerly[:_MOST_EAGERLY]:
        each = f" of {quantity(row.time_us, TIME)}" if row.time_us is not None else ""
        told.append(f"{row.launched} {row.label}{each} instead of {row.eager}")
    rest = len(report.eagerly) - len(told)
    more = f"; {rest} more" if rest > 0 else ""
    return f"in a graph this model runs other operators than eagerly: {'; '.join(told)}{more}"


def _kernels(audit: KernelAudit, launch: str) -> str:
    told = [f"those of the tuples account for {percent(audit.explained)} of the whole's kernel time"]
    for kernels, number, what in (
        (audit.only_whole, audit.only_whole_count, "only in the whole"),
        (audit.only_tuples, audit.only_tuples_count, "only in the tuples"),
        (audit.other_counts, audit.other_counts_count, "launched more or less often"),
    ):
        if number:
            told.append(f"{number} {what} ({_kernel_name(kernels[0].name)}{', ...' if number > 1 else ''})")
    if audit.unknown_tuples:
        told.append(f"{audit.unknown_tuples} {plural('tuple', audit.unknown_tuples)} not looked at")
    if audit.launch != launch:
        told.append(f"of an {audit.launch} pass, not of the run that was measured")
    return "; ".join(told) if len(told) > 1 else f"{told[0]}; the same, as often"


def _kernel_name(name: str, most: int = 48) -> str:
    """The part that a person knows a kernel by: no return type, no template arguments."""
    short = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    return short if len(short) <= most else short[: most - 1] + "…"


def _in_model(timed: InModelTimes, read_at_s: float | None) -> str:
    passes = f"median of {timed.passes} passes"
    if read_at_s is not None:
        passes += f", read {span(time.time() - read_at_s)} ago"
    if timed.source != "kernels":
        return f"each call by the clock where it stands, {passes}"
    share = timed.attributed_share or 0.0
    missing = "" if share >= 0.999 else f"; {percent(1 - share)} of the kernel time belongs to no call"
    return f"the kernels of each call where it stands, without the gaps between them, {passes}{missing}"
