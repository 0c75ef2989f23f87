"""Declared fields: name, type, default, meaning, unit, choices and command-line option in one
place.

A field of `Variant`, `Protocol`, `Stopping`, `Software`, `Reading` or `Request` is declared once,
with `declared`, in its class. The texts of fields that users give are in `fields.toml`. Everything
else is derived from both: validation, JSON and content id (`Record`), database columns
(`farm.store.tables`), export columns (`farm.store.data_columns`), command-line options
(`cli.options`), keys of measurement files (`farm.requests.measurement_file`) and the fields of
`farm.requests.partial_request.PartialRequest`.

This module imports neither torch nor Pydantic, because every command loads it at start.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Self

from farm.errors import UsageError
from farm.types.figure import Figure, PassCost, figure_of

#: The largest value of an integer column in the database.
LARGEST_NUMBER = 2**31 - 1
A_NUMBER = "a number, with or without a unit (1%, 60s)"
_FACTORS = {"%": 0.01, "s": 1.0, "min": 60.0, "h": 3600.0}
_KINDS = {str: "text", int: "integer", float: "number", bool: "boolean", tuple: "texts"}


@dataclass(frozen=True)
class Field:
    """One declared field."""

    name: str  # of the attribute, database column, export column and measurement-file key
    type: Any  # str, int, float, bool or another plain type; without None
    default: Any  # `dataclasses.MISSING` if the field must be given
    description: str = ""  # text for users; begins in lower case
    unit: str = ""  # of a number
    note: str = ""  # addition for the data dictionary, such as the meaning of 0
    usual: str = ""  # the default that users get, for the help text
    choices: tuple[str, ...] = ()  # the accepted values; (): any value. "" means "not given"
    minimum: int | None = None  # the smallest accepted integer
    option: tuple[str, ...] = ()  # flags of the command-line option; () if there is none
    metavar: str | None = None  # placeholder for the value in the help text
    given: bool = True  # True if users give the value; False if the farm computes it
    # True if the option accepts several values, separated by commas; each value creates a job
    several: bool = False
    # True if JSON contains the field even at its default; see `Record.to_json`
    always: bool = False

    @property
    def kind(self) -> str:
        """The kind of the field's export column: text, integer, number, boolean or texts."""
        return _KINDS.get(self.type, "json")

    @property
    def meaning(self) -> str:
        """The field's text in the data dictionary."""
        return f"{self.description}; {self.note}" if self.note else self.description

    @property
    def help(self) -> str:
        """The help text of the command-line option."""
        text = self.description[:1].upper() + self.description[1:]
        several = " Each of several values makes its own job." if self.several else ""
        return f"{text}.{f' Default: {self.usual}.' if self.usual else ''}{several}"

    def check_choice(self, value: Any) -> None:
        """Raise `UsageError` if a value is none of the accepted ones."""
        if self.choices and value not in self.choices:
            raise UsageError(
                f"{self.name.replace('_', ' ')} '{value}' is unknown.",
                f"Choose one of {', '.join(filter(None, self.choices))}.",
            )


def number_of(text: Any) -> float:
    """Parse a number with or without a unit: 0.01, 1%, 90, 90s, 2min. Raises ValueError."""
    unit = next((suffix for suffix in _FACTORS if str(text).endswith(suffix)), "")
    try:
        return float(str(text).removesuffix(unit)) * _FACTORS.get(unit, 1.0)
    except ValueError:
        raise ValueError(f"it must be {A_NUMBER}") from None


def declared(default: Any, description: str = "", **more: Any) -> Any:
    """Declare a field of a frozen dataclass. `more`: see `Field`. What `fields.toml` has of the
    field is added.
    """
    metadata = {"description": description, **more} if description else more
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def original(default: Any, description: str = "", **more: Any) -> Any:
    """Declare a field that JSON contains even at its default. Only fields of the first version;
    else use `declared`.
    """
    return declared(default, description, always=True, **more)


@functools.cache
def texts() -> dict[str, dict[str, dict[str, str]]]:
    """Return record -> field -> its texts for users, from ``fields.toml``."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@functools.cache
def fields_of(kind: Any) -> tuple[Field, ...]:
    """The fields of a dataclass, in order. A figure has two: its value and its half-width."""
    hints, of_kind = typing.get_type_hints(kind), texts().get(kind.__name__, {})
    fields = []
    for field in dataclasses.fields(kind):
        more = {"always": field.default is MISSING, **of_kind.get(field.name, {}), **field.metadata}
        option = tuple(more.pop("option", "").split())
        plain_type = _plain_type(hints[field.name])
        if plain_type is Figure:
            fields += _fields_of_figure(field, more)
        else:
            fields.append(Field(field.name, plain_type, field.default, option=option, **more))
    return tuple(fields)


def _fields_of_figure(figure: dataclasses.Field[Any], more: Mapping[str, Any]) -> list[Field]:
    """The two numbers of a figure: its value and its half-width."""
    quantity, _, unit = figure.name.rpartition("_")
    value_name, half_width_name = figure_keys(quantity, unit)
    half_width = {**more, "description": "half of its 95 % interval"}
    return [
        Field(value_name, float, figure.default, **more),
        Field(half_width_name, float, figure.default, **half_width),
    ]


@functools.cache
def names_of(kind: Any) -> tuple[str, ...]:
    """The names of a dataclass's fields, in order."""
    return tuple(field.name for field in dataclasses.fields(kind))


