"""The models of the catalog as plain rows. Needs neither torch nor the packages of the sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from farm.errors import UnknownModel
from farm.models import catalog
from farm.models.entry import ModelEntry
from farm.models.source import install_line, is_installed


@dataclass(frozen=True)
class Models:
    """Models of the catalog, a row for each."""

    rows: list[dict[str, Any]]
    #: A source whose package is not installed -> how to install it.
    to_install: dict[str, str]
    #: Number of timm's models that are not listed, unless a pattern or a source is given.
    further: int


def models(pattern: str = "", source: str = "") -> Models:
    """List the models whose names have a text or match a shell pattern, of all sources or one.
    Raises `UnknownModel` if there are none, and `UsageError` for an unknown source."""
    entries = [catalog.find(name) for name in _names(pattern, source)]
    origins = {entry.origin for entry in entries}
    to_install = {}
    for origin in catalog.SOURCES:
        if origin.name in origins and not is_installed(origin):
            to_install[origin.name] = install_line(origin)
    further = 0 if pattern or source else len(catalog.names(source="timm"))
    return Models([_row(entry) for entry in entries], to_install, further)


def _names(pattern: str, source: str) -> list[str]:
    every = catalog.names(source=source or None)
    # timm's many models are listed only on request, or if nothing else matches.
    few = every if source else [name for name in every if catalog.find(name).origin != "timm"]
    if not pattern:
        return few
    if catalog.is_pattern(pattern):
        return catalog.matching(f"{source}/{pattern}" if source else pattern)
    for names in (few, every):
        matches = [name for name in names if pattern.lower() in name.lower()]
        if matches:
            return matches
    raise UnknownModel.named(pattern, every)


def _row(entry: ModelEntry) -> dict[str, Any]:
    notes = ["fixed input size"] if entry.fixed_size and entry.input_size else []
    return {
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
        "note": ", ".join([*notes, *entry.phases]),
    }
