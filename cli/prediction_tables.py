"""The tables of `farm estimate` and `farm predict`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from cli.tables import Text, grid, row, ruled
from farm.estimate.estimate import PerToken
from farm.types.format import ENERGY, NOTHING, TIME, Units, interval, percent, plural, quantity, span

if TYPE_CHECKING:
    from farm.estimate.estimate import Estimate, MissingTuple
    from farm.estimate.generation import Generation
    from farm.estimate.next_measurements import MeasurementPlan
    from farm.prediction.calibration import IntervalCoverage
    from farm.prediction.evaluation import Evaluation, Score
    from farm.prediction.stored_predictor import PredictedValue

MOST_MISSING, MOST_PROPOSED = 10, 12  # rows shown
_SHARES = {"measured": "measured", "predicted": "predicted", "unseen_types": "of types without a reading"}

# -- farm estimate


def generation(found: Generation) -> RenderableType:
    """A generated text: the prompt, a decode at each measured length of the cache, and the sum."""
    prompt = found.prefill.variant
    table = ruled("", ">time", ">energy", drops=())
    for one in (found.prefill, *found.decodes):
        energy = one.whole_energy or one.energy
        row(table, str(one.variant), interval(one.whole_time or one.time, TIME), interval(energy, ENERGY))
    table.add_section()
    sums = (interval(found.time, TIME), interval(found.energy, ENERGY))
    row(table, f"{found.tokens} tokens after it", *sums, style="bold")
    per_token = str(PerToken(prompt.batch * found.tokens, found.tokens_per_s, found.energy_per_token_mj))
    return Group(
        Text(f"{prompt}, then {found.tokens} tokens each", style="bold"),
        table,
        Text(f"  {per_token.replace('a pass', 'generated')}"),
        *(Text(f"  {note}") for note in found.notes),
    )


def estimate(found: Estimate) -> RenderableType:
    table = grid(2)
    software = found.software
    lines = {
        "card": found.card_model,
        "software": f"torch {software.torch}, CUDA {software.cuda or NOTHING}, driver {software.driver or NOTHING}",
        "protocol": f"{found.protocol.launch} launch, {found.protocol.residency} data",
        "covered": f"{percent(found.coverage)} of the estimated cost; {found.covered_tuples} of {found.tuples} tuples",
        "time": interval(found.time, TIME),
        "energy": interval(found.energy, ENERGY) if found.energy else "not available",
    }
    if found.whole_time:
        energy = f", {interval(found.whole_energy, ENERGY)}" if found.whole_energy else ""
        lines["whole model"] = f"{interval(found.whole_time, TIME)}{energy}, measured"
    if per_token := str(found.per_token):
        lines["tokens"] = per_token
    if found.predicted_us is not None and found.missing:
        bound = " at least" if found.total_time and found.total_time.low is None else ""
        lines["the rest"] = f"predicted {quantity(found.predicted_us, TIME)}{bound} (model `{found.predictor}`)"
        if not bound:
            totals = (predicted(found.total_time, TIME), predicted(found.total_energy, ENERGY))
            lines["together"] = ", ".join(filter(None, totals))
            shares = (f"{percent(share)} {_SHARES[name]}" for name, share in found.shares.items() if share)
            lines["made of"] = ", ".join(shares)
    if number := len(found.missing):
        card_time = f"measuring takes about {span(found.measuring_rest_s)} of a card"
        lines["missing"] = f"{number} {plural('tuple', number)}; {card_time}"
    if found.other_data_calls:
        lines["data"] = f"{found.other_data_calls} calls in another class of data than in the model"
    if found.flags:
        lines["flags"] = ", ".join(f"{name} ×{number}" for name, number in found.flags.items())
    if foreign := [f"{number} from {name}" for name, number in found.origins.items() if name]:
        lines["readings"] = ", ".join(foreign)
    if found.oldest_at_s:
        lines["age"] = f"the oldest reading is {span(time.time() - found.oldest_at_s)} old"
    for name, value in lines.items():
        row(table, f"  {name}", value)
    notes = [Text(f"  {note}") for note in found.notes]
    parts: list[RenderableType] = [Text(str(found.variant), style="bold"), table, *notes]
    if found.missing:
        extra = ["predicted"] if found.predictor else []
        entries = {entry.operator_id: entry for entry in found.missing}
        head = "without a reading, what would narrow it most first" if found.narrowing else "not covered"
        missing = ruled(head, ">calls", ">of the cost", *(f">{name}" for name in extra), drops=extra)
        for entry in [entries[id_] for id_ in found.narrowing or entries][:MOST_MISSING]:
            values = [predicted_call(entry)] if extra else []
            row(missing, entry.label, str(entry.calls), percent(entry.share), *values)
        parts += [Text(""), missing]
        if (more := len(found.missing) - MOST_MISSING) > 0:
            parts.append(Text(f"  {more} more; --json lists them.", style="dim"))
    return Group(*parts)


def predicted(found: PredictedValue | None, units: Units) -> str:
    """`8.41 ms (7.2 to 9.8)`, with the 90 % interval; "" for None."""
    if found is None:
        return ""
    ends = _ends(found, units)
    return quantity(found.value, units) + (f" ({ends})" if ends != NOTHING else "")


def predicted_call(entry: MissingTuple) -> str:
    """One call, with a mark if its operator type has no reading."""
    if entry.predicted_low_us is None or entry.predicted_high_us is None:
        return quantity(entry.predicted_us, TIME)
    low, high = (quantity(value, TIME) for value in (entry.predicted_low_us, entry.predicted_high_us))
    mark = "" if entry.known else ", type never measured"
    return f"{quantity(entry.predicted_us, TIME)} ({low} to {high}{mark})"


def curve(found: Sequence[Estimate]) -> RenderableType:
    """A row for each size."""
    table = ruled("", ">time", ">90 %", ">energy", ">90 %", ">measured", ">predicted", drops=())
    for one in found:
        time, energy, shares = one.total_time, one.total_energy, one.shares
        row(
            table,
            str(one.variant),
            quantity(time.value if time else one.time.value, TIME),
            _ends(time, TIME),
            quantity(energy.value if energy else one.energy.value if one.energy else None, ENERGY),
            _ends(energy, ENERGY),
            percent(shares["measured"]) if shares else percent(one.coverage),
            percent(1 - shares["measured"]) if shares else NOTHING,
        )
    notes = dict.fromkeys(note for one in found for note in one.notes)
    return Group(Text(f"on {found[0].card_model}", style="bold"), table, *(Text(f"  {note}") for note in notes))


def _ends(found: PredictedValue | None, units: Units) -> str:
    if found is None or found.low is None or found.high is None:
        return NOTHING
    return f"{quantity(found.low, units)} to {quantity(found.high, units)}"


def narrowed(before: Estimate, after: Estimate) -> RenderableType:
    """An estimate before and after some measurements."""
    table = ruled("", ">time", ">energy", ">measured", drops=())
    for name, one in (("before", before), ("with the new readings", after)):
        row(
            table,
            name,
            predicted(one.total_time, TIME) or interval(one.time, TIME),
            predicted(one.total_energy, ENERGY) or interval(one.energy, ENERGY),
            percent(one.shares.get("measured", one.coverage)),
        )
    return Group(table, Text(""))


# -- farm predict


def evaluations(found: Sequence[Evaluation], about: str, left_out: str) -> RenderableType:
    """All predictors in one table, and the errors of the best one in detail."""
    best = min(found, key=lambda one: score.median if (score := one.families["time_us"]) else 1.0)
    parts: list[RenderableType] = [Text(about, style="bold"), Text("")]
    if any(one.cross_validation for one in found):
        parts += [_scores("ten folds", found, "cross_validation"), Text("")]
    parts += [_scores(left_out, found, "families"), Text("")]
    parts += [_sums(found), Text(""), _intervals(found), Text("")]
    for group, scores in (
        ("type", list(best.by_type.items())[:MOST_PROPOSED]),
        ("family", list(best.by_family.items())),
    ):
        table = ruled(f"time by {group}, {best.predictor}", ">tuples", ">mean", ">median", drops=())
        for name, score in scores:
            row(table, name, str(score.count), percent(score.mean), percent(score.median))
        parts += [table, Text("")]
    parts.append(_models(best))
    if best.unseen:
        unseen = f"{best.unseen.count} tuples of types that were not learned: median {percent(best.unseen.median)}"
        parts.append(Text(f"  {unseen}"))
    curves = [one for one in found if one.curve]
    if curves:
        table = ruled("tuples learned", *(f">{number}" for number, _ in curves[0].curve), drops=())
        for one in curves:
            row(table, one.predictor, *(percent(median) for _, median in one.curve))
        parts += [Text(""), table]
    return Group(*parts)


def plan(found: MeasurementPlan) -> RenderableType:
    """The tuples to measure, those with the largest gain first."""
    table = ruled("to measure", ">of the uncertainty", ">predicted", "models", drops=["models"])
    for one in found.proposals[:MOST_PROPOSED]:
        models = ", ".join(one.models[:2]) + (" ..." if len(one.models) > 2 else "")
        gain = percent(one.gain / found.uncertain)
        row(table, one.entry.label, gain, quantity(one.entry.predicted_us, TIME), models)
    number = len(found.proposals)
    more = number - MOST_PROPOSED
    parts = [Text(f"  {more} more; --json lists them.", style="dim")] if more > 0 else []
    gain = percent(min(1.0, sum(one.gain for one in found.proposals) / found.uncertain))
    tuples = f"{number} {plural('tuple', number)}, {gain} of the uncertainty"
    return Group(table, *parts, Text(f"  {tuples}; about {span(found.seconds)} of a card"))


def _scores(title: str, found: Sequence[Evaluation], of: str) -> RenderableType:
    heads = [f">{name}" for name in ("time", "within 10 %", "20 %", "power", "energy")]
    table = ruled(f"{title}: mean, median", *heads, drops=())
    for one in found:
        scores = getattr(one, of)
        time = scores.get("time_us")
        within = [percent(time.within_10), percent(time.within_20)] if time else [NOTHING, NOTHING]
        row(table, one.predictor, _pair(time), *within, _pair(scores.get("power_w")), _pair(scores.get("energy_mj")))
    return table


def _models(best: Evaluation) -> RenderableType:
    table = ruled(f"whole models, {best.predictor}", ">time", ">measured", ">error", ">energy", ">error", drops=())
    for one in best.models:
        energies = one["energy_mj"], one["whole_energy_mj"]
        row(
            table,
            one["model"],
            quantity(one["time_us"], TIME),
            quantity(one["whole_time_us"], TIME),
            f"{100 * (one['time_us'] / one['whole_time_us'] - 1):+.1f} %",
            quantity(energies[0], ENERGY),
            f"{100 * (energies[0] / energies[1] - 1):+.1f} %" if all(energies) else NOTHING,
        )
    return table


def _sums(found: Sequence[Evaluation]) -> RenderableType:
    table = ruled(
        "sums of whole models: mean, median",
        ">time",
        ">energy",
        ">5 tuples measured",
        ">12 measured",
        ">models",
        drops=(),
    )
    for one in found:
        time = one.sums["time_us"]
        narrowed = [_pair(one.narrowed.get(number)) for number in (5, 12)]
        row(table, one.predictor, _pair(time), _pair(one.sums["energy_mj"]), *narrowed, str(time.count if time else 0))
    return table


def _intervals(found: Sequence[Evaluation]) -> RenderableType:
    table = ruled("90 % intervals: cover, worst, width", ">time", ">power", ">sums, time", ">sums, energy", drops=())
    for one in found:
        row(
            table,
            one.predictor,
            _interval(one.intervals.get("time_us")),
            _interval(one.intervals.get("power_w")),
            _interval(one.sum_intervals.get("time_us")),
            _interval(one.sum_intervals.get("energy_mj")),
        )
    return table


def _pair(score: Score | None) -> str:
    return f"{100 * score.mean:.1f}, {100 * score.median:.1f} %" if score else NOTHING


def _interval(found: IntervalCoverage | None) -> str:
    if found is None or found.coverage != found.coverage:
        return NOTHING
    return f"{100 * found.coverage:.0f}, {100 * found.worst:.0f} %, x/÷ {found.width:.2f}"
