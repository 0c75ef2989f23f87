"""Two sides are held against each other: what moved comes first, and nothing is called faster whose
intervals overlap."""

from __future__ import annotations

import dataclasses
import json

import pytest
from sqlalchemy import select, update

from farm.errors import UsageError
from farm.exchange import packaged
from farm.exchange.export import as_table
from farm.report.compare import compare
from farm.report.compared_side import _models_of
from farm.report.gate import Gate, judge
from farm.settings import settings
from farm.store import tables
from farm.store.query import _SHORT, KNOWN, parse
from farm.types.figure import Figure
from farm.types.protocol import Protocol
from farm.types.variant import Variant
from farm.verdict.cost_line import Change
from tests.cli.conftest import farm  # noqa: F401
from tests.report import filled, rows
from tests.report.measured import measured


def compared(database, first, second):
    with database.read() as session:
        return compare(session, first, second)


def test_what_moved_comes_first_and_what_one_side_alone_has_is_listed(any_database):
    taken = filled.fill(any_database, leave_out=lambda spec: spec.short_name == "Linear")
    newer = dataclasses.replace(filled.SOFTWARE, torch="2.12.0")
    filled.fill(
        any_database,
        software=newer,
        slower=1.1,
        leave_out=lambda spec: spec.short_name == "MaxPool2d",
    )
    found = compared(any_database, "torch=2.11", "torch=2.12")
    assert (found.a.software, found.b.software) == (("2.11.0+cu130",), ("2.12.0",))
    assert len(found.tuples) == len(taken.capture.tuples) - 2
    assert all(
        row.time.change.value == pytest.approx(0.1) and row.time.verdict == "slower"
        for row in found.tuples
    )
    moved = [abs(row.time.b.value - row.time.a.value) for row in found.types]
    assert moved == sorted(moved, reverse=True)
    assert found.total.energy.change.value == pytest.approx(0.1)
    assert [row.name.split()[0] for row in found.tuples_only_a] == ["MaxPool2d"]
    assert [row.name.split()[0] for row in found.tuples_only_b] == ["Linear"]
    assert compared(any_database, "torch=2.12", "torch=2.11").types[0].time.verdict == "faster"


def test_nothing_is_faster_whose_intervals_overlap():
    difference = Change(Figure(100.0, 3.0), Figure(105.0, 3.0))
    assert (difference.apart, difference.verdict) == (False, "same")
    assert Change(Figure(100.0, 2.0), Figure(105.0, 2.0)).verdict == "slower"


def test_two_dtypes_are_matched_by_all_else(database):
    filled.fill(database)
    filled.fill(database, dataclasses.replace(filled.VARIANT, dtype="bfloat16"), slower=0.5)
    found = compared(database, "dtype=float32", "dtype=bfloat16")
    assert not [*found.tuples_only_a, *found.tuples_only_b]
    assert {row.time.verdict for row in found.types} == {"faster"}


def test_jobs_are_compared_as_their_reports_have_them(database):
    rows.model_job(database)
    found = compared(database, "job1", "job1")
    assert found.a.job_id == "job1"
    assert {row.operator: row.a.calls for row in found.types} == {"Conv2d": 5, "add": 3}
    assert found.total.time.change.value == 0
    assert found.total.time.verdict == "same"
    (whole,), (total,) = found.wholes, found.sums
    assert (whole.time.a, whole.covers) == (Figure(720.0, 1.44), "A: preliminary; B: preliminary")
    assert (total.a.job_id, total.a.calls, total.a.tuples) == ("job1", 8, 3)
    for side in "AB":  # a ReLU without a reading, and a pool that was not asked for
        assert f"{side}: 3 of 5 tuples (1 not in scope)" in total.covers
        assert f"{side}: 3 of 5 tuples" in found.total.covers
    assert 0 < total.a.coverage < 1
    assert found.total.a.coverage == pytest.approx(total.a.coverage)  # both by the estimated time


