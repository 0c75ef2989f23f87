"""Families: operators with similar kernels, and models that are variants of one architecture.

If an operator type has few readings, a predictor uses readings of other types of its family.
Evaluations leave out whole families of models, because the tuples of resnet18 resemble those of
resnet34."""

from __future__ import annotations

import json
import re
from pathlib import Path

#: families: name -> its operator types; same_work: operator type -> other operators that run its
#: kernels;
#: architectures: pattern -> architecture, for models whose names do not begin with the
#: architecture.
_TABLE = json.loads(Path(__file__).with_name("families.json").read_text())
_FAMILY_OF, _TYPE_OF = (
    {name: group for group, names in _TABLE[part].items() for name in names.split()}
    for part in ("families", "same_work")
)
_BACKWARD = re.compile(r"_backward(_data)?$")


def operator_type(short_name: str) -> str:
    """Return the common name of modules, functions and aten operators with equal kernels: `ReLU`,
    `relu_` -> `relu`.
    """
    name = short_name.lower()
    name = name.rstrip("_") or name
    return _TYPE_OF.get(name, name)


def operator_family(short_name: str) -> str:
    """Return the kind of kernels that an operator runs; `pointwise` for unknown operators.

    A backward operator has a separate family (``convolution backward``), because it runs different
    kernels."""
    name = short_name.lower()
    name = name.rstrip("_") or name
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")):
        return "optimizer"
    forward = _BACKWARD.sub("", name)
    if forward != name:
        backward_of = {"embedding_dense": "indexing", "threshold": "pointwise"}.get(
            forward
        ) or operator_family(forward)
        return (
            backward_of if backward_of in ("pointwise", "indexing") else f"{backward_of} backward"
        )
    return _FAMILY_OF.get(name, "pointwise")


def model_family(model: str) -> str:
    """Return the architecture of a model from its name: `resnet` for `resnet18` and
    `wide_resnet50_2`.

    For other names, it is the letters at the beginning; after a single letter also the number:
    `t5`."""
    name = model.rsplit("/", 1)[-1].lower()
    first = re.match(r"[a-z]{2,}|[a-z]\d*", name)
    prefixes = (
        family for pattern, family in _TABLE["architectures"].items() if re.match(pattern, name)
    )
    return next(prefixes, first[0] if first else name)
