"""A PostgreSQL database that an earlier version wrote is migrated and read as the SQLite database
of the same readings.

`farm.sql.xz` is a dump (`pg_dump --inserts`) of a database with the export in
`tests/store/golden/export`. Do not make it again: it stands for the databases of users."""

import lzma
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url
from sqlmodel import select

from farm.exchange.importer import import_export
from farm.report import report
from farm.store import tables
from farm.store.database import Database
from tests.statements import rows_in_order

FOLDER = Path(__file__).parent
EXPORT = FOLDER.parent / "store" / "golden" / "export"
#: They belong to the import, not to what was imported.
OF_THE_IMPORT = ("job_id", "created_at_s", "ended_at_s", "closed_at_s", "origin", "imported_at_s")


@pytest.fixture
def restored(postgres_url):
    dump = lzma.decompress((FOLDER / "farm.sql.xz").read_bytes()).decode()
    # Lines with a backslash are commands of psql, not SQL.
    statements = "\n".join(line for line in dump.splitlines() if not line.startswith("\\"))
    url = make_url(postgres_url)
    with psycopg.connect(
        host=url.query["host"], user="postgres", dbname=url.database
    ) as connection:
        connection.execute(statements)
    database = Database(postgres_url)
    database.upgrade()
    yield database
    database.close()


def reports(database):
    """Title of each job -> its report as JSON."""
    with database.read() as session:
        jobs = session.exec(select(tables.Job)).all()
        return {job.title: report.build(session, job.id).to_json() for job in jobs}


def without(document, names):
    """The document without the keys with these names, at any depth."""
    if isinstance(document, dict):
        return {key: without(value, names) for key, value in document.items() if key not in names}
    if isinstance(document, list):
        return [without(value, names) for value in document]
    return document


def test_a_stored_postgresql_database_has_the_reports_of_its_export(restored, database):
    restored.check_schema()
    import_export(database, EXPORT, origin="golden")
    expected = reports(database)
    assert len(expected) == 3
    assert without(reports(restored), OF_THE_IMPORT) == without(expected, OF_THE_IMPORT)


def test_a_report_does_not_depend_on_the_order_in_which_the_database_finds_rows(restored):
    expected = reports(restored)
    for order in (0, 1):
        with rows_in_order(restored, order):
            assert reports(restored) == expected
