"""``farm compare MODEL``: schemes of quantisation of one model over its sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from cli import output, tables
from cli.output import answer, say, say_differences
from cli.tables import Text
from farm.errors import FarmError, UsageError
from farm.extensions import result_pages
from farm.types.figure import value_of
from farm.types.format import ENERGY, NOTHING, TIME, count_of, gap, interval, quantity

if TYPE_CHECKING:
    from cli.interruption import Ending
    from cli.options import CliOptions
    from farm.report.schemes import Cell, OperatorChange, SchemeComparison, SchemeRow
    from farm.requests.partial_request import PartialRequest
    from farm.store.tables import CardRow
    from farm.types.request import Request
    from farm.verdict.cost_line import Change

_STYLES = {"faster": "green", "slower": "red"}


def compare_schemes(options: CliOptions, *, run: bool, limit: int, html: Path | None) -> None:
    """Show the schemes of a model, or write them as a page; with ``run``, measure those that no job
    has measured."""
    from cli.interruption import interruptible

    output.check_page(html)

    partials = options.requests()
    models = {partial.model for partial in partials}
    if len(models) != 1:
        raise UsageError(f"{len(models)} models are named.", "Name one model.")
    if run:
        interruptible(lambda ending: _measure_missing(options, partials, limit, html, ending))
        return
    from farm.report.schemes import compare_schemes
    from farm.requests.card_selection import matching_cards
    from farm.settings import settings

    def is_chosen(card: CardRow) -> bool:
        texts = options.card or []
        return not texts or any(matching_cards([card], text) for text in texts)

    kinds = ["cuda", "cpu", *(["simulated"] if settings().simulated_cards else [])]
    cells, axis = _cells(partials, kinds)
    model = str(partials[0].model)
    compared = output.first_that_knows(
        lambda session: compare_schemes(session, cells, model, axis, is_chosen)
    )
    _show(options, compared, limit, html)


def _measure_missing(
    options: CliOptions,
    partials: Sequence[PartialRequest],
    limit: int,
    html: Path | None,
    ending: Ending,
) -> None:
    from cli.run import measure
    from farm.report.schemes import compare_schemes
    from farm.settings import settings
    from tasks.submissions import Submissions, resolve_all

    cards = output.chosen_own_cards(options.card or [])
    ids, kind = {card.id for card in cards}, cards[0].kind
    cells, axis = _cells(partials, [kind])

    with output.writable_database(may_upgrade=True) as database:

        def ask() -> SchemeComparison:
            with database.read() as session:
                return compare_schemes(
                    session,
                    cells,
                    str(partials[0].model),
                    axis,
                    lambda card: card.id in ids,
                    kind,
                )

        missing = {request.id for request in ask().missing}
        left = []
        for partial, entry in zip(partials, cells, strict=True):
            request = entry.requests.get(kind)
            if request and request.id in missing:
                left.append(partial)
        if left:
            requests = resolve_all(left, cards, target=settings().target)
            requests = [replace(resolved, alone=len(requests) == 1) for resolved in requests]
            say_differences(requests)
            measure(database, [requests], cards, Submissions(say), ending)
        compared = ask()
    _show(options, compared, limit, html)


def _show(options: CliOptions, compared: SchemeComparison, limit: int, html: Path | None) -> None:
    if html is not None:
        result_pages("--html").write_schemes(html, compared)
        say(f"Written to {html}")
    if html is None or options.as_json:
        answer(options.as_json, compared, lambda: comparison(compared, limit))


def _cells(partials: Sequence[PartialRequest], kinds: Sequence[str]) -> tuple[list[Cell], str]:
    """The schemes and sizes that a person asks for on these kinds of cards, and the field that is
    the size."""
    from farm.report.schemes import NONE, Cell, axis_of

    axis = axis_of([partial.given for partial in partials])
    completed = [_requests(partial, kinds) for partial in partials]
    if not any(requests for requests, _ in completed):
        _, reasons = completed[0]
        raise next(iter(reasons.values()))
    memory: dict[str, int | None] = {}
    cells = []
    for partial, (requests, reasons) in zip(partials, completed, strict=True):
        scheme = partial.quantize or NONE
        if scheme not in memory:
            memory[scheme] = _memory_bytes(requests.values())
        size = partial.given.get(axis, 0)
        texts = {kind: error.message for kind, error in reasons.items()}
        cells.append(Cell(scheme, size, requests, texts, memory[scheme]))
    return cells, axis


def _requests(
    partial: PartialRequest, kinds: Sequence[str]
) -> tuple[dict[str, Request], dict[str, UsageError]]:
    """Kind of card -> the complete request, or the reason why such a card cannot measure it."""
    from farm.requests.partial_request import complete
    from farm.settings import settings

    requests, reasons = {}, {}
    for kind in kinds:
        try:
            requests[kind] = complete(
                partial, kind, target=settings().target, model=partial.resolved
            )
        except UsageError as error:
            reasons[kind] = error
    return requests, reasons


def _memory_bytes(requests: Any) -> int | None:
    """The memory of parameters and buffers; None if the model cannot be built here."""
    from farm.requests.memory import memory_of

    for request in requests:
        with contextlib.suppress(FarmError):
            return memory_of(request.variant).parameters
    return None


# ---- tables


def comparison(compared: SchemeComparison, limit: int) -> RenderableType:
    """A table of schemes and sizes, the sizes from which on each gains, and its operators."""
    heading = " on ".join(filter(None, (compared.model, compared.card_model)))
    parts: list[RenderableType] = [Text(heading, style="bold"), Text(), _schemes(compared)]
    if any(
        row.row and not row.row.time.apart for row in compared.rows if row.scheme != compared.base
    ):
        text = (
            f"  A change in parentheses: the intervals of {compared.base} and the scheme overlap."
        )
        parts.append(Text(text, style="dim"))
    parts.append(Text())
    for row in compared.rows:
        if row.lacks:
            parts.append(Text(f"{row.scheme} at {compared.axis} {row.size}: {row.lacks}"))
    for (scheme, name), trend in compared.trends.items():
        parts.append(Text(f"{scheme}, {name}: {trend.words(compared.axis)}."))
    for row in compared.rows:
        if limit and row.operators:
            parts += [Text(), Text(f"{row.scheme} at {compared.axis} {row.size}, by operator:")]
            parts.append(_operators(row.operators, limit))
    if compared.other_card_models:
        others = ", ".join(compared.other_card_models)
        parts += [Text(), Text(f"There are jobs on {others}, too: --card selects them.")]
    commands = [row.command for row in compared.rows if row.command]
    if commands:
        parts += [Text(), Text("Add --run to measure what is missing, or run:")]
        parts += [Text(f"    {command}") for command in commands]
    return Group(*parts)


def _schemes(compared: SchemeComparison) -> RenderableType:
    has_tokens = any(row.per_token.tokens for row in compared.rows)
    has_energy = any(row.row and row.row.b.energy_mj for row in compared.rows)

    def change(row: SchemeRow, change: Change) -> Any:
        return NOTHING if row.scheme == compared.base else _change(change)

    columns: list[Any] = [
        (f">{compared.axis}", lambda row: str(row.size or NOTHING)),
        ("scheme", "scheme"),
        (">time", lambda row: interval(row.time.b, TIME)),
        (">change", lambda row: change(row, row.time)),
    ]
    if has_energy:
        columns += [
            (">energy", lambda row: interval(row.energy.b, ENERGY)),
            (">change", lambda row: change(row, row.energy)),
        ]
    if has_tokens:
        columns.append((">tokens/s", lambda row: count_of(row.per_token.tokens_per_s, "").strip()))
    if has_tokens and has_energy:
        columns.append(
            (">energy\na token", lambda row: quantity(row.per_token.energy_per_token_mj, ENERGY))
        )
    columns.append((">memory of\nparameters", lambda row: count_of(row.memory_bytes, "B")))
    if any(row.job_id for row in compared.rows):
        columns.append(("job", lambda row: row.job_id or NOTHING))
        columns.append(("verdict", lambda row: tables.outcome(row.outcome) if row.outcome else ""))
    return tables.filled(compared.rows, columns, drops=("energy a token", "memory of parameters"))


def _operators(rows: Sequence[OperatorChange], most: int) -> RenderableType:
    """The operator types of a scheme, those that gain first and those that lose last; without those
    that cost the same."""
    changed = [operator for operator in rows if operator.saved_us != 0]
    shown = sorted(changed, key=lambda operator: -abs(operator.saved_us or 0.0))[:most]
    shown.sort(key=lambda operator: -(operator.saved_us or 0.0))

    def calls(operator: OperatorChange) -> str:
        return f"{operator.row.a.calls or NOTHING} / {operator.row.b.calls or NOTHING}"

    columns: list[Any] = [
        ("operator", lambda operator: operator.row.operator),
        (">calls", calls),
        (">time\nbefore", lambda operator: quantity(value_of(operator.row.time.a), TIME)),
        (">time\nafter", lambda operator: quantity(value_of(operator.row.time.b), TIME)),
        (">saved", lambda operator: quantity(operator.saved_us, TIME)),
        (">energy\nsaved", lambda operator: quantity(operator.saved_mj, ENERGY)),
    ]
    if any(operator.lacks for operator in shown):
        columns.append(("lacks", "lacks"))
    return tables.filled(shown, columns, drops=("lacks", "time before", "calls"))


def _change(change: Change) -> Any:
    text = gap(change.change)
    if change.change and not change.apart:
        text = f"({text})"
    return Text(text, style=_STYLES.get(change.verdict, ""))
