"""The overloads of PyTorch's registry that a tuple may name, and why the others are refused.

`benchmarks/operator_registry.py` makes the list. It fails closed: an overload that is denied or
that the list does not name is refused."""

from __future__ import annotations

from pathlib import Path

#: Operators that compute element by element, or reduce: their integers are only operands.
BY_ELEMENT = "allowed: computes by element"


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
