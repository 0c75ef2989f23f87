"""Reads the rows of an exported file, and checks each value.

`farm.store.data_columns` declares the values that each column accepts. A file of another farm can
hold anything, so its sizes are bounded before anything is unpacked. Each file is read once, batch
by batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from farm.errors import FarmError, UsageError
from farm.errors.safe_text import printable
from farm.exchange.column_types import check_of
from farm.exchange.export import METADATA, schema_of
from farm.exchange.parquet_pages import DamagedPage, page_sizes
from farm.store.data_columns import ADDED, FORMAT, TABLES, Column
from farm.types.fields import first_problem

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

BATCH = 20_000  # rows that are checked together: equal values in a column are checked once
BATCH_BYTES = 64 << 20  # bytes of unpacked rows that are read together
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
class ExportFile:
    """An opened Parquet file of an export. `about` is the description in its metadata."""

    path: Path
    table: str
    about: Mapping[str, Any]
    parquet: pq.ParquetFile


def opened(path: Path) -> ExportFile:
    """Open an exported file. Raises `ImportRefused` if it is none, is damaged or too large."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # opening a pipe would block until a process writes to it
    if path.exists() and not path.is_file():
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
                sizes = [size for chunk in chunks for size in page_sizes(file, chunk)]
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


def checked_rows(
    file: ExportFile, check: Callable[[Row, str], Any], farm: str
) -> Iterator[list[Any]]:
    """Check the values of a file, then each row. Yield what ``check`` (of `import_rows`) returns,
    in batches. Raises `ImportRefused`, with the row, for an error of ``check``.

    Args:
        farm: the name of the exporting farm.
    """
    import pyarrow as pa

    columns = [column for column in TABLES[file.table] if not column.derived]
    added = ADDED.get(file.table, {})
    before = 0  # rows of earlier parts
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
                        records.append(check(row, farm))
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


def _decoded_bytes(column: pa.Array) -> int:
    """The size of a column's values in bytes, if each repeated value is stored again."""
    import pyarrow as pa

    values = _without_lists(column)
    if not pa.types.is_dictionary(values.type):
        return int(values.nbytes)
    return _bytes_of_texts(values, values.indices)


def _different_bytes(column: pa.Array) -> int:
    """The size of a column's different values in bytes. Numbers in lists count fourfold: they
    become objects.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    values = _without_lists(column)
    if not pa.types.is_dictionary(values.type):
        return int(values.nbytes) * (4 if pa.types.is_list(column.type) else 1)
    return _bytes_of_texts(values, pc.unique(values.indices))


def _without_lists(column: pa.Array) -> pa.Array:
    import pyarrow as pa

    return column.flatten() if pa.types.is_list(column.type) else column


def _bytes_of_texts(values: pa.Array, indices: pa.Array) -> int:
    """The size of the texts of a dictionary-encoded array with these indices, in bytes."""
    import pyarrow.compute as pc

    sizes = pc.binary_length(values.dictionary).cast("int64")
    return pc.sum(sizes.take(indices)).as_py() or 0


def _longest_list(column: pa.Array) -> int:
    """The number of values in the longest list of a column; 0 if it has no lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_list(column.type):
        return 0
    return pc.max(pc.list_value_length(column)).as_py() or 0


def _checked_column(
    file: ExportFile, column: Column, found: pa.Array, before: int
) -> Sequence[Any]:
    """Check the values of one column of a batch, which has `before` rows before it. Return their
    stored form.
    """
    import pyarrow as pa

    positions = None  # equal values are checked once: for each row, the position of its value
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
        f"{file.path}, table {file.table}, row {row}{column}: {problem_of(error)[:300]}.",
        "`farm export` never writes such a value. Nothing was imported. Export the readings again.",
    )


def problem_of(error: BaseException) -> str:
    """Describe the error and its value, without a full stop at the end."""
    if isinstance(error, FarmError):
        return error.message.rstrip(".")
    if isinstance(error, ValidationError):
        value = error.errors()[0]["input"]
        return f"{first_problem(error)}, not {printable(str(value)[:60])!r}"
    return str(error).rstrip(".") or type(error).__name__
