"""Another farm's export is taken in without duplicates, keeps its origin, and is believed
nothing.
"""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import delete, text
from sqlmodel import col, select

from farm.addons.pages import page
from farm.errors import UsageError
from farm.exchange import import_file, importer
from farm.exchange.column_types import COLUMN_TYPES
from farm.exchange.export import METADATA, export, schema_of
from farm.exchange.importer import ImportRefused, import_export
from farm.jobs import listing
from farm.jobs.jobs import done_entries
from farm.models import catalog
from farm.report.layers import layers
from farm.report.report import build
from farm.store import tables
from farm.store.captures import find_capture
from farm.store.data_columns import ADDED, FORMAT, TABLES
from farm.store.database import Database, read_clock_s
from farm.store.query import parse
from farm.types.request import Request
from farm.types.verification import InModelTimes, Verification
from tests import slow
from tests.report import filled
from tests.report.measured import measured

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def exported(database, folder, **options):
    with database.read() as session:
        return export(session, folder, **options)


def rows_of(folder, table):
    rows = pq.read_table(folder / f"{table}.parquet").to_pylist()
    return sorted(
        ({**row, "origin": ""} for row in rows), key=lambda row: json.dumps(row, sort_keys=True)
    )


def test_exported_imported_and_exported_again_is_the_same(any_database, other_database, tmp_path):
    taken = filled.fill(other_database)
    with other_database.write() as session:
        session.add(
            tables.Job(
                id="job1", kind="model", title="<b>resnet18</b>", protocol_id=filled.PROTOCOL.id
            )
        )
        session.flush()
        details = {"sum_time_us": 7.0}
        session.add(
            tables.VerdictRow(job_id="job1", round=1, outcome="pass", target=0.95, details=details)
        )
    exported(other_database, tmp_path / "h200", traces=True)
    found = {one.table: one for one in import_export(any_database, tmp_path / "h200")}
    assert found["readings"].new == len(taken.capture.tuples) + 1
    assert found["calls"].new == len(taken.capture.calls)
    exported(any_database, tmp_path / "again", traces=True)
    for table in TABLES:
        assert rows_of(tmp_path / "again", table) == rows_of(tmp_path / "h200", table), table
    assert set(
        pq.read_table(tmp_path / "again" / "readings.parquet").column("origin").to_pylist()
    ) == {"h200"}
    again = import_export(any_database, tmp_path / "h200")
    assert {one.new for one in again} == {0}


def test_a_training_step_is_taken_in_whole(database, other_database, tmp_path):
    step = catalog.variant(
        "squeezenet1_1", 1, input_size=32, step="training", optimizer="adam", accumulate=2
    )
    taken = filled.fill(other_database, step)
    exported(other_database, tmp_path / "h200")
    import_export(database, tmp_path / "h200")
    exported(database, tmp_path / "again")
    for table in ("readings", "captures", "calls", "verdicts"):
        assert rows_of(tmp_path / "again", table) == rows_of(tmp_path / "h200", table), table
    calls = pq.read_table(tmp_path / "again" / "calls.parquet").to_pylist()
    assert {(row["part"], row["owner"]) for row in calls} == {
        (call.part, call.owner) for call in taken.capture.calls
    }
    assert {(row["step"], row["optimizer"], row["accumulate"]) for row in calls} == {
        ("training", "adam", 2)
    }


def test_one_s_own_readings_stay_one_s_own(database, tmp_path):
    filled.fill(database)
    exported(database, tmp_path / "mine")
    assert {one.new for one in import_export(database, tmp_path / "mine")} == {0}
    with database.read() as session:
        assert set(session.exec(select(tables.ReadingRow.origin))) == {""}


