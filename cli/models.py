"""``farm models``: what can be measured by name."""

from __future__ import annotations

import fnmatch
from typing import Annotated

import typer

from cli.output import emit_json, show


def models(
    pattern: Annotated[
        str | None, typer.Argument(help="Part of a name, or a pattern such as 'resnet*'. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")] = False,
) -> None:
    """List the models of the catalog."""
    from farm import catalog
    from farm.errors import UnknownModel

    names = catalog.names()
    if pattern:
        wildcard = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
        found = [name for name in names if fnmatch.fnmatchcase(name.lower(), wildcard.lower())]
        if not found:
            raise UnknownModel.named(pattern, names)
        names = found
    rows = [catalog.describe(name) for name in names]
    if as_json:
        emit_json({"models": [{"name": e.name, "task": e.task, "input_size": e.input_size} for e in rows]})
    else:
        from cli import render

        show(render.models(rows))
