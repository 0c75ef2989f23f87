"""Selects readings by filters such as ``Conv2d in_channels=64 flops>=1e9 torch=2.11 card=H200``.

A filter names a column of an export (`farm.store.data_columns`). Python evaluates filters on
operators, cards, software and protocols, because these tables are small. The database evaluates
filters on columns of readings."""

from __future__ import annotations

import datetime
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy
from sqlalchemy import ColumnElement
from sqlmodel import Session

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.store import data_columns as columns
from farm.store import tables
from farm.store.columns import CALL, CAPTURE, ITEM, OPERATOR, PROTOCOL, READING, VARIANT
from farm.store.data_columns import Column
from farm.store.database import among, in_batches
from farm.types.fields import fields_of
from farm.types.protocol import Protocol
from farm.types.tuple import DTYPES, dtype_of_call, shapes_passed

_WORD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_COLUMNS = {entry.name: entry for entry in columns.READINGS}
_JOB = next(entry for entry in columns.VERDICTS if entry.name == "job_id")
#: Short name -> name of the column.
_SHORT = {
    "time": "time_us",
    "energy": "energy_mj",
    "power": "power_w",
    "bytes": "bytes_moved",
    "data": "data_class",
    "shape": "input_shape",
    "card": "card_model",
    "intensity": "flops_per_byte",
}
_OF_OPERATOR = {entry.name for entry in columns.OPERATOR if entry.kind != "json"} | {"dtype"}
_OF_VARIANT = {entry.name for entry in columns.VARIANT}
_OF_SOFTWARE = {entry.name for entry in columns.SOFTWARE}
_NEW_IN_PROTOCOL = {one.name: one.default for one in fields_of(Protocol) if not one.always}
_OF_PROTOCOL = {entry.name for entry in columns.PROTOCOL}
_OF_CARD = {entry.name for entry in columns.CARD} - {"card_fingerprint"}
_OF_READING = {
    *("reading_id", "subject_kind", "subject_id", "method", "origin"),
    *(one.name for one in columns.FIGURES),
}
_DATES = ("since", "until")
#: The next step if a database has no readings.
NO_READINGS = "Measure a model: `farm run resnet18`; or import readings with `farm import`."
_OTHER = {*_SHORT, *_DATES, "flag", "job"}
KNOWN = sorted(
    _OTHER.union(_OF_OPERATOR, _OF_VARIANT, _OF_SOFTWARE, _OF_PROTOCOL, _OF_CARD, _OF_READING)
)


@dataclass(frozen=True)
class Filter:
    """One condition on a column. If it has several values, one must match. A range is (least,
    most), both included.
    """

    column: Column
    sign: str  # = != < <= > >= ..
    values: tuple[Any, ...]
    text: str  # the filter as the user wrote it

    def holds(self, value: Any) -> bool:
        """True if a value of the column satisfies the condition; None never does."""
        if value is None:
            return False
        if self.sign == "..":
            return bool(self.values[0] <= value <= self.values[1])
        if self.sign in _ORDER:
            return bool(_ORDER[self.sign](value, self.values[0]))
        return any(self._equal(value, wanted) for wanted in self.values) == (self.sign == "=")

    def _equal(self, value: Any, wanted: Any) -> bool:
        if self.column.kind == "integers":
            # kernel_size=3 also matches 3x3.
            return list(value) == list(wanted) or (len(wanted) == 1 and set(value) == set(wanted))
        if self.column.name in _VERSIONS:
            return bool(value == wanted or re.match(re.escape(wanted) + r"([.+]|\Z)", value))
        if self.column.name in ("card_model", "card_id"):
            return str(wanted).lower() in str(value).lower()
        return bool(value == wanted)


_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_VERSIONS = frozenset({"torch", "torchvision", "cuda", "cudnn", "driver", "python"})


@dataclass(frozen=True)
class Filters:
    """Conditions, and the short names of operators to select (none given: all)."""

    operators: tuple[str, ...] = ()
    filters: tuple[Filter, ...] = ()

    def __str__(self) -> str:
        return (
            " ".join([*self.operators, *(entry.text for entry in self.filters)]) or "all readings"
        )

    def __bool__(self) -> bool:
        return bool(self.operators or self.filters)