def test_a_file_of_readings_alone_will_do(database, other_database, tmp_path):
    filled.fill(other_database)
    exported(other_database, tmp_path / "h200.parquet")
    (taken,) = import_export(database, tmp_path / "h200.parquet", origin="the lab's")
    assert taken.new == taken.rows
    exported(database, tmp_path / "again.parquet")
    first, second = (
        pq.read_table(tmp_path / name).drop(["origin"])
        for name in ("h200.parquet", "again.parquet")
    )
    assert first.sort_by("reading_id").equals(second.sort_by("reading_id"))
    with database.read() as session:
        assert session.exec(select(tables.Origin)).one().name == "the lab's"


def test_calls_without_their_captures_are_left_out_with_the_reason(
    database, other_database, tmp_path
):
    taken = filled.fill(other_database)
    exported(other_database, tmp_path / "h200")
    (found,) = import_export(database, tmp_path / "h200" / "calls.parquet")
    assert (found.rows, found.new) == (len(taken.capture.calls), 0)
    assert "captures.parquet" in found.left_out


def test_a_farm_needs_a_name_of_which_the_folder_s_will_do(
    database, other_database, tmp_path, monkeypatch
):
    filled.fill(other_database, whole=False)
    exported(other_database, tmp_path / "berlin")
    for named in ("x" * 301, "\x1b[31m"):
        with pytest.raises(UsageError, match="not a valid farm name"):
            import_export(database, tmp_path / "berlin", origin=named)
    monkeypatch.chdir(tmp_path / "berlin")
    import_export(database, Path("."))
    with database.read() as session:
        assert set(session.exec(select(tables.ReadingRow.origin))) == {"berlin"}


def test_all_files_of_a_folder_are_taken_in(database, other_database, tmp_path):
    filled.fill(other_database, whole=False)
    parts = ["Conv2d"], ["ReLU", "Linear"]
    for number, words in enumerate(parts):
        exported(other_database, tmp_path / "parts" / f"{number}.parquet", filters=parse(words))
    found = import_export(database, tmp_path / "parts")
    assert [one.path.name for one in found] == ["0.parquet", "1.parquet"]
    assert all(one.rows == one.new > 0 for one in found)


def test_own_jobs_neither_go_by_imported_captures_nor_offer_imported_cards(
    database, other_database, tmp_path
):
    filled.fill(other_database)
    exported(other_database, tmp_path / "h200")
    import_export(database, tmp_path / "h200")
    with database.read() as session:
        like = tables.Capture(
            variant_id=filled.VARIANT.id,
            device_type="cuda",
            torch=filled.SOFTWARE.torch,
            launch="graph",
        )
        assert find_capture(session, like) is None
        assert listing.registered_cards(session, 5.0) == []


def mangled(folder, target, table="readings", metadata=None, **changes):
    """The file with its first row changed."""
    found = pq.read_table(folder / f"{table}.parquet")
    rows = found.to_pylist()
    rows[0] |= changes
    schema = found.schema if metadata is None else found.schema.with_metadata(metadata)
    pq.write_table(pa.Table.from_pylist(rows, schema), target)
    return target


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("operator_spec", json.dumps({"operator": "os.system"}), "Not an operator tuple"),
        ("operator_spec", "[" * 100_000, "recursion"),
        ("subject_id", "0" * 32, "not the hash of the row's description"),
        ("card_model", "\x1b[31mred", "control characters"),
        ("card_model", "x" * 1000, "at most 300 characters"),
        ("card_kind", "abacus", "'cuda', 'cpu' or 'simulated', not 'abacus'"),
        ("time_us", float("nan"), "finite number"),
        ("time_us", -1.0, "greater than or equal to 0, not '-1.0'"),
        ("time_us", 0.0, "time_us is not positive"),
        ("time_us", None, "valid number"),
        ("flops", -1, "greater than or equal to 0"),
        ("launch", "rocket", "rocket"),
        ("details", '{"method": "x"}', "method: Input should be a valid integer, not 'x'"),
        ("details", '{"burst": {"time_us": "fast"}}', "burst.time_us"),
        ("details", '{"looped_us": 5}', "looped_us"),
        ("details", '{"context": {"alone_us": 1.0}}', "context.effect_us: Field required"),
        ("details", "{", "not valid JSON"),
        ("cost_s", '{"total": "much"}', "total: Input should be a valid number, not 'much'"),
        ("reading_id", "../../etc/passwd", "not '../../etc/passwd'"),
        ("flags", ["\x1b[31mred"], "control characters"),
        ("flags", ["x"] * 100, "at most 64 items"),
    ],
)
def test_what_no_farm_writes_is_refused_and_nothing_imported(
    database, other_database, tmp_path, column, value, message
):
    filled.fill(other_database, whole=False)
    exported(other_database, tmp_path / "h200")
    with pytest.raises(ImportRefused) as refused:
        import_export(
            database, mangled(tmp_path / "h200", tmp_path / "bad.parquet", **{column: value})
        )
    assert message in refused.value.message
    assert "bad.parquet, table readings, row 1" in refused.value.message
    row_rule = column in ("subject_id", "launch") or value == 0.0
    assert row_rule or f"row 1, column {column}: " in refused.value.message
    with database.read() as session:
        assert session.exec(select(tables.ReadingRow)).all() == []


