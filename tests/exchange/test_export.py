"""An export is tidy tables that other programs open, with every column declared once."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from sqlalchemy import delete, update
from sqlmodel import select

from farm.errors import UnknownOperator, UsageError
from farm.errors.safe_text import cell
from farm.exchange.export import METADATA, export
from farm.exchange.importer import import_export
from farm.exchange.packaged import FOLDER
from farm.settings import settings
from farm.store import tables
from farm.store.data_columns import FORMAT, TABLES, as_markdown
from farm.store.query import parse
from farm.types.protocol import Protocol
from farm.types.variant import Variant
from tests.cli.conftest import farm  # noqa: F401
from tests.report import filled, rows
from tests.report.measured import measured

pq = pytest.importorskip("pyarrow.parquet")


def exported(database, target, *words, **options):
    with database.read() as session:
        return export(session, Path(target), filters=parse(words) if words else None, **options)


def test_a_row_is_a_reading_with_units_in_the_names(any_database, tmp_path):
    taken = filled.fill(any_database)
    written = exported(any_database, tmp_path / "out", traces=True)
    assert set(written.files) == set(TABLES)
    table = pq.read_table(tmp_path / "out" / "readings.parquet")
    assert table.num_rows == written.files["readings"][1] == len(taken.capture.tuples) + 1
    assert table.column_names == [entry.name for entry in TABLES["readings"]]
    by_label = {row["label"]: row for row in table.to_pylist()}
    conv = by_label["Conv2d 64->128 k3 s2 p1 | 2x64x16x16 fp32"]
    assert (conv["operator"], conv["in_channels"], conv["kernel_size"], conv["dtype"]) == (
        "Conv2d",
        64,
        [3, 3],
        "float32",
    )
    assert (conv["input_shape"], conv["output_shape"]) == ([2, 64, 16, 16], [2, 128, 8, 8])
    assert conv["flops_per_byte"] == conv["flops"] / conv["bytes_moved"]
    assert json.loads(conv["kernels"]) == filled.KERNELS
    least_us = max(conv["flops"] / 5e13, conv["bytes_moved"] / 4.2e12) * 1e6
    assert conv["roofline_share"] == pytest.approx(least_us / conv["time_us"])
    assert (conv["card_model"], conv["torch"], conv["launch"], conv["data_class"]) == (
        "NVIDIA H200",
        "2.11.0+cu130",
        "graph",
        "normal",
    )
    assert (conv["card_time_s"], conv["neighbours_effect_us"], conv["origin"]) == (1.25, 0.0, "")
    linear = next(row for row in table.to_pylist() if row["operator"] == "Linear")
    assert (linear["m"], linear["n"], linear["k"]) == (2, 1000, 512)
    whole = by_label[None]
    assert (whole["model"], whole["batch"], whole["subject_kind"]) == ("resnet18", 2, "variant")
    throttled = [row for row in table.to_pylist() if row["flags"] == ["throttled_power"]]
    assert throttled
    assert throttled[0]["burst_time_us"] == pytest.approx(0.95 * throttled[0]["time_us"])


def test_calls_captures_and_verdicts_are_further_tables(database, tmp_path):
    rows.model_job(database)
    with database.write() as session:
        details = {"sum_time_us": 700.0, "parts": 5}
        session.add(
            tables.VerdictRow(job_id="job1", round=1, outcome="pass", target=0.95, details=details)
        )
    exported(database, tmp_path)
    calls = pq.read_table(tmp_path / "calls.parquet").to_pylist()
    assert len(calls) == 11
    assert (calls[0]["call_index"], calls[0]["operator"], calls[0]["model"]) == (
        0,
        "Conv2d",
        "resnet18",
    )
    (verdict,) = pq.read_table(tmp_path / "verdicts.parquet").to_pylist()
    assert (verdict["job_id"], verdict["outcome"], verdict["sum_time_us"]) == (
        "job1",
        "pass",
        700.0,
    )
    assert verdict["card_models"] == ["NVIDIA H200"]
    exported(database, tmp_path, "ReLU")
    assert (
        pq.read_metadata(tmp_path / "verdicts.parquet").num_rows == 0
    )  # none of its readings is of that


def test_the_file_says_what_it_is_and_what_its_columns_mean(database, tmp_path):
    filled.fill(database)
    exported(database, tmp_path / "h200.parquet")
    schema = pq.read_schema(tmp_path / "h200.parquet")
    told = json.loads(schema.metadata[METADATA])
    assert (told["table"], told["format"]) == ("readings", FORMAT)
    field = schema.field("time_us")
    assert field.metadata[b"unit"].decode() == "µs"
    assert field.metadata[b"meaning"]
    assert "| `time_us` | number | µs |" in (tmp_path / "h200.dictionary.md").read_text()


def test_the_documented_dictionary_is_the_code_s():
    written = Path(__file__).parents[2] / "docs" / "data-dictionary.md"
    assert written.read_text() == as_markdown(), (
        "write it anew: python -m farm.store.data_columns > docs/data-dictionary.md"
    )
    for table, columns in TABLES.items():
        names = [entry.name for entry in columns]
        assert len(names) == len(set(names)), table
        assert all(entry.meaning for entry in columns)


@pytest.mark.parametrize("table", ["readings", "calls", "captures", "verdicts"])
def test_columns_keep_the_order_of_earlier_exports(table):
    earlier = pq.read_schema(FOLDER / "h200" / f"{table}.parquet").names
    assert [entry.name for entry in TABLES[table] if entry.name in earlier] == earlier


def test_other_formats_hold_the_same(database, tmp_path):
    filled.fill(database)
    exported(database, tmp_path, form="parquet")
    for form in ("csv", "jsonl"):
        exported(database, tmp_path, form=form)
    parquet = {
        row["reading_id"]: row for row in pq.read_table(tmp_path / "readings.parquet").to_pylist()
    }
    with (tmp_path / "readings.csv").open() as lines:
        for row in csv.DictReader(lines):
            own = parquet[row["reading_id"]]
            assert float(row["time_us"]) == own["time_us"]
            assert row["kernel_size"] == (
                "" if own["kernel_size"] is None else "x".join(map(str, own["kernel_size"]))
            )
    lines = (tmp_path / "readings.jsonl").read_text().splitlines()
    assert len(lines) == len(parquet)
    own = json.loads(lines[0])
    assert own["details"] == json.loads(parquet[own["reading_id"]]["details"])
    assert own["time_us"] == parquet[own["reading_id"]]["time_us"]


def test_a_text_is_never_a_formula_of_a_spreadsheet_and_numbers_stay_numbers(database, tmp_path):
    filled.fill(database, model="=cmd|' /C calc'!A0")
    with database.write() as session:
        session.execute(update(tables.ReadingRow).values(flags=["+1+1"]))
    exported(database, tmp_path, form="csv")
    with (tmp_path / "readings.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["card_model"] for row in rows} == {"'=cmd|' /C calc'!A0"}
    assert {row["flags"] for row in rows} == {"'+1+1"}
    assert all(float(row["time_us"]) > 0 for row in rows)
    cells = [value for row in rows for value in row.values()]
    assert [value for value in cells if cell(value) != value] == []


def test_filters_take_what_columns_say(database, tmp_path):
    filled.fill(database)
    filled.fill(
        database,
        Variant("resnet18", 2, 64, "bfloat16"),
        model="NVIDIA H100",
        card="GPU-1",
        created_at_s=1.8e9,
    )

    def found(*words, **options):
        exported(database, tmp_path / "some.parquet", *words, **options)
        return pq.read_table(tmp_path / "some.parquet").to_pylist()

    convolutions = found("Conv2d")
    assert {row["operator"] for row in convolutions} == {"Conv2d"}
    assert {tuple(row["kernel_size"]) for row in found("Conv2d", "kernel_size=3")} == {(3, 3)}
    assert {row["dtype"] for row in found("dtype=bfloat16")} == {"bfloat16"}
    assert {row["card_model"] for row in found("Conv2d", "card=H100")} == {"NVIDIA H100"}
    assert {row["card_id"] for row in found("Conv2d", "card=GPU-1")} == {"GPU-1"}
    assert {row["in_channels"] for row in found("Conv2d", "in_channels=64..128")} == {64, 128}
    assert all(row["time_us"] > 3 for row in found("time_us>3"))
    assert found("torch=2.11")
    assert not found("torch=2.1")  # a version's part, not a beginning of its text
    assert not found("launch=eager")
    assert {row["card_model"] for row in found("since=2027-01-01")} == {"NVIDIA H100"}
    assert {row["model"] for row in found("model=resnet18")} == {"resnet18"}
    assert {tuple(row["flags"]) for row in found("flag=throttled_power")} == {("throttled_power",)}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("kernelsize=3", "Did you mean kernel_size"),
        ("kernel_size=big", "needs sizes such as 3 or 3x3"),
        ("time_us<fast", "needs a number"),
        ("operator>3", "have no order"),
        ("details=x", "cannot be filtered"),
        ("since=yesterday", "not a date"),
        ("3x3", "neither an operator nor a filter"),
        ("card=V100", "no readings of a card with card=V100"),
    ],
)
def test_a_filter_that_means_nothing_is_told(database, tmp_path, word, message):
    filled.fill(database)
    with pytest.raises(UsageError) as error:
        exported(database, tmp_path / "x", word)
    assert message in f"{error.value.message} {error.value.next_step}"
    with pytest.raises(UnknownOperator) as unknown:
        exported(database, tmp_path / "x", "Conv2")
    assert "Conv2d" in unknown.value.next_step


def test_a_frame_opens_in_pandas_polars_and_duckdb(database, tmp_path):
    filled.fill(database)
    number = exported(database, tmp_path).files["readings"][1]
    path = tmp_path / "readings.parquet"
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(path)
    assert len(frame) == number
    assert frame.groupby("operator").time_us.mean()["Conv2d"] > 0
    polars = pytest.importorskip("polars")
    assert polars.read_parquet(path).filter(polars.col("in_channels") == 64).height > 0
    duckdb = pytest.importorskip("duckdb")
    query = f"SELECT count(*) FROM '{path}' WHERE list_contains(kernel_size, 3)"
    assert (
        duckdb.sql(query).fetchall()[0][0]
        == (frame.kernel_size.map(lambda sizes: sizes is not None and 3 in sizes)).sum()
    )


def test_a_folder_that_cannot_be_written_is_told_and_leaves_nothing(database, tmp_path):
    filled.fill(database)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="cannot be written"):
        exported(database, tmp_path / "file" / "deeper")
    with pytest.raises(UsageError, match=r"does not end in \.csv"):
        exported(database, tmp_path / "x.parquet", form="csv")
    assert [
        path.name
        for path in tmp_path.iterdir()
        if path.name not in ("farm.db", "farm.db-wal", "farm.db-shm", "file")
    ] == []


@pytest.mark.parametrize("name", ["結" * 79 + "xx", "x" * 239])
def test_a_name_that_leaves_no_room_for_the_dictionary_writes_nothing(database, tmp_path, name):
    folder = tmp_path / "exports"
    folder.mkdir()
    rows.model_job(database)
    with pytest.raises(UsageError, match="would have 256 bytes") as caught:
        exported(database, folder / f"{name}xxx.csv")
    assert caught.value.next_step == "Give a name of at most 245 bytes."
    assert not list(folder.iterdir())
    exported(database, folder / f"{name}xx.csv")
    assert len(list(folder.iterdir())) == 2


def test_of_protocols_each_is_told(database, tmp_path):
    filled.fill(database, whole=False)
    filled.fill(database, protocol=Protocol(tf32=True), whole=False)
    exported(database, tmp_path / "x.parquet", "tf32=yes")
    assert set(pq.read_table(tmp_path / "x.parquet").column("tf32").to_pylist()) == {True}


def test_large_values_are_divided_into_row_groups_that_an_import_accepts(
    database, other_database, tmp_path, monkeypatch
):
    filled.fill(database)
    exported(database, tmp_path / "whole")
    monkeypatch.setattr("farm.exchange.export.MOST_GROUP_BYTES", 3000)
    exported(database, tmp_path / "divided")
    whole, divided = (
        pq.ParquetFile(tmp_path / name / "readings.parquet") for name in ("whole", "divided")
    )
    assert whole.metadata.num_row_groups == 1
    assert 1 < divided.metadata.num_row_groups <= divided.metadata.num_rows
    assert divided.read() == whole.read()
    (readings,) = (
        one
        for one in import_export(other_database, tmp_path / "divided")
        if one.table == "readings"
    )
    assert readings.new == readings.rows == whole.metadata.num_rows


def test_an_export_with_filters_says_what_it_leaves_out_and_why(
    database, tmp_path, farm, monkeypatch
):
    measured(database)
    with database.write() as session:
        copied(session, "job2", state=tables.JobState.CANCELLED)
    whole = exported(database, tmp_path / "whole")
    (left_out,) = map(str, whole.left_out)
    assert left_out.startswith("1 verdict: their jobs were cancelled")
    convolutions = exported(database, tmp_path / "convolutions", "Conv2d")
    readings = whole.files["readings"][1] - convolutions.files["readings"][1]
    assert str(convolutions.left_out[0]) == f"{readings} readings: Conv2d does not select them"
    assert convolutions.files["verdicts"][1] == 1
    nothing = exported(database, tmp_path / "nothing", "time_us>1e9")
    assert [(one.table, one.rows) for one in nothing.left_out] == [
        ("readings", whole.files["readings"][1]),
        ("captures", 1),
        ("calls", whole.files["calls"][1]),
        ("verdicts", 1),
        ("verdicts", 1),
    ]
    assert nothing.left_out[-1].why == "their jobs have no selected reading"
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    said = farm("export", tmp_path / "again", "Conv2d")
    assert f"Left out: {readings} readings: Conv2d " in said.stderr
    shown = json.loads(farm("export", tmp_path / "again", "Conv2d", "--json").stdout)
    assert shown["left_out"][0] == {
        "table": "readings",
        "rows": readings,
        "why": "Conv2d does not select them",
    }


def test_a_verdict_without_a_job_goes_with_its_readings(database, other_database, tmp_path):
    measured(database)
    exported(database, tmp_path / "part", "Conv2d")
    import_export(other_database, tmp_path / "part")  # a part of its readings: it has no job here
    kept = exported(other_database, tmp_path / "card", "card=H200")
    assert kept.files["verdicts"][1] == 1
    assert kept.left_out == ()
    with other_database.write() as session:
        session.execute(
            delete(tables.ReadingRow).where(tables.ReadingRow.subject_kind == "operator")
        )
        made_of_nothing = session.exec(select(tables.ImportedVerdict)).one()
        made_of_nothing.row = {**made_of_nothing.row, "job_id": "job1"}
    lost = exported(other_database, tmp_path / "lost", "subject_kind=operator")
    assert str(lost.left_out[-1]).startswith("1 verdict: other farms measured them")


def copied(session, job_id, **changes):
    """A second job like the first one, with a verdict."""
    job = session.get_one(tables.Job, "job1")
    session.add(tables.Job(**{**job.model_dump(), "id": job_id, "request_id": "", **changes}))
    session.flush()
    verdict = session.exec(select(tables.VerdictRow)).one()
    session.add(tables.VerdictRow(**{**verdict.model_dump(), "id": None, "job_id": job_id}))
