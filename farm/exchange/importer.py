"""Imports an export of another farm. Every row is checked before anything is written; duplicates
are skipped.

`farm.store.data_columns` declares the values that each column accepts. Content-hash ids are
computed again from the row. Each file is read once, batch by batch. Checked batches go to a
temporary file until all files are checked."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import pickle
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from pydantic import ValidationError
from sqlmodel import Session

from farm.errors import FarmError, Unreadable, UsageError
from farm.errors.safe_text import printable
from farm.exchange.column_types import check_of
from farm.exchange.export import METADATA, schema_of
from farm.exchange.parquet_pages import DamagedPage, pages_of
from farm.exchange.tidy import ORIGIN, capture_key
from farm.store import captures, content, item_state, tables
from farm.store.columns import CALL, CAPTURE, CARD, IMPORTED, ITEM, OPERATOR, READING
from farm.store.data_columns import ADDED, FIGURES, FORMAT, PROTOCOL, TABLES, VARIANT_FIELDS, Column
from farm.store.database import Database, among, fetch_values, read_clock_s
from farm.subjects.label import label_of
from farm.types.fields import names_of
from farm.types.protocol import Protocol, Software, Variant, content_id
from farm.types.reading import Trace, Verification
from farm.types.request import Request
from farm.types.tuple import Cost, OperatorTuple

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

AT_ONCE = 1000  # rows in one transaction: small, because other writers wait for its end
BATCH = 20_000  # rows that are checked together: equal values in a column are checked once
BATCH_BYTES = 64 << 20  # bytes of unpacked rows that are read together
MOST_IN_MEMORY = 64 << 20  # bytes of compressed checked rows in memory; more go to the disk
MOST_ROWS = 50_000_000  # rows of one file
# bytes of an unpacked row group; PyArrow needs up to four times as much to read it
MOST_BYTES = 192 << 20
# bytes of an unpacked page; an export writes dictionaries of about 64 MiB at most
MOST_PAGE_BYTES = 80 << 20
MOST_DECODED_BYTES = 1 << 30  # bytes of the values of a batch, if each repeated value counts again
MOST_IN_LISTS = 20_000_000  # values in the lists of a row group
MOST_IN_ONE_LIST = 2_000_000  # values in one list
# bytes of different values that become Python objects at a time: up to 24 times as large
PART_BYTES = 8 << 20
NEXT_STEP = "Give a Parquet file that `farm export` wrote."

Row = Mapping[str, Any]


class ImportRefused(UsageError):
    """A file is not an export, is damaged or too large, or contains a value that no farm writes."""


@dataclass(frozen=True)
class Imported:
    """The number of rows of one file, and how many of them were new to the database. ``left_out``:
    why the file was not imported."""

    path: Path
    table: str
    rows: int
    new: int
    left_out: str = ""


@dataclass(frozen=True)
class ExportFile:
    """An opened Parquet file of an export. `about` is the description in its metadata."""

    path: Path
    table: str
    about: Mapping[str, Any]
    parquet: pq.ParquetFile


def import_export(database: Database, path: Path, *, origin: str = "") -> list[Imported]:
    """Import a file of readings, or a folder with the tables of an export. `origin`: the name of
    the exporting farm; by default the name of the file or folder. Raises `UsageError` if it is not
    a valid name, and `ImportRefused` if a file is not an export, of a newer format, damaged, or has
    a value that no farm writes. Then nothing was written."""
    origin = origin or (path.resolve().name if path.is_dir() else path.stem)  # "." has no name
    try:
        check_of(_ORIGIN)(origin)
    except ValueError as error:
        raise UsageError(
            f"{printable(origin)[:40]!r} is not a valid farm name: {_problem(error)}.",
            "Give a name for the exporting farm with --origin.",
        ) from error
    files = [
        _opened(file) for file in (sorted(path.glob("*.parquet")) if path.is_dir() else [path])
    ]
    if not files:
        raise ImportRefused(
            f"The folder {path} has no Parquet file.",
            "Give a file or folder that `farm export` wrote.",
        )
    files.sort(key=lambda file: list(_IMPORTS).index(file.table))
    metadata = files[0].about
    left_out: list[Imported] = []
    if not any(file.table == "captures" for file in files):
        why = "calls need the table of their captures, captures.parquet of the same export"
        calls = [file for file in files if file.table == "calls"]
        left_out = [
            Imported(file.path, file.table, file.parquet.metadata.num_rows, 0, why)
            for file in calls
        ]
        files = [file for file in files if file.table != "calls"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rare_garbage_collection())
        checked = [(file, stack.enter_context(_spooled(_checked(file, origin)))) for file in files]
        _store_origin(database, origin, path, metadata)
        return [*(_write(database, file, batches) for file, batches in checked), *left_out]


@contextlib.contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage a hundred times less often: a batch is a million objects that are no garbage,
    and looking at them again and again takes a quarter of an import's time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 70_000), *(max(count, 20) for count in before[1:]))
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _spooled(batches: Iterable[list[Any]]) -> Iterator[Iterator[list[Any]]]:
    """Write checked batches to an unnamed temporary file. Then yield one iterator over all
    batches.
    """
    with tempfile.SpooledTemporaryFile(MOST_IN_MEMORY) as spool:
        try:
            for records in batches:
                pickle.dump(zlib.compress(pickle.dumps(records), 1), spool)
        except OSError as error:
            raise UsageError(
                f"Temporary data cannot be written to {tempfile.gettempdir()}: {error.strerror}.",
                "Free disk space there, or set the environment variable TMPDIR to another folder.",
            ) from error
        except RecursionError:
            raise ImportRefused(
                "A JSON value in the export is nested too deeply.", "Export the readings again."
            ) from None
        end = spool.tell()
        spool.seek(0)
        yield (
            pickle.loads(zlib.decompress(pickle.load(spool)))
            for _ in iter(lambda: spool.tell() < end, False)
        )


# -------------------------------------------------------------------------------------------
# reading a file


def _opened(path: Path) -> ExportFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if (
        path.exists() and not path.is_file()
    ):  # opening a pipe would block until a process writes to it
        raise ImportRefused(f"{path} is not a regular file.", NEXT_STEP)
    limits = {"thrift_string_size_limit": 100 << 20, "thrift_container_size_limit": 1 << 20}
    try:
        file = pq.ParquetFile(path, **limits)
    except FileNotFoundError:
        raise ImportRefused(f"There is no file {path}.", NEXT_STEP) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ImportRefused(f"{path} is not a complete Parquet file.", NEXT_STEP) from error
    try:
        metadata = json.loads((file.schema_arrow.metadata or {}).get(METADATA, b"null"))
    except ValueError:
        metadata = None
    if (
        not isinstance(metadata, dict)
        or type(metadata.get("format")) is not int
        or metadata.get("table") not in TABLES
    ):
        raise ImportRefused(f"{path} was not written by `farm export`.", NEXT_STEP)
    if metadata["format"] > FORMAT:
        raise ImportRefused(
            f"{path} has format {metadata['format']}; this program reads formats up to {FORMAT}.",
            "Update this program, or export again with an older program.",
        )
    table = metadata["table"]
    for field in schema_of(table):
        at = file.schema_arrow.get_field_index(field.name)
        if at < 0 and field.name in ADDED.get(table, ()):
            continue
        if at < 0 or file.schema_arrow.field(at).type != field.type:
            raise ImportRefused(
                f"{path} lacks the column {field.name} of type {field.type}.", NEXT_STEP
            )
    _check_size(path, file.metadata)
    _check_pages(path, file.metadata)
    # Dictionary encoding: a text that repeats is in memory once, as in the file.
    leaves = [file.schema.column(index) for index in range(file.metadata.num_columns)]
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    options = {
        "metadata": file.metadata,
        "read_dictionary": texts,
        "page_checksum_verification": True,
    }
    return ExportFile(path, table, metadata, pq.ParquetFile(path, **limits, **options))


def _check_size(path: Path, metadata: pq.FileMetaData) -> None:
    """Raise `ImportRefused` if the file's metadata announce more data than an import may have in
    memory.
    """
    lists = [
        index
        for index in range(metadata.num_columns)
        if metadata.schema.column(index).max_repetition_level
    ]
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if metadata.num_rows > MOST_ROWS or any(
        not 0 <= group.total_byte_size <= MOST_BYTES
        or sum(group.column(index).num_values for index in lists) > MOST_IN_LISTS
        for group in groups
    ):
        raise _too_large(path)


def _check_pages(path: Path, metadata: pq.FileMetaData) -> None:
    """Raise `ImportRefused` if the file's pages would unpack to more data than an import may have
    in memory.
    """
    try:
        with path.open("rb") as file:
            for number in range(metadata.num_row_groups):
                group = metadata.row_group(number)
                chunks = [group.column(index) for index in range(group.num_columns)]
                sizes = [page.unpacked_bytes for chunk in chunks for page in pages_of(file, chunk)]
                if max(sizes, default=0) > MOST_PAGE_BYTES or sum(sizes) > MOST_BYTES:
                    raise _too_large(path)
    except (OSError, DamagedPage) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ImportRefused:
    return ImportRefused(
        f"{path} is damaged: {str(error).splitlines()[0][:200]}.",
        "Nothing was imported. Export the readings again.",
    )


def _too_large(path: Path) -> ImportRefused:
    most = (
        f"{MOST_ROWS} rows; per row group, {MOST_BYTES >> 20} MiB unpacked and {MOST_IN_LISTS} "
        "values in lists"
    )
    return ImportRefused(
        f"{path} is too large. Limits: {most}.", "Export the readings in parts, with filters."
    )


def _decoded_bytes(found: pa.Array) -> int:
    """The size of a column's values in bytes, if each repeated value is stored again."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = found.flatten() if pa.types.is_list(found.type) else found
    if not pa.types.is_dictionary(values.type):
        return int(values.nbytes)
    return (
        pc.sum(pc.binary_length(values.dictionary).cast("int64").take(values.indices)).as_py() or 0
    )


