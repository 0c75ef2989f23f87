"""The operators of libraries, such as torchvision, that a tuple may name.

Each library has a list of its operators with their signatures, made by
`benchmarks/library_operators.py`. The setting `libraries` of this host names the libraries. A
process that measures imports them at its start. A message never imports anything, and a namespace
alone allows nothing: an operator is refused if no list of the setting allows it, if the host lacks
it, or if it has another signature there. So is one that takes whole numbers without limits: they
may be sizes or places in memory."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import operator
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm.errors import SettingsError, TupleRejected, told
from farm.settings import settings

FOLDER = Path(__file__).with_name("library_lists")
_DEFAULT_LIST = re.compile(r"=\[[^\]]*\]")
_WHOLE_NUMBERS = re.compile(r"(int|Scalar)(\[\d*\])?\??")


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
    #: The tensor argument that has at least as many elements as the outputs, if their sizes depend
    #: on values.
    selects_from: str = ""


def listed(name: str) -> LibraryOperator | None:
    """The entry of an operator, such as ``torchvision.nms.default``, in the lists of the setting
    `libraries`; None if no list names it. Raises `SettingsError` if a list cannot be read."""
    for library, file in settings().libraries.items():
        entry = _list(library, _file(library, file)).get(name)
        if entry is not None:
            return entry
    return None


def _file(library: str, file: str) -> Path:
    return Path(file) if file else FOLDER / f"{library}.toml"


def allowed() -> frozenset[str]:
    """The operators of libraries that a tuple may name on this host, if it has them."""
    entries: dict[str, LibraryOperator] = {}
    for library, file in settings().libraries.items():
        # as `listed`: the first one counts
        entries = _list(library, _file(library, file)) | entries
    return frozenset(name for name, entry in entries.items() if not entry.reason)


@functools.cache
def _list(library: str, path: Path) -> dict[str, LibraryOperator]:
    try:
        return _entries(library, tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        text = f"The list of operators of the library '{library}' cannot be read: {told(error)}."
        step = "Name the file of a list in the setting 'libraries', or leave the library out."
        raise SettingsError(text, step) from error


def _entries(library: str, table: Mapping[str, Any]) -> dict[str, LibraryOperator]:
    entries = {}
    values, limits = table.get("values", {}), table.get("limits", {})
    selecting = table.get("selects_from", {})
    for name, signature in table.get("allowed", {}).items():
        limited = {key: (least, most) for key, (least, most) in limits.get(name, {}).items()}
        reason = without_limits(signature, limited)
        entries[name] = LibraryOperator(
            library, signature, reason, values.get(name, {}), limited, selecting.get(name, "")
        )
    for name, reason in table.get("denied", {}).items():
        entries[name] = LibraryOperator(library, reason=reason or "is denied")
    return entries


def arguments_in(signature: str) -> list[tuple[str, str]]:
    """The type and the name of each argument of a signature."""
    text = _DEFAULT_LIST.sub("", signature.rpartition(" -> ")[0])[1:-1]
    parts = [part.partition("=")[0].rpartition(" ") for part in text.split(", ") if part != "*"]
    return [(kind, name) for kind, _, name in parts if name]


def without_limits(signature: str, limits: Mapping[str, Any]) -> str:
    """Why an operator is denied for the whole numbers that it takes; "" if it is not."""
    for kind, name in arguments_in(signature):
        numbers = _WHOLE_NUMBERS.fullmatch(kind)
        if numbers and name not in limits:
            return f"takes whole numbers '{name}' for which the list has no limits"
        if numbers and numbers[2] == "[]":
            return f"takes a list '{name}' of any length"
    return ""


def load() -> dict[str, str]:
    """Import the libraries of the setting `libraries`. Returns why a library could not be imported,
    by its name; its operators are refused."""
    problems = {}
    for library in settings().libraries:
        try:
            importlib.import_module(library)
        except Exception as error:  # a library may raise anything
            problems[library] = told(error)
    return problems


@functools.cache
def version_of(library: str) -> str:
    """The version of a library that this process has imported; for a module without one, a hash of
    its file. "" if it is not imported."""
    module = sys.modules.get(library)
    if module is None:
        return ""
    try:
        return importlib.metadata.version(library).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        file = module.__file__
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else "unknown"


def library_overload(name: str) -> Any:
    """The overload of a library with a name such as ``torchvision.nms.default``. Raises
    `TupleRejected` if no list allows it, or this host has no such operator."""
    entry = listed(name)
    if entry is None:
        text = (
            f"'{name}' is not in this version's allow-list of operators. It is in no list of a "
            "library either that the setting 'libraries' of this host (FARM_LIBRARIES) names."
        )
        step = "Name its library there, on each host that captures or measures it."
        raise TupleRejected(text, step)
    if entry.reason:
        text = f"'{name}' is not in this version's allow-list of operators: it {entry.reason}."
        raise TupleRejected(text, "Use another operator, or measure the model without it.")
    overload = registered(name)
    if overload is None:
        raise lacks(name, entry.library)
    if signature_of(overload) != entry.signature:
        text = f"'{name}' has another signature in the installed version of '{entry.library}'."
        raise TupleRejected(text, "Install the version for which the farm has a list.")
    return overload


def lacks(name: str, library: str) -> TupleRejected:
    """The error for a listed operator that this process cannot run."""
    return TupleRejected(
        f"This host has no operator '{name}' of the library '{library}'.",
        f"Install a build of {library} with its operators that suits PyTorch on this host. Check "
        f'it with python -c "import {library}". Then start the worker again.',
    )


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
