"""``farm lookup``, ``export`` and ``import``: readings and their exchange."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import lists, output
from cli.options import AsJson, Cards
from cli.output import emit, emit_json, say, show
from farm.types.format import plural

if TYPE_CHECKING:
    from farm.exchange.importer import Imported


def lookup(
    words: list[str],
    card: Cards = None,
    sort: str = "time",
    limit: int = 20,
    as_json: AsJson = False,
) -> None:
    """Show the cost of an operator: time, energy and power from readings, with their card, software
    and age.
    """
    from farm.report import lookup as lookups
    from farm.store.query import parse

    filters = parse(words, card or ())
    matches, total = output.first_that_knows(
        lambda session: lookups.lookup(session, filters, sort=sort, limit=limit),  # type: ignore[arg-type]
        lambda result: result[1] > 0,
    )
    rows = [row.to_json() for row in matches]
    if as_json:
        emit_json({"total": total, "readings": rows})
    elif not rows:
        say(f"No readings match {filters}.\n→ Omit a filter; `farm export` writes all readings.")
    else:
        show(lists.readings(rows))
        if total > len(rows):
            say(f"{total - len(rows)} more: -n {total} shows all, `farm export` writes them.")


def export(
    target: Path = Path("farm-export"),
    filters: list[str] | None = None,
    form: str | None = None,
    card: Cards = None,
    traces: bool = False,
    as_json: AsJson = False,
) -> None:
    """Write readings, calls and verdicts as tidy tables, with a data dictionary beside them."""
    from farm.exchange import export as exports
    from farm.store.query import parse

    selected = parse(filters or (), card or ())
    written = output.first_that_knows(
        lambda session: exports.export(
            session, target, form=form, filters=selected or None, traces=traces
        ),
        lambda exported: exported.files["readings"][1] > 0,
    )
    if as_json:
        files = {
            table: {"file": str(path), "rows": rows}
            for table, (path, rows) in written.files.items()
        }
        lacking = [vars(part) for part in written.left_out]
        emit_json({"files": files, "dictionary": str(written.dictionary), "left_out": lacking})
        return
    for table, (path, rows) in written.files.items():
        emit(f"{path}  {rows} {plural(table[:-1], rows)}")
    emit(f"{written.dictionary}  meaning of the columns")
    if not written.files["readings"][1]:
        say(f"No readings match {selected}." if selected else "The database has no readings yet.")
    for part in written.left_out:
        say(f"Left out: {part}.")


def import_(paths: list[Path], origin: str = "", as_json: AsJson = False) -> None:
    """Import the export of another farm: duplicates are skipped, and each reading keeps its
    origin.
    """
    from farm.exchange.importer import import_export
    from farm.exchange.packaged import export_at

    with output.writable_database() as database:
        imported: list[Imported] = []
        for path in paths:
            imported += import_export(database, export_at(path), origin=origin)
    if as_json:
        emit_json({"imported": [_as_data(entry) for entry in imported]})
        return
    for entry in imported:
        rows = f"{entry.rows} {plural(entry.table[:-1], entry.rows)}"
        emit(f"{entry.path}  {rows}, {entry.new} new")
        if entry.left_out:
            say(f"{entry.path} was left out: {entry.left_out}.")


def _as_data(imported: Imported) -> dict[str, Any]:
    """The rows of one table, with the path as text and last."""
    data = dict(vars(imported))
    data["file"] = str(data.pop("path"))
    return data
