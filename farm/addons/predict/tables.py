"""The tables of `farm estimate` and `farm predict`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from cli.tables import Text, filled, grid, row, ruled
from farm.addons.predict.estimate import PREDICTED_LEVEL, cost_at, too_large_from
from farm.addons.predict.stored_predictor import PredictedCost, PredictedValue
from farm.types.figure import Figure
from farm.types.format import (
    ENERGY,
    NOTHING,
    TIME,
    Units,
    count_of,
    interval,
    percent,
    plural,
    quantity,
    span,
)
from farm.verdict.figures import PerToken

if TYPE_CHECKING:
    from farm.addons.predict.calibration import IntervalCoverage
    from farm.addons.predict.estimate import CompileGain, Estimate, MissingTuple
    from farm.addons.predict.evaluation import Evaluation, Score
    from farm.addons.predict.generation import Generation
    from farm.addons.predict.next_measurements import MeasurementPlan
    from farm.addons.predict.side_by_side import Offer

MOST_MISSING, MOST_PROPOSED = 10, 12  # rows shown
_OF_LEVEL = f"\n({percent(PREDICTED_LEVEL, 0)} interval)"
_TIME_AND_POWER = ("time_us", "power_w")
_SHARES = {"unseen_types": "predicted for operator types without any reading"}

# -- farm estimate


def generation(found: Generation) -> RenderableType:
    """A generated text: the sum, the prompt, and a decode at some lengths of the cache."""
    prompt, level = found.prefill.variant, found.level
    rows = [_row(phase.title, phase, level) for phase in found.phases]
    text = f"prompt and {found.tokens} generated tokens"
    total = (text, *_cells(found.time, found.energy, not found.is_lower_bound), "")
    per_token = str(
        PerToken(prompt.batch * found.tokens, found.tokens_per_s, found.energy_per_token_mj)
    )
    notes = [per_token.replace("a pass", "generated"), *found.notes]
    if found.incomplete_reason:
        notes.append(f"The total is incomplete. {found.incomplete_reason}")
    notes += _left_out(found.phases)
    if too_large := [phase for phase in found.phases if phase.memory and not phase.memory.fits]:
        notes.append(f"{too_large[-1].title}: memory {_memory(too_large[-1])}")
    after = f"then {found.tokens} generated tokens per sequence, on {found.prefill.card_model}"
    title = Text(f"{prompt}, {after}", style="bold")
    return Group(
        title, ruled(_heads(level), [total, *rows]), *(Text(f"  {note}") for note in notes)
    )


def estimate(title: str, offer: Offer, level: float = 0.0) -> RenderableType:
    """Show the estimated cost of the model, its measured and predicted parts, and the missing
    tuples. `level` is the level of the intervals, e.g. 0.95; default: that of the estimate."""
    estimate = offer.estimate
    level = level or estimate.level
    lines = _cost_lines(estimate, level)
    if offer.per_million:
        lines["price"] = f"{_price(offer)} for a million {offer.counted}"
    lines |= _part_lines(estimate, level) | _origin_lines(estimate)
    table = grid(2)
    for name, value in lines.items():
        if value:
            row(table, f"  {name}", value)
    parts: list[RenderableType] = [Text(f"  {note}") for note in estimate.notes]
    if estimate.missing:
        parts += [Text(""), _missing(estimate)]
    return Group(Text(title, style="bold"), table, *parts)


def side_by_side(offers: Sequence[Offer]) -> RenderableType:
    """A row for each card and size."""
    estimates = [offer.estimate for offer in offers]
    level = min(estimate.level for estimate in estimates)
    titles = list(dict.fromkeys(estimate.title for estimate in estimates))
    priced = any(offer.per_million for offer in offers)
    of_tokens = any(estimate.per_token.tokens for estimate in estimates)
    heads = ["card"]
    if len(titles) > 1:
        heads.append("model")
    heads += [">time", f">{percent(level, 0)} interval", ">width", ">energy", ">interval"]
    if of_tokens:
        heads.append(">tokens/s")
    compiles = any(estimate.gain for estimate in estimates)
    if compiles:
        heads += _GAIN_HEADS
    heads += ["fits into\none card (need)", ">measured\nshare"]
    if priced:
        heads.append(f">price of a million\n{offers[0].counted}")

    rows = []
    for offer in offers:
        estimate = offer.estimate
        time, energy = estimate.time_at(level), estimate.energy_at(level)
        cells = [str(estimate.card_model)]
        if len(titles) > 1:
            cells.append(estimate.title)
        cells += _cells(time, energy, estimate.complete)
        cells.insert(-2, time.width or NOTHING)
        if of_tokens:
            cells.append(count_of(estimate.per_token.tokens_per_s, "").strip())
        if compiles:
            cells += _gain_cells(estimate, level)
        cells += [_fits(estimate), percent(_measured(estimate))]
        if priced:
            cells.append(_price(offer))
        rows.append(cells)

    notes = list(itertools.chain.from_iterable(estimate.notes for estimate in estimates))
    notes += [
        f"The estimate of {estimate.title} on {estimate.card_model} is incomplete. "
        f"{estimate.incomplete_reason}"
        for estimate in estimates
        if not estimate.complete
    ]
    if any(offer.cards > 1 for offer in offers):
        notes.append(
            "If a model needs several cards, the time is for one card with enough memory; a price "
            "is that of all cards for this time."
        )
    table = ruled(heads, rows, drops=["interval", *(_GAIN_DROPS if compiles else ())])
    lines = [Text(f"  {note}") for note in dict.fromkeys(notes)]
    title = "on several cards" if len(titles) > 1 else titles[0]
    return Group(Text(title, style="bold"), table, *lines)


def _fits(estimate: Estimate) -> str:
    need = estimate.memory
    if need is None:
        return "unknown"
    answer = "yes" if need.fits else f"no: {need.cards} cards"
    if need.needed_bytes is None:
        return answer
    return f"{answer} ({count_of(need.needed_bytes, 'B')})"


def _price(offer: Offer) -> str:
    """`0.42 (0.3 to 0.61)`, or `0.42` without an interval; "" without a price."""
    price = offer.per_million
    if price is None:
        return NOTHING
    least = "" if offer.estimate.complete else "at least "
    if price.low is None or price.high is None:
        return f"{least}{price.value:.3g}"
    return f"{price.value:.3g} ({price.low:.3g} to {price.high:.3g})"


def _cost_lines(estimate: Estimate, level: float) -> dict[str, str]:
    """The cost of the whole model."""
    of_level = f"{percent(level, 0)} interval"
    least = "" if estimate.complete else "at least "
    whole = ", the whole model measured" if estimate.whole else ""
    energy = estimate.energy_at(level)
    lines = {
        "time": f"{least}{_shown(estimate.time_at(level), TIME, of_level)}{whole}",
        "energy": f"{least}{_shown(energy, ENERGY, of_level)}" if energy else "not available",
        "width": _width(estimate, level),
        "tokens": str(estimate.per_token),
        "implementation": estimate.implementation,
        "communication": _communication(estimate),
        "incomplete": estimate.incomplete_reason,
        "memory": _memory(estimate),
    }
    if estimate.floor:
        lines["floor"] = estimate.floor.in_words(estimate.time.value)
        lines["copies"] = estimate.floor.copies_in_words(estimate.sum_at(level).time_us.value)
    if estimate.gain:
        lines["gain"] = _gain(estimate.gain, estimate.time_at(level))
        lines["bounds"] = _bounds(estimate.gain)
    if estimate.whole and estimate.missing:
        lines["sum of parts"] = _both(estimate.sum_at(level))
    return lines


#: Of the columns of `_gain_cells`.
_GAIN_HEADS = (">gain", ">time without\n--compile", ">roofline")
#: Those that a narrow terminal drops, the least important first.
_GAIN_DROPS = ("roofline", "time without --compile")


def _gain_cells(estimate: Estimate, level: float) -> tuple[str, ...]:
    """The lines `gain` and `bounds` as cells: `1.4 times (1.2 to 1.7)`, and two times."""
    gain = estimate.gain
    if gain is None:
        return (NOTHING,) * len(_GAIN_HEADS)
    roofline, eager = quantity(gain.roofline_us, TIME), gain.eager
    faster = gain.faster(estimate.time_at(level))
    if eager is None or faster is None:
        return NOTHING, NOTHING, roofline
    ends = "" if faster.low is None else f" ({faster.low:.2g} to {faster.high:.2g})"
    return f"{faster.value:.2g} times{ends}", quantity(eager.time_us.value, TIME), roofline


def _gain(gain: CompileGain, compiled: PredictedValue) -> str:
    """`predicted 1.4 times as fast as without --compile (1.2 to 1.7)`."""
    faster = gain.faster(compiled)
    if faster is None:
        return ""
    ends = "" if faster.low is None else f" ({faster.low:.2g} to {faster.high:.2g})"
    return f"predicted {faster.value:.2g} times as fast as without --compile{ends}"


def _bounds(gain: CompileGain) -> str:
    """The roofline of a compiled model's kernels, and what the model takes without the compiler."""
    roofline = f"{quantity(gain.roofline_us, TIME)} at the roofline of its kernels"
    if gain.eager is None:
        return roofline
    source = "measured" if gain.eager_is_measured else "predicted"
    return f"{roofline}; {quantity(gain.eager.time_us.value, TIME)} without --compile ({source})"


