"""``farm db``: the database's schema."""

from __future__ import annotations

import typer

from cli.output import emit

app = typer.Typer(help="Create, update and check the database's tables.", no_args_is_help=True)


@app.command()
def upgrade() -> None:
    """Create the tables, or bring them to this program's version."""
    from farm.settings import settings
    from farm.store.database import Database

    database = Database(settings().database)
    before = database.schema_version()
    database.upgrade()
    after = database.schema_version()
    emit(f"{database}: schema {after}" + (" already" if before == after else f" (was {before or 'empty'})"))


@app.command()
def check() -> None:
    """Say whether the database answers and has this program's schema (exit 3 if not)."""
    from cli import opening

    database = opening.open_database()
    emit(f"{database}: schema {database.schema_version()}, as this program needs it")
