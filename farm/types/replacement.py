"""Replaces an attribute of a class or a module while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While active, the attribute ``name`` of a class or module is replaced by ``value``."""
    is_inherited = name not in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if not is_inherited:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
