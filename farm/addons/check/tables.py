"""The table of `farm cards check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType

from cli.tables import Text, facts, hanging, ruled, sparkline
from farm.addons.check.card_check import (
    LEAST_CARDS,
    LEAST_EARLIER,
    CardCheck,
    CheckedFigure,
    FigureComparison,
)
from farm.addons.check.deviation import FALSE_ALARMS
from farm.types.format import NOTHING, POWER, TIME, count_of, day, few, percent, plural, quantity

_OUTCOMES = {
    "inside": ("INSIDE", "bold green"),
    "outside": ("OUTSIDE", "bold red"),
    "not judged": ("NOT JUDGED", "bold yellow"),
    "not measured": ("NOT MEASURED", "bold yellow"),
}
_DROPS = ("found from", "spread")
_HEADS = ("figure", ">value", ">compared with", ">difference", ">spread", ">found from", "result")


def card_check(result: CardCheck) -> RenderableType:
    """A check: its outcome, its figures and the conditions."""
    words, style = _OUTCOMES[result.outcome]
    title = Text(f"{result.subject}  {result.card_model}  job {result.job_id}  ", style="bold")
    table = ruled(_HEADS, _rows(result), _DROPS)
    return Group(title.append(words, style), table, facts(_conditions(result)), *_notes(result))


def card_history(checks: Sequence[CardCheck]) -> RenderableType:
    """The checks of a card, the oldest first, and the course of each figure."""
    last = checks[-1]
    title = Text(f"{last.subject}  {last.card_model}  {len(checks)} checks", style="bold")
    rows = [(day(check.checked_at_s), check.job_id, *_summary(check)) for check in checks]
    courses = [_course(checks, number) for number in range(len(last.figures))]
    heads = ("figure", ">first", ">last", ">change", "course")
    return Group(
        title, ruled(("checked", "job", "outcome", "outside"), rows), ruled(heads, courses)
    )


def _summary(check: CardCheck) -> tuple[RenderableType, str]:
    words, style = _OUTCOMES[check.outcome]
    return Text(words, style), few(check.outside(), 3) or NOTHING


def _course(checks: Sequence[CardCheck], number: int) -> tuple[RenderableType, ...]:
    """One figure over all checks in which it was measured."""
    times_s, values = [], []
    for check in checks:
        figure = check.figures[number]
        if figure.value is not None:
            times_s.append(check.checked_at_s)
            values.append(figure.value.value)
    figure = checks[-1].figures[number]
    if not values:
        return figure.title, NOTHING, NOTHING, NOTHING, NOTHING
    units = TIME if figure.quantity == "time" else POWER
    change = f"{values[-1] / values[0] - 1:+.1%}"
    bars = sparkline(times_s, values, (times_s[0], times_s[-1]), width=min(30, len(values)))
    return figure.title, quantity(values[0], units), quantity(values[-1], units), change, bars


def _rows(result: CardCheck) -> Iterator[tuple[RenderableType, ...]]:
    for figure in result.figures:
        units = TIME if figure.quantity == "time" else POWER
        value = quantity(figure.value.value, units) if figure.value else NOTHING
        if figure.bytes_per_s:
            value = f"{value}, {count_of(figure.bytes_per_s, 'B')}/s"
        name = figure.title
        if not figure.comparisons:
            reason = figure.reason or "nothing to compare with"
            yield name, value, NOTHING, NOTHING, NOTHING, NOTHING, Text(reason, style="dim")
        for number, comparison in enumerate(figure.comparisons):
            heads = ("", "") if number else (name, value)
            yield *heads, *_cells(figure, comparison)


def _cells(figure: CheckedFigure, comparison: FigureComparison) -> tuple[RenderableType, ...]:
    word = "card" if comparison.reference == "cards" else "reading"
    whose = "other" if comparison.reference == "cards" else "earlier"
    found_from = NOTHING if comparison.found_from is None else percent(comparison.found_from)
    return (
        f"{comparison.count} {whose} {plural(word, comparison.count)}",
        f"{comparison.difference:+.1%}",
        percent(comparison.spread),
        found_from,
        _result(figure, comparison),
    )


def _result(figure: CheckedFigure, comparison: FigureComparison) -> Text:
    more = "slower than" if figure.quantity == "time" else "more power than"
    above = f"{more} {percent(comparison.above, 0)}"
    if comparison.is_outside:
        return Text(f"OUTSIDE, {above}", style="bold red")
    if comparison.score is None:
        return Text(f"{above}; too few to judge", style="dim")
    return Text(f"inside, {above}")


def _conditions(result: CardCheck) -> Iterator[tuple[str, str]]:
    state = result.conditions
    yield (
        "power",
        f"{quantity(state.idle_power_w, POWER)} at rest, at most "
        f"{quantity(state.highest_power_w, POWER)} under load; limit "
        f"{quantity(state.power_limit_w, POWER)}",
    )
    yield "lowest clock", _with_unit(state.lowest_sm_clock_mhz, "MHz")
    yield "highest temperature", _with_unit(state.highest_temperature_c, "°C")
    yield "throttled", ", ".join(state.throttle_reasons) or "no"
    yield "flags", ", ".join(state.flags) or "none"
    yield "error counters", state.counters_text()


def _with_unit(value: float | None, unit: str) -> str:
    return NOTHING if value is None else f"{value:.0f} {unit}"


def _notes(result: CardCheck) -> Iterator[RenderableType]:
    disturbed = [figure for figure in result.figures if figure.value and figure.reason]
    if disturbed:
        yield hanging(
            f"{len(disturbed)} of {len(result.figures)} figures are not judged: another process "
            "used the card or the host. End it, then check the card again.",
            style="yellow",
        )
    if result.limit is not None:
        yield hanging(
            f"A healthy card is outside in at most {percent(FALSE_ALARMS, 0)} of the checks, all "
            "figures together. `found from`: the smallest increase that is found in 95 %.",
            style="dim",
        )
    else:
        yield hanging(
            f"A judgement needs {LEAST_CARDS} other cards of the model, or {LEAST_EARLIER} earlier "
            "readings of the card, with the same software.",
            style="dim",
        )
