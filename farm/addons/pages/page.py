"""Writes HTML pages that need no network and no server: reports as one page, and the database as a
folder of pages.

The pages fit phones and paper, light or dark. plotly (extra `operator-farm[plot]`) draws the charts
in the browser; its JavaScript is part of the page, or one file of the folder. Jinja escapes all
text, and the page's content security policy forbids all requests. The browser searches, filters and
sorts the tables. The pages of the database are: sum and whole of all models, one page per model,
all operators, the models on different cards, and the cards."""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlmodel import Session, col, func, select

from farm.addons.pages import charts, check_file
from farm.errors import Unreadable, UsageError, needing, writing_to
from farm.errors.safe_text import printable
from farm.report.history import HistoryRow
from farm.report.layers import layers
from farm.report.owners import OF_OWNERS, OwnerGroup, grouped
from farm.report.report import Report, build, remarks
from farm.report.schemes import SchemeComparison
from farm.settings.shared_files import replacing_file
from farm.store import tables
from farm.store.columns import (
    ITEM,
    JOB,
    OF_TUPLES,
    OPERATOR,
    PROTOCOL,
    READING,
    REAL_CARDS,
    SOFTWARE,
    VARIANT,
    VERDICT,
)
from farm.store.database import by_key, fetch_values
from farm.types import format
from farm.types.fingerprint import median_fingerprint, sound_fingerprint
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.roofline import Roofline
from farm.types.tuple import dtype_of_call

_STEP = "Name an .html file in a folder that you may write to."
_TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def flag_meanings() -> dict[str, str]:
    """Flag of a reading -> its meaning; `docs/method.md` has the same text."""
    rows = csv.DictReader((_TEMPLATES / "flags.csv").read_text(encoding="utf-8").splitlines())
    return {row["flag"]: row["meaning"] for row in rows}


@dataclass(frozen=True)
class JobPage:
    """The values of one job that a page shows."""

    report: Report
    command: str  # "" for a sweep
    remarks: list[tuple[str, str]]  # except the remarks that have their own section
    sums: list[charts.Chart]
    tree: charts.Chart | None
    roofline: charts.Chart | None
    peaks: Roofline
    peaks_measured: bool  # False: the peaks are from the data sheet
    distributions: list[charts.Chart]
    owner_groups: list[OwnerGroup]
    parts_shown: list[str]  # the parts of a training step that the page shows


def job_page(session: Session, report: Report) -> JobPage:
    """Collect the values of a job that a page shows."""
    peaks = report.roofline
    fingerprints = [
        session.get_one(tables.CardRow, card.id).fingerprint for card in report.cards[:1]
    ]
    ids = [row.reading_id for row in report.tuples if row.reading_id]
    readings = fetch_values(session, (READING.id, READING.power_w, READING.sm_clock_mhz), ids)
    of_model = not report.is_sweep
    modules = layers(session, report, "module", outputs=False).rows if of_model else ()
    return JobPage(
        report=report,
        command=Request.from_json(report.request).command(),
        remarks=[
            (what, text)
            for what, text in remarks(report)
            if what not in ("coverage", "flags", "ranks")
        ],
        sums=charts.sum_and_whole(report) if of_model else [],
        tree=charts.modules(modules, report.title),
        roofline=charts.roofline(report, peaks),
        peaks=peaks,
        peaks_measured=bool(
            fingerprints and sound_fingerprint(fingerprints[0]).get("copy_bytes_per_s")
        ),
        distributions=charts.distributions(report, readings),
        owner_groups=grouped(report.owners),
        parts_shown=[part for part in OF_OWNERS if any(row.part == part for row in report.owners)],
    )


def check_page(path: Path) -> None:
    """Check that a page can be written to this file, before the report is computed. Raises
    `UsageError` if not.
    """
    plotly_js()
    check_file(path)