def test_the_row_and_the_column_of_a_later_file_are_named_and_no_file_is_imported(
    database, other_database, tmp_path
):
    filled.fill(other_database)
    exported(other_database, tmp_path / "h200")
    calls = pq.read_table(tmp_path / "h200" / "calls.parquet")
    rows = calls.to_pylist()
    rows[7]["reads"] = "[-1]"
    pq.write_table(pa.Table.from_pylist(rows, calls.schema), tmp_path / "h200" / "calls.parquet")
    with pytest.raises(ImportRefused, match=r"row 8, column reads: 0: .* not '-1'"):
        import_export(database, tmp_path / "h200")
    with database.read() as session:
        assert (
            session.exec(select(tables.ReadingRow)).all()
            == session.exec(select(tables.Origin)).all()
            == []
        )


def test_the_time_of_an_import_is_the_database_s(database, other_database, tmp_path, monkeypatch):
    filled.fill(other_database, whole=False)
    exported(other_database, tmp_path / "h200.parquet")
    monkeypatch.setattr("time.time", lambda: 1.0)
    import_export(database, tmp_path / "h200.parquet")
    with database.read() as session:
        assert session.exec(select(tables.Origin)).one().imported_at_s == pytest.approx(
            read_clock_s(session), abs=60
        )


def test_a_file_is_read_once(database, other_database, tmp_path, monkeypatch):
    filled.fill(other_database)
    exported(other_database, tmp_path / "h200")
    read = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda self, *a, **k: read.append(self) or batches(self, *a, **k),
    )
    import_export(database, tmp_path / "h200")
    assert len(read) == len(set(map(id, read))) == 4


def test_html_in_a_name_is_a_name(database, other_database, tmp_path):
    filled.fill(other_database, model="<script>alert(1)</script>")
    exported(other_database, tmp_path / "h200.parquet")
    assert import_export(database, tmp_path / "h200.parquet")[0].new


def test_a_file_that_is_no_export_is_refused(database, other_database, tmp_path):
    filled.fill(other_database)
    exported(other_database, tmp_path / "h200")
    own = tmp_path / "h200" / "readings.parquet"
    (tmp_path / "cut.parquet").write_bytes(own.read_bytes()[:5000])
    middle = bytearray(own.read_bytes())
    middle[100:3000] = bytes(reversed(middle[100:3000]))
    (tmp_path / "damaged.parquet").write_bytes(middle)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "foreign.parquet")
    newer = {METADATA: json.dumps({"format": FORMAT + 1, "table": "readings"})}
    ours = {METADATA: json.dumps({"format": FORMAT, "table": "readings"})}
    pq.write_table(pa.table({"x": [1]}).replace_schema_metadata(ours), tmp_path / "lacking.parquet")
    for path, message in (
        (tmp_path / "nowhere.parquet", "There is no file"),
        (tmp_path / "cut.parquet", "is not a complete Parquet file"),
        (tmp_path / "damaged.parquet", "damaged|row "),
        (tmp_path / "foreign.parquet", "was not written by `farm export`"),
        (tmp_path / "lacking.parquet", "lacks the column reading_id"),
        (
            mangled(tmp_path / "h200", tmp_path / "newer.parquet", metadata=newer),
            "has format 2; this program reads formats up to 1",
        ),
    ):
        with pytest.raises(ImportRefused, match=message):
            import_export(database, path)


