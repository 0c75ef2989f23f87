"""The operators of libraries, such as torchvision, that a tuple may name.

Each library has a list of its operators with their signatures, made by
`benchmarks/library_operators.py`. The setting `libraries` of this host names the libraries. A
process that measures imports them at its start. A message never imports anything, and a namespace
alone allows nothing: an operator is refused if no list of the setting allows it, if the host lacks
it, or if it has another signature there."""

from __future__ import annotations

import functools
import importlib
import operator
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.errors import SettingsError, TupleRejected, told
from farm.settings import settings

FOLDER = Path(__file__).with_name("library_lists")


@dataclass(frozen=True)
class LibraryOperator:
    """An operator of a list. ``reason``: why it is denied; "" if a tuple may name it."""

    library: str  # the module that defines it on import
    signature: str = ""  # `(Tensor dets, Tensor scores, float iou_threshold) -> Tensor`
    reason: str = ""
    #: Tensor argument -> the rule for its values (`farm.subjects.library`).
    values: Mapping[str, str] = field(default_factory=dict)
    #: Argument -> its least and its largest valid number, or number of rows of a tensor.
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def listed(name: str) -> LibraryOperator | None:
    """The entry of an operator, such as ``torchvision.nms.default``, in the lists of the setting
    `libraries`; None if no list names it. Raises `SettingsError` if a list cannot be read."""
    for library, file in settings().libraries.items():
        path = Path(file) if file else FOLDER / f"{library}.toml"
        entry = _list(library, path).get(name)
        if entry is not None:
            return entry
    return None


@functools.cache
def _list(library: str, path: Path) -> dict[str, LibraryOperator]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        text = f"The list of operators of the library '{library}' cannot be read: {told(error)}."
        step = "Name the file of a list in the setting 'libraries', or leave the library out."
        raise SettingsError(text, step) from error
    entries = {
        name: LibraryOperator(library, reason=reason) for name, reason in table["denied"].items()
    }
    for name, signature in table["allowed"].items():
        values, limits = table["values"].get(name, {}), table["limits"].get(name, {})
        entries[name] = LibraryOperator(library, signature, "", values, limits)
    return entries


def load() -> dict[str, str]:
    """Import the libraries of the setting `libraries`. Returns why a library could not be imported,
    by its name; its operators are refused."""
    return {library: _imported(library) for library in settings().libraries}


@functools.cache
def _imported(library: str) -> str:
    try:
        importlib.import_module(library)
    except Exception as error:  # a library may raise anything
        return told(error)
    return ""


def library_overload(name: str) -> Any:
    """The overload of a library with a name such as ``torchvision.nms.default``. Raises
    `TupleRejected` if no list allows it, or this host has no such operator."""
    entry = listed(name)
    if entry is None or entry.reason:
        why = f": it {entry.reason}" if entry else ""
        text = f"'{name}' is not in this version's allow-list of operators{why}."
        step = "Name its library in the setting 'libraries' of this host (FARM_LIBRARIES)."
        raise TupleRejected(text, "Use another operator." if entry else step)
    overload = registered(name)
    library = entry.library
    if overload is None:
        problem = load()[library]
        why = f": {problem}" if problem else ""
        text = f"This host has no operator '{name}' of the library '{library}'{why}."
        raise TupleRejected(text, f"Install {library} with its operators on this host.")
    if signature_of(overload) != entry.signature:
        text = f"'{name}' has another signature in the installed version of '{library}'."
        raise TupleRejected(text, "Install the version for which the farm has a list.")
    return overload


def registered(name: str) -> Any:
    """The registered overload with a name of a list; None if there is none."""
    import torch

    try:
        return operator.attrgetter(name)(torch.ops)
    except AttributeError:
        return None


def signature_of(overload: Any) -> str:
    """Arguments and results of an overload, with symbolic integers as integers."""
    text = str(overload._schema)
    return text[text.index("(") :].replace("SymInt", "int")
