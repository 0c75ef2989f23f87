"""What the first commit of this layout wrote is still read: the same ids, the same database, the
same export.

`golden/ids.json` holds descriptions with their ids, `golden/farm.db.xz` a database of a tiny CPU
farm (a model, a sweep and a training step) and `golden/export/` its export. Do not regenerate them:
readings of other farms carry these ids."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlmodel import SQLModel, select

from farm.exchange.export import export
from farm.exchange.importer import import_export
from farm.operators.cost import cost
from farm.report import report
from farm.store import tables
from farm.store.content import find_tokens
from farm.store.database import Database
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.protocol import Protocol
from farm.types.request import Request, Sweep
from farm.types.software import Software
from farm.types.tokens import Tokens
from farm.types.variant import Variant

GOLDEN = Path(__file__).parent / "golden"
IDS = json.loads((GOLDEN / "ids.json").read_text())


def of(kind):
    return pytest.mark.parametrize("golden", IDS[kind], ids=lambda golden: golden["id"][:8])


@of("tuples")
def test_ids_and_labels_of_tuples(golden):
    spec = parse(golden["json"])
    assert (spec.id, label_of(spec), spec.to_json()) == (
        golden["id"],
        golden["label"],
        golden["json"],
    )


@of("variants")
def test_ids_of_variants(golden):
    variant = Variant(**golden["fields"])
    assert (variant.id, str(variant), variant.to_json()) == (
        golden["id"],
        golden["title"],
        golden["json"],
    )
    assert Variant.from_json(golden["json"]) == variant


@of("protocols")
def test_ids_of_protocols(golden):
    protocol = Protocol(**golden["fields"])
    assert (protocol.id, str(protocol), protocol.to_json()) == (
        golden["id"],
        golden["title"],
        golden["json"],
    )
    assert Protocol.from_json(golden["json"]) == protocol


@of("software")
def test_ids_of_software(golden):
    software = Software(**golden["fields"])
    assert (software.id, software.to_json()) == (golden["id"], golden["json"])


@of("sweeps")
def test_ids_of_sweeps(golden):
    assert Sweep.from_json(golden["json"]).id == golden["id"]


@of("requests")
def test_ids_of_requests(golden):
    request = Request.from_json(golden["json"])
    assert (request.id, request.title) == (golden["id"], golden["title"])
    assert json.loads(json.dumps(request.to_json())) == golden["json"]


@of("tokens")
def test_ids_of_tokens(golden):
    tokens = Tokens.from_json(golden["json"])
    assert (tokens.id, tokens.ids.tolist()) == (golden["id"], golden["ids"])


def ids_of(folder):
    """Table -> the ids in its rows, of an export."""
    found = {}
    for path in folder.glob("*.parquet"):
        rows = pq.read_table(path).to_pylist()
        found[path.stem] = sorted(
            {str(row[name]) for row in rows for name in row if name.endswith("_id") and row[name]}
        )
    return found


@pytest.fixture
def stored(tmp_path):
    file = tmp_path / "golden.db"
    file.write_bytes(lzma.decompress((GOLDEN / "farm.db.xz").read_bytes()))
    database = Database(f"sqlite:///{file}")
    database.upgrade()
    database.check_schema()
    yield database
    database.close()


def test_the_migrations_end_at_the_schema_of_a_new_database(stored):
    with stored.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, SQLModel.metadata) == [], (
            "write a migration (CONTRIBUTING.md)"
        )
        assert connection.exec_driver_sql("SELECT sum(calls) FROM occurrence").scalar() == 357


def test_a_database_of_the_first_schema_is_reported_and_exported_with_the_same_ids(
    stored, tmp_path
):
    with stored.read() as session:
        for row in session.exec(select(tables.Operator)):
            assert parse(row.spec).id == row.id
            assert row.output_shapes == list(map(list, cost(parse(row.spec)).output_shapes))
        for row in session.exec(select(tables.ProtocolRow)):
            assert Protocol.from_json(row.spec).id == row.id
        for golden in IDS["tokens"]:
            assert find_tokens(session, golden["id"]).id == golden["id"]
        jobs = session.exec(select(tables.Job)).all()
        assert sorted(job.kind for job in jobs) == ["model", "model", "sweep"]
        for job in jobs:
            assert Request.from_json(job.request).id == job.request_id
            assert report.build(session, job.id).to_json()["tuples"]
    with stored.read() as session:
        export(session, tmp_path / "export")
    assert ids_of(tmp_path / "export") == ids_of(GOLDEN / "export")


def test_an_export_of_the_first_schema_is_imported(database, tmp_path):
    import_export(database, GOLDEN / "export", origin="golden")
    with database.read() as session:
        assert len(session.exec(select(tables.ReadingRow)).all()) == 58
    with database.read() as session:
        export(session, tmp_path / "export")
    assert ids_of(tmp_path / "export") == ids_of(GOLDEN / "export")