def _width(estimate: Estimate, level: float) -> str:
    """The widths of the intervals of a transfer: `-28 to +40 % in time, -38 to +60 % in energy`.
    "" if the whole model was measured."""
    if not estimate.transfer or estimate.whole:
        return ""
    time, energy = estimate.time_at(level), estimate.energy_at(level)
    widths = [f"{time.width} in time" if time.width else ""]
    widths += [f"{energy.width} in energy" if energy and energy.width else ""]
    return ", ".join(filter(None, widths))


def _part_lines(estimate: Estimate, level: float) -> dict[str, str]:
    """What is measured, predicted and missing."""
    number = len(estimate.missing)
    tuples = f"{number} {plural('tuple', number)}"
    lines = {"measured": _measured_part(estimate, level)}
    if number and estimate.predicted is not None:
        of_missing = estimate.predicted
        energy = None
        if of_missing.energy_mj and of_missing.energy_mj.value:
            energy = PredictedValue(of_missing.energy_mj.value)
        figures = _both(PredictedCost(PredictedValue(of_missing.time_us.value), energy))
        bound = "" if estimate.total and estimate.total.time_us.low else "at least "
        lines["predicted"] = f"{bound}{figures}: {tuples} (predictor `{estimate.predictor}`)"
        if estimate.complete:
            lines["shares of time"] = ", ".join(
                f"{percent(share)} {_SHARES.get(name, name)}"
                for name, share in estimate.shares.items()
                if share
            )
    if number:
        measuring = f"measuring them takes about {span(estimate.measuring_rest_s)} of card time"
        lines["missing"] = f"{tuples} without a reading; {measuring}"
    lines["left out"] = estimate.left_out
    if estimate.other_data_calls:
        calls = f"{estimate.other_data_calls} {plural('call', estimate.other_data_calls)}"
        lines["data"] = f"the readings for {calls} have another class of data than the model"
    return lines


