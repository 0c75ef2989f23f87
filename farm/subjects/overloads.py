"""The overloads of PyTorch's registry that a tuple may name, and why the others are refused.

`benchmarks/operator_registry.py` makes the list. It fails closed: an overload that is denied or
that the list does not name is refused."""

from __future__ import annotations

from pathlib import Path


def listed(file: Path) -> dict[str, str]:
    """Name in the file -> the reason for which it is denied; "" if it is allowed."""
    reasons: dict[str, str] = {}
    reason = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            reason = line.strip("[]").removeprefix("denied: ")
        elif not line.startswith("#"):
            reasons |= dict.fromkeys(line.split(), "" if reason == "allowed" else reason)
    return reasons
