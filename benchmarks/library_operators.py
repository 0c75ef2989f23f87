"""Make the list of a library's operators that a tuple may name, in farm/subjects/library_lists.

The operators are those of the library's namespaces when it is imported. Each is allowed, or denied
by a property. Rules for values, limits of whole numbers, and the arguments that operators select
from are written by hand into the list (`farm.subjects.library` says how); the script keeps them, so
run it again after an edit. An operator whose name begins with an underscore is allowed only if the
list has a rule for it: somebody has read what it checks. Read that of each operator that the script
allows: it must check that the shapes of its tensors belong together.

    python -m benchmarks.library_operators torchao                        # print
    python -m benchmarks.library_operators my_library --file my_library.toml --write
    python -m benchmarks.library_operators torchvision --write
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from farm.subjects.libraries import (
    FOLDER,
    arguments_in,
    registered,
    signature_of,
    version_of,
    without_limits,
)
from farm.subjects.overloads import NOT_READ, OTHER_ARGUMENTS, OTHER_TENSORS

HEADER = """\
# The operators of {library} {version}. Made by benchmarks/library_operators.py, apart from the rules below them.
"""
#: Types of arguments that JSON of a tuple can contain.
PLAIN_TYPES = {"Tensor", "int", "bool", "float", "Scalar", "ScalarType", "Device", "Layout"}
#: Operators on tensors that a tuple cannot describe.
SPECIAL = re.compile(r"torchvision\.q\w+")
#: Public operators of which nobody has read what they check.
UNCHECKED = re.compile(r"torchvision\.box_iou_rotated\.")


def registered_by(library: str, namespaces: Iterable[str]) -> dict[str, str]:
    """Overload -> signature, of all operators of some namespaces, after a library is imported. The
    import may register more: torchvision has operators that read and write files."""
    importlib.import_module(library)
    signatures = {}
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = qualified.partition("::")
        if namespace not in namespaces:
            continue
        packet, _, overload = rest.partition(".")
        name = f"{namespace}.{packet}.{overload or 'default'}"
        signatures[name] = signature_of(registered(name))
    return signatures


def reason_of(
    name: str, signature: str, ruled: Iterable[str], limits: Mapping[str, Any] | None = None
) -> str:
    """Why an operator is denied; "" if it is allowed."""
    results = signature.rpartition(" -> ")[2]
    kinds = [kind for kind, _ in arguments_in(signature)]
    if {re.sub(r"\(\w+!?\)|\[\d*\]|\?", "", kind) for kind in kinds} - PLAIN_TYPES:
        return OTHER_ARGUMENTS
    if SPECIAL.match(name):
        return OTHER_TENSORS
    if "Tensor" not in results and not any("!" in kind for kind in kinds):
        return "returns no tensor"
    is_private = name.split(".")[1].startswith("_")
    if (is_private or UNCHECKED.match(name)) and name not in ruled:
        return NOT_READ
    return without_limits(signature, limits or {})


def text_of(
    library: str, version: str, signatures: Mapping[str, str], present: Mapping[str, Any]
) -> str:
    """The list as TOML, with the rules of the present list."""
    limits = present.get("limits", {})
    ruled = {*present.get("values", {}), *limits}
    reasons = {
        name: reason_of(name, text, ruled, limits.get(name))
        for name, text in sorted(signatures.items())
    }
    lines = [HEADER.format(library=library, version=version), "[allowed]"]
    for name, reason in reasons.items():
        if not reason:
            lines.append(f'"{name}" = {json.dumps(signatures[name])}')
    lines += ["", "[denied]"]
    lines += [f'"{name}" = {json.dumps(reason)}' for name, reason in reasons.items() if reason]
    return "\n".join([*lines, "", *_rules(present)])


def _rules(present: Mapping[str, Any]) -> Iterator[str]:
    for title in ("values", "limits"):
        yield f"[{title}]"
        for name, rules in present.get(title, {}).items():
            entries = ", ".join(
                f"{argument} = {json.dumps(rule)}" for argument, rule in rules.items()
            )
            yield f'"{name}" = {{{entries}}}'
        yield ""
    yield "[selects_from]"
    for name, argument in present.get("selects_from", {}).items():
        yield f'"{name}" = {json.dumps(argument)}'
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="the module that registers the operators")
    parser.add_argument("--namespaces", nargs="+", help="default: the name of the library")
    parser.add_argument("--file", type=Path, help="the list; default: that of the farm")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    file = given.file or FOLDER / f"{given.library}.toml"
    present = tomllib.loads(file.read_text()) if file.exists() else {}
    signatures = registered_by(given.library, given.namespaces or [given.library])
    text = text_of(given.library, version_of(given.library), signatures, present)
    if given.write:
        file.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