def _measured_part(estimate: Estimate, level: float) -> str:
    of_all = (
        f"sum of {estimate.covered_tuples} of {estimate.tuples} tuples, which have "
        f"{percent(estimate.coverage)} of the estimated cost"
    )
    if not estimate.covered_tuples:
        return of_all
    # Without missing tuples the sum stands for the whole model, and so does its interval.
    figures = _both(estimate.sum_at(level))
    if estimate.missing:
        figures = _both(cost_at(estimate.readings, level))
    # If the estimate is complete, the line of the time names the level.
    of_level = "" if estimate.complete else f" ({percent(level, 0)} interval)"
    return f"{figures}{of_level}: {of_all}"


def _origin_lines(estimate: Estimate) -> dict[str, str]:
    """The conditions and the origin of the readings."""
    software = estimate.software
    cuda, driver = software.cuda or NOTHING, software.driver or NOTHING
    farms = (f"{count} from {name}" for name, count in estimate.origins.items() if name)
    lines = {
        "card": estimate.card_model,
        "software": f"torch {software.torch}, CUDA {cuda}, driver {driver}",
        "protocol": f"{estimate.protocol.launch} launch, {estimate.protocol.residency} data",
        "flags": ", ".join(f"{name} ×{count}" for name, count in estimate.flags.items()),
        "readings": ", ".join(farms),
    }
    if estimate.oldest_age_s is not None:
        lines["age"] = f"the oldest reading is {span(estimate.oldest_age_s)} old"
    return lines


