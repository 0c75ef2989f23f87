"""``farm significant``: the operator types that the accuracy loop measures first."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import output
from cli.options import AsJson
from cli.output import emit, emit_json, say

app = typer.Typer(
    help="Show or edit the operator types that `--operators auto` measures first.", invoke_without_command=True
)
Names = Annotated[list[str], typer.Argument(metavar="OPERATOR", help="Operator types, e.g. Conv2d.")]


@app.callback()
def significant(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the operator types that `--operators auto` measures first."""
    if context.invoked_subcommand is not None:
        return
    from sqlmodel import select

    from farm.store import tables

    with output.open_database().read() as session:
        rows = session.exec(select(tables.SignificantOperator).order_by(tables.SignificantOperator.name)).all()
    if as_json:
        emit_json({"significant": [{"operator": row.name, "added_by": row.added_by} for row in rows]})
    elif not rows:
        say("No operator types yet. `farm significant add Conv2d` adds one; `--operators auto` finds and adds them.")
    for row in [] if as_json else rows:
        emit(f"{row.name}  (added by {'a person' if row.added_by == 'person' else 'the accuracy loop'})")


@app.command()
def add(operators: Names) -> None:
    """Add operator types."""
    from farm.jobs.rounds import remember_significant
    from farm.requests.partial_request import check_operator_names

    check_operator_names(operators)
    with output.open_database().write() as session:
        remember_significant(session, operators, "person")
    say(f"Added to the significant operator types: {', '.join(operators)}.")


@app.command()
def remove(operators: Names) -> None:
    """Remove operator types."""
    from farm.jobs.rounds import forget_significant

    with output.open_database().write() as session:
        forget_significant(session, operators)
    say(f"Removed from the significant operator types: {', '.join(operators)}.")
