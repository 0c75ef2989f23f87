"""Remarks on the figures of a report, in sentences, for a terminal and a page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from farm.types.format import ENERGY, TIME, interval, percent, plural, quantity, span

if TYPE_CHECKING:
    from farm.report.breakdowns import AllLayers
    from farm.report.report import Report
    from farm.types.reading import InModelTimes
    from farm.verdict.verdict import Adjustment, KernelAudit, Verdict

_MOST_EAGERLY = 4


def remarks(report: Report) -> Iterator[tuple[str, str]]:
    """The subject of each remark, which `farm help` explains, and its text."""
    verdict = report.verdict
    if report.kind == "model":
        if verdict.parts:
            tuples = f"{verdict.measured} of {verdict.parts} tuples"
            yield "coverage", f"{percent(verdict.coverage)} of the estimated cost; {tuples}"
        yield "intervals", f"95 %. {_systematic(verdict)}"
    if tokens := str(report.per_token):
        yield "tokens", tokens
    if report.all_layers is not None:
        yield "all layers", _all_layers(report.all_layers)
    if adjusted := [entry for entry in verdict.adjustments if entry.used != "steady"]:
        yield "power limit", _power_limit(adjusted)
    if verdict.context_time_us is not None:
        yield "neighbours", _neighbours(verdict)
    if verdict.launch_gap_us is not None:
        more = "longer" if verdict.launch_gap_us >= 0 else "shorter"
        yield "launch gap", f"{quantity(abs(verdict.launch_gap_us), TIME)} {more} if launched eagerly"
    if report.capture_origin:
        yield "operators", _capture(report)
    if report.eagerly:
        yield "eagerly", _eagerly(report)
    if verdict.kernels:
        yield "kernels", _kernels(verdict.kernels, verdict.launch)
    if timed := report.verification.in_model:
        yield "in model", _in_model(timed, report.verification.read_at_s)
    if empty := sum("zeros-100" in row.data.partition("/")[2].split(",") for row in report.tuples):
        tuples = f"{empty} {plural('tuple', empty)} measured with zeros only, as in the model (empty caches)"
        yield "data", f"{tuples}: other values take more energy"
    if verdict.flags:
        yield "flags", ", ".join(f"{name} ×{number}" for name, number in verdict.flags.items())


def _all_layers(found: AllLayers) -> str:
    """The sum for the complete model, for which there is no whole."""
    text = f"no readings for any of the {found.layers} layers"
    if found.time:
        sums = [interval(found.time, TIME), *([interval(found.energy, ENERGY)] if found.energy else [])]
        text = f"sum over all {found.layers} layers {', '.join(sums)}; not compared with a whole"
    if each := str(found.per_token):
        text += f"; {each}"
    if found.lacking:
        number, share = found.tuples - found.covered_tuples, percent(1 - found.coverage)
        text += f"; without {number} of {found.tuples} tuples ({share} of the estimated cost) that have no reading: "
        text += f"{found.lacking[0].label}{', ...' if number > 1 else ''}"
    return text


def _power_limit(adjusted: Sequence[Adjustment]) -> str:
    """The figures that the sum takes for tuples that hit the power limit in a loop."""
    figures = {"burst": "burst figures", "interpolated": "figures between steady and burst, by the whole's clock,"}
    numbers = Counter[str](entry.used for entry in adjusted)
    used = [
        f"{text} for {numbers[name]} {plural('tuple', numbers[name])}"
        for name, text in figures.items()
        if numbers[name]
    ]
    time_us = sum(entry.effect_time_us for entry in adjusted)
    return f"{', '.join(used)} instead of steady figures: {time_us:+z.1f} µs on the sum"


def _neighbours(verdict: Verdict) -> str:
    """The effect of the neighbouring operators on the sum."""
    added_us = verdict.context_time_us or 0.0
    share = added_us / (verdict.time.total.value - added_us)
    weights = "the share of the weights that stays in the cache is unknown"
    if verdict.weights_in_cache is not None:
        weights = f"{percent(verdict.weights_in_cache)} of the weights stay in the cache"
    return f"effect of the operators around each tuple: {share * 100:+z.1f} % on the looped sum; {weights}"


def _systematic(verdict: Verdict) -> str:
    if not verdict.systematic_time and not verdict.systematic_energy:
        return verdict.systematic_note
    spread = f"time by {percent(verdict.systematic_time, 2)}"
    if verdict.energy:
        spread += f", energy by {percent(verdict.systematic_energy, 2)}"
    return f"Added linearly: {spread} ({verdict.systematic_note.rstrip('.')})."


def _capture(report: Report) -> str:
    found, origin = report.verification, report.capture_origin
    if found.matches is None:
        return f"{origin}; not compared with a run on the card"
    if (observed := found.launch or "eager") != report.verdict.launch:
        why = f" ({found.not_captured})" if found.not_captured else ""
        return f"{origin}; compared with an {observed} pass, not with the measured run{why}"
    if found.matches:
        return f"{origin}; the same as in an unobserved run on the card"
    differences = found.differences or ()
    number = len(differences) if found.difference_count is None else found.difference_count
    first = f", the first: {differences[0]}" if differences else ""
    return f"{origin}; {number} {plural('difference', number)} between prediction and card{first}"


def _eagerly(report: Report) -> str:
    """The operators that differ in an eager pass, with the cost of each."""
    changes = []
    for row in report.eagerly[:_MOST_EAGERLY]:
        each = f" of {quantity(row.time_us, TIME)}" if row.time_us is not None else ""
        changes.append(f"{row.launched} {row.label}{each} instead of {row.eager}")
    left = len(report.eagerly) - len(changes)
    more = f"; {left} more" if left > 0 else ""
    return f"in a graph this model runs other operators than eagerly: {'; '.join(changes)}{more}"


def _kernels(audit: KernelAudit, launch: str) -> str:
    text = [f"those of the tuples account for {percent(audit.explained)} of the whole's kernel time"]
    for kernels, number, what in (
        (audit.only_whole, audit.only_whole_count, "only in the whole"),
        (audit.only_tuples, audit.only_tuples_count, "only in the tuples"),
        (audit.other_counts, audit.other_counts_count, "launched more or less often"),
    ):
        if number:
            text.append(f"{number} {what} ({_kernel_name(kernels[0].name)}{', ...' if number > 1 else ''})")
    if audit.unknown_tuples:
        text.append(f"{audit.unknown_tuples} {plural('tuple', audit.unknown_tuples)} not observed")
    if audit.launch != launch:
        text.append(f"of an {audit.launch} pass, not of the measured run")
    return "; ".join(text) if len(text) > 1 else f"{text[0]}; the same kernels, equally often"


def _kernel_name(name: str, most: int = 48) -> str:
    """A kernel's name without return type and template arguments."""
    short = name.removeprefix("void ").split("<")[0].split("(")[0].strip() or name
    return short if len(short) <= most else short[: most - 1] + "…"


def _in_model(timed: InModelTimes, read_at_s: float | None) -> str:
    passes = f"median of {timed.passes} passes"
    if read_at_s is not None:
        passes += f", measured {span(time.time() - read_at_s)} ago"
    if timed.source != "kernels":
        return f"each call in the running model, by the clock, {passes}"
    share = timed.attributed_share or 0.0
    missing = "" if share >= 0.999 else f"; {percent(1 - share)} of the kernel time belongs to no call"
    return f"the kernels of each call in the running model, without the gaps between them, {passes}{missing}"
