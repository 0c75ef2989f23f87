"""``farm db``: the database's schema, old data, and the operator types that the accuracy loop
measures first.
"""

from __future__ import annotations

import sys

import typer

from cli import output
from cli.options import AsJson
from cli.output import emit, emit_json, say
from farm.errors import SchemaMismatch, UsageError

app = typer.Typer(
    help="Create, update and check the database's tables; delete old data.", no_args_is_help=True
)


@app.command(epilog="Example: farm db upgrade")
def upgrade() -> None:
    """Create the tables, or migrate them to this program's schema."""
    from farm.jobs.cards import served
    from farm.settings import settings
    from farm.store.database import Database
    from farm.types.format import few

    database = Database(settings().database)
    before = database.schema_version()
    if before and database.older_schema():
        working = served(database, settings().heartbeat_s)
        if working:
            raise SchemaMismatch(
                f"Workers of an older version use the database {database}, which has schema "
                f"{before}: {few(working)}. Nothing was changed.",
                "Stop all workers and runs (docs/operate.md, Upgrading), then repeat this command. "
                "Killed ones count for three heartbeats.",
            )
    database.upgrade()
    after = database.schema_version()
    emit(
        f"{database}: schema {after}"
        + (" already" if before == after else f" (was {before or 'empty'})")
    )


@app.command(epilog="Example: farm db check")
def check() -> None:
    """Check that the database answers and has this program's schema (exit code 3 if not)."""
    database = output.open_database()
    emit(f"{database}: schema {database.schema_version()}, the schema that this program needs")


@app.command(epilog="Example: farm db prune --older-than 90 --dry-run")
def prune(older_than: float = 30.0, dry_run: bool = False, yes: bool = False) -> None:
    """Delete old time series, and ended jobs that have no reading. Readings are never deleted."""
    from farm.store import pruning
    from farm.types.format import count_of, plural

    database = output.open_database()
    old = pruning.prunable(database, older_than * 86400)

    def told(what: pruning.Prunable) -> str:
        series = f"{what.traces} time series of readings ({count_of(what.traces_bytes, 'B')})"
        return f"{series} and {len(what.jobs)} {plural('job', len(what.jobs))} without a reading"

    if dry_run or not (old.traces or old.jobs):
        note = " Nothing was deleted (--dry-run)." if dry_run else ""
        emit(f"{database}: {told(old)} to delete.{note}")
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"This would delete {told(old)}.",
                "Add --yes to delete, or --dry-run to print only.",
            )
        typer.confirm(f"Delete {told(old)} from {database}?", abort=True, err=True)
    emit(f"{database}: {told(pruning.prune(database, older_than * 86400))} deleted.")


@app.command(epilog="Example: farm db significant --add Conv2d")
def significant(
    add: list[str] | None = None, remove: list[str] | None = None, as_json: AsJson = False
) -> None:
    """Show or edit the operator types that `--operators auto` measures first."""
    from sqlmodel import select

    from farm.jobs.significant import forget_significant, remember_significant
    from farm.requests.partial_request import check_operator_names
    from farm.store import tables

    check_operator_names(add or ())
    with output.open_database().write() as session:
        remember_significant(session, add or (), "person")
        forget_significant(session, remove or ())
        rows = session.exec(
            select(tables.SignificantOperator).order_by(tables.SignificantOperator.name)
        ).all()
    if as_json:
        emit_json(
            {"significant": [{"operator": row.name, "added_by": row.added_by} for row in rows]}
        )
    elif not rows:
        say(
            "No operator types yet. `farm db significant --add Conv2d` adds one; `--operators "
            "auto` adds them."
        )
    for row in [] if as_json else rows:
        emit(
            f"{row.name}  (added by "
            f"{'a person' if row.added_by == 'person' else 'the accuracy loop'})"
        )
