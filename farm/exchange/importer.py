"""Taking in another farm's export: checked as a whole before anything is written, without duplicates, its origin kept.

A file from elsewhere may be anything. It is read batch by batch, with bounds on every size; every operator is validated by
`farm.types.tuple`, every id is worked out again from what it stands for, and what a reading's details hold is checked
where sums are made of it.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session

from farm.errors import FarmError, UsageError
from farm.exchange.columns import ADDED, FIGURES, FORMAT, OF_VARIANT, TABLES, VARIANT
from farm.exchange.export import METADATA, schema_of
from farm.exchange.imported_jobs import write_job
from farm.exchange.tidy import ORIGIN, capture_key
from farm.store import content, tables
from farm.store.database import Database
from farm.store.rows import in_batches
from farm.types.format import printable
from farm.types.protocol import Protocol, Software, Variant, content_id
from farm.types.reading import Trace, Verification
from farm.types.tuple import OperatorTuple, parse
from farm.types.value_profiles import class_of, is_class
from farm.verdict.verdict import VERDICT_SCHEMA, Verdict

if TYPE_CHECKING:
    import pyarrow.parquet as pq

AT_ONCE = 1000  # rows in one transaction: others wait for it
MOST_ROWS = 50_000_000
MOST_BYTES = 4 << 30  # of a group of rows, unpacked
MOST_TEXT = 300  # characters of a name
_MOST_OF = {"text": 32, "recompute": 10_000}  # of a variant's own, where it is not that
MOST_JSON = 16 << 20  # characters of a document
LARGEST = 2**63 - 1
KNOWN = 50_000  # descriptions that are checked once
_ID = re.compile(r"[0-9a-f]{32}")
#: First what others refer to.
_ORDER = ("readings", "captures", "calls", "verdicts", "traces")

Row = Mapping[str, Any]

_READING = tables.Reading.__table__.c  # type: ignore[attr-defined]
_CAPTURE = tables.Capture.__table__.c  # type: ignore[attr-defined]
_CALL = tables.Call.__table__.c  # type: ignore[attr-defined]
_CARD = tables.Card.__table__.c  # type: ignore[attr-defined]
_IMPORTED = tables.ImportedVerdict.__table__.c  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Taken:
    """What was found in one file, and what of it was not there before."""

    path: Path
    table: str
    rows: int
    new: int


class Refused(UsageError):
    """A file that is no export, or holds what no farm writes."""


def import_export(database: Database, path: Path, *, origin: str = "") -> list[Taken]:
    """Take in a file of readings, or a folder with the tables of an export.

    Args:
        origin: the name of the farm it comes from; that of the file or folder if "".

    Raises:
        Refused: it is no export, of a newer format, cut off, or holds what no farm writes; nothing of it was written.
    """
    origin = origin or (path.resolve().name if path.is_dir() else path.stem)  # "." has no name itself
    try:
        _name({"origin": origin}, "origin")
    except ValueError as error:
        raise UsageError(f"{error}: {printable(origin)[:40]!r}.", "Name the farm with --origin.") from error
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    opened = [(file, *_open(file)) for file in files]
    if not opened:
        raise Refused(f"{path} holds no Parquet file.", "Name a file or folder that `farm export` wrote.")
    opened.sort(key=lambda one: _ORDER.index(one[1]))
    there = {table for _, table, _, _ in opened}
    taken = [one for one in opened if one[1] != "calls" or "captures" in there]
    for file, table, _, parquet in taken:
        reader = _Reader(origin)
        for row in _rows(file, parquet, table):
            _checked(file, reader, table, row)
    _note(database, origin, path, [told for _, _, told, _ in opened])
    return [_take(database, file, parquet, table, origin) for file, table, _, parquet in taken]


def _open(path: Path) -> tuple[str, Mapping[str, Any], pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    step = "Name a file that `farm export` wrote as Parquet."
    try:
        found = pq.ParquetFile(
            path,
            thrift_string_size_limit=100 << 20,
            thrift_container_size_limit=1 << 20,
            page_checksum_verification=True,
        )
    except FileNotFoundError:
        raise Refused(f"There is no file {path}.", step) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read as Parquet: it is cut off, or something else.", step) from error
    try:
        told = json.loads((found.schema_arrow.metadata or {}).get(METADATA, b"null"))
    except ValueError:
        told = None
    if not isinstance(told, dict) or type(told.get("format")) is not int or told.get("table") not in TABLES:
        raise Refused(f"{path} is no export of a farm.", step)
    if told["format"] > FORMAT:
        raise Refused(
            f"{path} has format {told['format']}, which is newer than this program ({FORMAT}).",
            "Update this program, or export again with the older one.",
        )
    groups = [found.metadata.row_group(index) for index in range(found.metadata.num_row_groups)]
    if found.metadata.num_rows > MOST_ROWS or any(not 0 <= group.total_byte_size <= MOST_BYTES for group in groups):
        raise Refused(f"{path} is larger than any export.", "Export in parts, with filters.")
    wanted = schema_of(told["table"])
    for field in wanted:
        at = found.schema_arrow.get_field_index(field.name)
        if at < 0 and field.name in ADDED.get(told["table"], ()):
            continue
        if at < 0 or found.schema_arrow.field(at).type != field.type:
            raise Refused(f"{path} lacks the column {field.name}, or has it as something else.", step)
    return told["table"], told, found


#: What is worked out again is not read.
_READ = {
    "readings": frozenset(
        [
            "reading_id",
            "subject_kind",
            "subject_id",
            "operator_spec",
            "flops",
            "bytes_moved",
            *OF_VARIANT,
            "model_flops",
            "kernels",
            "flags",
            "throttle_reasons",
            "card_id",
            "card_model",
            "card_kind",
            "card_memory_bytes",
            "card_fingerprint",
            "torch",
            "torchvision",
            "cuda",
            "cudnn",
            "driver",
            "python",
            "platform",
            "launch",
            "residency",
            "data_class",
            "grad",
            "tf32",
            "cudnn_benchmark",
            "cudnn_deterministic",
            "placement",
            "details",
            "cost_s",
            "origin",
        ]
    )
    | {entry.name for entry in FIGURES},
    "calls": frozenset(
        [
            "capture_id",
            "call_index",
            "module_path",
            "operator_id",
            "part",
            "owner",
            "seen",
            "reads",
            "writes",
            "operator_spec",
            "flops",
            "bytes_moved",
        ]
    ),
}


def _rows(path: Path, parquet: pq.ParquetFile, table: str) -> Iterator[Row]:
    import pyarrow as pa

    columns = [entry.name for entry in TABLES[table] if table not in _READ or entry.name in _READ[table]]
    try:
        later = ADDED.get(table, {})
        for batch in parquet.iter_batches(batch_size=AT_ONCE, columns=columns):
            yield from ({**later, **row} for row in batch.to_pylist())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Refused(f"{path} is damaged: {str(error).splitlines()[0][:200]}.", "Export it again.") from error


def _checked(path: Path, reader: _Reader, table: str, row: Row) -> Any:
    try:
        return reader.read[table](row)
    except (FarmError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        problem = error.message if isinstance(error, FarmError) else str(error) or type(error).__name__
        raise Refused(
            f"{path} holds what no farm writes ({table}): {problem.rstrip('.')[:300]}.", "Nothing of it was taken."
        ) from error


# ------------------------------------------------------------------------------------- a row checked


@dataclass(frozen=True)
class _Cost:
    flops: int
    bytes: int


@dataclass(frozen=True)
class _Read:
    """A reading with all that it refers to."""

    row: dict[str, Any]
    software: Software
    protocol: Protocol
    card: dict[str, Any]
    spec: OperatorTuple | None
    cost: _Cost | None
    variant: Variant | None
    variant_costs: dict[str, int]


class _Reader:
    """Makes rows of the database from rows of a file; raises at whatever is wrong."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self._specs: dict[str, OperatorTuple] = {}
        self.read: dict[str, Callable[[Row], Any]] = {
            "readings": self.reading,
            "calls": self.call,
            "captures": self.capture,
            "verdicts": self.verdict,
            "traces": self.trace,
        }

    def reading(self, row: Row) -> _Read:
        software = Software(**{name: _name(row, name, empty=name != "torch") for name in _SOFTWARE})
        flags = {name: _truth(row, name) for name in ("grad", "tf32", "cudnn_benchmark", "cudnn_deterministic")}
        placement = _name(row, "placement", empty=True)
        protocol = Protocol(row["launch"], row["residency"], _name(row, "data_class"), placement=placement, **flags)
        spec = cost = variant = None
        costs: dict[str, int] = {}
        if row["subject_kind"] == "operator":
            spec, cost = self.spec(row), _Cost(_count(row, "flops"), _count(row, "bytes_moved"))
        elif row["subject_kind"] == "variant":
            variant, costs = (
                self.variant(row),
                {name: _count(row, name) for name in ("flops", "model_flops", "bytes_moved")},
            )
        else:
            raise ValueError("subject_kind is neither operator nor variant")
        subject = spec or variant
        assert subject is not None
        if subject.id != row["subject_id"]:
            raise ValueError(f"subject_id {str(row['subject_id'])[:40]!r} is not that of its description")
        card = {
            "id": _name(row, "card_id", most=80),
            "model": _name(row, "card_model"),
            "kind": row["card_kind"],
            "memory_bytes": _count(row, "card_memory_bytes"),
            "fingerprint": _document(row, "card_fingerprint"),
            "driver": software.driver,
            "software_id": software.id,
            "origin": self.origin,
        }
        if card["kind"] not in ("cuda", "cpu", "simulated"):
            raise ValueError("card_kind is none of cuda, cpu and simulated")
        details = _document(row, "details")
        _check_details(details)
        method = details.get("method")
        read = {
            "id": _id(row, "reading_id"),
            "subject_kind": row["subject_kind"],
            "subject_id": subject.id,
            "card_id": card["id"],
            "card_model": card["model"],
            "software_id": software.id,
            "protocol_id": protocol.id,
            **_figures(row),
            "flags": _words(row, "flags"),
            "throttle_reasons": _words(row, "throttle_reasons"),
            "details": details,
            "cost_s": _numbers(_document(row, "cost_s"), "cost_s"),
            "method": method,
            "kernels": None if row["kernels"] is None else _numbers(_document(row, "kernels"), "kernels"),
            "origin": _name(row, "origin", empty=True) or self.origin,
        }
        return _Read(read, software, protocol, card, spec, cost, variant, costs)

    def spec(self, row: Row) -> OperatorTuple:
        text = row["operator_spec"]
        spec = self._specs.get(text)
        if spec is None:
            spec = parse(_loaded(text, "operator_spec"))
            if len(self._specs) > KNOWN:
                self._specs.clear()
            self._specs[text] = spec
        return spec

    def variant(self, row: Row) -> Variant:
        kinds = {column.name: column.kind for column in VARIANT}

        def value(name: str) -> Any:
            if name in Variant.CHOICES:
                return row[name]
            if kinds[name] == "text":
                return _name(row, name, empty=name != "model", most=_MOST_OF.get(name, MOST_TEXT))
            return _truth(row, name) if kinds[name] == "boolean" else _count(row, name)

        return Variant(**{name: value(name) for name in OF_VARIANT})

    def capture(self, row: Row) -> tuple[str, dict[str, Any], Variant, dict[str, int]]:
        variant = self.variant(row)
        captured, torch = row["captured"], _name(row, "torch", empty=True)
        if captured not in ("predicted", "observed"):
            raise ValueError("captured is neither predicted nor observed")
        if row["device_type"] not in ("cuda", "cpu"):
            raise ValueError("device_type is neither cuda nor cpu")
        if row["launch"] not in Protocol.CHOICES["launch"]:
            raise ValueError("launch is neither graph nor eager")
        key = content_id([variant.id, row["device_type"], _truth(row, "grad"), torch, row["launch"], captured])
        if row["capture_id"] != key:
            raise ValueError("capture_id is not that of its description")
        found = {
            "variant_id": variant.id,
            "device_type": row["device_type"],
            "grad": row["grad"],
            "torch": torch,
            "launch": row["launch"],
            "origin": tables.IMPORTED + captured,
            "card_id": _name(row, "card_id", empty=True, most=80) or None,
            "verification": {**_verification(row), ORIGIN: _name(row, "origin", empty=True) or self.origin},
            "created_at_s": _number(row, "created_at_s"),
        }
        return key, found, variant, {name: _count(row, name) for name in ("flops", "model_flops", "bytes_moved")}

    def call(self, row: Row) -> tuple[str, dict[str, Any], OperatorTuple, _Cost]:
        spec = self.spec(row)
        if spec.id != row["operator_id"]:
            raise ValueError("operator_id is not that of its description")
        found = {
            "call_index": _count(row, "call_index"),
            "module_path": _name(row, "module_path", empty=True, most=1000),
            "operator_id": spec.id,
            "part": _name(row, "part", empty=True, most=1000),
            "owner": _name(row, "owner", empty=True, most=1000),
            "reads": list(_wholes(row["reads"], "reads")),
            "writes": list(_wholes(row["writes"], "writes")),
            "data": _seen(row["seen"]),
        }
        return _id(row, "capture_id"), found, spec, _Cost(_count(row, "flops"), _count(row, "bytes_moved"))

    def verdict(self, row: Row) -> dict[str, Any]:
        for name in ("title", "job_kind", "launch", "residency", "data_policy", "outcome"):
            _name(row, name, empty=True, most=1000)
        for entry in TABLES["verdicts"]:
            if entry.kind == "number" and row[entry.name] is not None:
                _number(row, entry.name)
        details = _document(row, "details")
        if details.get("schema") == VERDICT_SCHEMA:
            Verdict.from_json(details)
        _words(row, "card_models")
        self._made_of(row)
        kept = {name: content.storable(value) for name, value in row.items() if name != "origin"}
        about = {"job_id": _name(row, "job_id", most=16), "round": _count(row, "round")}
        return {**about, "origin": _name(row, "origin", empty=True) or self.origin, "row": kept}

    def _made_of(self, row: Row) -> None:
        """What a job is made of again: checked, where the file has it."""
        entries = _loaded(row["made_of"], "made_of") if row["made_of"] is not None else []
        _words(row, "operators")
        if not entries:
            return
        if row["capture_id"] is not None:
            _id(row, "capture_id")
        for reading_id, role, number, reused in entries:
            _id({"reading_id": reading_id}, "reading_id")
            if role not in ("tuple", "whole", "canary") or type(reused) is not bool or _whole(number) > row["round"]:
                raise ValueError("made_of holds what no job has")
        _document(row, "request")

    def trace(self, row: Row) -> tuple[str, str, tuple[float, float], list[float], list[float]]:
        times_s, values = list(row["times_s"] or ()), list(row["values"] or ())
        if len(times_s) != len(values):
            raise ValueError("a series has not as many times as values")
        window_s = _number(row, "window_begin_s"), _number(row, "window_end_s")
        return _id(row, "reading_id"), _name(row, "series"), window_s, times_s, values


