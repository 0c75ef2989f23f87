"""The kinds of operator tuples that this process knows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from farm.errors import TupleRejected
from farm.subjects.base import Kind
from farm.types.tuple import OperatorTuple

_KINDS: dict[str, Kind] = {}
#: Name -> kind, in the order of their registration.
KINDS: Mapping[str, Kind] = MappingProxyType(_KINDS)


def register(kind: Kind) -> None:
    """Make a kind known to this process: it can then be parsed, labelled, built and counted."""
    _KINDS[kind.name] = kind


def kinds_on_several_cards() -> list[str]:
    """The names of the kinds whose calls several cards may run together."""
    return [name for name, kind in _KINDS.items() if kind.on_several_cards]


def unpredictable_kinds() -> list[str]:
    """The names of the kinds whose readings no predictor learns from."""
    return [name for name, kind in _KINDS.items() if not kind.is_predictable]


def recorded_as(function: Any) -> tuple[str, str]:
    """The kind and the operator that a capture records for a call of a function of the model; two
    empty texts if no kind knows the function.
    """
    for kind in _KINDS.values():
        operator = kind.recorded_name(function)
        if operator:
            return kind.name, operator
    return "", ""


def kind_of(spec: OperatorTuple) -> Kind:
    """The kind of a tuple. Raises `TupleRejected` if this process does not know it."""
    try:
        return _KINDS[spec.kind]
    except KeyError:
        text = f"This version of the farm has no operators of the kind '{spec.kind}'."
        raise TupleRejected(text, "Use the version that captured the operator.") from None
