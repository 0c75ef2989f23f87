"""``farm models``: what can be measured by name."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import AsJson
from cli.output import emit_json, say, show


def models(
    pattern: Annotated[
        str | None, typer.Argument(help="Part of a name, or a pattern such as 'resnet*'. Default: all.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="Where they come from: torchvision, transformers or user. Default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the models of the catalog, with parameters and FLOPs of one pass at batch 1."""
    from farm.errors import UnknownModel
    from farm.models import catalog

    names = known = catalog.names(source=source)
    if pattern:
        if catalog.is_pattern(pattern):
            names = catalog.matching(f"{source}/{pattern}" if source else pattern)
        elif not (names := [name for name in names if pattern.lower() in name.lower()]):
            raise UnknownModel.named(pattern, known)
    entries = [catalog.find(name) for name in names]
    rows = [
        {
            "name": entry.name,
            "task": entry.task,
            "input_size": entry.input_size,
            "smallest_size": entry.input_size if entry.fixed_size else entry.smallest_size,
            "fixed_size": entry.fixed_size,
            "origin": entry.origin,
            "parameters": entry.parameters,
            "flops": entry.flops,
            "note": "takes this size only" if entry.fixed_size else "",
        }
        for entry in entries
    ]
    if as_json:
        emit_json({"models": rows})
    else:
        from cli import lists

        show(lists.models(rows))
        say(
            '→ Add your own in the setting `models`: FARM_MODELS=\'{"my_net": "my_package.models:my_net"}\'; docs/settings.md'
        )
