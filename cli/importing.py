"""``farm import``: what another farm exported, beside one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.options import AsJson
from cli.output import emit, emit_json


def import_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Parquet files of `farm export`, folders of them, or h200: what comes with the package.",
        ),
    ],
    origin: Annotated[
        str, typer.Option(help="What to call the farm it comes from. Default: the name of the file.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Take in what another farm exported: no duplicates, and each reading keeps where it came from."""
    from farm.exchange.importer import import_export
    from farm.exchange.packaged import packaged_named
    from farm.settings import settings
    from farm.store.database import Database
    from farm.types.format import plural

    database = Database(settings().database)
    database.upgrade() if database.missing else database.check_schema()
    found = [path if path.exists() else packaged_named(str(path)) or path for path in paths]
    taken = [entry for path in found for entry in import_export(database, path, origin=origin)]
    if as_json:
        rows = [{"file": str(one.path), "table": one.table, "rows": one.rows, "new": one.new} for one in taken]
        emit_json({"imported": rows})
        return
    for one in taken:
        emit(f"{one.path}  {one.rows} {plural(one.table[:-1], one.rows)}, {one.new} new")
