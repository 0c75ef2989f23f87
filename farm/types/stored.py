"""Records as plain JSON, as the database and files keep them.

A field that is a figure is two numbers (`farm.types.fields.figure_keys`): ``time_us`` and
``time_half_width_us``. An exact figure is the first number alone. In a tuple, a figure is an
object, as other records are. JSON of another version may lack keys and have others.

`record_from` is the inverse of `plain`: it checks all values. `StoredField.parse` reads one field
of JSON that the farm has written: it checks only the records within."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeVar

from farm.types.fields import adapter, figure_keys, without_none
from farm.types.figure import Figure, figure_of

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class StoredField:
    """One field of a record in JSON."""

    name: str  # also the key in JSON; of a figure, the key of its value
    hint: Any  # as declared
    required: bool  # True if JSON must contain the field
    half_width_key: str = ""  # of a figure; the metadata of its field may name an irregular one

    def parse(self, data: Mapping[str, Any]) -> Any:
        """Return the field's value in the JSON of its record. Lists become tuples and objects
        become records. Raises ValueError for an incomplete record.
        """
        value = data.get(self.name)
        if value is None:
            return None
        if self.half_width_key:
            return figure_of(value, data.get(self.half_width_key))
        if _has_record(self.hint):
            return _records(self.hint, value)
        return tuple(value) if isinstance(value, list) else value

    def plain(self, value: Any) -> dict[str, Any]:
        """Return the keys of the field with its value."""
        if not isinstance(value, Figure):
            return {self.name: plain(value)}
        if not value.half_width:
            return {self.name: value.value}
        return {self.name: value.value, self.half_width_key: value.half_width}


@functools.cache
def stored_fields(kind: Any) -> tuple[StoredField, ...]:
    """The fields of a record in JSON, in order."""
    hints = typing.get_type_hints(kind)
    fields = []
    for entry in dataclasses.fields(kind):
        hint = hints[entry.name]
        required = entry.default is MISSING and entry.default_factory is MISSING
        half_width_key = ""
        if without_none(hint) is Figure:
            quantity, _, unit = entry.name.rpartition("_")
            half_width_key = entry.metadata.get("half_width_key", figure_keys(quantity, unit)[1])
        fields.append(StoredField(entry.name, hint, required, half_width_key))
    return tuple(fields)


def plain(value: Any) -> Any:
    """Return a value as plain JSON: records become objects, also within lists and mappings."""
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, tuple | list):
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
    checked = adapter(json_model(kind)).validate_python(data)  # type: ignore[arg-type]
    values = {}
    for entry in stored_fields(kind):  # type: ignore[arg-type]
        if entry.name not in checked.model_fields_set:
            continue  # the record has a default
        value = vars(checked)[entry.name]
        if entry.half_width_key:
            value = figure_of(value, vars(checked)[entry.half_width_key])
        values[entry.name] = value
    return kind(**values)


@functools.cache
def json_model(kind: Any) -> Any:
    """Return the Pydantic model of a record's JSON. Its values are plain, or records within."""
    from pydantic import PlainValidator, create_model  # late: making a record does not need it

    keys: dict[str, Any] = {}
    for entry in stored_fields(kind):
        hint = entry.hint
        if entry.half_width_key:
            hint = float if entry.required else float | None
            keys[entry.half_width_key] = (float | None, None)
        elif _has_record(hint):
            hint = Annotated[Any, PlainValidator(functools.partial(_records, hint))]
        keys[entry.name] = (hint, ... if entry.required else None)
    return create_model(kind.__name__, **keys)


def _has_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_has_record, typing.get_args(hint)))


def _records(hint: Any, value: Any) -> Any:
    """Parse a record, a tuple of records, or a mapping whose values are records; None if the hint
    allows it. Raises ValueError for another value."""
    if value is None and without_none(hint) is not hint:
        return None
    hint = without_none(hint)
    if dataclasses.is_dataclass(hint):
        return record_from(hint, value)  # type: ignore[arg-type]
    *_, record = (argument for argument in typing.get_args(hint) if argument is not ...)
    if typing.get_origin(hint) is tuple and isinstance(value, tuple | list):
        return tuple(_records(record, entry) for entry in value)
    if isinstance(value, Mapping):
        return {name: _records(record, entry) for name, entry in value.items()}
    raise ValueError(f"{value!r} is no {hint}")