def write_page(path: Path, pages: Sequence[JobPage]) -> None:
    """Write one page about one or several jobs. Raises `UsageError` and leaves no partial file if
    that fails.
    """
    title = pages[0].report.title if len(pages) == 1 else f"{len(pages)} jobs"
    values = {
        "title": title,
        "pages": pages,
        "scatters": own_scatters(pages),
        "script": plotly_js(),
    }
    write_whole(path, render("reports.html", **values))


def write_history(path: Path, model: str, rows: list[HistoryRow]) -> None:
    """Write a page with a chart and a table for each series of `farm.report.history`."""
    groups = by_key(lambda row: row.series, rows)
    series = [(of_series, charts.history(of_series)) for of_series in groups.values()]
    write_whole(
        path,
        render("history.html", title=f"History of {model}", series=series, script=plotly_js()),
    )


def write_schemes(path: Path, compared: SchemeComparison) -> None:
    """Write a page with curves of time and energy for each scheme, and a table."""
    names = {"time": "Time over sizes", "energy": "Energy over sizes"}
    figures = [(name, charts.schemes(compared, quantity)) for quantity, name in names.items()]
    figures = [(name, figure) for name, figure in figures if figure]
    title = f"{compared.model} on {compared.card_model}"
    values = {"compared": compared, "figures": figures, "script": plotly_js()}
    write_whole(path, render("schemes.html", title=title, **values))


def own_scatters(pages: Sequence[JobPage]) -> list[charts.Chart]:
    """Return the scatter charts of several jobs, with links to the jobs' sections on the same
    page.
    """
    return (
        charts.scatters([(page.report, f"#{page.report.job_id}") for page in pages])
        if len(pages) > 1
        else []
    )


def write_whole(path: Path, text: str) -> None:
    """Write a file under a temporary name and rename it. Raises `UsageError` and leaves no part if
    that fails.
    """
    try:
        with writing_to(path, _STEP), replacing_file(path) as file:
            file.write(text.encode())
    except ValueError as error:
        raise UsageError(f"'{path}' cannot be written: {error}.", _STEP) from error


def plotly_js() -> str:
    """Return the JavaScript of plotly. Raises `UsageError` if plotly is not installed."""
    with needing("Pages need plotly", "plot"):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())


def render(template: str, **values: Any) -> str:
    """Render a template to HTML. All text is escaped, and control characters become visible."""
    return (
        _environment()
        .get_template(template)
        .render(flags=flag_meanings(), made_at_s=time.time(), **values)
    )


@functools.cache
def _environment() -> Any:  # keeps the compiled templates
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(_TEMPLATES),
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.finalize = lambda value: (
        printable(value, keep="\n") if type(value) is str else value
    )
    units_of = {"TIME": format.TIME, "ENERGY": format.ENERGY, "POWER": format.POWER}
    environment.filters |= {
        "percent": format.percent,
        "gap": format.gap,
        "span": format.span,
        "plural": format.plural,
        "day": format.day,
        "few": format.few,
        "count": format.count_of,
        "time": functools.partial(format.quantity, units=format.TIME),
        "energy": functools.partial(format.quantity, units=format.ENERGY),
        "power": functools.partial(format.quantity, units=format.POWER),
        "quantity": lambda value, name: format.quantity(value, units_of[name]),
        "interval": lambda figure, name: format.interval(figure, units_of[name]),
    }
    return environment


# ---- the database as a folder of pages


MOST_OPERATORS = 20_000  # most rows of the table: browsers are slow with more
_OURS = 'name="generator" content="operator-farm"'
_SCRIPT = "plotly.min.js"

_PEAKS = (
    "copy_bytes_per_s",
    "matmul_flops_per_s",
    "launch_floor_us",
    "idle_power_w",
    "power_limit_w",
)

Row = dict[str, Any]  # a row of a table in a template


@dataclass(frozen=True)
class ModelPage:
    """A model, with its newest job for each variant, card model and protocol."""

    name: str
    file: str
    jobs: tuple[JobPage, ...]


