"""Studies on simulated cards: what they read, what they keep, and what they say."""

import dataclasses
import json

import pytest
from sqlmodel import select
from typer.testing import CliRunner

from benchmarks.studies import STUDIES, results
from benchmarks.studies.__main__ import app
from benchmarks.studies.conditions import data, simultaneous
from benchmarks.studies.laboratory import Laboratory, Sample, StudyOptions
from benchmarks.studies.method import against_whole, windows
from farm.devices.lock import CardLock
from farm.errors import CardBusy, CardUnavailable, FarmError, UnhealthyCard, UsageError
from farm.jobs.cards import quarantine, stored_state
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.reuse import satisfies
from farm.types.protocol import Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests import slow

pytestmark = slow.MEASURED

VARIANT = Variant("squeezenet1_1", 1, 224)


@pytest.fixture
def perform(database, cards):
    def run(name, **plan):
        return results.perform(
            STUDIES[name], database, cards[0], StudyOptions(VARIANT, True, **plan)
        )

    return run


def rows_of(database):
    with database.read() as session:
        return list(session.exec(select(tables.ReadingRow)))


def test_readings_of_a_study_are_kept_with_their_circumstances_and_never_reused(database, perform):
    made = perform("windows", tuples=2)
    kept = rows_of(database)
    assert sorted(row.id for row in kept) == sorted(made.readings)
    assert len(kept) == 2 * 7  # seven windows of two tuples
    for row in kept:
        assert row.details["study"]["id"] == made.id
        assert row.details["study"]["window_s"] in (0.05, 0.1, 0.2, 0.5)
        assert "study" in row.flags
        assert not satisfies(row, Stopping())
    assert [row["window_s"] for row in made.rows] == [0.05, 0.1, 0.2, 0.5]
    assert made.rows[-1]["time_off_most"] == 0


class Scripted(Laboratory):
    """Hands out readings that a test wrote, in the order in which a study asks for them."""

    def __init__(
        self,
        card,
        id="one",
        energy_mj=lambda sample, circumstances: 100.0,
        time_us=lambda sample, circumstances: 10.0,
    ):
        super().__init__(None, card, "windows", id=id)
        self.asked = []
        self.energy_mj, self.time_us = energy_mj, time_us

    def samples(self, variant, most=None, *, values=False):
        seen = (("normal", 1), ("zeros-50+", 3))
        return [Sample(Subject("operator", name, {}), name, name, data=seen) for name in ("a", "b")]

    def read(self, sample, protocol, stopping, **circumstances):
        self.asked.append((sample.label, *circumstances.values()))
        energy_mj = self.energy_mj(sample, circumstances)
        figures = {"energy_mj": energy_mj, "energy_half_width_mj": 3.0, "power_w": 300.0}
        figures |= {"time_us": self.time_us(sample, circumstances), "time_half_width_us": 0.3}
        self.readings.append(str(len(self.asked)))
        return tables.ReadingRow(
            id=str(len(self.asked)), card_id=self.card.id, details={}, cost_s={}, **figures
        )


def test_a_sum_takes_each_class_of_data_that_a_tuple_meets_by_itself(cards):
    parts = Scripted(cards[0]).parts(VARIANT)
    assert [(part.label, part.count, part.data_class) for part in parts] == [
        ("a", 1, "normal"),
        ("a", 3, "zeros-50+"),
        ("b", 1, "normal"),
        ("b", 3, "zeros-50+"),
    ]


def orders(laboratory, study):
    """The order in which each tuple was read."""
    study(laboratory, StudyOptions(VARIANT, True))
    return {
        label: [what for name, what in laboratory.asked if name == label]
        for label in dict.fromkeys(name for name, _ in laboratory.asked)
    }