def test_sums_of_different_parts_have_no_change_and_are_not_judged(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    measured(database)
    measured(database, Variant("resnet18", 16, 224), "job2")
    arguments = ("compare", "job1", "job2", "--fail-above", "5%")
    assert "incomplete" not in farm(*arguments).stdout
    rows.cancel_early(database, "job2")
    (total,) = compared(database, "job1", "job2").sums
    assert total.incomplete
    change = total.time.change
    assert total.to_json()["time_change"] == change.value, "programs get every figure"
    said = farm(*arguments)
    assert "incomplete" in said.stdout
    assert f"{change.value * 100:+.1f}" not in said.stdout
    assert "Not judged, because one side lacks readings" in said.stderr
    judged = json.loads(farm(*arguments, "--json").stdout)["gate"]
    assert "sum of the tuples" in judged["incomplete"]
    assert not [row for row in judged["rows"] if row["level"] == "sum"]
    assert "Not judged" in farm(*arguments, "--format", "markdown").stdout


def test_what_cannot_be_compared_says_why(database):
    filled.fill(database)
    filled.fill(database, model="NVIDIA H100", card="GPU-1")
    filled.fill(database, protocol=Protocol(launch="eager"), card="GPU-2", model="NVIDIA A100")
    filled.fill(database, card="GPU-2", model="NVIDIA A100")
    for text, message in (
        ("Conv2d launch=graph", "several card models"),
        ("card=A100", "several kinds of launch"),
        ("card=H100 in_channels=65", "No reading"),
        ("nojob", "no job"),
        (" ", "empty"),
    ):
        with pytest.raises(UsageError, match=message):
            compared(database, text, "card=H200")


def test_readings_that_differ_in_any_software_are_never_dropped(database):
    filled.fill(database)
    filled.fill(database, software=dataclasses.replace(filled.SOFTWARE, cudnn="92000"), slower=1.5)
    with pytest.raises(UsageError, match="several versions of cudnn") as caught:
        compared(database, "torch=2.11", "card=H200")
    assert caught.value.next_step == "Choose one, for instance with cudnn=92000."
    found = compared(database, "cudnn=91900", "cudnn=92000")
    assert found.total.time.change.value == pytest.approx(0.5)


def test_dtypes_come_from_the_description_of_a_tuple_not_from_its_label(database):
    filled.fill(database)
    filled.fill(database, dataclasses.replace(filled.VARIANT, dtype="bfloat16"), slower=0.5)
    with database.write() as session:
        session.execute(update(tables.Operator).values(label="a label"))
        # Only the tensors of a description have the dtypes of its call.
        for operator in session.exec(select(tables.Operator)).scalars():
            operator.spec = {**operator.spec, "zeros": {"tensors": [{"dtype": "float64"}]}}
    found = compared(database, "dtype=float32", "dtype=bfloat16")
    assert (found.a.dtypes, found.b.dtypes) == (("float32",), ("bfloat16",))
    assert not [*found.tuples_only_a, *found.tuples_only_b]


def test_at_a_terminal(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database)
    filled.fill(database, model="NVIDIA H100", card="GPU-1", slower=1.3)
    said = farm("compare", "card=H200", "card=H100", "--fail-above", "5%")
    assert said.code == 5
    assert "+30.0" in said.stdout
    assert "B takes over 5 % more than A in " in said.stderr
    assert farm("compare", "card=H200", "card=H100", "--fail-above", "0.5").code == 0
    assert farm("compare", "card=H100", "card=H200", "--fail-above", "5%", "--json").code == 0
    assert json.loads(farm("compare", "card=H200", "card=H100", "--json").stdout)["total"][
        "time_change"
    ] == pytest.approx(0.3)
    for text in ("much", "5"):  # five would be 500 %
        assert farm("compare", "card=H200", "card=H100", "--fail-above", text).code == 2


def test_what_has_nothing_in_common_is_listed_and_passes_no_bound(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database)
    said = farm("compare", "Conv2d", "Linear", "--fail-above", "5%")
    assert said.code == 5
    assert [
        line
        for line in said.stdout.splitlines()
        if line.startswith("A and") or line[:1] not in "AB "
    ] == [
        "A and B have no tuple in common.",
        "only in A: 11 tuples",
        "only in B: 1 tuple",
    ]


def on_another_card(database, job_id, model="NVIDIA H100"):
    """The readings of a job, as if another card had made them."""
    with database.write() as session:
        its = select(tables.Item.reading_id).where(tables.Item.job_id == job_id)
        session.execute(
            update(tables.CardRow).where(tables.CardRow.id == rows.OTHER_CARD).values(model=model)
        )
        where = {"card_id": rows.OTHER_CARD, "card_model": model}
        session.execute(
            update(tables.ReadingRow).where(tables.ReadingRow.id.in_(its)).values(**where)
        )
        session.execute(update(tables.Item).where(tables.Item.job_id == job_id).values(**where))


def verdict_of(database, job_id):
    with database.read() as session:
        return session.execute(
            select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id)
        ).scalar_one()


