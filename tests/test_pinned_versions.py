"""`constraints.txt` is complete: `make` installs its lists without resolving dependencies."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_PINNED = {"operator-farm", "setuptools"}  # the project, and what builds it


def names(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}


def needed(root: str) -> set[str]:
    """The names of all packages that a requirement needs here. Extras are included."""
    found: set[str] = set()
    to_do, seen = [Requirement(root)], set()
    while to_do:
        one = to_do.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        for text in importlib.metadata.requires(name) or ():
            more = Requirement(text)
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                to_do.append(more)
    # The CUDA libraries of a build of torch have no pins: torch names their exact versions.
    return {name for name in found if not name.startswith(("nvidia-cu", "nvidia-n", "cuda-", "triton"))}


@pytest.mark.parametrize(("root", "part"), [("operator-farm", 0), ("operator-farm[dev]", 1)])
def test_every_needed_package_has_a_pinned_version(root: str, part: int) -> None:
    text = (Path(__file__).parent.parent / "constraints.txt").read_text()
    default, more = text.split("# Extras")
    pinned = names(default.splitlines()) | (names(more.splitlines()[1:]) if part else set())
    assert needed(root) - NOT_PINNED <= pinned
