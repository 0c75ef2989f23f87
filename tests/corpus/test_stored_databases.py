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

FOLDER = Path(__file__).parent
EXPORT = FOLDER.parent / "store" / "golden" / "export"
#: They belong to the import, not to what was imported.
OF_THE_IMPORT = ("job_id", "created_at_s", "ended_at_s", "closed_at_s", "origin", "imported_at_s")


#: Settings of PostgreSQL's planner. They make it return the rows of a query without an order in
#: different orders.
PLANNERS = {
    "by hash": {"enable_sort": "off", "enable_mergejoin": "off", "enable_indexscan": "off"},
    "by sort": {"enable_hashagg": "off", "enable_hashjoin": "off", "enable_seqscan": "off"},
}


def connection_to(postgres_url):
    url = make_url(postgres_url)
    return psycopg.connect(host=url.query["host"], user="postgres", dbname=url.database)


@pytest.fixture
def restored(postgres_url):
    dump = lzma.decompress((FOLDER / "farm.sql.xz").read_bytes()).decode()
    # Lines with a backslash are commands of psql, not SQL.
    statements = "\n".join(line for line in dump.splitlines() if not line.startswith("\\"))
    with connection_to(postgres_url) as connection:
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


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_report_does_not_depend_on_the_order_in_which_the_database_finds_rows(
    restored, postgres_url, planner
):
    expected = reports(restored)
    restored.engine.dispose()
    with connection_to(postgres_url) as connection:
        for name, value in PLANNERS[planner].items():
            connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {name} = {value}")
    assert reports(restored) == expected