def test_two_models_are_compared_as_wholes_and_by_their_own_calls(database):
    measured(database, Variant("resnet18", 2, 64), "small")
    measured(database, Variant("resnet50", 2, 64), "large")
    small, large = verdict_of(database, "small"), verdict_of(database, "large")
    found = compared(database, "small", "large")
    (whole,), (total,) = found.wholes, found.sums
    assert whole.name == "resnet18 2x64 float32 / resnet50 2x64 float32"
    assert (whole.time.a.value, whole.time.b.value) == (small.whole_time_us, large.whole_time_us)
    assert (whole.energy.a.value, whole.energy.b.value) == (
        small.whole_energy_mj,
        large.whole_energy_mj,
    )
    assert (total.time.a.value, total.time.b.value) == (small.sum_time_us, large.sum_time_us)
    assert (total.energy.a.value, total.energy.b.value) == (
        small.sum_energy_mj,
        large.sum_energy_mj,
    )
    assert whole.time.apart
    assert whole.time.change.value > 0.5
    assert (total.a.calls, total.b.calls) == (68, 174)
    assert found.weights == "own calls"
    # Types and single tuples add up to the sums.
    for side, us in (("a", small.sum_time_us), ("b", large.sum_time_us)):
        only = found.tuples_only_a if side == "a" else found.tuples_only_b
        for listed in (found.types, (*found.tuples, *only)):
            figures = [getattr(row.time, side) for row in listed]
            assert sum(figure.value for figure in figures if figure) == pytest.approx(us)
        shares = [getattr(row, side).share for row in (*found.tuples, *only)]
        assert sum(shares) == pytest.approx(1)
        shares = [getattr(row, side).share for row in only]
        assert shares == sorted(shares, reverse=True)
    assert found.to_json()["only_a"] == [row.name for row in found.tuples_only_a]
    assert {row.covers for row in found.tuples_only_a} == {"only in A"}
    conv = next(row for row in found.types if row.name == "Conv2d")
    assert (conv.a.calls, conv.b.calls, conv.a.coverage, conv.b.coverage) == (20, 53, 1, 1)
    both = sum(row.operator == "Conv2d" for row in found.tuples)
    assert conv.covers == f"{both} tuples in both (A has {conv.a.tuples}, B has {conv.b.tuples})"
    # The tuples of both, with the calls of A, are only a part of each side.
    assert 0 < found.total.a.coverage < 1
    assert found.total.b.coverage < found.total.a.coverage
    assert "A: " in found.total.covers
    with database.read() as session:
        worse, back = (
            judge(session, one, Gate(0.5)) for one in (found, compare(session, "large", "small"))
        )
    assert {(row.quantity, row.level) for row in worse.findings} >= {
        *(("time", "whole"), ("energy", "whole"), ("time", "sum"), ("energy", "sum")),
    }
    assert not any(row.level == "whole" for row in back.findings)
    assert compared(database, "job=small", "job=large").to_json() == found.to_json()


def test_a_type_of_one_side_only_is_marked(database):
    measured(database, Variant("resnet18", 2, 64), "small")
    measured(database, Variant("alexnet", 2, 64), "other")
    for sides, of, other in ((("small", "other"), "a", "b"), (("other", "small"), "b", "a")):
        found = compared(database, *sides)
        marks = {row.name: (row.covers, row.time.verdict) for row in found.types}
        assert marks["BatchNorm2d"] == (f"only in {of.upper()}", "unknown")
        assert "tuples in both" in marks["Conv2d"][0]
        row = next(row.to_json() for row in found.types if row.name == "BatchNorm2d")
        assert (row[f"{other}_time_us"], row[f"{other}_share"], row["time_change"]) == (
            None,
            None,
            None,
        )
        assert row[f"{of}_time_us"] > 0


