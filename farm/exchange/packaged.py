"""The packaged readings: exports in ``farm/data`` (one folder for each card model), queried like a
database.

The first query makes an SQLite file of them in the state folder. So the same queries work on them
and on a farm's own database. The package has this file compressed; if the exports or the schema
differ, the exports are imported instead."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from farm.exchange.copies import DatabaseCopy, unpack
from farm.settings import settings
from farm.settings.package_files import DATA, check_package_files
from farm.store.database import Database, newest_schema

FOLDER = DATA


def packaged_files(folder: Path = FOLDER) -> list[Path]:
    """Return the packaged exports. Each one is a file of readings or a folder with all tables."""
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix == ".parquet" or next(path.glob("*.parquet"), None)
    )


def export_at(path: Path) -> Path:
    """Return the path of an export: `path` if it exists, else the packaged export with this name.
    Raises `DamagedPackage` if a file of it belongs to the package and is damaged."""
    export = path if path.exists() else packaged_named(str(path)) or path
    check_package_files(_tables([export.resolve()]))
    return export


def _tables(exports: Sequence[Path]) -> Iterator[Path]:
    """The Parquet files of exports, in a fixed order."""
    for path in exports:
        yield from sorted(path.glob("*.parquet")) if path.is_dir() else [path]


def packaged_named(name: str, folder: Path = FOLDER) -> Path | None:
    """Return the packaged export with this name (of its file or folder, without the suffix), or
    None.
    """
    return next((path for path in packaged_files(folder) if path.stem == name), None)


def compressed_database(files: Sequence[Path], folder: Path = FOLDER) -> Path:
    """Return the path of the compressed database of these exports in the current schema. The file
    may be missing.
    """
    digest = hashlib.sha256(newest_schema().encode())
    for file in _tables(files):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return folder / f"packaged-{digest.hexdigest()[:16]}.db.zst"


def database_of(files: Sequence[Path], cache: Path) -> Database:
    """Open a database with the contents of these exports, for reading.

    Folder `cache` has a copy for the next time; see `farm.exchange.copies`. Raises `ImportRefused`
    if a file is not an export, and `DamagedPackage` if it is a damaged file of the package."""
    digest = hashlib.sha256(newest_schema().encode())
    for file in _tables(files):
        digest.update(f"{file}:{file.stat().st_size}:{file.stat().st_mtime_ns}".encode())
    path = cache / f"exports-{digest.hexdigest()[:16]}.db"
    return DatabaseCopy(path, functools.partial(_write_database, files)).open()


def _write_database(files: Sequence[Path], target: Path) -> None:
    """Write a database with the contents of exports: from the package, if it has one, else by
    importing them.
    """
    from farm.exchange.importer import import_export

    check_package_files(_tables(files))
    packed = compressed_database(files)
    if packed.is_file():
        check_package_files([packed])
        unpack(packed, target)
        return
    with contextlib.closing(Database(f"sqlite:///{target}")) as database:
        database.create_or_check()
        for path in files:
            import_export(database, path)


def packaged_database() -> Database:
    """Open the database of the packaged readings. `database_of` creates it if it is missing."""
    return database_of(packaged_files(), settings().state_dir / "packaged")
