"""Writes readings and their context from the database to Parquet, CSV or JSON Lines files, batch by
batch.

`farm.store.data_columns` declares the columns; `farm.exchange.export_rows` reads their values from
the database."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from sqlmodel import Session

from farm.errors import UsageError, did_you_mean, writing_to
from farm.errors.safe_text import FORMULA, cell
from farm.exchange import export_rows
from farm.exchange.left_out import LeftOut, left_out
from farm.settings import MOST_NAME_BYTES
from farm.settings.shared_files import replacing_file
from farm.store.data_columns import FORMAT, TABLES, Column, arrow_schema, as_markdown
from farm.store.query import Filters, select_readings
from farm.types.release import __version__

if TYPE_CHECKING:
    import pyarrow as pa


FORMATS = ("parquet", "csv", "jsonl")
METADATA = b"operator_farm"  # metadata key that marks a Parquet file as an export


@dataclass(frozen=True)
class Exported:
    """The written files: table -> (file, rows). ``left_out``: the rows that they do not contain,
    and why.
    """

    files: Mapping[str, tuple[Path, int]]
    dictionary: Path
    left_out: tuple[LeftOut, ...] = ()


def export(
    session: Session,
    target: Path,
    *,
    form: str | None = None,
    filters: Filters | None = None,
    traces: bool = False,
) -> Exported:
    """Write readings to a file. If `target` is a folder, also write their calls, captures and
    verdicts.

    A file is written completely or not at all. Other files in the folder do not change. Raises
    `UsageError` if the target cannot be written, or if its suffix contradicts `form`; see also
    `select_readings`.

    Args:
        target: a file for the readings alone (its suffix is the format), or a folder, which is
            created.
        form: format of the files in a folder; default: parquet.
        filters: select the readings to write; default: all.
        traces: also write the sampled time series, which are much larger than everything else.
    """
    alone = _format_of(target)
    _check_options(target, alone, form, traces)
    form = alone or form or "parquet"
    selection = select_readings(session, filters or Filters())
    makers = {"readings": export_rows.readings}
    if not alone:
        makers |= {
            "calls": export_rows.calls,
            "captures": export_rows.captures,
            "verdicts": export_rows.verdicts,
        }
    if traces:
        makers["traces"] = export_rows.traces
    with writing_to(target, "Give another path, or free disk space."):
        folder = target.parent if alone else target
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {
            "format": FORMAT,
            "farm_version": __version__,
            "exported_at_s": round(time.time(), 3),
        }
        files = {}
        for table, make in makers.items():
            path = target if alone else folder / f"{table}.{form}"
            files[table] = (path, _write(path, form, table, make(session, selection), metadata))
        dictionary = _dictionary_beside(target) if alone else folder / "dictionary.md"
        with replacing_file(dictionary) as file:
            file.write(as_markdown().encode())
    written = {table: rows for table, (_, rows) in files.items()}
    return Exported(files, dictionary, left_out(session, filters, written))


def _dictionary_beside(file: Path) -> Path:
    return file.with_suffix(".dictionary.md")


def _check_options(target: Path, alone: str | None, form: str | None, traces: bool) -> None:
    """Raise `UsageError` if the format is unknown, an option contradicts the target, or the name
    of the file is too long.

    ``alone``: the format of a single file; None for a folder."""
    if form is not None and form not in FORMATS:
        near = did_you_mean(form, FORMATS)
        raise UsageError(
            f"There is no format '{form}'.", near or f"Choose one of {', '.join(FORMATS)}."
        )
    if alone and form not in (None, alone):
        raise UsageError(
            f"The name {target} does not end in .{form}.",
            f"Name it {target.with_suffix(f'.{form}')}.",
        )
    name_bytes = len(os.fsencode(target.name))
    dictionary_bytes = len(os.fsencode(_dictionary_beside(target).name))
    if alone and dictionary_bytes > MOST_NAME_BYTES:
        raise UsageError(
            f"The name {target.name} is too long: that of the dictionary beside it would have "
            f"{dictionary_bytes} bytes, and the limit is {MOST_NAME_BYTES}.",
            f"Give a name of at most {MOST_NAME_BYTES - dictionary_bytes + name_bytes} bytes.",
        )
    if alone and traces:
        raise UsageError(
            "--traces needs a folder, not a file.", "Give a folder: `farm export FOLDER --traces`."
        )


def as_table(
    session: Session, table: Literal["readings", "calls"], filters: Filters | None = None
) -> pa.Table:
    """Return one table of an export as an Arrow table, without writing a file. Raises as
    `select_readings` does.
    """
    import pyarrow as pa

    selection = select_readings(session, filters or Filters())
    rows = (
        export_rows.readings(session, selection)
        if table == "readings"
        else export_rows.calls(session, selection)
    )
    schema = schema_of(table)
    return pa.Table.from_batches([_batch(schema, columns) for columns in rows], schema)


def _format_of(target: Path) -> str | None:
    """Return the format of a file, from its suffix; None for a folder."""
    suffix = target.suffix.lower()
    if target.is_dir() or not suffix:
        return None
    if suffix in (".parq", ".json", ".gz", ".xlsx", ".db"):
        raise UsageError(
            f"`farm export` cannot write {target.suffix} files.", "Choose .parquet, .csv or .jsonl."
        )
    return suffix[1:] if suffix[1:] in FORMATS else None


# --------------------------------------------------------------------------------------------
# writing


def _write(
    path: Path, form: str, table: str, batches: export_rows.Batches, about: Mapping[str, Any]
) -> int:
    """Write a file; return its number of rows."""
    schema = schema_of(table, about)
    rows = 0
    with replacing_file(path) as file, writer(file, form, schema, TABLES[table]) as write:
        for batch in _gathered(_batch(schema, columns) for columns in batches):
            rows += batch.num_rows
            write(batch)
    return rows


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches and divide large ones, because each batch becomes a row group of the
    Parquet file. An import refuses row groups that are too large."""
    import pyarrow as pa

    pending: list[pa.RecordBatch] = []
    parts = itertools.chain.from_iterable(map(_divided, batches))
    for batch in parts:
        if pending and sum(part.nbytes for part in [*pending, batch]) > MOST_GROUP_BYTES:
            yield pa.concat_batches(pending)
            pending = []
        pending.append(batch)
        if sum(part.num_rows for part in pending) >= export_rows.BATCH:
            yield pa.concat_batches(pending)
            pending = []
    if pending:
        yield pa.concat_batches(pending)


