"""``farm significant``: the operator types that the accuracy loop measures first."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening
from cli.output import emit_json, say

app = typer.Typer(
    help="Show or edit the operator types that `--operators auto` measures first.", invoke_without_command=True
)
Names = Annotated[list[str], typer.Argument(metavar="OPERATOR", help="Operator types, e.g. Conv2d.")]


@app.callback()
def significant(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """Show the operator types that `--operators auto` measures first."""
    if context.invoked_subcommand is not None:
        return
    from sqlmodel import select

    from farm.store import tables

    with opening.open_database().read() as session:
        rows = session.exec(select(tables.SignificantOperator).order_by(tables.SignificantOperator.name)).all()
    if as_json:
        emit_json({"significant": [{"operator": row.name, "added_by": row.added_by} for row in rows]})
    elif not rows:
        say("None yet. `farm significant add Conv2d` adds one; `--operators auto` finds them by itself.")
    for row in [] if as_json else rows:
        typer.echo(f"{row.name}  (added by {'a person' if row.added_by == 'person' else 'the accuracy loop'})")


@app.command()
def add(operators: Names) -> None:
    """Add operator types."""
    from cli.following import check_operator_names
    from farm.store import tables
    from farm.store.database import database_now

    check_operator_names(operators)
    with opening.open_database().write() as session:
        from sqlmodel import select

        now_s = session.exec(select(database_now())).one()
        for name in dict.fromkeys(operators):
            if session.get(tables.SignificantOperator, name) is None:
                session.add(tables.SignificantOperator(name=name, added_by="person", created_at_s=now_s))
    say(f"Significant now: {', '.join(operators)}.")


@app.command()
def remove(operators: Names) -> None:
    """Remove operator types."""
    from sqlmodel import select

    from farm.errors import UnknownOperator, did_you_mean
    from farm.store import tables

    with opening.open_database().write() as session:
        known = list(session.exec(select(tables.SignificantOperator.name)).all())
        for name in operators:
            if (row := session.get(tables.SignificantOperator, name)) is None:
                raise UnknownOperator(
                    f"'{name}' is not among the significant operators.",
                    did_you_mean(name, known) or f"There is: {', '.join(known) or 'none'}.",
                )
            session.delete(row)
    say(f"No longer significant: {', '.join(operators)}.")
