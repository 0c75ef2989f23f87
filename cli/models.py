"""``farm models``: what can be measured by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import AsJson
from cli.output import emit_json, say, show

if TYPE_CHECKING:
    from farm.models.entry import ModelEntry


def models(
    pattern: Annotated[
        str | None, typer.Argument(help="Part of a name, or a pattern such as 'resnet*'. Default: all.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="Where they come from: torchvision, transformers, timm or user. Default: all but timm, which has more than a thousand."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models of the catalog, with parameters and FLOPs of one pass at batch 1."""
    from farm.errors import UnknownModel
    from farm.models import catalog
    from farm.models.entry import install_line, is_installed

    known = catalog.names(source=source)
    # timm's would bury the others: they are shown where they are asked for, or where nothing else fits.
    few = known if source else [name for name in known if catalog.find(name).origin != "timm"]
    names = few
    if pattern:
        if catalog.is_pattern(pattern):
            names = catalog.matching(f"{source}/{pattern}" if source else pattern)
        else:
            names = [name for name in few if pattern.lower() in name.lower()]
            names = names or [name for name in known if pattern.lower() in name.lower()]
        if not names:
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
            "length": entry.length,
            "longest": entry.longest,
            "phases": entry.phases,
            "note": _note(entry),
        }
        for entry in entries
    ]
    if as_json:
        emit_json({"models": rows})
    else:
        from cli import lists

        show(lists.models(rows))
        chosen = {entry.origin for entry in entries}
        for one in catalog.SOURCES:
            if one.NAME in chosen and not is_installed(one):
                say(f"→ What is of {one.NAME} wants its package: {install_line(one)}")
        if not pattern and not source:
            say(f"→ {len(catalog.names(source='timm'))} of timm besides: farm models --source timm")
        say(
            '→ Add your own in the setting `models`: FARM_MODELS=\'{"my_net": "my_package.models:my_net"}\'; docs/settings.md'
        )


def _note(entry: ModelEntry) -> str:
    notes = ["takes this size only"] if entry.fixed_size and entry.input_size else []
    return ", ".join([*notes, *entry.phases])
