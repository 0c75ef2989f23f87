"""Checks a row of an export as a whole, and makes of it what the writers of its table need.

Content-hash ids are computed again from the row. Each function gets a row whose values were checked
(`farm.exchange.import_file`) and the name of the exporting farm. It raises `ValueError` or
`FarmError` for a row that no farm writes."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from farm.exchange.import_file import Row
from farm.store import captures, content, tables
from farm.store.data_columns import FIGURES, PROTOCOL, VARIANT_FIELDS
from farm.types.fields import names_of
from farm.types.protocol import Protocol
from farm.types.reading import Trace
from farm.types.software import Software
from farm.types.tuple import Cost, OperatorTuple
from farm.types.variant import Variant


@dataclass(frozen=True)
class CheckedReading:
    """A reading: its row in the database, and what the row refers to."""

    row: dict[str, Any]
    subject: OperatorTuple | Variant
    cost: Cost
    model_flops: int  # PyTorch's count for a variant; 0 for a tuple
    software: Software
    protocol: Protocol
    card: dict[str, Any]  # its row


@dataclass(frozen=True)
class CheckedCapture:
    """A capture: its row in the database, and the variant."""

    row: dict[str, Any]
    variant: Variant
    cost: Cost
    model_flops: int


@dataclass(frozen=True)
class CheckedCall:
    """A call: its row in the database without the capture, its operator, and its capture: (id in
    exports, farm)."""

    row: dict[str, Any]
    spec: OperatorTuple
    cost: Cost
    capture: tuple[str, str]


def _variant(row: Row) -> Variant:
    for name in (*VARIANT_FIELDS, "model_flops"):
        if row[name] is None:
            raise ValueError(f"the column {name} is empty")
    return _record(Variant, row, VARIANT_FIELDS)


def _record(kind: type, row: Row, columns: Iterable[str]) -> Any:
    """A record from the columns of its fields, in their order."""
    return _record_of(kind, tuple(row[name] for name in columns))


@functools.lru_cache(maxsize=10_000)
def _record_of(kind: type, values: tuple[Any, ...]) -> Any:
    return kind(**dict(zip(names_of(kind), values, strict=True)))


def _columns(row: Row, names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}


_SAME_IN_READING = (
    "subject_kind",
    "subject_id",
    "card_id",
    "card_model",
    "flags",
    "throttle_reasons",
    "details",
    "cost_s",
    "kernels",
    *(column.name for column in FIGURES),
)


def reading(row: Row, farm: str) -> CheckedReading:
    if row["subject_kind"] not in ("operator", "variant"):
        raise ValueError("subject_kind is neither 'operator' nor 'variant'")
    of_model = row["subject_kind"] == "variant"
    subject = _variant(row) if of_model else row["operator_spec"]
    if subject is None or subject.id != row["subject_id"]:
        raise ValueError(
            f"subject_id {row['subject_id'][:40]!r} is not the hash of the row's description"
        )
    for name in ("time_us", "power_w", "energy_mj"):
        if row[name] is not None and row[name] <= 0:
            raise ValueError(f"{name} is not positive")
    software = _record(Software, row, names_of(Software))
    protocol = _record(Protocol, row, (column.name for column in PROTOCOL))
    card = {
        name: row[f"card_{name}"] for name in ("id", "model", "kind", "memory_bytes", "fingerprint")
    }
    card |= {
        "driver": software.driver,
        "software_id": software.id,
        "origin": farm,
        "capabilities": [],
    }
    stored = _columns(row, _SAME_IN_READING)
    stored["id"] = row["reading_id"]
    stored["software_id"] = software.id
    stored["protocol_id"] = protocol.id
    stored["method"] = row["details"].get("method")
    stored["origin"] = row["origin"] or farm
    model_flops = row["model_flops"] if of_model else 0
    return CheckedReading(stored, subject, _cost(row), model_flops, software, protocol, card)


def capture(row: Row, farm: str) -> CheckedCapture:
    variant = _variant(row)
    farm = row["origin"] or farm
    stored = {
        "variant_id": variant.id,
        **_columns(row, ("device_type", "grad", "torch", "launch")),
        "card_model": row["compiled_for"],
        "compiled": row["compiled"],
        "origin": tables.imported_origin(row["captured"], farm),
        "card_id": row["card_id"] or None,
        "verification": {**row["verification"], captures.VERIFYING_FARM: farm},
        "created_at_s": row["created_at_s"],
    }
    if row["capture_id"] != captures.exported_id(tables.Capture(**stored)):
        raise ValueError("capture_id is not the hash of the row's description")
    cost = Cost(row["flops"], row["bytes_moved"])
    return CheckedCapture(stored, variant, cost, row["model_flops"])


def call(row: Row, farm: str) -> CheckedCall:
    spec = row["operator_spec"]
    if spec.id != row["operator_id"]:
        raise ValueError("operator_id is not the hash of operator_spec")
    same = ("call_index", "module_path", "operator_id", "part", "owner", "reads", "writes")
    stored = {**_columns(row, same), "data": row["seen"]}
    return CheckedCall(stored, spec, _cost(row), (row["capture_id"], row["origin"] or farm))


def _cost(row: Row) -> Cost:
    """The cost of an operator tuple. Older exports have one output shape, and only of operators
    with one output.
    """
    shapes = row["output_shapes"]
    if shapes is None and row["output_shape"] is not None:
        shapes = [row["output_shape"]]
    output_shapes = None if shapes is None else tuple(map(tuple, shapes))
    return Cost(row["flops"], row["bytes_moved"], output_shapes)


def verdict(row: Row, farm: str) -> dict[str, Any]:
    """Convert a row to a row of the table of imported verdicts."""
    if any(number > row["round"] for _, _, number, _ in json.loads(row["made_of"] or "[]")):
        raise ValueError("made_of has an item of a later round than the verdict's")
    kept = {name: content.storable(value) for name, value in row.items() if name != "origin"}
    return {
        "job_id": row["job_id"],
        "round": row["round"],
        "origin": row["origin"] or farm,
        "row": kept,
    }


def series(row: Row, farm: str) -> tuple[str, Trace]:
    """Return the reading id of a sampled series, and a trace that contains only this series."""
    if len(row["times_s"]) != len(row["values"]):
        raise ValueError("times_s and values have different lengths")
    values = {row["series"]: (row["times_s"], row["values"])}
    return row["reading_id"], Trace((row["window_begin_s"], row["window_end_s"]), values)
