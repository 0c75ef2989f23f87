"""The tables of `farm estimate` and `farm predict`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from cli.tables import Text, filled, grid, row, ruled
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
    rows = [
        (str(one.variant), interval(one.whole_time or one.time, TIME), interval(one.whole_energy or one.energy, ENERGY))
        for one in (found.prefill, *found.decodes)
    ]
    total = (f"{found.tokens} tokens after it", interval(found.time, TIME), interval(found.energy, ENERGY))
    per_token = str(PerToken(prompt.batch * found.tokens, found.tokens_per_s, found.energy_per_token_mj))
    notes = (per_token.replace("a pass", "generated"), *found.notes)
    title = Text(f"{prompt}, then {found.tokens} tokens each", style="bold")
    return Group(title, ruled(("", ">time", ">energy"), rows, total=total), *(Text(f"  {note}") for note in notes))


def estimate(found: Estimate) -> RenderableType:
    software, number = found.software, len(found.missing)
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
    lines["tokens"] = str(found.per_token)
    if found.predicted_us is not None and number:
        bound = " at least" if found.total_time and found.total_time.low is None else ""
        lines["the rest"] = f"predicted {quantity(found.predicted_us, TIME)}{bound} (model `{found.predictor}`)"
        if not bound:
            totals = (predicted(found.total_time, TIME), predicted(found.total_energy, ENERGY))
            lines["together"] = ", ".join(filter(None, totals))
            shares = (f"{percent(share)} {_SHARES[name]}" for name, share in found.shares.items() if share)
            lines["made of"] = ", ".join(shares)
    if number:
        card_time = f"measuring takes about {span(found.measuring_rest_s)} of a card"
        lines["missing"] = f"{number} {plural('tuple', number)}; {card_time}"
    if found.other_data_calls:
        lines["data"] = f"{found.other_data_calls} calls in another class of data than in the model"
    lines["flags"] = ", ".join(f"{name} ×{flagged}" for name, flagged in found.flags.items())
    lines["readings"] = ", ".join(f"{count} from {name}" for name, count in found.origins.items() if name)
    if found.oldest_at_s:
        lines["age"] = f"the oldest reading is {span(time.time() - found.oldest_at_s)} old"
    table = grid(2)
    for name, value in lines.items():
        if value:
            row(table, f"  {name}", value)
    parts = [Text(f"  {note}") for note in found.notes] + ([Text(""), _missing(found)] if number else [])
    return Group(Text(str(found.variant), style="bold"), table, *parts)


def _missing(found: Estimate) -> RenderableType:
    """The tuples without a reading."""
    extra = [(">predicted", _predicted_call)] if found.predictor else []
    entries = {entry.operator_id: entry for entry in found.missing}
    head = "without a reading, what would narrow it most first" if found.narrowing else "not covered"
    missing = filled(
        [entries[id_] for id_ in found.narrowing or entries][:MOST_MISSING],
        [(head, "label"), (">calls", "calls"), (">of the cost", "share", percent), *extra],
        drops=["predicted"] if extra else (),
    )
    return Group(missing, *_more(len(entries) - MOST_MISSING))


def _more(number: int) -> list[Text]:
    return [Text(f"  {number} more; --json lists them.", style="dim")] if number > 0 else []


def predicted(found: PredictedValue | None, units: Units) -> str:
    """`8.41 ms (7.2 to 9.8)`, with the 90 % interval; "" for None."""
    if found is None:
        return ""
    ends = _ends(found, units)
    return quantity(found.value, units) + (f" ({ends})" if ends != NOTHING else "")


def _predicted_call(entry: MissingTuple) -> str:
    """One call, with a mark if its operator type has no reading."""
    if entry.predicted_low_us is None or entry.predicted_high_us is None:
        return quantity(entry.predicted_us, TIME)
    low, high = (quantity(value, TIME) for value in (entry.predicted_low_us, entry.predicted_high_us))
    mark = "" if entry.known else ", type never measured"
    return f"{quantity(entry.predicted_us, TIME)} ({low} to {high}{mark})"


def curve(found: Sequence[Estimate]) -> RenderableType:
    """A row for each size."""
    rows = []
    for one in found:
        time, energy = one.total_time or one.time, one.total_energy or one.energy
        times = quantity(time.value, TIME), _ends(one.total_time, TIME)
        energies = quantity(energy.value if energy else None, ENERGY), _ends(one.total_energy, ENERGY)
        measured = one.shares.get("measured", one.coverage)
        shares = percent(measured), percent(1 - measured) if one.shares else NOTHING
        rows.append((str(one.variant), *times, *energies, *shares))
    notes = dict.fromkeys(note for one in found for note in one.notes)
    table = ruled(("", ">time", ">90 %", ">energy", ">90 %", ">measured", ">predicted"), rows)
    return Group(Text(f"on {found[0].card_model}", style="bold"), table, *(Text(f"  {note}") for note in notes))


def _ends(found: PredictedValue | None, units: Units) -> str:
    if found is None or found.low is None or found.high is None:
        return NOTHING
    return f"{quantity(found.low, units)} to {quantity(found.high, units)}"


def narrowed(before: Estimate, after: Estimate) -> RenderableType:
    """An estimate before and after some measurements."""
    rows = []
    for name, one in (("before", before), ("with the new readings", after)):
        time = predicted(one.total_time, TIME) or interval(one.time, TIME)
        energy = predicted(one.total_energy, ENERGY) or interval(one.energy, ENERGY)
        rows.append((name, time, energy, percent(one.shares.get("measured", one.coverage))))
    return Group(ruled(("", ">time", ">energy", ">measured"), rows), Text(""))


# -- farm predict


def evaluations(found: Sequence[Evaluation], about: str, left_out: str) -> RenderableType:
    """All predictors in one table, and the errors of the best one in detail."""
    best = min(found, key=lambda one: score.median if (score := one.families["time_us"]) else 1.0)

    def errors(group: str, scores: Iterable[tuple[str, Score]]) -> RenderableType:
        heads = (f"time by {group}, {best.predictor}", ">tuples", ">mean", ">median")
        rows = ((name, str(one.count), percent(one.mean), percent(one.median)) for name, one in scores)
        return ruled(heads, rows)

    shown = [
        Text(about, style="bold"),
        *([_scores("ten folds", found, "cross_validation")] if any(one.cross_validation for one in found) else []),
        _scores(left_out, found, "families"),
        _sums(found),
        _intervals(found),
        errors("type", list(best.by_type.items())[:MOST_PROPOSED]),
        errors("family", best.by_family.items()),
        _models(best),
    ]
    parts = [line for part in shown for line in (part, Text(""))][:-1]
    if best.unseen:
        unseen = f"{best.unseen.count} tuples of types that were not learned: median {percent(best.unseen.median)}"
        parts.append(Text(f"  {unseen}"))
    if curves := [one for one in found if one.curve]:
        heads = ("tuples learned", *(f">{number}" for number, _ in curves[0].curve))
        rows = ((one.predictor, *(percent(median) for _, median in one.curve)) for one in curves)
        parts += [Text(""), ruled(heads, rows)]
    return Group(*parts)


def plan(found: MeasurementPlan) -> RenderableType:
    """The tuples to measure, those with the largest gain first."""
    table = filled(
        found.proposals[:MOST_PROPOSED],
        [
            ("to measure", lambda one: one.entry.label),
            (">of the uncertainty", lambda one: one.gain / found.uncertain, percent),
            (">predicted", lambda one: one.entry.predicted_us, TIME),
            ("models", lambda one: ", ".join(one.models[:2]) + (" ..." if len(one.models) > 2 else "")),
        ],
        drops=["models"],
    )
    number = len(found.proposals)
    gain = percent(min(1.0, sum(one.gain for one in found.proposals) / found.uncertain))
    tuples = f"{number} {plural('tuple', number)}, {gain} of the uncertainty"
    return Group(table, *_more(number - MOST_PROPOSED), Text(f"  {tuples}; about {span(found.seconds)} of a card"))


def _scores(title: str, found: Sequence[Evaluation], of: str) -> RenderableType:
    def cells(predictor: str, scores: Mapping[str, Score | None]) -> Sequence[str]:
        time = scores.get("time_us")
        within = [percent(time.within_10), percent(time.within_20)] if time else [NOTHING, NOTHING]
        return predictor, _pair(time), *within, _pair(scores.get("power_w")), _pair(scores.get("energy_mj"))

    heads = (f"{title}: mean, median", ">time", ">within 10 %", ">20 %", ">power", ">energy")
    return ruled(heads, (cells(one.predictor, getattr(one, of)) for one in found))


def _models(best: Evaluation) -> RenderableType:
    def cells(one: Mapping[str, Any], name: str, units: Units) -> Sequence[str]:
        value, whole = one[name], one[f"whole_{name}"]
        error = f"{100 * (value / whole - 1):+.1f} %" if value and whole else NOTHING
        return quantity(value, units), quantity(whole, units), error

    heads = (f"whole models, {best.predictor}", ">time", ">measured", ">error", ">energy", ">error")
    rows = ((one["model"], *cells(one, "time_us", TIME), *cells(one, "energy_mj", ENERGY)[::2]) for one in best.models)
    return ruled(heads, rows)


def _sums(found: Sequence[Evaluation]) -> RenderableType:
    heads = ("sums of whole models: mean, median", ">time", ">energy", ">5 tuples measured", ">12 measured", ">models")
    rows = []
    for one in found:
        scores = (one.sums["time_us"], one.sums["energy_mj"], one.narrowed.get(5), one.narrowed.get(12))
        rows.append((one.predictor, *map(_pair, scores), str(scores[0].count if scores[0] else 0)))
    return ruled(heads, rows)


def _intervals(found: Sequence[Evaluation]) -> RenderableType:
    heads = ("90 % intervals: cover, worst, width", ">time", ">power", ">sums, time", ">sums, energy")
    rows = []
    for one in found:
        singles = (one.intervals.get(name) for name in ("time_us", "power_w"))
        sums = (one.sum_intervals.get(name) for name in ("time_us", "energy_mj"))
        rows.append((one.predictor, *map(_interval, (*singles, *sums))))
    return ruled(heads, rows)


def _pair(score: Score | None) -> str:
    return f"{100 * score.mean:.1f}, {100 * score.median:.1f} %" if score else NOTHING


def _interval(found: IntervalCoverage | None) -> str:
    if found is None or found.coverage != found.coverage:
        return NOTHING
    return f"{100 * found.coverage:.0f}, {100 * found.worst:.0f} %, x/÷ {found.width:.2f}"