def test_windows_are_read_in_an_order_that_goes_with_nothing(cards):
    found = orders(Scripted(cards[0]), windows)
    rising = [0.05] * 3 + [0.1] * 2 + [0.2, 0.5]
    assert {tuple(sorted(order)) for order in found.values()} == {tuple(rising)}
    assert len({tuple(rising), *map(tuple, found.values())}) == 3
    assert orders(Scripted(cards[0]), windows) == found  # the study's id gives the order again
    assert orders(Scripted(cards[0], id="another"), windows) != found


def test_values_are_read_in_an_order_that_goes_with_nothing(cards):
    several = [orders(Scripted(cards[0], id=str(number)), data) for number in range(5)]
    assert {tuple(sorted(order)) for found in several for order in found.values()} == {
        ("normal", "zeros", "zeros-50+")
    }
    assert len({tuple(order) for found in several for order in found.values()}) > 2
    (row, _) = data(Scripted(cards[0], energy_mj=_by_data), StudyOptions(VARIANT, True)).rows
    assert (row["seen_energy"], row["zeros_energy"]) == (pytest.approx(-0.1), pytest.approx(-0.2))


def test_what_sees_normal_values_has_no_change_and_counts_in_no_median(cards):
    class Mixed(Scripted):
        def samples(self, variant, most=None, *, values=False):
            usual, seen = super().samples(variant, most, values=values)
            return [dataclasses.replace(usual, data=(("normal", 3), ("zeros-50+", 1))), seen]

    findings = data(Mixed(cards[0], energy_mj=_by_data), StudyOptions(VARIANT, True))
    usual, seen = findings.rows
    assert (usual["seen"], usual["seen_energy"], usual["seen_time"]) == ("normal", None, None)
    assert usual["zeros_energy"] == pytest.approx(-0.2)
    assert seen["seen_energy"] == pytest.approx(-0.1)
    told = "\n".join(findings.notes)
    assert "most calls have the class `normal`" in told
    assert "median change of the energy -10.0% over 1 tuples, -10.0% to" in told
    assert set(findings.charts[0].bars["a"]) == {"zeros"}


def test_without_energy_each_column_still_says_whose_it_is(cards):
    findings = data(
        Scripted(cards[0], energy_mj=lambda sample, circumstances: None),
        StudyOptions(VARIANT, True),
    )
    shown = [
        column
        for column in findings.columns
        if any(row[column.key] is not None for row in findings.rows)
    ]
    assert [column.head for column in shown][-2:] == ["time change, seen", "time change, zeros"]


def _by_data(sample, circumstances):
    return {"normal": 100.0, "zeros-50+": 90.0, "zeros": 80.0}[circumstances["data"]]


@pytest.mark.parametrize(("off_mj", "inside"), [(4.2, 1.0), (4.3, 0.0)])
def test_the_longest_window_is_the_reference_and_two_intervals_cover_what_they_cover_together(
    cards, off_mj, inside
):
    laboratory = Scripted(
        cards[0],
        energy_mj=lambda sample, circumstances: 100.0 + off_mj * (circumstances["window_s"] < 0.5),
    )
    rows = windows(laboratory, StudyOptions(VARIANT, True)).rows
    assert laboratory.asked[6][1] != 0.5  # it was not the last of its tuple
    assert [row["energy_off_most"] for row in rows] == [pytest.approx(off_mj / 100)] * 3 + [0.0]
    assert [row["energy_inside"] for row in rows] == [inside] * 3 + [
        1.0
    ]  # 3 and 3 together are 4.24


@pytest.mark.parametrize(("off_us", "inside"), [(0.42, 1.0), (0.43, 0.0)])
def test_the_interval_of_time_is_judged_too_and_alone_where_there_is_no_energy(
    cards, off_us, inside
):
    laboratory = Scripted(
        cards[0],
        energy_mj=lambda sample, circumstances: None,
        time_us=lambda sample, circumstances: 10.0 + off_us * (circumstances["window_s"] < 0.5),
    )
    rows = windows(laboratory, StudyOptions(VARIANT, True)).rows
    assert [row["time_inside"] for row in rows] == [inside] * 3 + [1.0]
    assert {row["energy_inside"] for row in rows} == {None}


