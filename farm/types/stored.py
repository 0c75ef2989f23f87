"""Records as plain JSON, as the database and files keep them.

A figure is two numbers (`farm.types.fields.figure_keys`): ``time_us`` and ``time_half_width_us``.
An exact figure is the first number alone. JSON of another version may lack keys and have others."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from farm.types.fields import adapter, figure_keys, without_none
from farm.types.figure import Figure, figure_of

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class StoredField:
    """One field of a record in JSON."""

    name: str
    hint: Any  # as declared
    default: Any  # `dataclasses.MISSING` if JSON must contain the field
    key: str
    half_width_key: str = ""  # of a figure; the metadata of its field may name an irregular one

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, self.half_width_key) if self.half_width_key else (self.key,)

    def parse(self, data: Mapping[str, Any]) -> Any:
        """Return the field's value in the JSON of its record. Lists become tuples and objects
        become records. Raises ValueError for an incomplete record.
        """
        value = data.get(self.key)
        if value is None:
            return None
        if self.half_width_key:
            return figure_of(value, data.get(self.half_width_key))
        if _has_record(self.hint):
            return _parsed(without_none(self.hint), value)
        return tuple(value) if isinstance(value, list) else value

    def plain(self, value: Any) -> dict[str, Any]:
        """Return the keys of the field with its value."""
        if not isinstance(value, Figure):
            return {self.key: plain(value)}
        if not value.half_width:
            return {self.key: value.value}
        return {self.key: value.value, self.half_width_key: value.half_width}


@functools.cache
def stored_fields(kind: Any) -> tuple[StoredField, ...]:
    """The fields of a record in JSON, in order."""
    hints = typing.get_type_hints(kind)
    fields = []
    for entry in dataclasses.fields(kind):
        hint = hints[entry.name]
        default = None if entry.default_factory is not MISSING else entry.default
        half_width_key = ""
        if without_none(hint) is Figure:
            quantity, _, unit = entry.name.rpartition("_")
            half_width_key = entry.metadata.get("half_width_key", figure_keys(quantity, unit)[1])
        fields.append(StoredField(entry.name, hint, default, entry.name, half_width_key))
    return tuple(fields)


def plain(value: Any) -> Any:
    """Return a value as plain JSON: records become objects, also within tuples and mappings."""
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return [plain(entry) for entry in value]
    if not dataclasses.is_dataclass(value):
        return value
    data: dict[str, Any] = {}
    for entry in stored_fields(type(value)):  # type: ignore[arg-type]
        data |= entry.plain(vars(value)[entry.name])
    return data


def record_from(kind: type[Kind], data: Any) -> Kind:
    """Return the record that `plain` wrote. Unknown keys are ignored. Raises ValueError if a key is
    missing or a value has another type.
    """
    checked = vars(adapter(json_model(kind)).validate_python(data))  # type: ignore[arg-type]
    values = {}
    for entry in stored_fields(kind):  # type: ignore[arg-type]
        if entry.half_width_key:
            values[entry.name] = figure_of(checked[entry.key], checked[entry.half_width_key])
        else:
            values[entry.name] = checked[entry.key]
    return kind(**values)


@functools.cache
def json_model(kind: Any) -> Any:
    """Return the Pydantic model of a record's JSON. Its values are plain."""
    from pydantic import create_model  # late: making a record does not need it

    keys: dict[str, Any] = {}
    for entry in stored_fields(kind):
        default = ... if entry.default is MISSING else entry.default
        if entry.half_width_key:
            keys[entry.key] = (float if default is ... else float | None, default)
            keys[entry.half_width_key] = (float | None, None)
        else:
            keys[entry.key] = (entry.hint, default)
    return create_model(kind.__name__, **keys)


def _has_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_has_record, typing.get_args(hint)))


def _parsed(hint: Any, value: Any) -> Any:
    """Parse a record, a tuple of records, or a mapping whose values are records."""
    if dataclasses.is_dataclass(hint):
        return record_from(hint, value)  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple:
        (record, _) = typing.get_args(hint)
        return tuple(record_from(record, entry) for entry in value)
    (_, record) = typing.get_args(hint)
    return {name: record_from(record, entry) for name, entry in value.items()}
