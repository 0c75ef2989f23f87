"""Databases with an older schema."""

from __future__ import annotations

import lzma
from pathlib import Path

from sqlalchemy import text

from farm.store.database import Database, newest_schema

GOLDEN = Path(__file__).parent / "golden" / "farm.db.xz"
OLDER = f"{int(newest_schema()) - 1:04}"


def make_older(url: str) -> None:
    """Create a database that says that it has the schema before the newest one."""
    database = Database(url)
    database.upgrade()
    with database.engine.begin() as connection:
        connection.execute(
            text("UPDATE alembic_version SET version_num = :version"), {"version": OLDER}
        )
    database.close()


def write_golden(file: Path) -> None:
    """Write a SQLite database of the first schema, with jobs and readings."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.decompress(GOLDEN.read_bytes()))
    file.chmod(0o600)