def test_averaging_tells_how_far_off_each_figure_is(perform):
    made = perform("averaging", tuples=2)
    assert [row["figure"] for row in made.rows] == ["mean", "median", "trimmed mean"]
    assert all(
        row["off"] == pytest.approx(0) and row["spread"] == pytest.approx(0) for row in made.rows
    )


def test_residency_holds_the_sum_of_each_policy_against_the_same_whole(database, perform):
    made = perform("residency")
    rows = {row["residency"]: row for row in made.rows}
    assert set(rows) == {"resident", "reuse", "stream"}
    assert len({row["sum_time_us"] for row in rows.values()}) == 1  # a simulated card has no cache
    assert rows["stream"]["gap_time"] == pytest.approx(
        rows["stream"]["sum_time_us"] / rows["stream"]["whole_time_us"] - 1
    )


def test_a_sum_can_be_taken_as_its_tuples_ran_in_their_loops():
    context = {"alone_us": 10.0, "effect_us": 2.0, "effect_half_width_us": 0.1, "passes": 138}
    row = tables.ReadingRow(
        id="a",
        card_id="c",
        time_us=10.0,
        time_half_width_us=0.1,
        throttle_reasons=[],
        flags=[],
        details={"context": context},
    )
    whole = tables.ReadingRow(
        id="w",
        card_id="c",
        time_us=36.0,
        time_half_width_us=0.1,
        throttle_reasons=[],
        flags=[],
        details={},
    )
    sample = Sample(Subject("operator", "a", {}), "ReLU", "ReLU", 3, 1.0)
    sums = {
        looped: against_whole([(sample, row)], whole, "graph", all_tuples=True, looped=looped)[
            "sum_time_us"
        ]
        for looped in (True, False)
    }
    assert sums == {True: 30, False: 36}


def test_progress_counts_the_readings_and_says_them_in_words(database, cards):
    said = []
    for name in ("windows", "averaging", "residency", "launch", "data"):
        lines = []
        made = results.perform(
            STUDIES[name], database, cards[0], StudyOptions(VARIANT, True, 1), lines.append
        )
        counts = [line.partition(":")[0] for line in lines]
        assert counts == [
            f"{number} of {len(made.readings)}" for number in range(1, len(lines) + 1)
        ]
        said += lines
    told = {line.partition(": ")[2].rpartition(", ")[2] for line in said}
    assert {"window 0.05 s", "whole", "residency stream", "standard normal values", "zeros"} <= told
    assert not any(word in line for line in said for word in ("window_s", " of whole", "c90"))


def test_a_sum_of_some_tuples_is_not_drawn_beside_the_whole_and_the_title_says_what_was_read(
    database, cards
):
    asked = dataclasses.replace(VARIANT, batch=2)
    made = results.perform(STUDIES["launch"], database, cards[0], StudyOptions(asked, True, 2))
    assert {name for bar in made.charts[0].bars.values() for name in bar} == {"whole"}
    assert made.variant == VARIANT  # a quick go reads batch 1 alone
    assert "1x224" in made.title
    made = results.perform(STUDIES["launch"], database, cards[0], StudyOptions(VARIANT, True))
    assert {name for bar in made.charts[0].bars.values() for name in bar} == {"whole", "sum"}


def test_without_all_tuples_what_is_drawn_of_residency_is_the_change_of_time(perform):
    (chart,) = perform("residency", tuples=2).drawable
    assert {name: set(row) for name, row in chart.bars.items()} == {
        "reuse": {"median", "most"},
        "stream": {"median", "most"},
    }
    assert len(perform("residency").drawable) == 2


