"""The size of the matrix product that a linear layer or a call such as ``torch.matmul`` computes.

It follows from the stored description of an operator tuple alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from farm.types.tuple import plain, shapes_passed


@dataclass(frozen=True)
class Products:
    """`count` independent products of m x k by k x n."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """2 for each multiply-add."""
        return 2 * self.m * self.n * self.k * self.count


_PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm")


def matrix_product(short_name: str, spec: Mapping[str, Any]) -> Products | None:
    """Return the products of a linear layer or a call such as ``torch.matmul``; None for other
    operators.
    """
    try:
        shapes = shapes_passed(spec)
        if short_name == "Linear":
            parameters = spec["parameters"]
            return Products(
                math.prod(shapes[0][:-1]),
                plain(parameters["out_features"]),
                plain(parameters["in_features"]),
            )
        if short_name not in _PRODUCTS:
            return None
        left, right = shapes[-2:]
        if left[-1] != right[-2] or len(left) < 2:
            return None
        return Products(
            left[-2], right[-1], left[-1], math.prod(np.broadcast_shapes(left[:-2], right[:-2]))
        )
    except (KeyError, TypeError, ValueError, IndexError):  # no rule knows this call
        return None
