"""Models of torchvision are extracted once per test process: what a variant consists of depends on
nothing that a test changes.

Commands and functions of the farm get the shared extraction too (`share`, which `tests/conftest.py`
calls for each test). A test of the extraction itself imports `farm.training.extract.extract`."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import pytest

from farm.models import catalog
from farm.settings import user_models
from farm.types.variant import Variant

MODULE = "farm.training.extract"
_originals: dict[str, Any] = {}


def extract(variant: Variant, **about: Any) -> Any:
    """As `farm.training.extract.extract`."""
    return _shared("extract", variant, **about)


def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions of extraction share their results for this test, if they are imported."""
    if MODULE in sys.modules:
        for name in ("extract", "extract_step"):
            _original(name)
            monkeypatch.setattr(f"{MODULE}.{name}", functools.partial(_shared, name))


def _original(name: str) -> Any:
    return _originals.setdefault(name, getattr(importlib.import_module(MODULE), name))


def _shared(name: str, variant: Variant, model: Any = None, **about: Any) -> Any:
    own = user_models.targets().keys() | user_models.weights().keys()
    if variant.model in _names() - own:
        return _once(name, variant, frozenset({"device_type": "cpu", **about}.items()))
    return _original(name)(variant, model=model, **about)


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(catalog.names(source="torchvision"))


@functools.cache
def _once(name: str, variant: Variant, about: frozenset[tuple[str, Any]]) -> Any:
    return _original(name)(variant, **dict(about))