def test_two_cards_have_the_models_of_one_name_side_by_side(database):
    for job_id, variant in (
        ("ours", Variant("resnet18", 2, 64)),
        ("other", Variant("resnet18", 4, 64)),
    ):
        measured(database, variant, job_id)
    for job_id, variant in (
        ("first", Variant("resnet18", 2, 64)),
        ("newest", Variant("resnet18", 2, 64)),
    ):
        measured(database, variant, job_id)
        on_another_card(database, job_id)
    found = compared(database, "card=H200", "card=H100")
    (whole,), (total,) = found.wholes, found.sums
    assert (whole.name, whole.a.job_id, whole.b.job_id) == (
        "resnet18 2x64 float32",
        "ours",
        "newest",
    )
    assert whole.covers == "B: the most complete of 2 jobs"
    ours, newest = verdict_of(database, "ours"), verdict_of(database, "newest")
    assert (whole.time.a.value, whole.time.b.value) == (ours.whole_time_us, newest.whole_time_us)
    assert (total.time.a.value, total.energy.b.value) == (ours.sum_time_us, newest.sum_energy_mj)
    assert (total.a.calls, total.b.calls) == (68, 68)
    assert found.weights == "once"
    assert found.total.a.calls == found.total.a.tuples == len(found.tuples)
    assert "A: " in found.total.covers  # it also has the tuples of the other batch size
    assert "B: " not in found.total.covers
    # A job against filters: its own model, and operators by its calls, whichever side it is.
    for sides, weights in (
        (("ours", "card=H100"), "calls of A"),
        (("card=H100", "ours"), "calls of B"),
    ):
        found = compared(database, *sides)
        assert found.weights == weights
        assert [row.name for row in found.wholes] == ["resnet18 2x64 float32"]
        assert (found.total.a.calls, found.total.b.calls, found.total.covers) == (68, 68, "")
    # Both sides name the batch size: it may differ.
    found = compared(database, "card=H200 batch=4", "card=H100 batch=2")
    assert [row.name for row in found.sums] == ["resnet18 4x64 float32 / resnet18 2x64 float32"]
    assert found.a.tuples == len(found.tuples) + len(found.tuples_only_a)
    assert not compared(database, "card=H200 batch=4", "card=H100").sums
    with database.write() as session:
        session.execute(
            update(tables.VerdictRow)
            .where(tables.VerdictRow.job_id == "newest")
            .values(coverage=0.5)
        )
    (whole,) = compared(database, "card=H200", "card=H100").wholes
    assert (whole.b.job_id, whole.covers) == ("first", "B: the most complete of 2 jobs")


def test_the_newest_verdict_of_a_job_is_that_of_its_last_round(database):
    """Its time may be before that of an earlier round: the clock was set back."""
    measured(database, Variant("resnet18", 2, 64), "ours")
    with database.write() as session:
        first = session.execute(select(tables.VerdictRow)).scalar_one()
        last = first.model_dump(exclude={"id"})
        last |= {
            "round": 2,
            "created_at_s": first.created_at_s - 3600,
            "sum_time_us": 2 * first.sum_time_us,
        }
        session.add(tables.VerdictRow(**last))
    with database.read() as session:
        models, _ = _models_of(session, parse(["card=H200"]))
        assert [session.get_one(tables.VerdictRow, model.verdict).round for model in models] == [2]


def test_two_dtypes_of_a_model_are_side_by_side(database):
    measured(database, Variant("resnet18", 2, 64), "single")
    measured(database, Variant("resnet18", 2, 64, dtype="bfloat16"), "half")
    for sides in (
        ("single", "half"),
        ("dtype=float32", "dtype=bfloat16"),
        ("single", "dtype=bfloat16"),
    ):
        found = compared(database, *sides)
        assert [row.name for row in found.wholes] == [
            "resnet18 2x64 float32 / resnet18 2x64 bfloat16"
        ]
        assert not [*found.tuples_only_a, *found.tuples_only_b]
        assert found.total.covers == ""


