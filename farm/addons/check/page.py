"""Pages of checks: the figures of a card with their population, and its checks over time."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farm.addons.check.card_check import CardCheck, CheckedFigure, FigureComparison, ReferenceName
from farm.addons.check.deviation import FALSE_ALARMS
from farm.addons.pages import COLOURS, GREY
from farm.addons.pages.charts import Chart, Legend, page_chart
from farm.addons.pages.page import plotly_js, render, write_whole
from farm.jobs.card_checks import Outcome

_CARD, _LIMIT, _OUTSIDE = COLOURS[0], COLOURS[1], COLOURS[5]
_ROW_PX, _AROUND_PX = 36, 90
_NAME_LETTERS = 20  # in a line of the name of a figure beside its row
#: Outcome -> class of its text; other outcomes have `none`.
_CLASSES: dict[Outcome, str] = {"inside": "pass", "outside": "fail"}
#: Reference -> caption of its chart, and what its points are.
_REFERENCES: dict[ReferenceName, tuple[str, str]] = {
    "cards": ("Compared with other cards of the model", "another card"),
    "earlier": ("Compared with earlier readings of the card", "an earlier reading"),
}


def write_checks(path: Path, checks: Sequence[CardCheck]) -> None:
    """Write one page of checks. Raises `UsageError` if the file cannot be written."""
    shown = []
    for check in checks:
        charts = []
        for reference, (caption, point) in _REFERENCES.items():
            chart = _population(check, reference, point)
            if chart is not None:
                charts.append((caption, chart))
        shown.append((check, charts))
    title = "Card check" if len(checks) > 1 else f"Card check of {checks[0].subject}"
    _write(path, "check.html", title=title, checks=shown)


def write_history(path: Path, checks: Sequence[CardCheck]) -> None:
    """Write one page of the checks of a card, the oldest first. Raises `UsageError` if the file
    cannot be written.
    """
    charts = []
    for quantity, caption in (("time", "Time over the checks"), ("power", "Power over the checks")):
        chart = _course(checks, quantity)
        if chart is not None:
            charts.append((caption, chart))
    title = f"Checks of {checks[-1].subject}"
    _write(path, "card_history.html", title=title, checks=checks, charts=charts)


def _write(path: Path, template: str, **values: Any) -> None:
    values |= {"false_alarms": FALSE_ALARMS, "classes": _CLASSES, "script": plotly_js()}
    write_whole(path, render(template, **values))


def _compared(
    check: CardCheck, reference: ReferenceName
) -> list[tuple[CheckedFigure, FigureComparison]]:
    compared = []
    for figure in check.figures:
        for comparison in figure.comparisons:
            if comparison.reference == reference:
                compared.append((figure, comparison))
    return compared


def _population(check: CardCheck, reference: ReferenceName, point: str) -> Chart | None:
    """A row for each figure: the reference and the card, as standard deviations from the median,
    and where a figure is outside.
    """
    compared = _compared(check, reference)
    if not compared:
        return None
    others = _Points(point, GREY, symbol="circle-open", size=7)
    limits = _Points("outside from here", _LIMIT, symbol="line-ns-open", size=14)
    inside = _Points("this card", _CARD, symbol="diamond", size=11)
    outside = _Points("this card, outside", _OUTSIDE, symbol="diamond", size=11)
    for figure, comparison in compared:
        for difference in comparison.differences:
            others.add(figure.title, difference, comparison.spread)
        if comparison.outside_from is not None:
            limits.add(figure.title, comparison.outside_from, comparison.spread)
        of_card = outside if comparison.is_outside else inside
        of_card.add(figure.title, comparison.difference, comparison.spread)
    shown = [points for points in (others, limits, inside, outside) if points.x]
    names = [_wrapped(figure.title) for figure, _ in reversed(compared)]
    return page_chart(
        [points.data() for points in shown],
        _AROUND_PX + _ROW_PX * len(compared),
        "standard deviations",
        "",
        axes=({"zeroline": True}, {"type": "category", "categoryarray": names}),
        legend=[(points.name, points.colour) for points in shown],
    )


def _wrapped(title: str) -> str:
    return "<br>".join(textwrap.wrap(title, _NAME_LETTERS))


class _Points:
    """The points of one kind in a chart of figures."""

    def __init__(self, name: str, colour: str, *, symbol: str, size: int) -> None:
        self.name = name
        self.colour = colour
        self.x: list[float] = []
        self._y: list[str] = []
        self._texts: list[str] = []
        self._marker = {"color": colour, "symbol": symbol, "size": size, "line": {"width": 2}}

    def add(self, title: str, difference: float, spread: float) -> None:
        self.x.append(difference / spread)
        self._y.append(_wrapped(title))
        self._texts.append(f"{self.name}: {difference:+.2%}")

    def data(self) -> dict[str, Any]:
        return {
            "type": "scatter",
            "mode": "markers",
            "name": self.name,
            "x": self.x,
            "y": self._y,
            "text": self._texts,
            "hovertemplate": "%{y}<br>%{text}<extra></extra>",
            "marker": self._marker,
        }


def _course(checks: Sequence[CardCheck], quantity: str) -> Chart | None:
    """A line for each figure: its change since the first check. Figures that were ever outside have
    a colour, and a mark at these checks."""
    data: list[dict[str, Any]] = []
    legend: Legend = []
    names = [figure.title for figure in checks[-1].figures if figure.quantity == quantity]
    for name in names:
        course = [(check, _figure(check, name)) for check in checks]
        measured = [(check, figure) for check, figure in course if figure and figure.value]
        if len(measured) < 2:
            continue
        is_marked = any(figure.is_outside for _, figure in measured)
        colour = COLOURS[len(legend) % len(COLOURS)] if is_marked else GREY
        if is_marked:
            legend.append((name, colour))
        data.append(_line(name, measured, colour))
    if not data:
        return None
    legend.append(("figures that were never outside", GREY))
    data.sort(key=lambda line: line["line"]["color"] != GREY)  # the marked lines above the others
    return page_chart(
        data,
        360,
        "time of the check, UTC",
        "change since the first check, %",
        axes=({"automargin": True}, {}),
        legend=legend,
    )


def _figure(check: CardCheck, title: str) -> CheckedFigure | None:
    figures = [figure for figure in check.figures if figure.title == title]
    return figures[0] if figures else None


def _line(
    name: str, measured: Sequence[tuple[CardCheck, CheckedFigure]], colour: str
) -> dict[str, Any]:
    times, changes, symbols, sizes = [], [], [], []
    values = [figure.value.value for _, figure in measured if figure.value]
    for (check, figure), value in zip(measured, values, strict=True):
        times.append(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(check.checked_at_s)))
        changes.append(round(100 * (value / values[0] - 1), 3))
        symbols.append("x" if figure.is_outside else "circle")
        sizes.append(11 if figure.is_outside else 5)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": times,
        "y": changes,
        "hovertemplate": f"{name}<br>%{{x}}: %{{y:+.2f}} %<extra></extra>",
        "line": {"color": colour, "width": 1 if colour == GREY else 2},
        "marker": {"color": colour, "symbol": symbols, "size": sizes},
    }