def _left_out(estimates: Iterable[Estimate]) -> list[str]:
    return [
        f"Left out of {estimate.title}: {estimate.left_out}."
        for estimate in estimates
        if estimate.left_out
    ]


def _communication(found: Estimate) -> str:
    """How much of the time is communication between cards; "" if there is none."""
    alone_us, exposed_us = found.communication_us, found.exposed_us
    if not alone_us:
        return ""
    alone = f"collectives take {quantity(alone_us, TIME)} alone"
    if exposed_us is not None:
        return (
            f"{alone}; {quantity(exposed_us, TIME)} exposed, "
            f"{quantity(max(0.0, alone_us - exposed_us), TIME)} hidden"
        )
    least = quantity(max(alone_us, found.time.value - alone_us), TIME)
    limit = (
        f"; the time is {least} if computation hides all that it can"
        if found.variant.data_parallel > 1
        else ""
    )
    return f"{alone}, and count as if computation hid nothing{limit}"


def _shown(found: PredictedValue, units: Units, of_level: str) -> str:
    """A value with its interval and the level: `243 ms (209 ms to 282 ms, 90 % interval)`."""
    text = predicted(found, units)
    if found.low is None:
        return text
    return f"{text[:-1]}, {of_level})" if text.endswith(")") else f"{text} ({of_level})"


def _memory(found: Estimate) -> str:
    """Describe the memory that the model needs, by its parts. If one card has too little, add the
    number of cards. "" if the needed memory is unknown, or certainly less than the card has."""
    need = found.memory
    if need is None or need.needed_bytes is None:
        return ""
    parts = {
        "weights": need.weights_bytes,
        "cache": need.cache_bytes,
        "activations": need.activations_bytes,
    }
    listed = ", ".join(f"{name} {count_of(size, 'B')}" for name, size in parts.items() if size)
    memory_of_card = f"the {count_of(need.card_bytes, 'B')} of one {found.card_model}"
    word = "about" if listed else "at least"
    text = f"{word} {count_of(need.needed_bytes, 'B')}{f' ({listed})' if listed else ''}"
    if need.fits:
        return f"{text}, of {memory_of_card}"
    return (
        f"{text}: does not fit into {memory_of_card}. The memory alone needs {need.cards} cards; "
        "the time is for one card with enough memory"
    )


def _both(cost: PredictedCost) -> str:
    time, energy = predicted(cost.time_us, TIME), predicted(cost.energy_mj, ENERGY)
    return ", ".join(filter(None, (time, energy)))


def _missing(found: Estimate) -> RenderableType:
    """The tuples without a reading."""
    has_intervals = any(
        missing.predicted and missing.predicted.time_us.low for missing in found.missing
    )
    per_call = f"predicted time per call{_OF_LEVEL if has_intervals else ''}"
    extra = [(f">{per_call}", _predicted_call)] if found.predictor else []
    entries = found.missing_by_id
    head = "tuple without a reading"
    head += " (first: those that narrow the interval most)" if found.narrowing else ""
    missing = filled(
        [entries[id_] for id_ in found.narrowing or entries][:MOST_MISSING],
        [
            (head, lambda entry: entry.needed.label),
            (">calls", lambda entry: str(entry.needed.all_calls)),
            (">share of\nestimated cost", "share", percent),
            *extra,
        ],
        drops=[per_call.replace("\n", " ")] if extra else (),
    )
    return Group(missing, *_more(len(entries) - MOST_MISSING), *_far(found, entries))