def parse(words: Iterable[str], cards: Sequence[str] = ()) -> Filters:
    """Parse ``Conv2d``, ``column=value``, also with ``!=``, ``<``, ``<=``, ``>``, ``>=``, ranges
    ``a..b`` and lists ``a,b``. One of `cards`, the values of ``--card``, must match. Raises
    `UsageError` if no column has this name (it suggests one), or if a value has the wrong type."""
    operators, filters = [], []
    for word in words:
        found = _WORD.fullmatch(word.strip())
        if found is None:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", word.strip()):
                raise UsageError(
                    f"'{word}' is neither an operator nor a filter.",
                    "Write an operator such as Conv2d, or a filter such as in_channels=64, "
                    "flops>=1e9, time_us=10..20.",
                )
            operators.append(word.strip())
            continue
        filters.append(_filter(found[1], found[2], found[3], word.strip()))
    if cards:
        filters.append(Filter(_COLUMNS["card_model"], "=", tuple(cards), f"card={','.join(cards)}"))
    return Filters(tuple(operators), tuple(filters))


def column_named(name: str) -> str:
    """Return the name of the column with this name or short name. Raises `UsageError`, which
    suggests similar names.
    """
    if name in KNOWN:
        return _SHORT.get(name, name)
    if name in _COLUMNS:
        raise UsageError(
            f"Readings cannot be filtered or sorted by '{name}'.",
            "Export the readings and filter the tables.",
        )
    raise UsageError(
        f"There is no column '{name}'.",
        did_you_mean(name, KNOWN) or "docs/data-dictionary.md lists the columns.",
    )


def _filter(name: str, sign: str, value: str, text: str) -> Filter:
    if name in _DATES:
        if sign != "=":
            raise UsageError(f"'{text}' is not a date.", f"Write {name}=2026-11-21.")
        try:
            at_s = datetime.datetime.fromisoformat(value).astimezone().timestamp()
        except (ValueError, OverflowError):
            raise UsageError(
                f"'{text}' is not a date.", "Write a date as 2026-11-21 or 2026-11-21T14:30."
            ) from None
        return Filter(_COLUMNS["created_at_s"], ">=" if name == "since" else "<", (at_s,), text)
    if name == "flag":
        return Filter(_COLUMNS["flags"], sign, (value,), text)
    column = _JOB if name == "job" else _COLUMNS[column_named(name)]
    if sign == "=" and column.kind in ("integer", "number") and ".." in value:
        low, _, high = value.partition("..")
        return Filter(column, "..", (_typed(column, low, text), _typed(column, high, text)), text)
    if sign in _ORDER and column.kind not in ("integer", "number"):
        raise UsageError(
            f"'{text}': the values of {name} have no order.", f"Write {name}=... or {name}!=..."
        )
    values = [value] if sign in _ORDER else value.split(",")
    return Filter(column, sign, tuple(_typed(column, entry, text) for entry in values), text)


def _typed(column: Column, value: str, text: str) -> Any:
    value = value.strip()
    try:
        if column.kind == "integer":
            number = float(value)
            if number != int(number):
                raise ValueError(value)
            return int(number)
        if column.kind == "number":
            return float(value)
        if column.kind == "boolean":
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[
                value.lower()
            ]
        if column.kind == "integers":
            return [int(size) for size in value.strip("[]()").split("x")]
        if column.name == "dtype":  # the short form that labels use is accepted too
            return next(name for name, (_, short) in DTYPES.items() if value in (name, short))
    except (ValueError, KeyError, OverflowError, StopIteration):
        needed = {
            "integer": "a whole number",
            "integers": "sizes such as 3 or 3x3",
            "boolean": "true or false",
            "text": "a data type such as float32",
        }.get(column.kind, f"a {column.kind}")
        raise UsageError(f"'{text}': {column.name} needs {needed}, not '{value}'.") from None
    return value


@dataclass(frozen=True)
class Selection:
    """The selected readings: conditions on the table of readings, and the ids of tuples or variants
    (None: all).
    """

    conditions: tuple[ColumnElement[bool], ...]
    subject_ids: tuple[str, ...] | None

    def where(self) -> Iterator[tuple[ColumnElement[bool], ...]]:
        """Yield the conditions of each SQL statement. Many subject ids need several statements."""
        if self.subject_ids is None:
            yield self.conditions
            return
        for batch in in_batches(self.subject_ids):
            yield (*self.conditions, READING.subject_id.in_(batch))


