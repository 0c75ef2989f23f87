"""Selects readings by filters such as ``Conv2d in_channels=64 flops>=1e9 torch=2.11 card=H200``.

A filter names a column of an export (`farm.store.data_columns`). Python evaluates filters on
operators, cards, software and protocols, because these tables are small. The database evaluates
filters on columns of readings."""

from __future__ import annotations

import datetime
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy
from sqlalchemy import ColumnElement
from sqlmodel import Session

from farm.errors import UnknownOperator, UsageError, did_you_mean
from farm.store import data_columns as columns
from farm.store import tables
from farm.store.columns import CALL, CAPTURE, CARD, ITEM, OPERATOR, PROTOCOL, READING, VARIANT
from farm.store.data_columns import Column
from farm.store.database import among, in_batches
from farm.types.fields import fields_of
from farm.types.protocol import Protocol
from farm.types.tuple import DTYPES, dtype_of_call, shapes_passed

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONDITION = re.compile(rf"({_NAME.pattern})(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_COLUMNS = {entry.name: entry for entry in columns.READINGS}
_JOB = next(entry for entry in columns.VERDICTS if entry.name == "job_id")
#: A reading has several flags: a filter compares with each. The values are texts.
_FLAGS = Column("flags", "text", _COLUMNS["flags"].meaning)
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
_OF_OPERATOR = {entry.name for entry in columns.OPERATOR if entry.type != "json"} | {"dtype"}
_OF_VARIANT = {entry.name for entry in columns.VARIANT}
_OF_SOFTWARE = {entry.name for entry in columns.SOFTWARE}
_NEW_IN_PROTOCOL = {
    declared.name: declared.default for declared in fields_of(Protocol) if not declared.always
}
_OF_PROTOCOL = {entry.name for entry in columns.PROTOCOL}
_OF_CARD = {entry.name for entry in columns.CARD} - {"card_fingerprint"}
_OF_READING = {
    *("reading_id", "subject_kind", "subject_id", "method", "origin"),
    *(column.name for column in columns.FIGURES),
}
_DATES = ("since", "until")
#: Name of a data type, or its short form in labels -> the name.
_DTYPES = {name: name for name in DTYPES} | {short: name for name, (_, short) in DTYPES.items()}
#: The next step if a database has no readings.
NO_READINGS = "Measure a model: `farm run resnet18`; or import readings: `farm import h200`."
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
        return any(self._equal(value, expected) for expected in self.values) == (self.sign == "=")

    def _equal(self, value: Any, wanted: Any) -> bool:
        if self.column.type == "integers":
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

    def on(self, names: Collection[str]) -> list[Filter]:
        """The conditions on columns with these names."""
        return [entry for entry in self.filters if entry.column.name in names]


def parse(words: Iterable[str], cards: Sequence[str] = ()) -> Filters:
    """Parse ``Conv2d``, ``column=value``, also with ``!=``, ``<``, ``<=``, ``>``, ``>=``, ranges
    ``a..b`` and lists ``a,b``. One of `cards`, the values of ``--card``, must match. Raises
    `UsageError` if no column has this name (it suggests one), or if a value has the wrong type."""
    operators, filters = [], []
    for word in map(str.strip, words):
        if condition := _CONDITION.fullmatch(word):
            name, sign, value = condition.groups()
            filters.append(_filter(name, sign, value, word))
        elif _NAME.fullmatch(word):
            operators.append(word)
        else:
            raise UsageError(
                f"'{word}' is neither an operator nor a filter.",
                "Write an operator such as Conv2d, or a filter such as in_channels=64, "
                "flops>=1e9, time_us=10..20.",
            )
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
        return _date_filter(name, sign, value, text)
    column = _column_of_filter(name)
    has_order = column.type in ("integer", "number")
    if sign == "=" and has_order and ".." in value:
        return _range_filter(column, value, text)
    if sign in _ORDER and not has_order:
        raise UsageError(
            f"'{text}': the values of {name} have no order.", f"Write {name}=... or {name}!=..."
        )
    words = [value] if sign in _ORDER else value.split(",")
    return Filter(column, sign, tuple(_typed(column, word, text) for word in words), text)


def _column_of_filter(name: str) -> Column:
    if name == "flag":
        return _FLAGS
    if name == "job":
        return _JOB
    return _COLUMNS[column_named(name)]


def _date_filter(name: str, sign: str, value: str, text: str) -> Filter:
    if sign != "=":
        raise UsageError(f"'{text}' is not a date.", f"Write {name}=2026-11-21.")
    try:
        at_s = datetime.datetime.fromisoformat(value).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"'{text}' is not a date.", "Write a date as 2026-11-21 or 2026-11-21T14:30."
        ) from None
    return Filter(_COLUMNS["created_at_s"], ">=" if name == "since" else "<", (at_s,), text)


def _range_filter(column: Column, value: str, text: str) -> Filter:
    least_text, _, most_text = value.partition("..")
    least, most = _typed(column, least_text, text), _typed(column, most_text, text)
    if least > most:
        raise UsageError(
            f"'{text}': no value is in this range, which begins above its end.",
            f"Write the smaller value first: {column.name}={most_text}..{least_text}.",
        )
    return Filter(column, "..", (least, most), text)


