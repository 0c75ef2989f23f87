"""``farm export`` and ``farm import``: the database as tables for other programs and other farms."""

from __future__ import annotations

from pathlib import Path

import typer

from cli import opening
from cli.options import AsJson, Cards
from cli.output import emit, emit_json, say


def export(
    target: Path = typer.Argument(
        Path("farm-export"),
        metavar="[FILE|FOLDER]",
        help="A file (.parquet, .csv, .jsonl) for readings alone, or a folder.",
    ),
    filters: list[str] | None = typer.Argument(
        None, metavar="[FILTER]...", help="Conv2d, in_channels=64, flops>=1e9, dtype=bfloat16, torch=2.11 ..."
    ),
    form: str | None = typer.Option(None, "--format", help="parquet (default), csv or jsonl."),
    card: Cards = None,
    traces: bool = typer.Option(False, "--traces", help="Also the sampled time series: large."),
    as_json: AsJson = False,
) -> None:
    """Write readings, calls and verdicts as tidy tables, with a data dictionary beside them."""
    from farm.exchange import export as exports
    from farm.exchange.filters import parse
    from farm.types.format import plural

    selected = parse(filters or (), card or ())
    with opening.open_database().read() as session:
        written = exports.export(session, target, form=form, filters=selected or None, traces=traces)
    if as_json:
        files = {table: {"file": str(path), "rows": rows} for table, (path, rows) in written.files.items()}
        emit_json({"files": files, "dictionary": str(written.dictionary)})
        return
    for table, (path, rows) in written.files.items():
        emit(f"{path}  {rows} {plural(table[:-1], rows)}")
    emit(f"{written.dictionary}  what the columns mean")
    if not written.files["readings"][1]:
        say(f"No readings match {selected}." if selected else "The database has no readings yet.")


def import_(
    paths: list[Path] = typer.Argument(
        ...,
        metavar="FILE...",
        help="Parquet files of `farm export`, folders of them, or h100 or h200: the packaged readings.",
    ),
    origin: str = typer.Option("", help="Name of the exporting farm. Default: the name of the file."),
    as_json: AsJson = False,
) -> None:
    """Import the export of another farm: duplicates are skipped, and each reading keeps its origin."""
    from farm.exchange.importer import import_export
    from farm.exchange.packaged import packaged_named
    from farm.settings import settings
    from farm.store.database import Database
    from farm.types.format import plural

    database = Database(settings().database)
    database.upgrade() if database.missing else database.check_schema()
    found = [path if path.exists() else packaged_named(str(path)) or path for path in paths]
    imported = [entry for path in found for entry in import_export(database, path, origin=origin)]
    if as_json:
        rows = [{"file": str(one.path), "table": one.table, "rows": one.rows, "new": one.new} for one in imported]
        emit_json({"imported": rows})
        return
    for one in imported:
        emit(f"{one.path}  {one.rows} {plural(one.table[:-1], one.rows)}, {one.new} new")