def _far(found: Estimate, entries: Mapping[str, MissingTuple]) -> list[Text]:
    """Explain the mark of predictions far from the readings, and name the measurement that narrows
    the total most.
    """
    far = [entry for entry in entries.values() if entry.predicted and entry.predicted.far]
    if not far:
        return []
    share = math.fsum(entry.all_calls_us for entry in far) / found.time.value
    summary = (
        f"far: no reading is similar, so the interval is wide ({len(far)} "
        f"{plural('tuple', len(far))}, "
    )
    first = f"{entries[found.narrowing[0]].needed.label} narrows the total most (`--measure 1`)"
    return [Text(f"  {summary}{percent(share)} of the time). A reading of {first}.")]


def _more(number: int) -> list[Text]:
    return [Text(f"  {number} more tuples; --json lists all.", style="dim")] if number > 0 else []


def predicted(found: PredictedValue | None, units: Units) -> str:
    """A value with its interval: `8.41 ms (7.2 ms to 9.8 ms)`, `8.41 ± 0.12 ms` if it is
    symmetrical; "" for None.
    """
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return quantity(found.value, units)
    if math.isclose(found.high - found.value, found.value - found.low, rel_tol=1e-6, abs_tol=1e-12):
        return interval(Figure(found.value, found.high - found.value), units)
    return f"{quantity(found.value, units)} ({_ends(found, units)})"


def _predicted_call(entry: MissingTuple) -> str:
    """The predicted time of one call with its interval, and a mark if no reading is similar or of
    this type.
    """
    call = entry.predicted
    if call is None or call.time_us.low is None or call.time_us.high is None:
        return quantity(entry.predicted_us, TIME)
    low, high = quantity(call.time_us.low, TIME), quantity(call.time_us.high, TIME)
    mark = ""
    if not call.known:
        mark = "; no reading of this operator type"
    elif call.far:
        mark = "; far"
    return f"{quantity(entry.predicted_us, TIME)} ({low} to {high}{mark})"


def curve(found: Sequence[Estimate]) -> RenderableType:
    """A row for each size."""
    level, incomplete = (
        min(estimate.level for estimate in found),
        [estimate for estimate in found if not estimate.complete],
    )
    too_large = too_large_from(found)
    compiles = any(estimate.gain for estimate in found)
    rows = []
    for estimate in found:
        *cells, measured_share = _row(estimate.title, estimate, level)
        tokens = (
            [count_of(estimate.per_token.tokens_per_s, "").strip()]
            if estimate.per_token.tokens
            else []
        )
        cards = []
        if too_large:
            cards = [str(estimate.memory.cards) if estimate.memory else NOTHING]
        predicted_share = (
            percent(1 - _measured(estimate)) if estimate.shares or estimate.whole else NOTHING
        )
        gains = _gain_cells(estimate, level) if compiles else ()
        rows.append((*cells, *tokens, *gains, measured_share, predicted_share, *cards))
    *heads, measured_head = _heads(level)
    heads += [">tokens/s"] if found[0].per_token.tokens else []
    heads += _GAIN_HEADS if compiles else ()
    heads += [
        measured_head,
        ">predicted share",
        *([">cards needed\nfor memory"] if too_large else []),
    ]
    notes = list(dict.fromkeys(itertools.chain.from_iterable(estimate.notes for estimate in found)))
    notes += [
        f"The estimate of {estimate.title} is incomplete. {estimate.incomplete_reason}"
        for estimate in incomplete
    ]
    notes += _left_out(found)
    if too_large:
        notes.append(f"From {too_large.title} on: memory {_memory(too_large)}.")
    table = ruled(heads, rows, drops=["interval", *(_GAIN_DROPS if compiles else ())])
    return Group(
        Text(f"on {found[0].card_model}", style="bold"),
        table,
        *(Text(f"  {note}") for note in notes),
    )