_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
#: Type of the values of a column -> the required value, for messages.
_REQUIRED = {
    "integer": "a whole number",
    "integers": "sizes such as 3 or 3x3",
    "boolean": "true or false",
    "text": "a data type such as float32",
}


def _typed(column: Column, word: str, text: str) -> Any:
    """Convert a word of a filter to a value of its column. Raises `UsageError` if it is none."""
    word = word.strip()
    try:
        return _value_of(column, word)
    except (ValueError, KeyError, OverflowError):
        required = _REQUIRED.get(column.type, f"a {column.type}")
        problem = f"'{text}': {column.name} needs {required}, not '{word}'."
        raise UsageError(problem, "docs/data-dictionary.md describes the columns.") from None


def _value_of(column: Column, word: str) -> Any:
    if column.type in ("integer", "number"):
        number = float(word)
        if math.isnan(number):
            raise ValueError(word)
        if column.type == "number":
            return number
        if number != int(number):
            raise ValueError(word)
        return int(number)
    if column.type == "boolean":
        return _BOOLEANS[word.lower()]
    if column.type == "integers":
        return [int(size) for size in word.strip("[]()").split("x")]
    if column.name == "dtype":
        return _DTYPES[word]
    return word


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
    subject_ids = _subjects(session, filters, kind)
    conditions = [*_conditions_on_readings(filters.filters)]
    if not placed and not filters.on({"placement"}):
        conditions += _without_placement(session)
    for small_table in _SMALL_TABLES:
        if selected := filters.on(small_table.names):
            conditions.append(small_table.condition(session, selected))
    return Selection(tuple(conditions), None if subject_ids is None else tuple(subject_ids))


def _subjects(
    session: Session, filters: Filters, kind: Literal["operator", "variant"] | None
) -> list[str] | None:
    """The ids of the selected tuples or variants; None: all."""
    of_variant, of_operator = filters.on(_OF_VARIANT), filters.on(_OF_OPERATOR)
    whole = kind == "variant" or (kind is None and bool(of_variant))
    if whole:  # the column dtype exists for models too
        of_variant += filters.on({"dtype"})
        of_operator = filters.on(_OF_OPERATOR - {"dtype"})
    if kind is None and filters.operators and of_variant:
        raise UsageError(
            f"'{of_variant[0].text}' selects readings of whole models, but {filters.operators[0]} "
            "is an operator.",
            "Filter an operator by its own sizes, such as shape=32x64x56x56 or in_channels=64.",
        )
    operators: list[str] | None = None
    if filters.operators or of_operator:
        operators = [] if whole else _operators(session, filters.operators, of_operator)
    if not of_variant:
        return operators
    models = _variants(session, of_variant)
    subjects = models if whole else _called_by(session, models)
    if operators is None:
        return subjects
    common = set(subjects)
    return [id_ for id_ in operators if id_ in common]


def _variants(session: Session, filters: Sequence[Filter]) -> list[str]:
    matching = []
    for row in session.execute(sqlalchemy.select(*VARIANT)):
        values: Any = row._mapping
        if all(_matches(entry, values) for entry in filters):
            matching.append(row.id)
    return matching


def _conditions_on_readings(filters: Iterable[Filter]) -> Iterator[ColumnElement[bool]]:
    for entry in filters:
        name = entry.column.name
        if entry.column is _FLAGS:
            has_flag = sqlalchemy.or_(*map(_has_flag, entry.values))
            yield has_flag if entry.sign == "=" else ~has_flag
        elif entry.column is _JOB:
            read_by_job = sqlalchemy.select(ITEM.reading_id).where(
                ITEM.job_id.in_(entry.values), ITEM.reading_id.is_not(None)
            )
            is_of_job = READING.id.in_(read_by_job)
            yield is_of_job if entry.sign == "=" else ~is_of_job
        elif name in _OF_READING:
            yield _compared(READING[name.removeprefix("reading_")], entry)


def _has_flag(flag: str) -> ColumnElement[bool]:
    # The flags are a JSON list: look for the quoted name.
    flags = sqlalchemy.cast(READING.flags, sqlalchemy.Text)
    return flags.contains(json.dumps(flag), autoescape=True)


def _without_placement(session: Session) -> list[ColumnElement[bool]]:
    protocols = session.execute(sqlalchemy.select(PROTOCOL.id, PROTOCOL.spec))
    placed = [row.id for row in protocols if (row.spec or {}).get("placement")]
    return [READING.protocol_id.not_in(placed)] if placed else []


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
    is_listed: ColumnElement[bool] = column.in_(entry.values)
    return is_listed if entry.sign == "=" else ~is_listed


def _called_by(session: Session, variants: Iterable[str]) -> list[str]:
    """The ids of the operator tuples that some variants call."""
    query = sqlalchemy.select(CALL.operator_id).distinct().where(CALL.capture_id == CAPTURE.id)
    return list(
        dict.fromkeys(id_ for (id_,) in among(session, query, CAPTURE.variant_id, variants))
    )


