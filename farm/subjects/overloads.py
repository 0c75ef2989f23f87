"""The overloads of PyTorch's registry that a tuple may name, and why the others are refused.

`benchmarks/operator_registry.py` makes the list. It fails closed: an overload that is denied or
that the list does not name is refused."""

from __future__ import annotations

from pathlib import Path

#: Operators that compute element by element, or reduce: their integers are only operands.
BY_ELEMENT = "allowed: computes by element"
# Reasons for which an overload is denied.
TAKEN_APART = "consists of other operators, which are tuples"
GENERATED = "is a variant that PyTorch generates and does not call"
OTHER_ARGUMENTS = "takes an argument that a tuple cannot contain"
OTHER_TENSORS = "works on sparse, nested, quantised or oneDNN tensors, or on other hardware"
NOT_READ = "is called by other operators only, and nobody has read what it checks"


def sections(file: Path) -> dict[str, list[str]]:
    """Title of each section of a list -> its names."""
    names: dict[str, list[str]] = {}
    title = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            title = line.strip("[]")
        elif not line.startswith("#"):
            names.setdefault(title, []).extend(line.split())
    return names


def listed(file: Path) -> dict[str, str]:
    """Name in the file -> the reason for which it is denied; "" if it is allowed."""
    reasons: dict[str, str] = {}
    for title, names in sections(file).items():
        reason = "" if title.startswith("allowed") else title.removeprefix("denied: ")
        reasons |= dict.fromkeys(names, reason)
    return reasons