def test_launch_never_mixes_the_two(database, perform):
    made = perform("launch", tuples=3)
    assert all(row["gap_time"] is None for row in made.rows)  # three tuples are not the model
    assert [row["launch"] for row in made.rows] == ["graph", "eager"]
    assert any(note.startswith("Eager launch of ") for note in made.notes)
    with database.read() as session:
        protocols = {row.id: row.launch for row in session.exec(select(tables.ProtocolRow))}
    assert {
        (protocols[row.protocol_id], row.details["study"]["launch"]) for row in rows_of(database)
    } == {
        ("graph", "graph"),
        ("eager", "eager"),
    }


def test_data_reads_each_tuple_with_the_values_that_the_model_shows_it(database, perform):
    made = perform("data", tuples=4)
    assert len(made.rows) == 4
    assert {row.details["study"]["data"] for row in rows_of(database)} >= {"normal", "zeros"}


def test_simultaneous_reads_the_same_list_alone_and_beside_its_neighbours(database, cards, perform):
    made = perform("simultaneous", tuples=3, neighbours=tuple(cards[1:]))
    assert len(made.rows) == 4  # the whole as well
    assert all(row["change_time"] == pytest.approx(0) for row in made.rows)
    assert {row.card_id for row in rows_of(database)} == {cards[0].id}
    for card in cards:
        CardLock(card.id, settings().lock_dir).acquire().release()


def test_the_neighbours_are_held_while_the_card_is_read_alone(database, cards):
    held = []

    def say(line):
        if line.endswith(", alone"):
            with pytest.raises(CardBusy):
                CardLock(cards[1].id, settings().lock_dir).acquire()
            held.append(line)

    plan = StudyOptions(VARIANT, True, 1, (cards[1],))
    made = results.perform(STUDIES["simultaneous"], database, cards[0], plan, say)
    assert len(held) == 2  # the whole and a tuple
    (count,) = [
        int(note.split(": ")[1].split()[0]) for note in made.notes if note.endswith("on card 1.")
    ]
    assert count >= 1


def test_a_neighbour_that_a_worker_holds_is_noticed_before_anything_is_read(
    database, cards, perform
):
    with CardLock(cards[1].id, settings().lock_dir), pytest.raises(CardBusy, match=cards[1].id):
        perform("simultaneous", tuples=1, neighbours=(cards[1],))
    assert rows_of(database) == []
    CardLock(cards[0].id, settings().lock_dir).acquire().release()


class Refusing(Laboratory):
    """Its tuples do not fit on any card; the whole does unless said otherwise."""

    whole_fits = True

    def samples(self, variant, most=None, *, values=False):
        return [
            Sample(Subject("operator", "big", {"parameters": {"simulate": "oom"}}), "big", "big")
        ]

    def whole(self, variant):
        return super().whole(variant) if self.whole_fits else self.samples(variant)[0]


def test_a_neighbour_that_measures_some_of_the_list_is_busy(database, cards):
    with Refusing(database, cards[0], "simultaneous") as laboratory:
        findings = simultaneous(laboratory, StudyOptions(VARIANT, True, 1, (cards[1],)))
    assert [row["subject"] for row in findings.rows] == [f"{VARIANT}, whole"]


def test_a_neighbour_that_measures_nothing_is_not_busy(database, cards, monkeypatch):
    monkeypatch.setattr(Refusing, "whole_fits", False)
    with (
        Refusing(database, cards[0], "simultaneous") as laboratory,
        pytest.raises(FarmError, match=f"does not measure: .*{cards[1].id}.*does not fit"),
    ):
        simultaneous(laboratory, StudyOptions(VARIANT, True, 1, (cards[1],)))
    for card in cards:
        CardLock(card.id, settings().lock_dir).acquire().release()


