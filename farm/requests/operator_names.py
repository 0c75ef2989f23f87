"""The names of operators that people ask for: whether PyTorch has them, and which one was meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from farm.errors import CaptureError, UnknownOperator
from farm.types.protocol import Variant
from farm.types.request import Request, named
from farm.types.tuple import short_name_of


def check_asked_operators(requests: Sequence[Request]) -> None:
    """Raises:
    UnknownOperator: a name that a request asks for is of no operator that PyTorch has.
    """
    names = {name for request in requests for name in named(request.operators)}
    check_operator_names(names, [request.variant for request in requests if request.variant])


def check_operator_names(names: Iterable[str], variants: Iterable[Variant] = ()) -> None:
    """
    Args:
        names: short names, such as Conv2d.
        variants: what they are asked of; what these run is suggested before all else.

    Raises:
        UnknownOperator: one of the names is of no operator that PyTorch has.
    """
    names = sorted(names)
    if not names:
        return
    from farm.operators import aten
    from farm.operators.allowed import ALLOWED_OPERATORS
    from farm.operators.recipes import RECIPES

    # Module classes last: of Conv2d and conv2d, which are near to the same misspellings, the class is suggested.
    there = {short_name_of(name) for name in (*ALLOWED_OPERATORS, *aten.NAMES)}
    known = sorted(there, key=lambda name: (name[0].isupper(), name))
    for name in names:
        if name not in known:
            raise UnknownOperator.named(name, _run_by(variants), RECIPES, known)


def _run_by(variants: Iterable[Variant]) -> set[str]:
    """The operators of the models, without those that cannot be taken apart: their own job says so."""
    from farm.training.extract import taken_apart

    found: set[str] = set()
    for variant in {variant.model: variant for variant in variants}.values():
        try:
            found.update(spec.short_name for spec in taken_apart(variant).capture.tuples.values())
        except CaptureError:
            continue
    return found