def select_readings(
    session: Session,
    filters: Filters,
    *,
    placed: bool = True,
    kind: Literal["operator", "variant"] | None = None,
) -> Selection:
    """Select readings. Raises `UnknownOperator` (it suggests similar names), or `UsageError` if no
    card matches.

    Args:
        placed: include readings with tensors in slow memory, even if no filter names a placement.
        kind: "operator": only readings of tuples; a filter on a model selects the tuples that it
            calls. "variant": only readings of whole models. None: tuples if filters name operators,
            whole models if filters name models.
    """
    conditions: list[ColumnElement[bool]] = []
    of_variant = [entry for entry in filters.filters if entry.column.name in _OF_VARIANT]
    whole = kind == "variant" or (kind is None and bool(of_variant))
    of_operator = [entry for entry in filters.filters if entry.column.name in _OF_OPERATOR]
    if whole:  # the column dtype exists for models too
        of_variant += [entry for entry in of_operator if entry.column.name == "dtype"]
        of_operator = [entry for entry in of_operator if entry.column.name != "dtype"]
    if kind is None and filters.operators and of_variant:
        raise UsageError(
            f"'{of_variant[0].text}' selects readings of whole models, but {filters.operators[0]} "
            "is an operator.",
            "Filter an operator by its own sizes, such as shape=32x64x56x56 or in_channels=64.",
        )
    subjects: list[str] | None = None
    if filters.operators or of_operator:
        subjects = [] if whole else _operators(session, filters.operators, of_operator)
    if of_variant:
        rows = session.execute(sqlalchemy.select(*VARIANT))
        models = [
            row.id
            for row in rows
            if all(one.holds(getattr(row, one.column.name)) for one in of_variant)
        ]
        models = models if whole else _called_by(session, models)
        subjects = models if subjects is None else [one for one in subjects if one in set(models)]
    for entry in filters.filters:
        name = entry.column.name
        if name == "flags":
            has = sqlalchemy.cast(READING.flags, sqlalchemy.Text).contains(
                json.dumps(entry.values[0]), autoescape=True
            )
            conditions.append(~has if entry.sign == "!=" else has)
        elif entry.column is _JOB:
            its = sqlalchemy.select(ITEM.reading_id).where(
                ITEM.job_id.in_(entry.values), ITEM.reading_id.is_not(None)
            )
            conditions.append(READING.id.in_(its) if entry.sign == "=" else READING.id.not_in(its))
        elif name in _OF_READING:
            conditions.append(_compared(READING[name.removeprefix("reading_")], entry))
    if not placed and not any(entry.column.name == "placement" for entry in filters.filters):
        specs = session.execute(sqlalchemy.select(PROTOCOL.id, PROTOCOL.spec))
        if slow := [row.id for row in specs if (row.spec or {}).get("placement")]:
            conditions.append(READING.protocol_id.not_in(slow))
    for names, table, column, values_of in _SMALL:
        own = [entry for entry in filters.filters if entry.column.name in names]
        if own:
            known = [
                (row, values_of(row)) for row in session.execute(sqlalchemy.select(table.__table__))
            ]
            matching = [
                row for row, values in known if all(_matches(entry, values) for entry in own)
            ]
            ids = [row.id for row in matching]
            if not ids and table is tables.CardRow:
                raise _no_card(own, {values["card_model"] for _, values in known})
            if table is tables.CardRow:
                models = sorted({row.model for row in matching})
                if len(matching) == sum(
                    row.model in models for row, _ in known
                ):  # indexes begin with the card model
                    column, ids = READING.card_model, models
            conditions.append(column.in_(ids))
    return Selection(tuple(conditions), None if subjects is None else tuple(subjects))


def _matches(entry: Filter, values: Mapping[str, Any]) -> bool:
    """True if a row (operator, card, software or protocol) matches. ``card=...`` also matches a
    part of its id.
    """
    if (
        entry.column.name == "card_model"
        and entry.sign == "="
        and entry.holds(values.get("card_id"))
    ):
        return True
    return entry.holds(values.get(entry.column.name))


def _compared(column: Any, entry: Filter) -> ColumnElement[bool]:
    if entry.sign == "..":
        return column.between(*entry.values)  # type: ignore[no-any-return]
    if entry.sign in _ORDER:
        return _ORDER[entry.sign](column, entry.values[0])  # type: ignore[return-value]
    return column.in_(entry.values) if entry.sign == "=" else column.not_in(entry.values)  # type: ignore[no-any-return]