def test_the_heaviest_tuples_are_those_at_the_peaks_that_the_card_has_shown(database, cards):
    def weights():
        with Laboratory(database, cards[0], "windows") as laboratory:
            return {
                sample.label: sample.weight_us / sample.count
                for sample in laboratory.samples(VARIANT)
            }

    by_table = weights()
    with database.write() as session:
        card = session.get_one(tables.CardRow, cards[0].id)
        card.fingerprint = {
            "copy_bytes_per_s": 1e6,
            "launch_floor_us": 500.0,
        }  # traffic is all that counts
        session.add(card)
    measured = weights()
    assert min(measured.values()) > 500 > min(by_table.values())
    assert list(measured) != list(by_table)


def test_one_card_alone_cannot_answer_what_neighbours_do(perform):
    with pytest.raises(UsageError, match="the only usable card"):
        perform("simultaneous")


def test_a_card_that_a_worker_holds_is_left_alone(cards, perform):
    with CardLock(cards[0].id, settings().lock_dir), pytest.raises(CardBusy):
        perform("windows", tuples=1)


def test_a_card_that_fails_its_health_check_is_put_in_quarantine_and_measured_by_nobody(
    database, cards, perform, tmp_path, monkeypatch
):
    bad = tmp_path / "bad"
    bad.write_text(cards[0].id)
    monkeypatch.setenv("FARM_SIMULATED_UNHEALTHY", str(bad))
    with pytest.raises(UnhealthyCard, match="product came out wrong"):
        perform("windows", tuples=1)
    assert rows_of(database) == []
    assert stored_state(database, cards[0].id) == "quarantined"
    bad.write_text("")
    perform(
        "windows", tuples=1
    )  # the quarantine was for that command alone: the next one checks the card again
    quarantine(database, cards[0].id, "a worker found it")
    with pytest.raises(CardUnavailable, match="quarantined"):
        perform("windows", tuples=1)


def test_a_card_that_fails_during_a_study_ends_it(database, cards, tmp_path, monkeypatch):
    bad = tmp_path / "bad"
    bad.write_text("")
    monkeypatch.setenv("FARM_SIMULATED_UNHEALTHY", str(bad))
    with Laboratory(database, cards[0], "windows") as laboratory:
        (sample,) = laboratory.samples(VARIANT, 1)
        assert (
            laboratory.read(sample, laboratory.protocol(), laboratory.stopping(quick=True))
            is not None
        )
        bad.write_text(cards[0].id)
        laboratory._process.kill()  # the next one checks the card again
        with pytest.raises(UnhealthyCard):
            laboratory.read(sample, laboratory.protocol(), laboratory.stopping(quick=True))
    assert len(rows_of(database)) == 1


def test_the_command_prints_draws_and_offers_no_card_to_jobs(cards, tmp_path):
    path = tmp_path / "found.png"
    arguments = [
        "windows",
        "squeezenet1_1",
        "-b",
        "1",
        "--quick",
        "--tuples",
        "1",
        "--png",
        str(path),
    ]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["study"], found["quick"], len(found["readings"])) == ("windows", True, 7)
    assert path.stat().st_size > 5_000
    with Database(settings().database).read() as session:
        assert [card.state for card in session.exec(select(tables.CardRow))] == ["stopped"]


@pytest.mark.parametrize("name", ["found.xyz", ""])
def test_a_file_that_cannot_be_drawn_is_refused_before_anything_is_measured(cards, tmp_path, name):
    arguments = ["windows", "squeezenet1_1", "-b", "1", "--quick", "--png", str(tmp_path / name)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert not (settings().state_dir / "farm.db").exists()


def test_a_drawing_that_fails_costs_no_findings(cards, tmp_path):
    full = tmp_path / "full.png"
    full.symlink_to("/dev/full")
    arguments = [
        "windows",
        "squeezenet1_1",
        "-b",
        "1",
        "--quick",
        "--tuples",
        "1",
        "--png",
        str(full),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert "cannot be written" in done.stderr
    assert "7 readings stored" in done.stdout


def test_every_study_has_its_measurement():
    import importlib

    for study in STUDIES.values():
        assert callable(
            getattr(importlib.import_module(f"benchmarks.studies.{study.module}"), study.name)
        )