def publish(session: Session, folder: Path, told: Callable[[str], None] = lambda _: None) -> int:
    """Write the site; an earlier site in the folder is replaced. Tell each page's name; return
    their number. Raises `UsageError` if plotly is missing, or if the folder cannot be written or
    contains another program's files."""
    script = plotly_js()
    _check_folder(folder)
    models = list(_models(session, told))
    cards = _cards(session)
    operators, left_out = _operators(session)
    points = list(_reports(models))
    index = {
        "title": "What models cost",
        "models": models,
        "scatters": charts.scatters(points),
        "cards": cards,
    }
    pages: dict[str, tuple[str, dict[str, Any]]] = {
        "index.html": ("index.html", index),
        "operators.html": (
            "operators.html",
            {"title": "What operators cost", "rows": operators, "left_out": left_out},
        ),
        "compare.html": (
            "compare.html",
            {"title": "Models on different cards", **_side_by_side(models)},
        ),
        "cards.html": ("cards.html", {"title": "Cards", "cards": cards}),
    }
    for model in models:
        values = {"title": model.name, "pages": model.jobs, "scatters": own_scatters(model.jobs)}
        pages[model.file] = ("model.html", values)
    write_whole(folder / _SCRIPT, script)
    for file, (template, values) in pages.items():
        told(file)
        write_whole(folder / file, render(template, script=_SCRIPT, **values))
    return len(pages)


def _check_folder(folder: Path) -> None:
    next_step = "Name a new folder, or one that you may write to."
    try:
        folder.mkdir(parents=True, exist_ok=True)
        index = folder / "index.html"
        ours = not index.exists() or _is_ours(index)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"The folder '{folder}' cannot be written: {reason}.", next_step
        ) from error
    if not ours:
        raise UsageError(
            f"'{folder}' contains pages that `farm publish` did not write.", "Name a new folder."
        )


def _is_ours(index: Path) -> bool:
    """True if `farm publish` wrote a page."""
    if not index.is_file():  # opening a pipe would wait for its writer
        return False
    with index.open(encoding="utf-8", errors="replace") as file:
        return _OURS in file.read(4000)


def _models(session: Session, told: Callable[[str], None]) -> Iterator[ModelPage]:
    """Yield the models by name, with the newest job that has a verdict for each request and card
    model.
    """
    rows = session.execute(
        sqlalchemy.select(JOB.id, VARIANT.model, JOB.request_id, JOB.request)
        .join(tables.ModelVariant, VARIANT.id == JOB.variant_id)
        .where(JOB.id.in_(sqlalchemy.select(VERDICT.job_id)), JOB.state == tables.JobState.DONE)
        .order_by(JOB.created_at_s.desc(), JOB.id)
    ).all()
    cards = (
        sqlalchemy.select(ITEM.job_id, func.min(ITEM.card_model))
        .where(ITEM.role == "whole")
        .group_by(ITEM.job_id)
    )
    card_models = {job_id: model for job_id, model in session.execute(cards)}
    newest: dict[str, dict[tuple[Any, ...], str]] = defaultdict(dict)
    for id_, model, request_id, request in rows:
        if not request_id:  # an imported job has no request id
            with contextlib.suppress(Unreadable):
                request_id = Request.from_json(request).id
        newest[model].setdefault((request_id or id_, card_models.get(id_)), id_)
    for model in sorted(newest):
        told(model)
        pages = [job_page(session, build(session, id_)) for id_ in newest[model].values()]
        yield ModelPage(
            model, file_of(model), tuple(sorted(pages, key=lambda page: page.report.title))
        )


def file_of(model: str) -> str:
    """Return the file name of a model's page: the model's name, plus a hash if it has special
    characters.
    """
    plain = re.sub(r"[^\w-]+", "_", model, flags=re.ASCII)[:80]
    mark = "" if plain == model else f"-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
    return f"model-{plain}{mark}.html"


