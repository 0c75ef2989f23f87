"""What a person asks of the farm in one job: a model variant or a sweep, under one protocol, on chosen cards."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from farm.errors import FarmError, Unreadable, UsageError
from farm.types.memory_tiers import PLACEMENTS, Placements
from farm.types.protocol import Plain, Protocol, Stopping, Variant, content_id

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Reuse = Literal["model", "card", "imported", "none"]
REUSE_CHOICES = get_args(Reuse)


@dataclass(frozen=True)
class Sweep(Plain):
    """A grid over one operator's parameters and input sizes: every combination is one operator tuple.

    ``grid`` maps a name to the values it takes, e.g. ``{"in_channels": [64, 128], "kernel_size": [1, 3]}``;
    `farm.operators.sweep` knows the names of each operator and makes the tuples.
    """

    operator: str  # Conv2d
    grid: dict[str, tuple[Any, ...]]
    name: str = ""

    @property
    def id(self) -> str:
        return content_id(self.to_json())

    @property
    def size(self) -> int:
        """How many combinations the grid has."""
        return math.prod(map(len, self.grid.values()))

    def __str__(self) -> str:
        return self.name or f"{self.operator} sweep of {self.size}"


def named(operators: Sequence[str]) -> tuple[str, ...]:
    """The operators that a request asks for by name: none where it takes all, or the accuracy loop chooses."""
    return () if {"all", "auto"} & set(operators) else tuple(operators)


@dataclass(frozen=True)
class Request(Plain):
    """One entry of a measurement file, or one model of ``farm submit``. Exactly one of variant and sweep is set."""

    variant: Variant | None = None
    sweep: Sweep | None = None
    protocol: Protocol = field(default_factory=Protocol)
    stopping: Stopping = field(default_factory=Stopping)
    operators: tuple[str, ...] = ("all",)  # ("all",) | ("auto",) | short names
    target: float = 0.95
    reuse: Reuse = "model"
    placements: Placements = "none"  # which configurations of fast and slow memory are read beside all fast

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012 - a job keeps its cards beside its request

    def __post_init__(self) -> None:
        if (self.variant is None) == (self.sweep is None):
            raise UsageError(
                "A job needs either a model or a sweep.", "Name a model, or a sweep in a measurement file."
            )
        if self.reuse not in REUSE_CHOICES:
            raise UsageError(f"--reuse '{self.reuse}' is unknown.", f"Choose one of {', '.join(REUSE_CHOICES)}.")
        if self.placements not in PLACEMENTS:
            raise UsageError(f"--placements '{self.placements}' is unknown.", f"Choose one of {', '.join(PLACEMENTS)}.")
        if not 0 < self.target <= 1:
            raise UsageError(
                f"The target is {self.target}; it must be above 0 and at most 1.", "Give --target 0.95, say."
            )
        if self.variant is not None and self.variant.step and self.protocol.data == "seen":
            raise UsageError(
                "What a training step's operators see is not looked at: only a forward pass is run for its values.",
                "Leave --data away for standard normal values, or name a class: --data zeros-50+.",
            )
        if self.variant is not None and self.protocol.placement:
            raise UsageError(
                "A placement is of a tuple's tensors, and a model has others.", "Ask for placements: all, each or none."
            )
        if not self.operators:
            raise UsageError("No operators were named.", "Give --operators all, auto, or names such as Conv2d,Linear.")

    def to_json(self) -> dict[str, Any]:
        data = {**super().to_json(), "variant": self.variant and self.variant.to_json()}
        data["protocol"] = self.protocol.to_json()
        if self.placements == "none":
            del data["placements"]
        return data

    @property
    def title(self) -> str:
        return str(self.variant or self.sweep)

    @property
    def id(self) -> str:
        """What makes two entries the same work: all but the stopping rule, the target and the reuse policy."""
        data = self.to_json()
        names = ("variant", "sweep", "protocol", "operators", "placements")
        return content_id({name: data[name] for name in names if name in data})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of `to_json`; what else stands beside these keys is passed over.

        Raises:
            Unreadable: it is no request; names the first thing that is wrong.
        """
        try:
            return _requests().validate_python(data)
        except (ValueError, FarmError) as error:
            raise Unreadable(
                f"What the job asks for cannot be read: {_first_problem(error)}.",
                "Its row was changed by something else than the farm. Submit the job again.",
            ) from error

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


def _first_problem(error: ValueError | FarmError) -> str:
    if isinstance(error, FarmError):
        return error.message.rstrip(".")
    problem = error.errors()[0]  # type: ignore[attr-defined]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")


@functools.cache
def _requests() -> TypeAdapter[Request]:
    from pydantic import TypeAdapter  # late: who only makes requests needs none of it

    return TypeAdapter(Request)