def _plain_type(hint: Any) -> Any:
    """Return ``int`` for ``int | None``, ``tuple`` for ``tuple[str, ...]``, ``str`` for
    ``Literal["a", "b"]``.
    """
    hint = without_none(hint)
    if typing.get_origin(hint) is typing.Literal:
        return type(typing.get_args(hint)[0])
    return typing.get_origin(hint) or hint


def without_none(hint: Any) -> Any:
    """Return ``int`` for ``int | None``."""
    if not isinstance(hint, types.UnionType) and typing.get_origin(hint) is not typing.Union:
        return hint
    return next(member for member in typing.get_args(hint) if member is not types.NoneType)


def content_id(data: Any) -> str:
    """Return the content hash of plain JSON: the first 32 hex digits of the SHA-256 of its
    canonical form.
    """
    text = json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def figure_keys(name: str, unit: str) -> tuple[str, str]:
    """Return the keys of a stored figure: ``name_unit`` and ``name_half_width_unit`` (without a
    unit: ``name`` and ``name_half_width``).
    """
    end = f"_{unit}" if unit else ""
    return f"{name}{end}", f"{name}_half_width{end}"


def figure_json(name: str, unit: str, figure: Figure | None) -> dict[str, float | None]:
    """Return the keys of `figure_keys` with a figure's values; None without a figure."""
    value, half_width = (figure.value, figure.half_width) if figure else (None, None)
    value_key, half_width_key = figure_keys(name, unit)
    return {value_key: value, half_width_key: half_width}


def cost_json(cost: PassCost | None) -> dict[str, float | None]:
    """Return the time and the energy of a cost under the keys of `figure_json`."""
    time_us, energy_mj = (cost.time_us, cost.energy_mj) if cost else (None, None)
    return {**figure_json("time", "us", time_us), **figure_json("energy", "mj", energy_mj)}


def cost_from_json(data: Mapping[str, Any]) -> PassCost | None:
    """Return the cost that `cost_json` wrote, or that columns of the same names hold; None without
    a time.
    """
    time_us = figure_from_json(data, "time", "us")
    return PassCost(time_us, figure_from_json(data, "energy", "mj")) if time_us else None


def figure_from_json(data: Mapping[str, Any], name: str, unit: str) -> Figure | None:
    """Return the figure that `figure_json` wrote; None without a value."""
    value_key, half_width_key = figure_keys(name, unit)
    return figure_of(data[value_key], data[half_width_key])


def first_problem(error: Exception) -> str:
    """The place and the text of the first error of a Pydantic ValidationError."""
    first = error.errors()[0]  # type: ignore[attr-defined]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


@functools.cache
def adapter(kind: Any) -> Any:
    """Return the Pydantic adapter that validates values of a type."""
    from pydantic import TypeAdapter  # late: making a record does not need it

    return TypeAdapter(kind)


@dataclass(frozen=True)
class Record:
    """A frozen dataclass of declared fields, with validation and JSON."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - not a field

    def __post_init__(self) -> None:
        """Raise `UsageError` with the name of a field whose value is not an allowed choice or is
        out of range.
        """
        for field in fields_of(type(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not self._accepts(field.name, value):
                field.check_choice(value)
            if field.minimum is not None and not field.minimum <= value <= LARGEST_NUMBER:
                flag = (field.option or (f"--{field.name}",))[0]
                raise UsageError(
                    f"{field.name} is {value}; it must be from {field.minimum} to "
                    f"{LARGEST_NUMBER}.",
                    f"Give {flag} {max(field.minimum, 1)} or more.",
                )

    def _accepts(self, name: str, value: Any) -> bool:
        """True if a field accepts a value that is not one of its choices."""
        return False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON by field name. A field at its default is left out unless it is `original`. So
        adding a field does not change the JSON and the ids of existing records."""
        values = [(field, getattr(self, field.name)) for field in fields_of(type(self))]  # type: ignore[arg-type]
        return {
            field.name: value.to_json() if isinstance(value, Record) else value
            for field, value in values
            if field.always or value != field.default
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True)
class ContentAddressed(Record):
    """A record whose id is the hash of its JSON."""

    @functools.cached_property
    def id(self) -> str:
        """32 hex digits, see `content_id`."""
        return content_id(self.to_json())