def _cells(time: PredictedValue, energy: PredictedValue | None, complete: bool) -> tuple[str, ...]:
    """Time and energy with their intervals, in four columns."""
    least = "" if complete else "≥ "
    energies = f"{least}{quantity(energy.value, ENERGY)}" if energy else NOTHING
    return (
        f"{least}{quantity(time.value, TIME)}",
        _ends(time, TIME),
        energies,
        _ends(energy, ENERGY),
    )


def _heads(level: float) -> tuple[str, ...]:
    """The heads of the columns of `_row`."""
    return "", ">time", f">{percent(level, 0)} interval", ">energy", ">interval", ">measured share"


def _row(name: str, one: Estimate, level: float) -> tuple[str, ...]:
    return (
        name,
        *_cells(one.time_at(level), one.energy_at(level), one.complete),
        percent(_measured(one)),
    )


def _measured(found: Estimate) -> float:
    """Return the measured share, 0 to 1: of the time if there are predictions, else of the
    estimated cost.
    """
    return 1.0 if found.whole else found.shares.get("measured", found.coverage)


def _ends(found: PredictedValue | None, units: Units) -> str:
    if found is None or found.low is None or found.high is None:
        return NOTHING
    return f"{quantity(found.low, units)} to {quantity(found.high, units)}"


def narrowed(before: Estimate, after: Estimate, level: float) -> RenderableType:
    """An estimate before and after some measurements."""
    rows = [_row("before", before, level), _row("with the new readings", after, level)]
    return Group(ruled(_heads(level), rows), Text(""))


# -- farm predict


def evaluations(found: Sequence[Evaluation], about: str, held_out: str) -> RenderableType:
    """All predictors in one table, and the errors of the best one in detail."""
    best = min(found, key=lambda one: score.median if (score := one.families["time_us"]) else 1.0)

    def errors(group: str, scores: Iterable[tuple[str, Score]]) -> RenderableType:
        heads = (
            f"error of time by {group}, predictor {best.predictor}",
            ">tuples",
            ">mean",
            ">median",
        )
        return ruled(
            heads,
            (
                (name, str(score.count), percent(score.mean), percent(score.median))
                for name, score in scores
            ),
        )

    folds = any(evaluation.cross_validation for evaluation in found)
    shown = [
        Text(about, style="bold"),
        *([_scores("ten random folds", found, "cross_validation")] if folds else []),
        _scores(held_out, found, "families"),
        _sums(found),
        _intervals(found),
        *([_by_distance(best)] if best.by_distance else []),
        errors("operator type", list(best.by_type.items())[:MOST_PROPOSED]),
        errors("model family", best.by_family.items()),
        _models(best),
    ]
    parts = [line for part in shown for line in (part, Text(""))][:-1]
    if best.unseen:
        unseen = (
            f"{best.unseen.count} tuples of operator types outside the training data: median "
            "error of time "
        )
        unseen += percent(best.unseen.median)
        parts.append(Text(f"  {unseen}"))
    if curves := [evaluation for evaluation in found if evaluation.curve]:
        heads = (
            "median error of time by training tuples",
            *(f">{number}" for number, _ in curves[0].curve),
        )
        rows = (
            (evaluation.predictor, *(percent(median) for _, median in evaluation.curve))
            for evaluation in curves
        )
        parts += [Text(""), ruled(heads, rows)]
    return Group(*parts)