def _called_by(session: Session, variants: Iterable[str]) -> list[str]:
    """The ids of the operator tuples that some variants call."""
    query = sqlalchemy.select(CALL.operator_id).distinct().where(CALL.capture_id == CAPTURE.id)
    return list(
        dict.fromkeys(id_ for (id_,) in among(session, query, CAPTURE.variant_id, variants))
    )


def _operators(session: Session, names: Sequence[str], filters: Sequence[Filter]) -> list[str]:
    query = sqlalchemy.select(*(OPERATOR[name] for name in OPERATOR_ROW))
    if names:
        there = set(session.scalars(sqlalchemy.select(OPERATOR.short_name).distinct()))
        for name in names:
            if name not in there:
                raise UnknownOperator.named(name, there)
        query = query.where(OPERATOR.short_name.in_(names))
    if not filters:
        return list(session.scalars(query.with_only_columns(OPERATOR.id)))
    found = ((row.id, operator_values(row)) for row in session.execute(query))
    return [id_ for id_, values in found if all(_matches(entry, values) for entry in filters)]


def _no_card(filters: Sequence[Filter], models: Iterable[str]) -> UsageError:
    models = sorted(models)
    text = " ".join(entry.text for entry in filters)
    known = f"There are readings of {', '.join(models[:8])}." if models else NO_READINGS
    return UsageError(
        f"The database has no readings of a card with {text}.",
        did_you_mean(str(filters[0].values[0]), models) or known,
    )


def protocol_values(row: Any) -> dict[str, Any]:
    """Column -> value, from a row of the table of protocols."""
    spec = dict(row.spec or {})
    return {**_NEW_IN_PROTOCOL, **spec, "data_class": spec.get("data")}


def card_values(row: Any) -> dict[str, Any]:
    """Column -> value, from a row of the table of cards."""
    return {column.name: getattr(row, column.name.removeprefix("card_")) for column in columns.CARD}


#: (names of columns, their table, the readings' column with its id, function: row -> values of the
#: columns)
_SMALL: tuple[tuple[set[str], Any, Any, Callable[[Any], Mapping[str, Any]]], ...] = (
    (_OF_SOFTWARE, tables.SoftwareRow, READING.software_id, lambda row: row._mapping),
    (_OF_PROTOCOL, tables.ProtocolRow, READING.protocol_id, protocol_values),
    (_OF_CARD, tables.CardRow, READING.card_id, card_values),
)

#: The columns of the table of operators that `operator_values` needs.
OPERATOR_ROW = tuple(
    [
        "id",
        "name",
        "short_name",
        "label",
        "training",
        "flops",
        "bytes_moved",
        "parameters",
        "spec",
        "output_shapes",
    ]
)


def operator_values(row: Any) -> dict[str, Any]:
    """Column -> value, from a row of the table of operators, without `operator_spec`."""
    from farm.operators.matrix_products import matrix_product  # late: it loads numpy

    spec: Mapping[str, Any] = row.spec or {}
    given: Mapping[str, Any] = row.parameters or {}
    inputs, outputs = shapes_passed(spec), row.output_shapes
    product = matrix_product(row.short_name, spec)
    return {
        "operator": row.short_name,
        "operator_name": row.name,
        **{name: getattr(row, name) for name in ("label", "training", "flops", "bytes_moved")},
        "dtype": dtype_of_call(spec),
        "input_shape": list(inputs[0]) if inputs else None,
        "input_shapes": list(map(list, inputs)),
        "output_shape": outputs[0] if outputs else None,
        "output_shapes": outputs,
        **{name: getattr(product, name, None) for name in ("m", "n", "k")},
        "products": product.count if product else None,
        **{
            column.name: _parameter(column, given.get(column.name)) for column in columns.PARAMETERS
        },
        "parameters": given,
        "flops_per_byte": row.flops / row.bytes_moved if row.bytes_moved else None,
    }


def _parameter(column: Column, value: Any) -> Any:
    """Convert a parameter to the type of its column; None if it has another type."""
    if column.kind == "integers":
        values = value if isinstance(value, list) else [value]
        return values if values and all(type(size) is int for size in values) else None
    return value if type(value) is {"integer": int, "boolean": bool}[column.kind] else None