def _divided(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide a batch until each part has at most `MOST_GROUP_BYTES`, or one row."""
    if batch.num_rows <= 1 or batch.nbytes <= MOST_GROUP_BYTES:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _divided(batch.slice(0, half))
    yield from _divided(batch.slice(half))


#: Most bytes of the values of a row group. An import accepts 192 MiB.
MOST_GROUP_BYTES = 128 << 20
#: Descriptions and details repeat, so large compressed dictionary pages keep a Parquet file small.
PARQUET: Mapping[str, Any] = {
    "compression": "zstd",
    "compression_level": 12,
    "dictionary_pagesize_limit": 1 << 26,
    "write_page_checksum": True,
}


@contextlib.contextmanager
def writer(
    file: IO[bytes], form: str, schema: pa.Schema, columns: Sequence[Column]
) -> Iterator[Callable[[Any], None]]:
    """A context for writing batches to an open file in this format."""
    if form == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(file, schema, **PARQUET) as written:
            yield written.write_batch
    elif form == "csv":
        import pyarrow.csv

        signs = {"integers": "x", "numbers": "x", "texts": ";"}
        lists = {entry.name: signs[entry.type] for entry in columns if entry.type in signs}
        kinds = [
            (entry.name, pyarrow.string() if entry.name in lists else entry.type)
            for entry in schema
        ]
        flat = pyarrow.schema(kinds)
        with pyarrow.csv.CSVWriter(file, flat) as written:
            yield lambda batch: written.write_batch(_flattened(batch, flat, lists))
    else:
        documents = [entry.name for entry in columns if entry.type == "json"]

        def write(batch: pa.RecordBatch) -> None:
            for row in batch.to_pylist():
                for name in documents:
                    row[name] = None if row[name] is None else json.loads(row[name])
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

        yield write


def schema_of(
    table: str, about: Mapping[str, Any] | None = None, columns: Sequence[Column] | None = None
) -> pa.Schema:
    """Return the Arrow schema of a table (`columns`: if not part of an export). Its metadata
    contains `about`.
    """
    metadata = {METADATA: json.dumps({"table": table, **(about or {"format": FORMAT})})}
    return arrow_schema(columns or TABLES[table]).with_metadata(metadata)


def _batch(schema: pa.Schema, columns: Mapping[str, Any]) -> pa.RecordBatch:
    import pyarrow as pa

    values = [(columns[entry.name], entry.type) for entry in schema]
    arrays = [
        cells if isinstance(cells, pa.Array) else pa.array(cells, kind) for cells, kind in values
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _flattened(
    batch: pa.RecordBatch, schema: pa.Schema, lists: Mapping[str, str]
) -> pa.RecordBatch:
    import pyarrow as pa

    def joined(name: str) -> pa.Array:
        rows = batch.column(name).to_pylist()
        return pa.array(
            [None if row is None else lists[name].join(map(str, row)) for row in rows], pa.string()
        )

    arrays = []
    for field in schema:
        array = joined(field.name) if field.name in lists else batch.column(field.name)
        are_texts = pa.types.is_string(field.type) and lists.get(field.name) != "x"
        arrays.append(_without_formulas(array) if are_texts else array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _without_formulas(texts: pa.Array) -> pa.Array:
    """Texts as cells that a spreadsheet does not execute: they come from models, hosts and
    imports.
    """
    import pyarrow as pa
    import pyarrow.compute

    risky = pyarrow.compute.match_substring_regex(texts, FORMULA)
    if not pyarrow.compute.any(risky).as_py():
        return texts
    cells = [None if text is None else cell(text) for text in texts.to_pylist()]
    return pa.array(cells, pa.string())