LONG = "x" * 60_000


@pytest.mark.parametrize(
    ("name", "one", "dictionary"),
    [
        ("platform", LONG, True),
        ("platform", LONG, False),
        ("flags", [LONG], True),
        ("flags", ["x"] * 1001, True),
    ],
    ids=["a text that repeats", "a text in full", "a list", "many in a list"],
)
def test_a_small_file_that_unpacks_to_gigabytes_is_refused_before(
    database, other_database, tmp_path, name, one, dictionary
):
    filled.fill(other_database)
    exported(other_database, tmp_path / "h200.parquet")
    rows = pq.read_table(tmp_path / "h200.parquet").slice(0, 1)
    at, many = rows.schema.get_field_index(name), rows.take([0] * import_file.BATCH)
    column = pa.repeat(pa.scalar(one, rows.schema.field(at).type), import_file.BATCH)
    path = tmp_path / "big.parquet"
    options = {"use_dictionary": dictionary, "dictionary_pagesize_limit": 1 << 26}
    pq.write_table(
        many.set_column(at, rows.schema.field(at), column), path, compression="zstd", **options
    )
    assert path.stat().st_size < 500_000
    del many
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of this process counts from here
    before = memory("VmRSS")
    with pytest.raises(ImportRefused, match=r"big\.parquet is too large\. Limits: 50000000 rows"):
        import_export(database, path)
    assert memory("VmHWM") - before < 256 << 10


def small_bomb(other_database, path, name, values):
    """Write a small file with one large column of different values."""
    filled.fill(other_database)
    exported(other_database, path)
    row = pq.read_table(path).slice(0, 1)
    at = row.schema.get_field_index(name)
    many = row.take([0] * len(values)).set_column(at, row.schema.field(at), pa.array(values))
    pq.write_table(many, path, compression="zstd", dictionary_pagesize_limit=1 << 30)
    assert path.stat().st_size < 200_000


def refused_as_too_large(database, path):
    with pytest.raises(ImportRefused, match=r"big\.parquet is too large\. Limits: 50000000 rows"):
        import_export(database, path)


def needed_kib(act):
    """The memory of this process that a function needs at most. Unit: KiB."""
    pa.default_memory_pool().release_unused()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of this process counts from here
    before = memory("VmRSS")
    act()
    return memory("VmHWM") - before


@pytest.fixture
def less_is_too_large(monkeypatch):
    """So that the tests need less memory."""
    monkeypatch.setattr(import_file, "MOST_BYTES", 32 << 20)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("platform", ["x" * 80_000_000]),
        ("details", [f'{{"x{number}": "{LONG}"}}' for number in range(1200)]),
    ],
    ids=["one text", "different documents"],
)
def test_a_small_file_of_large_values_is_refused_before(
    other_database, tmp_path, name, values, less_is_too_large
):
    small_bomb(other_database, tmp_path / "big.parquet", name, values)
    assert (
        needed_kib(lambda: refused_as_too_large(other_database, tmp_path / "big.parquet"))
        < 32 << 10
    )


