"""Make the list of a library's operators that a tuple may name, in farm/subjects/library_lists.

The operators are those that the library registers when it is imported, or that the files of its
source define. Each is allowed, or denied by a property. Rules for values and limits are written by
hand into the list (`farm.subjects.library` says how); the script keeps them. An operator whose name
begins with an underscore is allowed only if the list has a rule for it: somebody has read what it
checks.

    python -m benchmarks.library_operators torchao                        # print
    python -m benchmarks.library_operators my_library --file my_library.toml --write
    python -m benchmarks.library_operators torchvision --definitions vision/torchvision/csrc/ops --write
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

from farm.subjects.libraries import FOLDER
from farm.subjects.overloads import NOT_READ, OTHER_ARGUMENTS, OTHER_TENSORS

HEADER = """\
# The operators of {library}. Made by benchmarks/library_operators.py, apart from the rules below them.
"""
#: Types of arguments that JSON of a tuple can contain.
PLAIN_TYPES = {"Tensor", "int", "bool", "float", "Scalar", "ScalarType", "Device", "Layout"}
#: Operators on tensors that a tuple cannot describe.
SPECIAL = re.compile(r"torchvision\.q\w+")
#: Public operators of which nobody has read what they check.
UNCHECKED = re.compile(r"torchvision\.box_iou_rotated\.")
_DEFINITION = re.compile(r'"(?:\w+::)?(\w+)(?:\.(\w+))?(\([^"]*\) -> [^"]*)"')


def registered_by(library: str) -> dict[str, str]:
    """Overload -> signature, of all operators that the import of a library adds."""
    before = set(torch._C._dispatch_get_all_op_names())
    importlib.import_module(library)
    signatures = {}
    for qualified in sorted(set(torch._C._dispatch_get_all_op_names()) - before):
        packet, _, overload = qualified.replace("::", ".").partition(".")[2].partition(".")
        namespace = qualified.partition("::")[0]
        name = f"{namespace}.{packet}.{overload or 'default'}"
        schema = str(torch._C._get_schema(f"{namespace}::{packet}", overload))
        signatures[name] = schema[schema.index("(") :]
    return signatures


def defined_in(library: str, folder: Path) -> dict[str, str]:
    """Overload -> signature, of all operators that files of a library's source define."""
    signatures = {}
    for file in sorted(folder.rglob("*.cpp")):
        for packet, overload, signature in _DEFINITION.findall(file.read_text(encoding="utf-8")):
            signatures[f"{library}.{packet}.{overload or 'default'}"] = signature
    return signatures


def reason_of(name: str, signature: str, ruled: Iterable[str]) -> str:
    """Why an operator is denied; "" if it is allowed."""
    arguments, _, results = signature.rpartition(" -> ")
    types = [one.split(" ")[0] for one in arguments.strip("()").replace("*, ", "").split(", ")]
    plain = {re.sub(r"\(\w+!?( -> \*)?\)|\[\d*\]|\?", "", kind) for kind in filter(None, types)}
    if {kind.replace("SymInt", "int") for kind in plain} - PLAIN_TYPES:
        return OTHER_ARGUMENTS
    if SPECIAL.match(name):
        return OTHER_TENSORS
    if "Tensor" not in results and "!" not in arguments:
        return "returns no tensor"
    is_private = name.split(".")[1].startswith("_")
    if (is_private or UNCHECKED.match(name)) and name not in ruled:
        return NOT_READ
    return ""


def text_of(library: str, signatures: Mapping[str, str], present: Mapping[str, Any]) -> str:
    """The list as TOML, with the rules of the present list."""
    ruled = {*present.get("values", {}), *present.get("limits", {})}
    reasons = {name: reason_of(name, text, ruled) for name, text in sorted(signatures.items())}
    lines = [HEADER.format(library=library), "[allowed]"]
    for name, reason in reasons.items():
        if not reason:
            lines.append(f'"{name}" = {json.dumps(signatures[name].replace("SymInt", "int"))}')
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--definitions", type=Path, help="folder with the source of its operators")
    parser.add_argument("--file", type=Path, help="the list; default: that of the farm")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    file = given.file or FOLDER / f"{given.library}.toml"
    present = tomllib.loads(file.read_text()) if file.exists() else {}
    if given.definitions:
        signatures = defined_in(given.library, given.definitions)
    else:
        signatures = registered_by(given.library)
    text = text_of(given.library, signatures, present)
    if given.write:
        file.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
