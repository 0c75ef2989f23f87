"""The columns of every exported table: name, type, meaning, unit, and the type that an import
accepts.

`data_columns.csv` declares them. The Parquet schemas, the checks of an import, the data dictionary
and the names of filters are derived from this file. Columns of variants, software, protocols and
figures are the declared fields of their records (`_declared`)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from farm.types.fields import fields_of, names_of
from farm.types.protocol import Protocol
from farm.types.reading import Reading
from farm.types.software import Software
from farm.types.variant import Variant

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1  # increased if a column changes its meaning or is removed, not if a column is added

ColumnType = Literal["text", "integer", "number", "boolean", "integers", "numbers", "texts", "json"]


@dataclass(frozen=True)
class Column:
    """One column of an exported table."""

    name: str
    type: ColumnType  # of the values; json is JSON as text; integers, numbers and texts are lists
    meaning: str
    unit: str = ""
    # the name of the type that an import accepts (`farm.exchange.column_types`); "Name?" also
    # accepts null; "": see `OF_TYPE` there
    accepts: str = ""
    derived: bool = False  # an export computes it from other columns, and an import ignores it


#: Kind of a declared field -> the name of the accepted type if the field is required.
_REQUIRED = {"integer": "Count", "number": "Positive", "boolean": "Flag", "text": "Text"}


def _declared(record: type) -> tuple[Column, ...]:
    """The columns of a record: one for each declared text, number or boolean."""
    declared = []
    for field in fields_of(record):
        if (accepted := _REQUIRED.get(field.kind)) is not None:
            accepted += "?" if field.default is None else ""
            declared.append(
                Column(
                    field.name, cast(ColumnType, field.kind), field.meaning, field.unit, accepted
                )
            )
    return tuple(declared)


def _of_records() -> dict[str, tuple[Column, ...]]:
    """Name of a record -> its columns, for the rows of `columns.csv` that include a record."""
    # Every table declares its own column `dtype`. `weights` is the second column in all exports so
    # far.
    variant = {column.name: column for column in _declared(Variant) if column.name != "dtype"}
    return {
        "Variant": tuple({name: variant[name] for name in ("model", "weights", *variant)}.values()),
        "Software": _declared(Software),
        "Reading": _declared(Reading),
        "Protocol": tuple(
            replace(column, name="data_class") if column.name == "data" else column
            for column in _declared(Protocol)
        ),
    }


def _read() -> dict[str, tuple[Column, ...]]:
    """Read `columns.csv`: table, or group of columns -> its columns.

    The column `accepts` of the file names the type that an import accepts, or is "derived". A row
    ``+group`` includes all columns of another group or of a record. A row without a kind repeats a
    column of its own group or of the readings. A later row replaces an earlier one with the same
    name."""
    groups = {
        name: {column.name: column for column in columns} for name, columns in _of_records().items()
    }
    text = Path(__file__).with_suffix(".csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        group, name, accepts = groups.setdefault(row["table"], {}), row["column"], row["accepts"]
        if name.startswith("+"):
            included: Iterable[Column] = groups[name[1:]].values()
            if accepts == "derived":
                included = [replace(column, derived=True) for column in included]
            elif accepts == "nullable":  # the columns of variants are null in readings of operators
                included = [
                    column if column.type == "text" else replace(column, accepts="")
                    for column in included
                ]
            group.update((column.name, column) for column in included)
        elif row["kind"]:
            derived = accepts == "derived"
            type_, accepted = cast(ColumnType, row["kind"]), "" if derived else accepts
            group[name] = Column(name, type_, row["meaning"], row["unit"], accepted, derived)
        else:
            repeated = group.get(name) or groups["readings"][name]
            group[name] = replace(repeated, accepts=accepts) if accepts else repeated
    return {name: tuple(columns.values()) for name, columns in groups.items()}


#: Columns from a reading's details: column -> (part of the details or "", key).
IN_DETAILS: Mapping[str, tuple[str, str]] = {
    "burst_time_us": ("burst", "time_us"),
    "burst_time_half_width_us": ("burst", "time_half_width_us"),
    "burst_power_w": ("burst", "power_w"),
    "burst_energy_mj": ("burst", "energy_mj"),
    "burst_energy_half_width_mj": ("burst", "energy_half_width_mj"),
    "burst_sm_clock_mhz": ("burst", "sm_clock_mhz"),
    "alone_time_us": ("context", "alone_us"),
    "neighbours_effect_us": ("context", "effect_us"),
    "neighbours_effect_half_width_us": ("context", "effect_half_width_us"),
    "eager_time_us": ("", "eager_time_us"),
}

_GROUPS = _read()
PARAMETERS = _GROUPS["parameters"]  # parameters of modules that have their own columns
OPERATOR = _GROUPS["operator"]
VARIANT = _GROUPS["variant"]
VARIANT_FIELDS = names_of(Variant)
CARD = _GROUPS["card"]
SOFTWARE = _GROUPS["software"]
PROTOCOL = _GROUPS["Protocol"]  # the column of `Protocol.data` is named data_class
FIGURES = _GROUPS["figures"]  # columns with the same name in the database table of readings
READINGS = _GROUPS["readings"]
VERDICTS = _GROUPS["verdicts"]
# written by `farm predict dataset`: training data (`farm.addons.predict.dataset`)
DATASET = _GROUPS["dataset"]
TABLES = {name: _GROUPS[name] for name in ("readings", "calls", "captures", "verdicts", "traces")}

#: Columns that were added to this format later -> the value that an import uses if a file lacks the
#: column.
_OF_A_VARIANT = {field.name: field.default for field in fields_of(Variant) if not field.always}
ADDED: Mapping[str, Mapping[str, Any]] = {
    "verdicts": dict.fromkeys(["request", "capture_id", "operators", "made_of"]),
    "readings": _OF_A_VARIANT
    | {"placement": "", "cards": 1, "communication": "", "output_shapes": None},
    "captures": _OF_A_VARIANT | {"compiled_for": "", "compiled": None},
    "calls": _OF_A_VARIANT | {"part": "", "owner": "", "output_shapes": None},
}

_ONE_ROW_IS = {
    "readings": "one reading: a subject, a card, software and a protocol, with the result",
    "calls": "one operator call of a captured model, in order",
    "captures": "one capture of a model variant",
    "verdicts": "the sum of the parts compared with the whole model, for one round of a job",
    "traces": "one sampled series of one reading (only with `--traces`)",
    "dataset": (
        "one operator tuple with the features of predictors (`farm predict dataset`; not part of "
        "an export)"
    ),
}


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The Arrow schema of these columns. The metadata of each field has its unit and meaning."""
    import pyarrow as pa

    kinds: dict[str, Any] = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64()}
    kinds |= {f"{name}s": pa.list_(kind) for name, kind in kinds.items()} | {
        "json": pa.string(),
        "boolean": pa.bool_(),
    }
    return pa.schema(
        pa.field(
            column.name,
            kinds[column.type],
            metadata={"unit": column.unit, "meaning": column.meaning},
        )
        for column in columns
    )


def as_markdown() -> str:
    """The data dictionary as Markdown text."""
    text = f"""# Data dictionary

The tables of `farm export`, format {FORMAT}. A half-width is half of a 95 % interval. The unit 1
marks a fraction. A value that could not be measured is empty, never zero. A list is a list in
Parquet and JSON Lines; in CSV its values are joined by `x` (numbers) or `;` (texts). JSON is text
in Parquet and CSV. In Parquet, each field's metadata holds its unit and meaning. A text that begins
with `=`, `+`, `-`, `@`, a tab or a line end has an apostrophe in front in CSV, because a
spreadsheet would execute it; numbers do not.
"""
    for table, columns in {**TABLES, "dataset": DATASET}.items():
        text += f"\n## {table}\n\nOne row is {_ONE_ROW_IS[table]}.\n\n"
        text += "| column | type | unit | meaning |\n| --- | --- | --- | --- |\n"
        text += "".join(
            f"| `{column.name}` | {column.type} | {column.unit} | {column.meaning} |\n"
            for column in columns
        )
    return text


if __name__ == "__main__":
    import sys

    sys.stdout.write(as_markdown())