def _checked(file: ExportFile, origin: str) -> Iterator[list[Any]]:
    """Check the rows of a file. Yield them in batches, in the form that the table's writer
    needs.
    """
    import pyarrow as pa

    columns = [column for column in TABLES[file.table] if not column.derived]
    added = ADDED.get(file.table, {})
    make, before = _IMPORTS[file.table][0], 0
    try:
        for batch in _batches(file.parquet, [column.name for column in columns]):
            present = [column for column in columns if column.name in batch.schema.names]
            names = [column.name for column in present]
            if sum(_decoded_bytes(batch.column(name)) for name in names) > MOST_DECODED_BYTES:
                raise _too_large(file.path)
            for part in _parts(file.path, batch):
                values = [
                    _checked_column(file, column, part.column(column.name), before)
                    for column in present
                ]
                records: list[Any] = []
                try:
                    for cells in zip(*values, strict=True):
                        row = dict(added)
                        row.update(zip(names, cells, strict=True))
                        records.append(make(row, origin))
                except (FarmError, ValueError, TypeError) as error:
                    raise _refused(file, before + len(records) + 1, error) from error
                before += len(records)
                yield records
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(file.path, error) from error


def _batches(parquet: pq.ParquetFile, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the rows of a file: `BATCH` at a time, or fewer if they have more than `BATCH_BYTES`.
    PyArrow cannot read lists with the dictionaries of two row groups at a time."""
    metadata = parquet.metadata
    if metadata.num_row_groups == 0:
        yield from parquet.iter_batches(columns=names)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        row_bytes = max(group.total_byte_size / max(group.num_rows, 1), 1.0)
        rows = max(1, min(BATCH, int(BATCH_BYTES / row_bytes)))
        yield from parquet.iter_batches(batch_size=rows, row_groups=[number], columns=names)


def _parts(path: Path, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide a batch until the different values of each part have at most `PART_BYTES`, or it is
    one row. Raises `ImportRefused` if one list is too long."""
    if (
        batch.num_rows <= 1
        or sum(_different_bytes(column) for column in batch.columns) <= PART_BYTES
    ):
        if any(_longest_list(column) > MOST_IN_ONE_LIST for column in batch.columns):
            raise _too_large(path)
        yield batch
        return
    half = batch.num_rows // 2
    yield from _parts(path, batch.slice(0, half))
    yield from _parts(path, batch.slice(half))


def _different_bytes(found: pa.Array) -> int:
    """The size of a column's different values in bytes. Numbers in lists count fourfold: they
    become objects.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_list = pa.types.is_list(found.type)
    values = found.flatten() if is_list else found
    if not pa.types.is_dictionary(values.type):
        return int(values.nbytes) * (4 if is_list else 1)
    used = values.dictionary.take(pc.unique(values.indices))
    return pc.sum(pc.binary_length(used).cast("int64")).as_py() or 0


def _longest_list(found: pa.Array) -> int:
    """The number of values in the longest list of a column; 0 if it has no lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return (pc.max(pc.list_value_length(found)).as_py() or 0) if pa.types.is_list(found.type) else 0


def _checked_column(
    file: ExportFile, column: Column, found: pa.Array, before: int
) -> Sequence[Any]:
    """Check the values of one column of a batch, which has `before` rows before it. Return their
    stored form.
    """
    import pyarrow as pa

    positions = None
    if not pa.types.is_nested(found.type):
        of_texts = pa.types.is_dictionary(found.type)
        encoded = (found.indices if of_texts else found).dictionary_encode("encode")
        found = found.dictionary.take(encoded.dictionary) if of_texts else encoded.dictionary
        positions = encoded.indices.to_pylist()
    check = check_of(column)
    checked: list[Any] = []
    for value in found.to_pylist():
        try:
            checked.append(check(value))
        except (
            FarmError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            at = len(checked) if positions is None else positions.index(len(checked))
            raise _refused(file, before + at + 1, error, f", column {column.name}") from error
    return checked if positions is None else [checked[position] for position in positions]


def _refused(file: ExportFile, row: int, error: BaseException, column: str = "") -> ImportRefused:
    return ImportRefused(
        f"{file.path}, table {file.table}, row {row}{column}: {_problem(error)[:300]}.",
        "`farm export` never writes such a value. Nothing was imported. Export the readings again.",
    )


def _problem(error: BaseException) -> str:
    """Describe the error and its value, without a full stop at the end."""
    if isinstance(error, FarmError):
        return error.message.rstrip(".")
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        said = f"{where}: {first['msg']}" if where else first["msg"]
        return f"{said}, not {printable(str(first['input'])[:60])!r}"
    return str(error).rstrip(".") or type(error).__name__


# -------------------------------------------------------------------------------------------
# checking a row


@dataclass(frozen=True)
class Checked:
    """A checked row, and the operator tuple or variant that it describes."""

    row: dict[str, Any]
    subject: Any
    cost: Cost
    model_flops: int | None = None  # PyTorch's count for the variant; None for a tuple
    # the other rows that the row refers to, in the form that its writer needs
    refers_to: Any = None

    def store_variant(self, session: Session) -> None:
        flops, bytes_moved = self.cost.flops, self.cost.bytes
        model_flops = self.model_flops or 0
        content.store_variant(
            session,
            self.subject,
            flops=flops,
            model_flops=model_flops,
            bytes_moved=bytes_moved,
        )
        stored = session.get_one(tables.ModelVariant, self.subject.id)
        before = stored.flops, stored.model_flops, stored.bytes_moved
        merged = (
            _agreed(stored.flops, flops),
            _agreed(stored.model_flops, model_flops),
            _agreed(stored.bytes_moved, bytes_moved),
        )
        if merged != before and not _is_own(session, stored.id):
            stored.flops, stored.model_flops, stored.bytes_moved = merged


def _variant(row: Row) -> Variant:
    for name in (*VARIANT_FIELDS, "model_flops"):
        if row[name] is None:
            raise ValueError(f"the column {name} is empty")
    return _record(Variant, tuple(row[name] for name in VARIANT_FIELDS))


@functools.lru_cache(maxsize=10_000)
def _record(kind: type, values: tuple[Any, ...]) -> Any:
    return kind(*values)


def _columns(row: Row, names: Iterable[str]) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _reading(row: Row, origin: str) -> Checked:
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
    software = _record(Software, tuple(row[name] for name in names_of(Software)))
    protocol = _record(Protocol, tuple(row[column.name] for column in PROTOCOL))
    card = {
        name: row[f"card_{name}"] for name in ("id", "model", "kind", "memory_bytes", "fingerprint")
    }
    card |= {
        "driver": software.driver,
        "software_id": software.id,
        "origin": origin,
        "capabilities": [],
    }
    reading = _columns(row, _SAME_IN_READING)
    reading["id"] = row["reading_id"]
    reading["software_id"] = software.id
    reading["protocol_id"] = protocol.id
    reading["method"] = row["details"].get("method")
    reading["origin"] = row["origin"] or origin
    model_flops = row["model_flops"] if of_model else None
    return Checked(reading, subject, _cost(row), model_flops, (software, protocol, card))


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


def _capture(row: Row, origin: str) -> Checked:
    variant = _variant(row)
    same = _columns(row, ("device_type", "grad", "torch", "launch"))
    kernels_of = [row["compiled_for"]] if row["compiled_for"] else []
    if row["capture_id"] != content_id([variant.id, *same.values(), row["captured"], *kernels_of]):
        raise ValueError("capture_id is not the hash of the row's description")
    farm = row["origin"] or origin
    capture = {
        "variant_id": variant.id,
        **same,
        "card_model": row["compiled_for"],
        "compiled": row["compiled"],
        "origin": tables.imported_origin(row["captured"], farm),
        "card_id": row["card_id"] or None,
        "verification": {**row["verification"], ORIGIN: farm},
        "created_at_s": row["created_at_s"],
    }
    cost = Cost(row["flops"], row["bytes_moved"])
    return Checked(capture, variant, cost, row["model_flops"])


def _call(row: Row, origin: str) -> Checked:
    spec = row["operator_spec"]
    if spec.id != row["operator_id"]:
        raise ValueError("operator_id is not the hash of operator_spec")
    same = ("call_index", "module_path", "operator_id", "part", "owner", "reads", "writes")
    capture = row["capture_id"], row["origin"] or origin
    return Checked(
        {**_columns(row, same), "data": row["seen"]}, spec, _cost(row), refers_to=capture
    )


def _cost(row: Row) -> Cost:
    """The cost of an operator tuple. Older exports have one output shape, and only of operators
    with one output.
    """
    shapes = row["output_shapes"]
    if shapes is None and row["output_shape"] is not None:
        shapes = [row["output_shape"]]
    output_shapes = None if shapes is None else tuple(map(tuple, shapes))
    return Cost(row["flops"], row["bytes_moved"], output_shapes)


def _verdict(row: Row, origin: str) -> dict[str, Any]:
    """Convert a row to a row of the table of imported verdicts."""
    if any(number > row["round"] for _, _, number, _ in json.loads(row["made_of"] or "[]")):
        raise ValueError("made_of has an item of a later round than the verdict's")
    kept = {name: content.storable(value) for name, value in row.items() if name != "origin"}
    return {
        "job_id": row["job_id"],
        "round": row["round"],
        "origin": row["origin"] or origin,
        "row": kept,
    }


def _series(row: Row, origin: str) -> tuple[str, Trace]:
    """Return the reading id of a sampled series, and a trace that contains only this series."""
    if len(row["times_s"]) != len(row["values"]):
        raise ValueError("times_s and values have different lengths")
    series = {row["series"]: (row["times_s"], row["values"])}
    return row["reading_id"], Trace((row["window_begin_s"], row["window_end_s"]), series)


# -------------------------------------------------------------------------------------------------
# writing


def _store_origin(database: Database, origin: str, path: Path, about: Mapping[str, Any]) -> None:
    exported_at_s: Any = about.get("exported_at_s")
    with database.write() as session:
        row = tables.Origin(
            name=origin,
            file=content.storable_text(printable(path.name)),
            farm_version=printable(str(about.get("farm_version", "")))[:300],
            exported_at_s=float(exported_at_s) if type(exported_at_s) in (int, float) else 0.0,
            imported_at_s=read_clock_s(session),
        )
        session.merge(row)


def _write(database: Database, file: ExportFile, batches: Iterable[list[Any]]) -> Imported:
    rows = new = 0
    for records in batches:
        rows += len(records)
        for begin in range(0, len(records), AT_ONCE):
            with database.write() as session:
                new += _IMPORTS[file.table][1](session, records[begin : begin + AT_ONCE])
    return Imported(file.path, file.table, rows, new)


def _missing(session: Session, column: Any, ids: Sequence[str]) -> set[str]:
    rows = among(session, sqlalchemy.select(column), column, ids)
    return set(ids).difference(row[0] for row in rows)


def _store_operators(session: Session, costs: Mapping[OperatorTuple, Cost]) -> None:
    """Store operators. If exports of two versions have different costs of one, the order of imports
    has no influence. The costs of operators that this farm captured or measured do not change."""
    columns = [OPERATOR[name] for name in ("id", "flops", "bytes_moved", "output_shapes", "label")]
    stored = fetch_values(session, columns, (spec.id for spec in costs))
    new = {spec: cost for spec, cost in costs.items() if spec.id not in stored}
    content.store_operators(session, new)
    for spec, cost in costs.items():
        if spec in new:
            continue
        before = stored[spec.id]._asdict()
        del before["id"]
        merged = {
            "flops": _agreed(before["flops"], cost.flops),
            "bytes_moved": _agreed(before["bytes_moved"], cost.bytes),
            "output_shapes": before["output_shapes"],
            # Versions wrote the keywords of a call in different orders.
            "label": min(before["label"], label_of(spec)),
        }
        if merged["output_shapes"] is None:
            merged["output_shapes"] = _shapes(cost)
        if merged != before and not _is_own(session, spec.id):
            operator = sqlalchemy.update(tables.Operator).where(OPERATOR.id == spec.id)
            session.execute(operator.values(**merged))


def _agreed(first: int, second: int) -> int:
    """Return the smaller of two costs that are known: later versions count less that is not moved.
    0: unknown.
    """
    return min(first, second) if first and second else first or second


def _shapes(cost: Cost) -> list[list[int]] | None:
    return None if cost.output_shapes is None else [list(shape) for shape in cost.output_shapes]


def _is_own(session: Session, subject_id: str) -> bool:
    """True if this farm has captured or measured an operator or a variant."""
    is_own = CAPTURE.origin.in_(captures.OWN_CAPTURES)
    calling = sqlalchemy.select(CAPTURE.id).join(tables.Call, CALL.capture_id == CAPTURE.id)
    queries = (
        sqlalchemy.select(READING.id).where(READING.subject_id == subject_id, READING.origin == ""),
        sqlalchemy.select(CAPTURE.id).where(CAPTURE.variant_id == subject_id, is_own),
        calling.where(CALL.operator_id == subject_id, is_own),
    )
    return any(session.execute(query.limit(1)).first() is not None for query in queries)


def _write_readings(session: Session, records: Sequence[Checked]) -> int:
    missing = _missing(session, READING.id, [record.row["id"] for record in records])
    new = {record.row["id"]: record for record in records if record.row["id"] in missing}.values()
    for software in dict.fromkeys(record.refers_to[0] for record in new):
        content.store_software(session, software)
    for protocol in dict.fromkeys(record.refers_to[1] for record in new):
        content.store_protocol(session, protocol)
    cards = {record.row["card_id"]: record.refers_to[2] for record in new}
    content.insert_new(session, tables.CardRow, list(cards.values()))

    costs = {}
    variants = {}
    for record in new:
        if isinstance(record.subject, OperatorTuple):
            costs[record.subject] = record.cost
        elif isinstance(record.subject, Variant):
            variants[record.subject] = record
    _store_operators(session, costs)
    for record in variants.values():
        record.store_variant(session)

    content.insert_new(session, tables.ReadingRow, [record.row for record in new])
    return len(new)


def _write_captures(session: Session, records: Sequence[Checked]) -> int:
    """Write the captures that the database does not have yet. Return their number. A capture refers
    to its card only if the database has the card."""
    new = 0
    card_ids = [record.row["card_id"] for record in records if record.row["card_id"]]
    missing_cards = _missing(session, CARD.id, card_ids)
    for record in records:
        record.store_variant(session)
        row = dict(record.row)
        stored = _same_capture(session, row)
        if stored is None:
            if row["card_id"] in missing_cards:
                row["card_id"] = None
            session.add(tables.Capture(**row))
            session.flush()
            new += 1
        elif _verified_at_s(row["verification"]) > _verified_at_s(stored.verification):
            stored.verification = row["verification"]
    return new


def _same_capture(session: Session, row: Row) -> tables.Capture | None:
    """Return the capture that was imported from the same farm before, or the one of this farm that
    was exported.
    """
    same = [CAPTURE[name] == row[name] for name in captures.CAPTURE_KEY]
    captured = tables.captured_as(row["origin"])
    verification = _without_farm(row["verification"])
    for capture in session.scalars(sqlalchemy.select(tables.Capture).where(*same)):
        if tables.captured_as(capture.origin) != captured:
            continue
        if _farm_of(capture) == row["verification"][ORIGIN]:
            return capture
        is_own = capture.origin == captured
        if is_own and (capture.verification or {}) == verification:
            return capture
    return None


def _farm_of(capture: tables.Capture) -> str:
    """Return the farm from which a capture was imported; "" for a capture of this farm."""
    return tables.farm_of_origin(capture.origin) or (capture.verification or {}).get(ORIGIN, "")


def _without_farm(verification: Row) -> dict[str, Any]:
    return {name: value for name, value in verification.items() if name != ORIGIN}


def _verified_at_s(verification: Row | None) -> float:
    return Verification.from_json(verification).read_at_s or 0.0


def _write_calls(session: Session, records: Sequence[Checked]) -> int:
    _store_operators(session, {record.subject: record.cost for record in records})
    ids = _imported_captures(session)
    rows = [
        {"capture_id": ids[record.refers_to], **record.row}
        for record in records
        if record.refers_to in ids
    ]
    keys = sqlalchemy.select(CALL.capture_id, CALL.call_index)
    stored = among(session, keys, CALL.capture_id, (row["capture_id"] for row in rows))
    stored_keys = set(map(tuple, stored))
    new = [row for row in rows if (row["capture_id"], row["call_index"]) not in stored_keys]
    if new:
        session.execute(sqlalchemy.insert(tables.Call.__table__), new)  # type: ignore[attr-defined]
    return len(new)


def _imported_captures(session: Session) -> dict[tuple[str, str], int]:
    """Return (capture id of exports, farm) -> id in this database."""
    columns = (CAPTURE[name] for name in ("id", "origin", *captures.CAPTURE_KEY))
    imported = session.execute(
        sqlalchemy.select(*columns).where(CAPTURE.origin.startswith(tables.IMPORTED))
    ).all()
    farms = {row.id: tables.farm_of_origin(row.origin) for row in imported}
    for id_ in [id_ for id_, farm in farms.items() if not farm]:  # imported by an older version
        farms[id_] = _farm_of(session.get_one(tables.Capture, id_))
    return {(capture_key(row), farms[row.id]): row.id for row in imported}


def _write_verdicts(session: Session, rows: Sequence[dict[str, Any]]) -> int:
    new = 0
    for row in rows:
        rounds_of = sqlalchemy.select(IMPORTED.round).where(IMPORTED.job_id == row["job_id"])
        rounds = set(session.scalars(rounds_of))
        if row["round"] in rounds:
            _choose_capture(session, row)
            continue
        if not rounds and session.get(tables.Job, row["job_id"]) is not None:  # a job of this farm
            continue
        session.add(tables.ImportedVerdict(**row))
        session.flush()
        new += 1
        if row["row"].get("made_of"):
            _write_job(session, row)
    return new


def _choose_capture(session: Session, row: Row) -> None:
    """Choose the capture of an imported round again: an older version may have dropped the capture
    of its farm.
    """
    stored = session.get(tables.Round, (row["job_id"], row["round"]))
    captured = _known_capture(session, row["row"], row["origin"])
    if stored is not None and captured is not None:
        stored.capture_id = captured


def _write_traces(session: Session, series: Sequence[tuple[str, Trace]]) -> int:
    """Write the series of imported readings. Two batches may contain series of the same reading."""
    traces: dict[str, Trace] = {}
    for reading_id, trace in series:
        traces.setdefault(reading_id, Trace(trace.window_s, {})).series.update(trace.series)
    imported = READING.id.in_(list(traces)), READING.origin != ""
    new = 0
    for reading_id in session.scalars(sqlalchemy.select(READING.id).where(*imported)).all():
        stored, trace = session.get(tables.TraceRow, reading_id), traces[reading_id]
        before = Trace.unpack(stored.packed) if stored else Trace(trace.window_s, {})
        if more := trace.series.keys() - before.series.keys():
            packed = Trace(before.window_s, {**trace.series, **before.series}).pack()
            session.merge(tables.TraceRow(reading_id=reading_id, packed=packed))
            new += len(more)
    return new


# ---------------------------------------------------------------------------------------- the job
# of a verdict


def _write_job(session: Session, verdict: Row) -> None:
    """Write the job of an imported verdict, as an ended job. Reports and pages show it like a job
    of this farm.

    Its `request_id` stays empty, so no request of this farm counts as done. If rows of the job are
    missing from the export (an export of a selection), no job is written."""
    row: Row = verdict["row"]
    try:
        request = Request.from_json(json.loads(row["request"]))
    except Unreadable:
        return
    variant = request.variant
    missing = variant is not None and session.get(tables.ModelVariant, variant.id) is None
    if missing or (variant.id if variant else None) != row["variant_id"]:
        return
    made_of = json.loads(row["made_of"])
    of_item = (
        "id",
        "subject_kind",
        "subject_id",
        "card_id",
        "card_model",
        "protocol_id",
        "created_at_s",
    )
    columns = [READING[name] for name in of_item]
    readings = fetch_values(session, columns, [reading_id for reading_id, *_ in made_of])
    captured = _known_capture(session, row, verdict["origin"])
    lacks_readings = any(entry[0] not in readings for entry in made_of)
    if lacks_readings or (row["capture_id"] and captured is None):
        return

    job = session.get(tables.Job, row["job_id"])
    if job is None:
        cards = sorted({reading.card_id for reading in readings.values()})
        job = _add_job(session, row, request, cards)
    job.round = max(job.round, row["round"])
    job.ended_at_s = max(job.ended_at_s or 0.0, row["created_at_s"])
    _add_round(session, row, captured)
    _write_items(session, job.id, made_of, readings)


def _add_job(session: Session, row: Row, request: Request, cards: list[str]) -> tables.Job:
    job = tables.Job(
        id=row["job_id"],
        kind=row["job_kind"],
        title=row["title"],
        variant_id=row["variant_id"],
        protocol_id=content.store_protocol(session, request.protocol),
        request={**request.to_json(), "cards": cards},
        state=tables.JobState.DONE,
        created_at_s=row["created_at_s"],
    )
    session.add(job)
    session.flush()
    return job


def _add_round(session: Session, row: Row, captured: int | None) -> None:
    """Write the round of an imported verdict, and the verdict."""
    at_s = row["created_at_s"]
    imported_round = tables.Round(
        job_id=row["job_id"],
        number=row["round"],
        operators=row["operators"] or ["all"],
        capture_id=captured,
        created_at_s=at_s,
        planned_at_s=at_s,
        published_at_s=at_s,
    )
    session.add(imported_round)
    figures = {
        name: row[name]
        for name in tables.VerdictRow.model_fields
        if name in row and name != "details"
    }
    session.add(tables.VerdictRow(**figures, details=json.loads(row["details"])))
    session.flush()


def _write_items(
    session: Session, job_id: str, made_of: Iterable[tuple[str, str, int, bool]], readings: Row
) -> None:
    """Write the items of an imported job, except those that an earlier round has written."""
    before = sqlalchemy.select(ITEM.reading_id, ITEM.role).where(ITEM.job_id == job_id)
    stored = set(map(tuple, session.execute(before)))
    items = {}
    for reading_id, role, of_round, reused in made_of:
        if (reading_id, role) in stored:
            continue
        reading = readings[reading_id]
        item = reading._asdict()
        del item["id"]
        item["job_id"] = job_id
        item["round"] = of_round
        item["role"] = role
        item |= item_state.IMPORT.values(
            reading_id=reading_id, reused=reused, ended_at_s=reading.created_at_s
        )
        items[reading.subject_id, reading.protocol_id, reading.card_id, role] = item
    if items:
        session.execute(sqlalchemy.insert(tables.Item.__table__), list(items.values()))  # type: ignore[attr-defined]


def _known_capture(session: Session, row: Row, farm: str) -> int | None:
    """Return the id of a verdict's capture in this database: preferably that of the verdict's farm,
    then one of this farm. The order of imports has no influence."""
    query = sqlalchemy.select(tables.Capture).where(CAPTURE.variant_id == row["variant_id"])
    same = [
        capture for capture in session.scalars(query) if capture_key(capture) == row["capture_id"]
    ]
    best = min(same, key=lambda found: (_farm_of(found) != farm, _farm_of(found)), default=None)
    return None if best is None else best.id


#: Table -> (row checker, writer). The tables are written in this order: a table comes before those
#: that refer to it.
_IMPORTS: Mapping[
    str, tuple[Callable[[Row, str], Any], Callable[[Session, Sequence[Any]], int]]
] = {
    "readings": (_reading, _write_readings),
    "captures": (_capture, _write_captures),
    "calls": (_call, _write_calls),
    "verdicts": (_verdict, _write_verdicts),
    "traces": (_series, _write_traces),
}
_ORIGIN = Column("origin", "text", "the farm that it was imported from", "", "Name")
