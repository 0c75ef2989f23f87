"""Finds the add-ons of this host: products beside the core, such as predictions or pages.

A distribution registers an add-on by an entry point of the group ``farm.addons``, which names a
`farm.types.add_on.AddOn`. The farm loads the entry points of its own distribution, and of other
distributions only if the setting ``addons`` of the host names them. The core never imports an
add-on. It loads one through this module, when a command, a name of ``import farm`` or a request
needs it.

Example, in the ``pyproject.toml`` of another distribution::

    [project.entry-points."farm.addons"]
    carbon = "farm_carbon.addon:ADD_ON"
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from farm.types.add_on import AddOn

GROUP = "farm.addons"
DISTRIBUTION = "operator-farm"


@functools.cache
def add_ons() -> Mapping[str, AddOn]:
    """Return the add-ons of this host by name.

    An add-on of the farm's own distribution without files is left out. Raises `SettingsError` if a
    distribution that the setting ``addons`` names is not installed, or cannot be loaded.
    """
    named: dict[str, AddOn] = {}
    for entry in _entry_points(DISTRIBUTION):
        try:
            add_on = entry.load()
        except ModuleNotFoundError as error:
            if error.name is None or not entry.module.startswith(error.name):
                raise
            continue
        named[add_on.name] = add_on
    for distribution in _other_distributions():
        for add_on in _add_ons_of(distribution):
            named.setdefault(add_on.name, add_on)
    return named


def _entry_points(distribution: str) -> Iterator[EntryPoint]:
    # late: it takes a tenth of the time of `farm --help`
    from importlib import metadata

    try:
        entries = metadata.distribution(distribution).entry_points
    except metadata.PackageNotFoundError:
        return
    yield from entries.select(group=GROUP)


def _other_distributions() -> list[str]:
    """The distributions that the setting ``addons`` names."""
    if not {"FARM_ADDONS", "FARM_CONFIG"} & os.environ.keys():
        return []
    # late: `farm --help` needs no settings
    from farm.settings import settings

    return settings().addons.replace(",", " ").split()


def unnamed_distributions() -> list[str]:
    """The installed distributions with add-ons that the setting ``addons`` does not name. Nothing
    of them is imported."""
    from importlib import metadata

    offered = metadata.entry_points(group=GROUP)
    installed = {entry.dist.name for entry in offered if entry.dist is not None}
    named = {metadata.distribution(name).name for name in _other_distributions()}
    return sorted(installed - named - {DISTRIBUTION})


def _add_ons_of(distribution: str) -> list[AddOn]:
    next_step = "Install it, or correct the setting 'addons' (FARM_ADDONS)."
    entries = list(_entry_points(distribution))
    if not entries:
        raise SettingsError(f"The distribution '{distribution}' has no add-on.", next_step)
    try:
        return [entry.load() for entry in entries]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        message = f"The add-on of '{distribution}' cannot be loaded: {reason}"
        raise SettingsError(message, next_step) from error


def public_names() -> Mapping[str, str]:
    """Return the names that add-ons add to ``import farm``, each with its module."""
    modules: dict[str, str] = {}
    for add_on in add_ons().values():
        for module, names in add_on.public.items():
            modules |= dict.fromkeys(names.split(), module)
    return modules


def handlers() -> list[Any]:
    """Return the handlers of requests that add-ons add to a benchmark process."""
    added: list[Any] = []
    for add_on in add_ons().values():
        if add_on.handlers:
            added.extend(at(add_on.handlers))
    return added


def offload() -> Any:
    """Return the function that puts tensors in slow memory; None if no add-on has one."""
    places = [add_on.offload for add_on in add_ons().values() if add_on.offload]
    return at(places[0]) if places else None


def result_pages(option: str) -> Any:
    """Return the module that writes pages, a `farm.report.pages.ResultPages`. Raises `UsageError`,
    which names the option, if no add-on has one."""
    return _first_module((add_on.pages for add_on in add_ons().values()), "pages", option)


def card_checks(option: str) -> Any:
    """Return the module that checks cards, a `farm.jobs.card_checks.CardChecks`. Raises
    `UsageError`, which names the option, if no add-on has one."""
    return _first_module((add_on.card_checks for add_on in add_ons().values()), "check", option)


def _first_module(places: Iterable[str], name: str, option: str) -> Any:
    """Import the first module that an add-on offers. Raises `UsageError` if there is none.

    Args:
        places: of each add-on, the name of its module; "" if it offers none.
        name: of the add-on that comes with the farm.
        option: what needs the module, for the message.
    """
    modules = list(filter(None, places))
    if not modules:
        raise UsageError(
            f"{option} needs the add-on '{name}', which is not installed.",
            f"Omit {option}, or install the farm again with all its files.",
        )
    return importlib.import_module(modules[0])


def card_history() -> Any:
    """Return the function that shows the history of a card. Raises `UsageError` if no add-on has
    one.
    """
    places = [add_on.card_history for add_on in add_ons().values() if add_on.card_history]
    if not places:
        raise UsageError(
            "--card needs the add-on 'check', which is not installed.",
            "Name a model instead, or install the farm again with all its files.",
        )
    return at(places[0])


def at(place: str) -> Any:
    """Import and return what is at a place."""
    module, _, attribute = place.partition(":")
    return vars(importlib.import_module(module))[attribute]