def _operators(session: Session, names: Sequence[str], filters: Sequence[Filter]) -> list[str]:
    query = sqlalchemy.select(*(OPERATOR[name] for name in OPERATOR_ROW))
    if names:
        known_names = set(session.scalars(sqlalchemy.select(OPERATOR.short_name).distinct()))
        for name in names:
            if name not in known_names:
                raise UnknownOperator.named(name, known_names)
        query = query.where(OPERATOR.short_name.in_(names))
    if not filters:
        return list(session.scalars(query.with_only_columns(OPERATOR.id)))
    matching = []
    for row in session.execute(query):
        values = operator_values(row)
        if all(_matches(entry, values) for entry in filters):
            matching.append(row.id)
    return matching


def _no_card(filters: Sequence[Filter], models: Iterable[str]) -> UsageError:
    models = sorted(models)
    text = " ".join(entry.text for entry in filters)
    models_text = f"There are readings of {', '.join(models[:8])}." if models else NO_READINGS
    return UsageError(
        f"The database has no readings of a card with {text}.",
        did_you_mean(str(filters[0].values[0]), models) or models_text,
    )


def protocol_values(row: Any) -> dict[str, Any]:
    """Column -> value, from a row of the table of protocols."""
    spec = dict(row.spec or {})
    return {**_NEW_IN_PROTOCOL, **spec, "data_class": spec.get("data")}


def card_values(row: Any) -> dict[str, Any]:
    """Column -> value, from a row of the table of cards."""
    return {column.name: getattr(row, column.name.removeprefix("card_")) for column in columns.CARD}


@dataclass(frozen=True)
class _SmallTable:
    """A table beside the readings that is small enough to filter in Python."""

    names: Collection[str]  # of its columns in an export
    table: Any
    key: Any  # the column of readings with the id of a row
    values_of: Callable[[Any], Mapping[str, Any]]  # row -> the values of the columns

    def condition(self, session: Session, filters: Sequence[Filter]) -> ColumnElement[bool]:
        """The condition on readings that their rows of this table match."""
        ids = [row.id for row in self._matching(session, filters)]
        return self.key.in_(ids)  # type: ignore[no-any-return]

    def _matching(self, session: Session, filters: Sequence[Filter]) -> list[Any]:
        rows = session.execute(sqlalchemy.select(self.table.__table__))
        return [row for row in rows if self._holds(row, filters)]

    def _holds(self, row: Any, filters: Sequence[Filter]) -> bool:
        values = self.values_of(row)
        return all(_matches(entry, values) for entry in filters)


class _Cards(_SmallTable):
    def condition(self, session: Session, filters: Sequence[Filter]) -> ColumnElement[bool]:
        """Raises `UsageError` if no card matches."""
        cards = self._matching(session, filters)
        if not cards:
            raise _no_card(filters, session.scalars(sqlalchemy.select(CARD.model).distinct()))
        models = sorted({card.model for card in cards})
        count = sqlalchemy.select(sqlalchemy.func.count()).where(CARD.model.in_(models))
        if session.scalar(count) == len(cards):  # indexes begin with the card model
            return READING.card_model.in_(models)
        return READING.card_id.in_([card.id for card in cards])


_SMALL_TABLES = (
    _SmallTable(_OF_SOFTWARE, tables.SoftwareRow, READING.software_id, lambda row: row._mapping),
    _SmallTable(_OF_PROTOCOL, tables.ProtocolRow, READING.protocol_id, protocol_values),
    _Cards(_OF_CARD, tables.CardRow, READING.card_id, card_values),
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
    from farm.types.matrix_products import matrix_product  # late: it loads numpy

    spec: Mapping[str, Any] = row.spec or {}
    parameters: Mapping[str, Any] = row.parameters or {}
    inputs, outputs = shapes_passed(spec), row.output_shapes
    product = matrix_product(row.short_name, spec)
    return {
        "operator": row.short_name,
        "operator_name": row.name,
        "label": row.label,
        "training": row.training,
        "flops": row.flops,
        "bytes_moved": row.bytes_moved,
        "dtype": dtype_of_call(spec),
        "input_shape": list(inputs[0]) if inputs else None,
        "input_shapes": list(map(list, inputs)),
        "output_shape": outputs[0] if outputs else None,
        "output_shapes": outputs,
        "m": product.m if product else None,
        "n": product.n if product else None,
        "k": product.k if product else None,
        "products": product.count if product else None,
        **{
            column.name: _parameter(column, parameters.get(column.name))
            for column in columns.PARAMETERS
        },
        "parameters": parameters,
        "flops_per_byte": row.flops / row.bytes_moved if row.bytes_moved else None,
    }


def _parameter(column: Column, value: Any) -> Any:
    """Convert a parameter to the type of its column; None if it has another type."""
    if column.type == "integers":
        values = value if isinstance(value, list) else [value]
        return values if values and all(type(size) is int for size in values) else None
    return value if type(value) is {"integer": int, "boolean": bool}[column.type] else None
