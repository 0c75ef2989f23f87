"""Add readings of farms to the packaged readings: ``python benchmarks/package_readings.py
h200.db``.

Existing rows stay. The script adds valid readings of real cards by the current method, without
rough ones (except those of collectives), from each database, with their jobs, captures and
verdicts, without traces. It does not change the databases. Adding the same database again changes
nothing, so run the script after every measurement. All verdicts are computed again from their
readings. At the end the script writes the compressed database of all packaged readings and the
checksums of all packaged files. Run it without a database after a change of the database's schema,
and with ``--verdicts`` after a change of the verdicts' arithmetic."""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
from sqlmodel import select

from farm.errors import FarmError
from farm.exchange.export import PARQUET, export
from farm.exchange.importer import import_export
from farm.exchange.packaged import FOLDER, compressed_database, database_of, packaged_files
from farm.settings.package_files import CHECKSUMS, DATA, checksum_of
from farm.store.database import Database
from farm.store.query import parse
from farm.store.tables import ImportedVerdict, Job, VerdictRow
from farm.types.collective import COLLECTIVES
from farm.types.reading import METHOD
from farm.verdict.job_results import JobResults

MOST_BYTES = 6_000_000  # limit of a folder: every installation has it


def add(databases: list[Path], target: Path) -> dict[str, int]:
    """Merge SQLite databases into an export; return table -> number of new rows.

    Raises:
        FarmError: a file is not a farm's database, or the export would be too large. The export is
            then unchanged.
    """
    new: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as made:
        merged = Database(f"sqlite:///{Path(made) / 'merged.db'}")
        merged.upgrade()
        if target.exists():
            import_export(merged, target, origin=target.name)
        for number, path in enumerate(databases):
            for chosen in ("flag!=rough", f"operator={','.join(COLLECTIVES)}"):
                exported = Path(made) / f"{number} {chosen[:8]}" / target.name
                _export(path, Path(made) / f"{number}.db", exported, chosen)
                for taken in import_export(merged, exported, origin=target.name):
                    new[taken.table] = new.get(taken.table, 0) + taken.new
        if any(new.values()) or not databases:
            judge_again(merged)
            written = Path(made) / "written" / target.name
            with merged.read() as session:
                export(session, written)
            for path in written.glob(
                "*.parquet"
            ):  # slower than the export itself, and about a tenth smaller
                pq.write_table(
                    pq.read_table(path),
                    path,
                    row_group_size=10**6,
                    **{**PARQUET, "compression_level": 22},
                )
            size = sum(file.stat().st_size for file in written.iterdir())
            if size > MOST_BYTES:
                raise FarmError(
                    f"{target.name} would have {size / 1e6:.1f} MB, more than "
                    f"{MOST_BYTES / 1e6:.0f} MB.",
                    "Leave out a database or a model.",
                )
            shutil.copytree(written, target, dirs_exist_ok=True)
        merged.close()
    return new


def judge_again(database: Database) -> None:
    """Compute the verdicts of all imported jobs from their readings, as jobs of this farm."""
    with database.write() as session:
        for row in session.exec(select(VerdictRow)):
            for name, value in (
                JobResults(session, session.get_one(Job, row.job_id), row.round)
                .verdict()
                .columns()
                .items()
            ):
                setattr(row, name, value)
            session.delete(session.get_one(ImportedVerdict, (row.job_id, row.round)))


def compress() -> Path:
    """Write the compressed database of all packaged exports, and remove that of earlier exports."""
    import pyarrow

    write_checksums()  # the exports may be new
    files = packaged_files()
    target = compressed_database(files)
    for old in FOLDER.glob("packaged-*.db.zst"):
        old.unlink()
    with tempfile.TemporaryDirectory() as made:
        database, small = database_of(files, Path(made)), Path(made) / "small.db"
        with database.engine.connect() as connection:
            connection.exec_driver_sql("COMMIT")
            connection.exec_driver_sql(f"VACUUM INTO '{small}'")
        database.close()
        target.write_bytes(
            pyarrow.Codec("zstd", compression_level=19).compress(small.read_bytes(), asbytes=True)
        )
    write_checksums()
    return target


def checked_files() -> list[Path]:
    """Return the files of `farm/data` that have a checksum: the packaged readings and
    predictors.
    """
    patterns = ("*/*.parquet", "*.db.zst", "predictors/*")
    return sorted(path for pattern in patterns for path in DATA.glob(pattern))


def write_checksums() -> None:
    """Write the checksums of the present files."""
    checksums = {path.relative_to(DATA).as_posix(): checksum_of(path) for path in checked_files()}
    CHECKSUMS.write_text(json.dumps(checksums, indent=1) + "\n", encoding="utf-8")


def _export(path: Path, copy: Path, target: Path, chosen: str) -> None:
    """Export the rows to add from a copy of a database, upgraded to the current schema."""
    with (
        sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as source,
        sqlite3.connect(copy) as sink,
    ):
        source.backup(sink)  # includes the write-ahead log
    database = Database(f"sqlite:///{copy}")
    try:
        database.upgrade()
        with database.read() as session:
            export(
                session,
                target,
                filters=parse([f"method={METHOD}", "simulated=false", "card_kind=cuda", chosen]),
            )
    finally:
        database.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "databases", nargs="*", type=Path, metavar="DATABASE", help="SQLite files of farms"
    )
    parser.add_argument(
        "--name", default="h200", help="name of the export under farm/data (default: %(default)s)"
    )
    parser.add_argument(
        "--verdicts", action="store_true", help="compute all verdicts of the export again"
    )
    asked = parser.parse_args()
    try:
        new = add(asked.databases, FOLDER / asked.name) if asked.databases or asked.verdicts else {}
    except FarmError as error:
        sys.exit(f"{error.message} {error.next_step}")
    print(", ".join(f"{number} {table}" for table, number in new.items()), "new")
    size = sum(file.stat().st_size for file in (FOLDER / asked.name).iterdir())
    print(f"{FOLDER / asked.name}: {size / 1e6:.2f} of at most {MOST_BYTES / 1e6:.0f} MB")
    made = compress()
    print(f"{made}: {made.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
