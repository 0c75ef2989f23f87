"""``farm export``: what the database holds as tables for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli import opening
from cli.options import AsJson, Cards
from cli.output import emit, emit_json, say


def export(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="[FILE|FOLDER]", help="A file (.parquet, .csv, .jsonl) for readings alone, or a folder."
        ),
    ] = Path("farm-export"),
    filters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILTER]...", help="Conv2d, in_channels=64, flops>=1e9, dtype=bfloat16, torch=2.11 ..."
        ),
    ] = None,
    form: Annotated[str | None, typer.Option("--format", help="parquet (default), csv or jsonl.")] = None,
    card: Cards = None,
    traces: Annotated[bool, typer.Option("--traces", help="Also the sampled time series: large.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write readings, calls and verdicts as tidy tables, with a data dictionary beside them."""
    from farm.errors import UsageError, did_you_mean
    from farm.exchange import export as exports
    from farm.exchange.filters import parse
    from farm.types.format import plural

    if form is not None and form not in exports.FORMATS:
        near = did_you_mean(form, exports.FORMATS)
        raise UsageError(f"There is no format '{form}'.", near or f"Choose one of {', '.join(exports.FORMATS)}.")
    wanted = parse(filters or (), card or ())
    with opening.open_database().read() as session:
        written = exports.export(session, target, form=form, filters=wanted or None, traces=traces)
    if as_json:
        files = {table: {"file": str(path), "rows": rows} for table, (path, rows) in written.files.items()}
        emit_json({"files": files, "dictionary": str(written.dictionary)})
        return
    for table, (path, rows) in written.files.items():
        emit(f"{path}  {rows} {plural(table[:-1], rows)}")
    emit(f"{written.dictionary}  what the columns mean")
    if not written.files["readings"][1]:
        say("No reading is meant by that." if wanted else "The database has no readings yet.")