_SOFTWARE = ("torch", "torchvision", "cuda", "cudnn", "driver", "python", "platform")


def _name(row: Row, name: str, *, empty: bool = False, most: int = MOST_TEXT) -> str:
    value = row[name]
    if empty and value is None:
        return ""
    if not isinstance(value, str) or len(value) > most or not (value or empty):
        raise ValueError(f"{name} is no name of at most {most} characters")
    if printable(value) != value or content.storable_text(value) != value:
        raise ValueError(f"{name} holds control characters")
    return value


def _id(row: Row, name: str) -> str:
    if not isinstance(row[name], str) or not _ID.fullmatch(row[name]):
        raise ValueError(f"{name} is no id")
    return str(row[name])


def _truth(row: Row, name: str) -> bool:
    if type(row[name]) is not bool:
        raise ValueError(f"{name} is neither true nor false")
    return bool(row[name])


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ValueError(f"{str(value)[:40]!r} is no count")
    return value


def _count(row: Row, name: str) -> int:
    if type(row[name]) is not int or not 0 <= row[name] <= LARGEST:
        raise ValueError(f"{name} is no count")
    return int(row[name])


def _number(row: Row, name: str) -> float:
    if type(row[name]) not in (int, float) or not math.isfinite(row[name]):
        raise ValueError(f"{name} is no number")
    return float(row[name])


