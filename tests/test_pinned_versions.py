"""`constraints.txt` is complete: `make` installs its lists without resolving dependencies."""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

CONSTRAINTS = (Path(__file__).parent.parent / "constraints.txt").read_text()
PYTHONS = ["3.11.2", "3.12.3", "3.13.5"]  # 3.11.2: python3 of Debian 12
NOT_PINNED = {"operator-farm", "setuptools"}  # the project, and what builds it


def names(lines: list[str]) -> set[str]:
    return {
        canonicalize_name(Requirement(line).name)
        for line in lines
        if line and not line.startswith("#")
    }


def needed(root: str, python: str) -> set[str]:
    """The names of all packages that a requirement needs with this version of Python. Extras are
    included.
    """
    there = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    found: set[str] = set()
    to_do, seen = [Requirement(root)], set()
    while to_do:
        one = to_do.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        found.add(name)
        try:
            requirements = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:  # only other versions of Python need it
            continue
        for text in requirements:
            more = Requirement(text)
            if more.marker is None or any(
                more.marker.evaluate({**there, "extra": extra}) for extra in extras | {""}
            ):
                to_do.append(more)
    # The CUDA libraries of a build of torch have no pins: torch names their exact versions.
    return {
        name for name in found if not name.startswith(("nvidia-cu", "nvidia-n", "cuda-", "triton"))
    }


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("root", "part"), [("operator-farm", 0), ("operator-farm[dev]", 1)])
def test_every_needed_package_has_a_pinned_version(root: str, part: int, python: str) -> None:
    default, more = CONSTRAINTS.split("# Extras")
    pinned = names(default.splitlines()) | (names(more.splitlines()[1:]) if part else set())
    assert needed(root, python) - NOT_PINNED <= pinned


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pinned_versions_support_each_python(python: str) -> None:
    for pin in (Requirement(line) for line in CONSTRAINTS.splitlines() if not line.startswith("#")):
        with contextlib.suppress(
            importlib.metadata.PackageNotFoundError
        ):  # only other versions of Python need it
            found = importlib.metadata.metadata(pin.name)
            applies = pin.marker is None or pin.marker.evaluate({"python_full_version": python})
            if applies and pin.specifier.contains(found["Version"]):
                assert SpecifierSet(found.get("Requires-Python", "")).contains(python), pin