def test_versions_of_an_own_model_are_compared_by_its_name(database):
    for version in ("1" * 8, "2" * 8):
        variant = Variant("resnet18", 2, 64, version=version)
        for card in ("ours", "other"):
            measured(database, variant, f"{card}{version[0]}")
    for job_id in ("other1", "other2"):
        on_another_card(database, job_id)

    def jobs(*sides):
        return [(row.a.job_id, row.b.job_id) for row in compared(database, *sides).wholes]

    assert jobs("card=H200", "card=H100") == [("ours1", "other1"), ("ours2", "other2")]
    assert jobs(f"card=H200 version={'1' * 8}", f"card=H100 version={'2' * 8}") == [
        ("ours1", "other2")
    ]
    assert jobs(f"card=H200 version={'1' * 8}", "job!=other1 card=H100") == [("ours1", "other2")]
    assert jobs("ours1", "job!=other1 card=H100") == [("ours1", "other2")]


def test_every_filter_of_lookup_selects_a_side(database):
    variant = dataclasses.replace(filled.VARIANT, model="vgg11_bn")
    measured(database, variant, "job1")
    values: dict[str, object] = {}
    with database.read() as session:
        cells = as_table(session, "readings").to_pylist()
        for row in sorted(cells, key=lambda row: row["subject_kind"] == "operator"):
            values |= {name: value for name, value in row.items() if value not in (None, "", [])}
    values |= {"job": "job1", "since": "1960-01-01", "until": "2100-01-01"}
    for name in KNOWN:
        value = values.get(_SHORT.get(name, name))
        if value is None:
            with pytest.raises(UsageError, match="No readings match"):
                compared(database, f"{name}{'=1' if name != 'flag' else '=drifting'}", "job1")
            continue
        text = "x".join(map(str, value)) if isinstance(value, list) else str(value)
        found = compared(database, f"{name}='{text}'", "job1")
        assert found.a.tuples or found.sums, name


def test_models_are_gates_too(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    measured(database, Variant("resnet18", 2, 64), "small")
    measured(database, Variant("alexnet", 2, 64), "other")
    slower = (
        verdict_of(database, "small").whole_time_us < verdict_of(database, "other").whole_time_us
    )
    said = farm(
        "compare",
        *(("small", "other") if slower else ("other", "small")),
        "--fail-above",
        "1%",
        "-n",
        "2",
    )
    assert said.code == 5
    assert "time of whole model: +" in said.stderr
    assert "whole model" in said.stdout
    assert "sum of all tuples" in said.stdout
    assert "with its own calls" in said.stdout
    assert "only in A" in said.stdout
    found = json.loads(farm("compare", "small", "other", "--json").stdout)
    assert {"a", "b", "total", "types", "tuples", "only_a", "only_b"} <= set(found)
    assert found["weights"] == "own calls"
    assert found["wholes"][0]["a_time_us"] == verdict_of(database, "small").whole_time_us
    assert found["sums"][0]["b_calls"] == sum(row["b_calls"] for row in found["types"])
    assert found["tuples_only_b"][0]["b_share"] > 0
    assert farm("compare", "card='NVIDIA H200", "small").code == 2


def test_a_job_and_its_own_readings_do_not_differ_in_any_operator(tmp_path):
    database = packaged.database_of(packaged.packaged_files(), tmp_path)  # the same for all tests
    for sides in (
        ("j9zadgnw", "card=H100 model=regnet_y_400mf"),
        ("card=H100 model=regnet_y_400mf", "j9zadgnw"),
    ):
        found = compared(database, *sides)
        assert len(found.tuples) > 20
        assert {row.time.change.value for row in (*found.tuples, *found.types, found.total)} == {
            0.0
        }
        assert {row.energy.change.value for row in (*found.tuples, *found.types)} == {0.0}
        with database.read() as session:
            assert judge(session, found, Gate(0.03)).findings == ()
