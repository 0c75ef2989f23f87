"""Options that several verbs have alike, each declared once. `cli.asking` has those of `run` and `submit`."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Follow = Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")]
Job = Annotated[str, typer.Argument(help="The job's id, or its beginning.")]
Cards = Annotated[
    list[str] | None, typer.Option("--card", help="Part of a card's model, or of its id. May be repeated.")
]
