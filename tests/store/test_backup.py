"""The commands of docs/operate.md that save and restore a database, run as they stand there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from sqlalchemy import text

from farm.errors import SchemaMismatch
from farm.store.database import Database
from tests.planned import claim, complete, items_of, plan, readings, register
from tests.servers import PostgresServer

COMMANDS = re.findall(
    r"^    (.+)$", (Path(__file__).parents[2] / "docs/operate.md").read_text(), re.MULTILINE
)
IN_CONTAINER = "docker compose -f deploy/compose.yml exec -T postgres "


def documented(*words):
    """The only command that has all these words."""
    (found,) = [command for command in COMMANDS if all(word in command for word in words)]
    return found


def run(command, folder, **environment):
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def postgres():
    """As the container's: the role farm owns the server and the database farm, grafana may read."""
    with PostgresServer() as server:
        with server.connect() as connection:
            connection.execute("CREATE ROLE farm SUPERUSER LOGIN")
            connection.execute("CREATE DATABASE farm OWNER farm")
            connection.execute("CREATE ROLE grafana LOGIN")
            connection.execute("GRANT pg_read_all_data TO grafana")
        yield server


def half_done(database):
    """A job with one item read, one in work and one that waits."""
    (card,) = register(database, 0)
    job_id = plan(database, [card], number=3)
    first, second, _ = items_of(database, job_id)
    complete(database, claim(database, first), card)
    return job_id, claim(database, second)


def go_on(database, job_id):
    """What happens after the copy was made: more is read, and a later program's schema comes."""
    _, _, third = items_of(database, job_id)
    complete(database, claim(database, third), third.card_id)
    with database.engine.begin() as connection:
        connection.execute(text("CREATE TABLE later (item_id INTEGER REFERENCES item (id))"))
        connection.execute(text("UPDATE alembic_version SET version_num = 'later'"))
    with pytest.raises(SchemaMismatch):
        database.check_schema()
    database.close()


def check(database, job_id, in_work):
    """All is as it was when the copy was made, and the job can go on."""
    database.check_schema()
    assert [item.state for item in items_of(database, job_id)] == ["done", "claimed", "waiting"]
    assert readings(database) == 1
    with database.engine.connect() as connection, pytest.raises(Exception, match="later"):
        connection.execute(text("SELECT * FROM later"))
    _, second, third = items_of(database, job_id)
    assert complete(database, in_work, second.card_id).accepted, (
        "as a reading that waited in a spool"
    )
    assert complete(database, claim(database, third), third.card_id).rounds == ((job_id, 1),)


def test_postgresql_is_saved_and_restored_as_documented(postgres, tmp_path):
    url = postgres.url("farm").replace("postgres@", "farm@")
    database = Database(url)
    database.upgrade()
    job_id, in_work = half_done(database)
    connects = {
        "PATH": f"{postgres.programs}{os.pathsep}{os.environ['PATH']}",
        "PGHOST": str(postgres.socket.parent),
    }
    run(documented(IN_CONTAINER, "pg_dump").removeprefix(IN_CONTAINER), tmp_path, **connects)
    (dump,) = tmp_path.glob("farm-*.dump")
    go_on(database, job_id)
    run(
        documented("pg_restore").removeprefix(IN_CONTAINER).replace("farm-....dump", dump.name),
        tmp_path,
        **connects,
    )
    reader = Database(url.replace("farm@", "grafana@"))
    with reader.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM item")).scalar() == 3
    reader.close()
    database = Database(url)
    check(database, job_id, in_work)
    database.close()


def test_sqlite_is_saved_and_restored_as_documented(tmp_path):
    if not shutil.which("sqlite3"):
        pytest.skip("needs the program sqlite3")
    database = Database(f"sqlite:///{tmp_path / 'farm.db'}")
    database.upgrade()
    job_id, in_work = half_done(database)
    run(documented('".backup'), tmp_path)
    go_on(database, job_id)
    run(documented("farm-copy.db farm.db"), tmp_path)
    database = Database(f"sqlite:///{tmp_path / 'farm.db'}")
    check(database, job_id, in_work)
    database.close()