def plan(found: MeasurementPlan) -> RenderableType:
    """The tuples to measure, those with the largest gain first."""
    table = filled(
        found.proposals[:MOST_PROPOSED],
        [
            ("to measure", lambda one: one.entry.needed.label),
            (">share of\nuncertainty", lambda one: one.gain / found.uncertain, percent),
            (f">predicted time per call{_OF_LEVEL}", lambda one: _predicted_call(one.entry)),
            (
                "models",
                lambda one: ", ".join(one.models[:2]) + (" ..." if len(one.models) > 2 else ""),
            ),
        ],
        drops=["models"],
    )
    number = len(found.proposals)
    gain = percent(min(1.0, sum(proposal.gain for proposal in found.proposals) / found.uncertain))
    tuples = f"{number} {plural('tuple', number)}, {gain} of the uncertainty"
    return Group(
        table,
        *_more(number - MOST_PROPOSED),
        Text(f"  {tuples}; measuring them takes about {span(found.seconds)} of card time"),
    )


def _scores(title: str, found: Sequence[Evaluation], of: str) -> RenderableType:
    def cells(predictor: str, scores: Mapping[str, Score | None]) -> Sequence[str]:
        time = scores.get("time_us")
        within = [percent(time.within_10), percent(time.within_20)] if time else [NOTHING, NOTHING]
        return (
            predictor,
            _pair(time),
            *within,
            _pair(scores.get("power_w")),
            _pair(scores.get("energy_mj")),
        )

    heads = (
        f"error, {title}: mean, median",
        ">time",
        ">within 10 %",
        ">within 20 %",
        ">power",
        ">energy",
    )
    return ruled(heads, (cells(evaluation.predictor, vars(evaluation)[of]) for evaluation in found))


def _models(best: Evaluation) -> RenderableType:
    def cells(one: Mapping[str, Any], name: str, units: Units) -> Sequence[str]:
        value, whole = one[name], one[f"whole_{name}"]
        error = f"{100 * (value / whole - 1):+z.1f} %" if value and whole else NOTHING
        return quantity(value, units), quantity(whole, units), error

    first = f"whole models, predictor {best.predictor}"
    heads = (first, ">predicted time", ">measured time", ">error", ">predicted energy", ">error")
    rows = (
        (model["model"], *cells(model, "time_us", TIME), *cells(model, "energy_mj", ENERGY)[::2])
        for model in best.models
    )
    return ruled(heads, rows)


def _sums(found: Sequence[Evaluation]) -> RenderableType:
    first = "error of sums, whole models: mean, median"
    heads = (first, ">time", ">energy", ">time, 5 tuples measured", ">time, 12 measured", ">models")
    rows = []
    for evaluation in found:
        scores = (
            evaluation.sums["time_us"],
            evaluation.sums["energy_mj"],
            evaluation.narrowed.get(5),
            evaluation.narrowed.get(12),
        )
        rows.append(
            (evaluation.predictor, *map(_pair, scores), str(scores[0].count if scores[0] else 0))
        )
    return ruled(heads, rows)


def _intervals(found: Sequence[Evaluation]) -> RenderableType:
    heads = (
        "90 % intervals: cover, worst family, width",
        ">time",
        ">power",
        ">time of sums",
        ">energy of sums",
    )
    rows = []
    for evaluation in found:
        singles = (evaluation.intervals.get(name) for name in _TIME_AND_POWER)
        sums = (evaluation.sum_intervals.get(name) for name in ("time_us", "energy_mj"))
        rows.append((evaluation.predictor, *map(_interval, (*singles, *sums))))
    return ruled(heads, rows)


def _by_distance(best: Evaluation) -> RenderableType:
    heads = (
        f"90 % intervals by distance from the readings, predictor {best.predictor}",
        ">tuples",
        ">time",
        ">power",
    )
    rows = []
    for distances in best.by_distance:
        cells = (_interval(distances.intervals.get(name)) for name in _TIME_AND_POWER)
        rows.append((f"up to {distances.distance:.2f}", str(distances.count), *cells))
    return ruled(heads, rows)


def _pair(score: Score | None) -> str:
    return f"{100 * score.mean:.1f}, {100 * score.median:.1f} %" if score else NOTHING


def _interval(found: IntervalCoverage | None) -> str:
    if found is None or found.coverage != found.coverage:
        return NOTHING
    return f"{100 * found.coverage:.0f}, {100 * found.worst:.0f} %, x/÷ {found.width:.2f}"
