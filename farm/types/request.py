"""A job's request: a model variant or a sweep, the protocol, the stopping rule and how readings are
reused.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from farm.errors import FarmError, Unreadable, UsageError
from farm.types.fields import (
    ContentAddressed,
    Field,
    adapter,
    content_id,
    declared,
    fields_of,
    first_problem,
    original,
)
from farm.types.placement import PLACEMENTS, Placements
from farm.types.protocol import QUICK, Protocol, Stopping
from farm.types.variant import IMAGE_PX, Variant

Reuse = Literal["model", "card", "imported", "none"]
# `Sweep.operator` of the packaged lists of tuples: those that calibrate predictions for a card, and
# those of a check of a card, and of the link between two cards. Each is a file in `farm/data`.
CALIBRATION, CARD_CHECK, LINK_CHECK = "calibration", "check", "check-link"
CHECKS = (CARD_CHECK, LINK_CHECK)
PACKAGED_LISTS = (CALIBRATION, *CHECKS)


@dataclass(frozen=True)
class Sweep(ContentAddressed):
    """A grid over one operator's parameters and input sizes: every combination is one operator
    tuple.

    ``grid`` maps a name to its values, for example ``{"in_channels": [64, 128], "kernel_size": [1,
    3]}``. `farm.subjects.sweep` knows the names of each operator and makes the tuples."""

    operator: str  # short name, such as Conv2d
    grid: dict[str, tuple[Any, ...]]
    name: str = original("", "title of the job")

    @property
    def size(self) -> int:
        """The number of combinations in the grid."""
        return math.prod(map(len, self.grid.values()))

    def __str__(self) -> str:
        return self.name or f"{self.operator} sweep of {self.size}"


def named(operators: Sequence[str]) -> tuple[str, ...]:
    """Return the operators that a request names; () if it requests all or the accuracy loop chooses
    them.
    """
    return () if {"all", "auto"} & set(operators) else tuple(operators)


class OfJobKind:
    """What a record with the column or field ``kind`` of a job says about it."""

    kind: str  # model | sweep

    @property
    def is_sweep(self) -> bool:
        """True if the job measures a grid of one operator, without a model."""
        return self.kind == "sweep"


@dataclass(frozen=True)
class Request(ContentAddressed):
    """One entry of a measurement file, or one model of ``farm submit``. Exactly one of variant and
    sweep is set.
    """

    variant: Variant | None = original(None)
    sweep: Sweep | None = original(None)
    protocol: Protocol = original(Protocol)
    stopping: Stopping = original(Stopping)
    operators: tuple[str, ...] = original(("all",))
    target: float = original(0.95)
    reuse: Reuse = original("model", choices=get_args(Reuse))
    placements: Placements = declared("none", choices=PLACEMENTS)
    within: float = declared(0.0)
    budget_s: float = declared(0.0, unit="s")
    comparison: str = declared("")

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012 - a job's stored JSON also has its cards

    def __post_init__(self) -> None:
        """Raise `UsageError` if a value is not allowed, or if two values contradict each other."""
        super().__post_init__()
        for problem, next_step in self._problems():
            raise UsageError(problem, next_step)

    def _problems(self) -> Iterator[tuple[str, str]]:
        """Yield each contradiction, and what to do."""
        if (self.variant is None) == (self.sweep is None):
            yield (
                "A job needs either a model or a sweep.",
                "Name a model, or a sweep in a measurement file.",
            )
        if not 0 < self.target <= 1:
            yield (
                f"The target is {self.target}; it must be above 0 and at most 1.",
                "Give --target 0.95, for example.",
            )
        is_seen = self.protocol.data == "seen"
        if is_seen and self.variant is not None and not self.variant.records_values:
            why = "input values are recorded in a forward pass only, on one card"
            problem = f"--data seen does not work for a training step or several cards: {why}."
            yield (
                problem,
                "Omit --data to use standard normal values, or name a value profile: --data "
                "zeros-50+.",
            )
        yield from self._problems_of_kernels()
        yield from self._problems_of_precision()
        if self.variant is not None and self.protocol.placement:
            problem = "A placement names the tensors of one tuple; a model has many tuples."
            yield problem, "Give --placements all, each or none."
        if not self.operators:
            yield (
                "No operators were named.",
                "Give --operators all, auto, or names such as Conv2d,Linear.",
            )

    def _problems_of_kernels(self) -> Iterator[tuple[str, str]]:
        """What cannot be asked of a model with generated kernels, and what only of such a model."""
        data = self.protocol.data
        if self.variant is None or not self.variant.generates_kernels:
            if data == "copied":
                yield "--data copied needs a compiled model.", "Give --compile, or --data seen."
            return
        if data not in ("copied", "zeros"):
            why = "the kernels get copies of the values in the running model"
            yield (
                f"--data {data} does not work with --compile: {why}.",
                "Omit --data, or give --data copied.",
            )
        if self.measures_slow_memory:
            why = "the farm cannot put tensors of kernels in slow memory"
            yield (
                f"--placements does not work with --compile: {why}.",
                "Omit --placements, or --compile.",
            )
        if self.operators == ("auto",):
            problem = (
                "--operators auto does not work with --compile: the kernels are known only after "
                "compiling."
            )
            yield problem, "Give --operators all, or kinds of kernels: pointwise,reduction."

    def _problems_of_precision(self) -> Iterator[tuple[str, str]]:
        for option, value, most, example in (
            ("--within", self.within, 1.0, "--within 1%"),
            ("--budget", self.budget_s, math.inf, "--budget 60s"),
        ):
            if not 0 <= value < most:
                yield (
                    f"{option} is {value:g}; it must be above 0 and below {most:g}.",
                    f"Give {example}.",
                )
            if value and self.variant is None:
                yield f"{option} is about the sum of a model; a sweep has none.", f"Omit {option}."
            if value and self.measures_slow_memory:
                yield (
                    f"{option} does not work with --placements.",
                    f"Omit {option} or --placements.",
                )
        if self.within and self.budget_s:
            yield (
                "--within and --budget both decide how precise the tuples are.",
                "Give one of them.",
            )

    @property
    def measures_slow_memory(self) -> bool:
        """True if its tuples are also measured with some of their tensors in slow memory."""
        return self.placements != "none"

    def as_precise_as(self, other: Request) -> bool:
        """True if readings that this request accepts are precise enough for another request."""
        mine, theirs = self.stopping, other.stopping
        narrow = (
            mine.time_half_width <= theirs.time_half_width
            and mine.energy_half_width <= theirs.energy_half_width
        )
        rough = (self.within, self.budget_s) not in ((0.0, 0.0), (other.within, other.budget_s))
        return (narrow or mine.maximum_s >= theirs.maximum_s) and not rough

    @property
    def title(self) -> str:
        return str(self.variant or self.sweep)

    def command(self) -> str:
        """Return the command that repeats the request: ``farm run resnet50 --batch 32 ... --reuse
        none``; "" for a sweep.

        Options whose default depends on the card are always included. FILE and FOLDER are
        placeholders for a user's own text, its tokenizer and weights, because their paths are not
        stored."""
        variant = self.variant
        if variant is None:
            return ""
        always = {"batch", "input_size", "phase", "launch", "data"}
        if variant.phase:
            always.add("dtype")
        skipped = {"text", "weights", "target", "reuse"}
        if variant.version and variant.input_size == IMAGE_PX:
            skipped.add("input_size")  # its own inputs may have no image size
        if variant.phase == "decode":
            skipped.add("length")
        if variant.step:
            skipped.add("mode")
        words = ["farm", "run", variant.model]
        for record in (variant, self.protocol, self):
            for field in fields_of(type(record)):  # type: ignore[arg-type]
                value = vars(record)[field.name]
                is_usual = value == field.default and field.name not in always
                has_option = field.option and field.name not in skipped
                if has_option and value not in (0, "") and not is_usual:
                    words += _option_of(field, value)
        if variant.text:
            words += ["--text", "FILE", "--tokenizer", "FOLDER"]
        if variant.weights != Variant.weights:
            words += ["--weights", "FILE"]
        if dataclasses.replace(self.stopping, **QUICK) == self.stopping:
            words.append("--quick")
        elif self.stopping.maximum_s != Stopping.maximum_s:
            words += ["--window", f"{self.stopping.maximum_s:g}"]
        return shlex.join([*words, "--reuse", "none"])

    @property
    def id(self) -> str:
        """The content id. Stopping rule, target and reuse policy do not affect it, so equal work
        has equal ids.
        """
        data = self.to_json()
        names = ("variant", "sweep", "protocol", "operators", "placements")
        return content_id({name: data[name] for name in names if name in data})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of `to_json`. Other keys are ignored. Raises `Unreadable`, which names the
        first problem.
        """
        try:
            return adapter(Request).validate_python(data)  # type: ignore[no-any-return]
        except (ValueError, FarmError) as error:
            if isinstance(error, FarmError):
                problem = error.message.rstrip(".")
            else:
                problem = first_problem(error)
            raise Unreadable(
                f"The job's request cannot be read: {problem}.",
                "Another program changed the job's row in the database. Submit the job again.",
            ) from error

    def replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)


def _option_of(field: Field, value: Any) -> list[str]:
    """The words of an option that give a field this value."""
    flag = field.option[-1].partition("/")[0]
    if value is True:
        return [flag]
    return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
