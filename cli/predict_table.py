"""Evaluations of predictors as they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from cli.tables import Text, row, ruled
from farm.types.format import ENERGY, NOTHING, TIME, percent, plural, quantity, span

if TYPE_CHECKING:
    from farm.estimate.next_measurements import ReadingPlan
    from farm.prediction.evaluation import Evaluation, Interval, Score

SHOWN = 12


def evaluations(found: Sequence[Evaluation], about: str, asked: str = "a family of models left out") -> RenderableType:
    """Every predictor in one table, and what the best of them is wrong about."""
    best = min(found, key=lambda one: score.median if (score := one.families["time_us"]) else 1.0)
    folds = any(one.cross_validation for one in found)
    parts: list[RenderableType] = [Text(about, style="bold"), Text("")]
    if folds:
        parts += [_scores("ten folds", found, "cross_validation"), Text("")]
    parts += [_scores(asked, found, "families"), Text("")]
    parts += [_sums(found), Text(""), _intervals(found), Text("")]
    types = ruled(f"time by type, {best.predictor}", ">tuples", ">mean", ">median", drops=())
    for name, score in list(best.by_type.items())[:SHOWN]:
        row(types, name, str(score.count), percent(score.mean), percent(score.median))
    families = ruled(f"time by family, {best.predictor}", ">tuples", ">mean", ">median", drops=())
    for name, score in best.by_family.items():
        row(families, name, str(score.count), percent(score.mean), percent(score.median))
    parts += [types, Text(""), families, Text(""), _models(best)]
    if best.unseen:
        parts.append(
            Text(
                f"  {best.unseen.count} tuples of types that were not learnt from: median {percent(best.unseen.median)}"
            )
        )
    curves = [one for one in found if one.curve]
    if curves:
        table = ruled("tuples learnt from", *(f">{number}" for number, _ in curves[0].curve), drops=())
        for one in curves:
            row(table, one.predictor, *(percent(median) for _, median in one.curve))
        parts += [Text(""), table]
    return Group(*parts)


def plan(found: ReadingPlan) -> RenderableType:
    """What to read, the most telling first."""
    table = ruled("to be read", ">of what is unsure", ">predicted", "models", drops=["models"])
    for wish in found.wishes[:SHOWN]:
        models = ", ".join(wish.models[:2]) + (" ..." if len(wish.models) > 2 else "")
        row(table, wish.entry.label, percent(wish.gain / found.unsure), quantity(wish.entry.predicted_us, TIME), models)
    more = len(found.wishes) - SHOWN
    told = percent(min(1.0, sum(wish.gain for wish in found.wishes) / found.unsure))
    number = len(found.wishes)
    parts = [Text(f"  {more} more; --json lists them.", style="dim")] if more > 0 else []
    return Group(
        table,
        *parts,
        Text(f"  {number} {plural('tuple', number)}, {told} of what is unsure; about {span(found.seconds)} of a card"),
    )


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
    table = ruled(f"whole models, {best.predictor}", ">time", ">read", ">off by", ">energy", ">off by", drops=())
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
        "sums of whole models: mean, median", ">time", ">energy", ">5 tuples read", ">12 read", ">models", drops=()
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


def _interval(found: Interval | None) -> str:
    if found is None or found.coverage != found.coverage:
        return NOTHING
    return f"{100 * found.coverage:.0f}, {100 * found.worst:.0f} %, x/÷ {found.width:.2f}"