#: Figures without which there is no reading, and those that may be zero.
_NEEDED = (
    "time_us",
    "time_half_width_us",
    "time_median_us",
    "time_trimmed_us",
    "window_s",
    "warm_up_s",
    "created_at_s",
)


def _figures(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in FIGURES:
        value = row[entry.name]
        wanted = entry.kind == "number" and (value is not None or entry.name in _NEEDED)
        if wanted and _number(row, entry.name) < 0 and entry.name != "temperature_c":
            raise ValueError(f"{entry.name} is negative")
        found[entry.name] = value
    if not found["time_us"]:
        raise ValueError("time_us is zero")
    found |= {"passes": _count(row, "passes"), "simulated": _truth(row, "simulated")}
    return {**found, "power_source": _name(row, "power_source", empty=True)}


def _words(row: Row, name: str) -> list[str]:
    values = row[name] or []
    if len(values) > 64:
        raise ValueError(f"{name} are too many")
    return [_name({name: value}, name) for value in values]


def _loaded(text: Any, name: str) -> Any:
    if not isinstance(text, str) or len(text) > MOST_JSON:
        raise ValueError(f"{name} is no document, or too large a one")
    try:
        return content.storable(json.loads(text))
    except ValueError:
        raise ValueError(f"{name} is no JSON") from None


@functools.lru_cache(maxsize=10_000)
def _wholes(text: Any, name: str) -> tuple[int, ...]:
    """Places in a list. Of a hundred thousand calls, most say what others have said."""
    return tuple(_whole(entry) for entry in _loaded(text, name))


def _document(row: Row, name: str) -> dict[str, Any]:
    found = _loaded(row[name], name)
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no JSON object")
    return found


def _verification(row: Row) -> dict[str, Any]:
    """What reports show of it is what it should be; the rest is only handed on."""
    found = _document(row, "verification")
    seen = Verification.from_json(found)
    for kernels in (seen.tuple_kernels or {}).values():
        _numbers(dict(kernels), "verification.tuple_kernels")
    for times_us in (seen.in_model.calls_us or {} if seen.in_model else {}).values():
        if any(type(value) not in (int, float, type(None)) for value in times_us):
            raise ValueError("verification.in_model holds what is no number")
    return found


def _numbers(found: dict[str, Any], name: str) -> dict[str, Any]:
    if len(found) > 10_000 or any(type(value) not in (int, float) for value in found.values()):
        raise ValueError(f"{name} holds what is no number")
    return found


#: What sums are made of: parts of the details, with what must be a number in them.
_SUMMED = {"burst": ("time_us",), "context": ("alone_us", "effect_us"), "canary": ("number", "time_us")}
_SCALARS = ("method", "copies", "found_again", "ceiling_s", "eager_time_us")


def _check_details(details: Mapping[str, Any]) -> None:
    for name in _SCALARS:
        if type(details.get(name)) not in (int, float, type(None)):
            raise ValueError(f"details.{name} is no number")
    if type(details.get("method")) not in (int, type(None)) or not 0 <= (details.get("method") or 0) < 10**6:
        raise ValueError("details.method is no version")
    for part, needed in _SUMMED.items():
        found = details.get(part)
        if found is None:
            continue
        if not isinstance(found, dict) or any(type(found.get(name)) not in (int, float) for name in needed):
            raise ValueError(f"details.{part} lacks {', '.join(needed)}")
        for name, value in found.items():
            if (
                name.endswith(("_us", "_mj", "_w", "_mhz"))
                and name != "duty_power_w"
                and type(value) not in (int, float, type(None))
            ):
                raise ValueError(f"details.{part}.{name} is no number")


@functools.lru_cache(maxsize=10_000)
def _seen(text: Any) -> list[Any] | None:
    """What each activation of a call held, and each buffer or parameter that it was given: numbers that make a class of data."""
    if text is None:
        return None
    found = _loaded(text, "seen")
    if not isinstance(found, list) or len(found) > 1024:
        raise ValueError("seen is no list")
    for entry in found:
        if entry is not None and (
            not isinstance(entry, dict)
            or any(type(value) not in (int, float) for value in entry.values())
            or not (entry.get("held") or {"zeros", "least"} <= set(entry))
        ):
            raise ValueError("seen holds what no model shows")
    if not is_class(class_of(found)):
        raise ValueError("seen makes no class of data")
    return found


# ------------------------------------------------------------------------------------------- writing


def _note(database: Database, origin: str, path: Path, told: Sequence[Mapping[str, Any]]) -> None:
    first = told[0]
    about: dict[str, Any] = {
        "file": content.storable_text(printable(path.name)),
        "farm_version": printable(str(first.get("farm_version", "")))[:MOST_TEXT],
        "exported_at_s": float(first["exported_at_s"]) if type(first.get("exported_at_s")) in (int, float) else 0.0,
        "imported_at_s": time.time(),
    }
    with database.write() as session:
        if (known := session.get(tables.Origin, origin)) is None:
            session.add(tables.Origin(name=origin, **about))
        else:
            known.sqlmodel_update(about)


def _take(database: Database, path: Path, parquet: pq.ParquetFile, table: str, origin: str) -> Taken:
    reader, rows, new = _Reader(origin), 0, 0
    pending: list[Any] = []

    def write() -> int:
        if not pending:
            return 0
        with database.write() as session:
            number: int = _WRITERS[table](session, pending)
        pending.clear()
        return number

    for row in _rows(path, parquet, table):
        pending.append(_checked(path, reader, table, row))
        rows += 1
        if len(pending) >= AT_ONCE:
            new += write()
    return Taken(path, table, rows, new + write())


def _missing(session: Session, column: Any, ids: Sequence[str]) -> set[str]:
    there = {
        id_ for batch in in_batches(ids) for id_ in session.scalars(sqlalchemy.select(column).where(column.in_(batch)))
    }
    return set(ids) - there


def _write_readings(session: Session, found: Sequence[_Read]) -> int:
    missing = _missing(session, _READING.id, [one.row["id"] for one in found])
    new = {one.row["id"]: one for one in found if one.row["id"] in missing}
    for software in {one.software.id: one.software for one in new.values()}.values():
        content.store_software(session, software)
    for protocol in {one.protocol.id: one.protocol for one in new.values()}.values():
        content.store_protocol(session, protocol)
    cards = {one.card["id"]: one.card for one in new.values()}
    content.insert_new(session, tables.Card, [{**card, "capabilities": []} for card in cards.values()])
    content.store_operators(session, {one.spec: one.cost for one in new.values() if one.spec and one.cost})
    for one in {one.variant.id: one for one in new.values() if one.variant}.values():
        assert one.variant is not None
        content.store_variant(session, one.variant, **one.variant_costs)
    content.insert_new(session, tables.Reading, [one.row for one in new.values()])
    return len(new)


def _write_captures(session: Session, found: Sequence[tuple[str, dict[str, Any], Variant, dict[str, int]]]) -> int:
    new = 0
    observed_on = {row["card_id"] for _, row, _, _ in found if row["card_id"]}
    unknown = _missing(session, _CARD.id, list(observed_on))  # no reading of theirs came with it
    for _, row, variant, costs in found:
        content.store_variant(session, variant, **costs)
        row["card_id"] = None if row["card_id"] in unknown else row["card_id"]
        if _capture(session, row) is None and _capture(session, row, own=True) is None:
            session.add(tables.Capture(**row))
            new += 1
    return new


def _capture(session: Session, row: Mapping[str, Any], *, own: bool = False) -> int | None:
    """The id of a capture that is there already; of one's own taking-apart of the same, too."""
    same = [_CAPTURE[name] == row[name] for name in ("variant_id", "device_type", "grad", "torch", "launch")]
    origin = row["origin"].removeprefix(tables.IMPORTED) if own else row["origin"]
    return session.scalar(sqlalchemy.select(_CAPTURE.id).where(*same, _CAPTURE.origin == origin))


def _write_calls(session: Session, found: Sequence[tuple[str, dict[str, Any], OperatorTuple, _Cost]]) -> int:
    content.store_operators(session, {spec: cost for _, _, spec, cost in found})
    about = sqlalchemy.select(
        *(_CAPTURE[name] for name in ("id", "variant_id", "device_type", "grad", "torch", "launch", "origin"))
    )
    ids = {}
    for row in session.execute(about.where(_CAPTURE.origin.startswith(tables.IMPORTED))):
        ids[capture_key(row)] = row.id
    there = {
        tuple(key)
        for batch in in_batches(ids[key] for key, *_ in found if key in ids)
        for key in session.execute(
            sqlalchemy.select(_CALL.capture_id, _CALL.call_index).where(_CALL.capture_id.in_(batch))
        )
    }
    rows = [
        {"capture_id": ids[key], **row}
        for key, row, _, _ in found
        if key in ids and (ids[key], row["call_index"]) not in there
    ]
    if rows:
        session.execute(sqlalchemy.insert(tables.Call), rows)
    return len(rows)


def _write_verdicts(session: Session, found: Sequence[dict[str, Any]]) -> int:
    new = 0
    for row in found:
        theirs = sqlalchemy.select(_IMPORTED.round).where(_IMPORTED.job_id == row["job_id"])
        rounds = set(session.scalars(theirs))
        if row["round"] in rounds or (not rounds and session.get(tables.Job, row["job_id"]) is not None):
            continue
        session.add(tables.ImportedVerdict(**row))
        new += 1
        if row["row"].get("made_of"):
            write_job(session, row["row"])
    return new


def _write_traces(
    session: Session, found: Sequence[tuple[str, str, tuple[float, float], list[float], list[float]]]
) -> int:
    """Series of readings of other farms; one reading's stand together, and may fall into two batches."""
    series: dict[str, dict[str, Any]] = {}
    windows = {}
    for reading_id, name, window_s, times_s, values in found:
        series.setdefault(reading_id, {})[name] = (times_s, values)
        windows[reading_id] = window_s
    imported = _READING.id.in_(list(series)), _READING.origin != ""
    new = 0
    for reading_id in session.scalars(sqlalchemy.select(_READING.id).where(*imported)).all():
        kept = session.get(tables.Trace, reading_id)
        if kept is None:
            packed = Trace(windows[reading_id], series[reading_id]).pack()
            session.add(tables.Trace(reading_id=reading_id, packed=packed))
            new += len(series[reading_id])
            continue
        before = Trace.unpack(kept.packed)
        if more := {name: value for name, value in series[reading_id].items() if name not in before.series}:
            kept.packed = Trace(before.window_s, before.series | more).pack()
            new += len(more)
    return new


_WRITERS: dict[str, Callable[[Session, Sequence[Any]], int]] = {
    "readings": _write_readings,
    "captures": _write_captures,
    "calls": _write_calls,
    "verdicts": _write_verdicts,
    "traces": _write_traces,
}