def test_a_file_whose_metadata_state_less_than_its_pages_is_refused_before(
    other_database, tmp_path, less_is_too_large
):
    """A reader allocates what the header of a page states, whatever the metadata state."""
    path = tmp_path / "big.parquet"
    small_bomb(other_database, path, "platform", ["x" * 80_000_000])
    written = bytearray(path.read_bytes())
    footer_begin = len(written) - 8 - int.from_bytes(written[-8:-4], "little")
    group = pq.read_metadata(path).row_group(0)
    sizes = [
        group.total_byte_size,
        *(group.column(at).total_uncompressed_size for at in range(group.num_columns)),
    ]
    for size in (size for size in sizes if size > 1 << 26):
        stated = varint(size)
        at = written.index(stated, footer_begin)
        written[at : at + len(stated)] = varint(1000, len(stated))
    path.write_bytes(written)
    assert pq.read_metadata(path).row_group(0).total_byte_size == 1000
    assert needed_kib(lambda: refused_as_too_large(other_database, path)) < 32 << 10


def varint(number, length=0):
    """A number in Thrift's compact protocol, with so many bytes."""
    rest, found = 2 * number, []
    while rest or len(found) < length or not found:
        found.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*found[:-1], found[-1] & 127])


def memory(name):
    """A figure of this process's memory. Unit: KiB."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def test_a_pipe_is_refused_at_once(database, tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    for path in (tmp_path / "pipe.parquet", tmp_path):
        with pytest.raises(ImportRefused, match=r"pipe\.parquet is not a regular file") as caught:
            import_export(database, path)
        assert "farm export" in caught.value.next_step


def test_a_job_is_reported_as_at_home_and_asks_for_nothing(any_database, other_database, tmp_path):
    measured(other_database)
    exported(other_database, tmp_path / "h200")
    import_export(any_database, tmp_path / "h200")
    with other_database.read() as home, any_database.read() as here:
        own, theirs = build(home, "job1"), build(here, "job1")
        assert theirs.origin == "h200"
        assert theirs.verdict == own.verdict
        assert (theirs.types, theirs.readings, theirs.protocol) == (
            own.types,
            own.readings,
            own.protocol,
        )
        assert {row.reading_id: row.count for row in theirs.tuples} == {
            row.reading_id: row.count for row in own.tuples
        }
        assert layers(here, theirs, "module").rows == layers(home, own, "module").rows
        (listed,) = listing.jobs(here, 10)
        assert (listed["origin"], listed["outcome"], listed["state"]) == (
            "h200",
            own.verdict.outcome,
            "done",
        )
        assert not done_entries(here, [Request.from_json(own.request)])
        assert page.publish(here, tmp_path / "site") == 5
    exported(any_database, tmp_path / "again")
    assert rows_of(tmp_path / "again", "verdicts") == rows_of(tmp_path / "h200", "verdicts")
    for words, jobs in (["card=H200"], ["job1"]), (["time_us>1e9"], []):
        exported(any_database, tmp_path / "part", filters=parse(words))
        assert [row["job_id"] for row in rows_of(tmp_path / "part", "verdicts")] == jobs
    assert {one.new for one in import_export(any_database, tmp_path / "h200")} == {0}
    own_job = import_export(other_database, tmp_path / "again")
    assert {one.new for one in own_job} == {0}


def test_a_part_of_a_job_and_a_file_of_before_are_verdicts_alone(
    database, other_database, tmp_path
):
    measured(other_database)
    exported(other_database, tmp_path / "part", filters=parse(["Conv2d"]))
    before = pq.read_table(tmp_path / "part" / "verdicts.parquet").drop(sorted(ADDED["verdicts"]))
    pq.write_table(before, tmp_path / "verdicts.parquet")
    assert [one.new for one in import_export(database, tmp_path / "verdicts.parquet")] == [1]
    with database.read() as session:
        assert session.exec(select(tables.Job)).all() == []
    exported(database, tmp_path / "again")
    assert rows_of(tmp_path / "again", "verdicts")[0]["made_of"] is None


def test_what_a_cancelled_job_had_read_is_no_verdict_elsewhere(database, tmp_path):
    measured(database)
    with database.write() as session:
        session.get_one(tables.Job, "job1").state = tables.JobState.CANCELLED
    exported(database, tmp_path / "mine")
    assert rows_of(tmp_path / "mine", "verdicts") == []


def test_what_the_buffers_of_a_model_held_comes_along(database, other_database, tmp_path):
    filled.fill(other_database)
    held = [
        {"mean": 0.0, "spread": 1.0, "zeros": 0.0, "least": -4.6, "channels": 0.1},
        None,
        {"held": 1.0, "zeros": 1.0},
    ]
    with other_database.write() as session:
        session.exec(select(tables.Call)).first().data = held
    exported(other_database, tmp_path / "h200")
    import_export(database, tmp_path / "h200")
    with database.read() as session:
        assert held in [call.data for call in session.exec(select(tables.Call))]
    for seen in (
        [{"held": 1.0, "used_dimension": 12, "used": 0.5}],
        [{"held": 1.0, "zeros": "all"}],
        [{"zeros": 1.0}],
    ):
        mangled(
            tmp_path / "h200", tmp_path / "h200" / "calls.parquet", "calls", seen=json.dumps(seen)
        )
        with pytest.raises(ImportRefused, match="seen"):
            import_export(database, tmp_path / "h200")


@slow.MEASURED
def test_a_check_keeps_one_batch_in_memory_and_a_bad_last_row_imports_nothing(
    database, tmp_path, monkeypatch
):
    def peak_bytes(rows):
        """The most memory of Python objects in the check of a file of so many rows, of which the
        last is bad.
        """
        ids = [f"{number:032x}" for number in range(1, rows)]
        columns = [
            [*ids, "bad"],
            ["power_w"] * rows,
            [0.0] * rows,
            [1.0] * rows,
            [[0.5]] * rows,
            [[300.0]] * rows,
        ]
        many = pa.Table.from_arrays(
            [pa.array(column) for column in columns], schema=schema_of("traces")
        )
        pq.write_table(many, tmp_path / "traces.parquet", row_group_size=import_file.BATCH)
        del ids, columns, many
        tracemalloc.start()
        with pytest.raises(ImportRefused, match=f"row {rows}, column reading_id"):
            import_export(database, tmp_path / "traces.parquet")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    monkeypatch.setattr(import_file, "BATCH", 2000)
    monkeypatch.setattr(importer, "MOST_IN_MEMORY", 1 << 18)
    assert peak_bytes(60_000) < 1.5 * peak_bytes(12_000)
    with database.read() as session:
        assert session.exec(select(tables.Origin)).all() == []


IN_MODEL = {"source": "kernels", "passes": 3, "attributed_share": 1.0}


def other_farm(folder, job_id, card, model, time_us):
    """The export of a farm with a job of the same variant on another card, which verified the same
    capture.
    """
    database = Database(f"sqlite:///{folder}.db")
    database.create_or_check()
    measured(database, filled.VARIANT, job_id)
    with database.engine.connect() as connection:
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        for table, column in (("card", "id"), ("reading", "card_id"), ("item", "card_id")):
            connection.execute(
                text(f"UPDATE {table} SET {column} = replace({column}, 'aaaa', :card)"),
                {"card": card},
            )
        for table, column in (("card", "model"), ("reading", "card_model"), ("item", "card_model")):
            connection.execute(text(f"UPDATE {table} SET {column} = :model"), {"model": model})
        if card != "aaaa":  # an older version counted more bytes, and knew no shapes of outputs
            connection.execute(
                text("UPDATE operator SET bytes_moved = bytes_moved + 1000, output_shapes = NULL")
            )
    with database.write() as session:
        (capture,) = session.exec(select(tables.Capture)).all()
        (used,) = set(session.exec(select(tables.Item.card_id)).all())
        calls = Counter(session.exec(select(tables.Call.operator_id)).all())
        times = {"calls_us": {id_: [time_us] * number for id_, number in calls.items()}, **IN_MODEL}
        capture.verification = Verification(
            card=used, read_at_s=1e9, in_model=InModelTimes(**times)
        ).to_json()
    exported(database, folder)
    database.close()
    return folder


@pytest.fixture(scope="module")
def two_farms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("farms")
    return [
        other_farm(folder / "h200", "job1", "aaaa", "NVIDIA H200", 10.0),
        other_farm(folder / "h100", "job2", "cccc", "NVIDIA H100 80GB HBM3", 20.0),
    ]


def reports_of(database):
    with database.read() as session:
        found = [build(session, job_id).to_json() for job_id in ("job1", "job2")]
    for report in found:
        report.pop("age_s", None)
    return found


def test_exports_that_are_imported_in_either_order_give_the_same_reports(
    database, other_database, two_farms
):
    for path in two_farms:
        import_export(database, path)
    for path in reversed(two_farms):
        import_export(other_database, path)
    here, there = reports_of(database), reports_of(other_database)
    assert here == there
    times_us = [{row["in_model_us"] for row in report["tuples"]} for report in here]
    assert times_us == [{10.0}, {20.0}], "each report has the times of its own card"
    assert {one.new for path in two_farms for one in import_export(database, path)} == {0}
    assert reports_of(database) == here
    for imported in (database, other_database):
        with imported.read() as session:
            assert None not in session.exec(select(tables.Operator.output_shapes)).all()


def test_an_import_changes_no_cost_that_this_farm_counted(database, two_farms):
    measured(database, filled.VARIANT, "own")
    with database.write() as session:
        session.execute(text("UPDATE operator SET bytes_moved = bytes_moved + 5"))
        before = session.execute(text("SELECT id, bytes_moved FROM operator ORDER BY id")).all()
    import_export(database, two_farms[0])
    with database.read() as session:
        assert (
            session.execute(text("SELECT id, bytes_moved FROM operator ORDER BY id")).all()
            == before
        )


def test_an_import_beside_an_own_capture_keeps_the_times_of_the_other_card(
    database, two_farms, tmp_path
):
    measured(database, filled.VARIANT, "own")
    import_export(database, two_farms[1])
    with database.read() as session:
        assert {row.in_model_us for row in build(session, "job2").tuples} == {20.0}
        assert {row.in_model_us for row in build(session, "own").tuples} == {None}


def test_what_an_older_version_dropped_is_added_by_another_import(database, two_farms):
    for path in two_farms:
        import_export(database, path)
    with database.write() as session:  # as the older version left it
        first, second = session.exec(select(tables.Capture).order_by(col(tables.Capture.id))).all()
        for found in session.exec(select(tables.Round)):
            found.capture_id = first.id
        first.origin = "imported predicted"
        session.flush()
        session.execute(delete(tables.Capture).where(col(tables.Capture.id) == second.id))
    assert {row["in_model_us"] for row in reports_of(database)[1]["tuples"]} == {None}
    import_export(database, two_farms[1])
    times_us = [{row["in_model_us"] for row in report["tuples"]} for report in reports_of(database)]
    assert times_us == [{10.0}, {20.0}]


def test_a_newer_export_of_the_same_farm_has_the_newer_verification(database, two_farms, tmp_path):
    import_export(database, two_farms[1])
    again = other_farm(tmp_path / "h100", "job2", "cccc", "NVIDIA H100 80GB HBM3", 30.0)
    rows = pq.read_table(again / "captures.parquet").to_pylist()
    verification = json.loads(rows[0]["verification"])
    mangled(
        again,
        again / "captures.parquet",
        "captures",
        verification=json.dumps({**verification, "read_at_s": 2e9}),
    )
    import_export(database, again)
    with database.read() as session:
        assert len(session.exec(select(tables.Capture)).all()) == 1
        (capture,) = session.exec(select(tables.Capture))
        assert capture.verification["read_at_s"] == 2e9


def test_each_column_names_a_type_that_exists():
    columns = [column for table in TABLES.values() for column in table]
    used = {column.accepts.removesuffix("?") for column in columns if column.accepts}
    assert used == set(COLUMN_TYPES)
