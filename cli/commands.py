"""The commands of `farm`: where each is, in the order of the help.

`commands.json` lists the commands of the core, each with its place in `cli` and an example. For a
command of the farm's own add-ons it only has the name of the add-on, which describes the command
itself (`farm.types.add_on.Command`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

from farm.extensions import add_ons, unnamed_distributions
from farm.types.add_on import Command

#: Group of the help -> command -> its place in `cli` and an example, or the name of its add-on. The
#: order is that in which a new user needs them.
_GROUPS: dict[str, dict[str, list[str] | str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)


_ORDER: list[str] = []
_OF_CORE: dict[str, Command] = {}
_OF_ADD_ONS: dict[str, str] = {}  # command of the farm's own add-ons -> name of the add-on
for _group, _entries in _GROUPS.items():
    for _name, _entry in _entries.items():
        _ORDER.append(_name)
        if isinstance(_entry, str):
            _OF_ADD_ONS[_name] = _entry
        else:
            _place, _example = _entry
            _OF_CORE[_name] = Command(_name, f"cli.{_place}", _example, _group)
#: The commands below which add-ons may have others.
_ABOVE_OTHERS = {_name.partition(" ")[0] for _name in _ORDER if " " in _name}


@functools.cache
def all_commands() -> Mapping[str, Command]:
    """Return the commands of this host by name, in the order of the help."""
    added: dict[str, Command] = {}
    for add_on in add_ons().values():
        for command in add_on.commands:
            added.setdefault(command.name, command)
    every = added | _OF_CORE
    return {name: every[name] for name in (*_ORDER, *added) if name in every}


def command_named(name: str) -> Command | None:
    """Return a command. A command of the core loads no add-on."""
    return _OF_CORE.get(name) or all_commands().get(name)


def with_joined_name(words: list[str]) -> list[str]:
    """Return the words of a command line. A command below another one, such as `cards check`, is
    one word.
    """
    if len(words) < 2 or words[0] not in _ABOVE_OTHERS:
        return words
    name = " ".join(words[:2])
    return [name, *words[2:]] if name in _OF_ADD_ONS or name in all_commands() else words


def missing_add_on(name: str) -> str:
    """Return the next step if a command belongs to an add-on that this host lacks; else ""."""
    if name not in _OF_ADD_ONS or name in all_commands():
        return ""
    return (
        f"It belongs to the add-on '{_OF_ADD_ONS[name]}', which is not installed. Install the farm "
        "again with all its files: `pip install operator-farm`, or `make` in a clone."
    )


def step_about_unnamed_add_ons() -> str:
    """Return the next step for a command of an add-on that the settings do not name; "" if they
    name all that are installed.
    """
    unnamed = unnamed_distributions()
    if not unnamed:
        return ""
    names = ", ".join(unnamed)
    return f"If it is a command of an installed add-on, name the add-on in FARM_ADDONS: {names}."