def _operators(session: Session) -> tuple[list[Row], int]:
    """The newest reading per tuple, card model, software and protocol by falling cost; and how many
    are omitted.
    """
    same_subject = (
        READING.subject_id,
        READING.card_model,
        READING.software_id,
        READING.protocol_id,
    )
    place = (
        func.row_number()
        .over(partition_by=same_subject, order_by=READING.created_at_s.desc())
        .label("place")
    )
    ours = (OF_TUPLES, READING.simulated.is_(False))
    placed = sqlalchemy.select(READING.id, place).where(*ours).subquery()
    newest = placed.c.place == 1
    of_reading = [
        READING[name]
        for name in ("card_model", "time_us", "energy_mj", "power_w", "flags", "created_at_s")
    ]
    of_operator = OPERATOR.label, OPERATOR.short_name, OPERATOR.flops, OPERATOR.bytes_moved
    query = (
        sqlalchemy.select(
            *of_reading,
            *of_operator,
            OPERATOR.spec,
            SOFTWARE.torch,
            PROTOCOL.spec.label("conditions"),
        )
        .join(placed, sqlalchemy.and_(placed.c.id == READING.id, newest))
        .join(OPERATOR.id.table, OPERATOR.id == READING.subject_id)
        .join(SOFTWARE.id.table, SOFTWARE.id == READING.software_id)
        .join(PROTOCOL.id.table, PROTOCOL.id == READING.protocol_id)
        .order_by(READING.time_us.desc())
        .limit(MOST_OPERATORS)
    )
    rows = []
    for row in session.execute(query).mappings():
        conditions = Protocol.from_json(row["conditions"])
        memory = (
            "some tensors in slow memory"
            if conditions.slow_tensors
            else f"{conditions.residency} data"
        )
        rate, dtype = row["flops"] / row["time_us"] * 1e6, dtype_of_call(row["spec"]) or "none"
        rows.append(
            {
                **row,
                "protocol": str(conditions),
                "memory": memory,
                "dtype": dtype,
                "flops_per_s": rate,
            }
        )
    number = session.execute(
        sqlalchemy.select(func.count()).select_from(placed).where(newest)
    ).scalar_one()
    return rows, number - len(rows)


def _cards(session: Session) -> list[Row]:
    """Return one row per card model: its peaks (medians over its cards), and its numbers of cards
    and readings.
    """
    counted = sqlalchemy.select(READING.card_model, func.count()).where(
        READING.simulated.is_(False)
    )
    readings = {
        model: number for model, number in session.execute(counted.group_by(READING.card_model))
    }
    card_row = tables.CardRow
    stored = session.exec(select(card_row).where(REAL_CARDS).order_by(col(card_row.id)))
    rows = []
    for model, cards in sorted(by_key(lambda card: card.model, stored).items()):
        first = next((card for card in cards if card.fingerprint), cards[0])
        row = {"model": model, "memory_bytes": first.memory_bytes, "driver": first.driver}
        row |= {"cards": len(cards), "readings": readings.get(model, 0)}
        peaks = median_fingerprint(card.fingerprint for card in cards)
        rows.append(row | {name: peaks.get(name) for name in _PEAKS})
    return rows


def _reports(models: Iterable[ModelPage]) -> Iterator[tuple[Report, str]]:
    """Yield the report of each job on the pages of models, and the file of its page."""
    for model in models:
        for page in model.jobs:
            yield page.report, model.file


def _side_by_side(models: Sequence[ModelPage]) -> Row:
    """The card models, most rows first; and a row per variant and protocol: card model -> time and
    energy.
    """
    rows: dict[tuple[str, str], Row] = {}
    for report, file in _reports(models):
        verdict, protocol = report.verdict, str(report.protocol)
        if (
            report.cards
            and not report.cards[0].simulated
            and verdict.time.whole
            and charts.is_complete(report)
        ):
            new = {
                "title": report.title,
                "protocol": protocol,
                "file": f"{file}#{report.job_id}",
                "on": {},
            }
            on = rows.setdefault((report.title, protocol), new)["on"]
            # the newest job is the first
            on.setdefault(report.cards[0].model, (verdict.time, verdict.energy))
    numbers = Counter(card for row in rows.values() for card in sorted(row["on"]))
    return {"cards": [card for card, _ in numbers.most_common()], "rows": list(rows.values())}
