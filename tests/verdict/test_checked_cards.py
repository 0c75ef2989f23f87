"""A sum restates its tuples to the cards of the wholes, if all cards of the job have checks."""

import math
from collections.abc import Mapping

import numpy as np
import pytest
from sqlmodel import col, select

from benchmarks.card_differences import DIFFERENCES, EQUAL, OPPOSITE, PLACES, simulated_job, summary
from farm.store import tables
from farm.types.request import CARD_CHECK, Request, Sweep
from farm.verdict.checked_cards import LONGEST_AGE_S, CardFigure, levels_of
from farm.verdict.job_results import JobResults
from tests.report import rows

#: Name of the operator of a check -> its FLOPs and bytes, which decide the kind of work.
CHECKED = {"copy": (0, 400_000_000), "mm": (200_000_000_000, 1_000_000), "add_0": (0, 8)}
SLOWER = {"copy": 1.10, "mm": 1.02, "add_0": 1.0}
HUNGRIER = {"copy": 1.05, "mm": 1.0, "add_0": 1.0}
FIGURES = 3  # of each operator


def gaps_of_times(jobs, *, checked):
    return [job.gaps(checked=checked)["time"] for job in jobs]


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("place", PLACES)
def test_the_gap_of_simulated_cards_closes_and_its_interval_holds(place, difference):
    slower = DIFFERENCES[difference]
    generator = np.random.default_rng(7)
    jobs = [simulated_job(generator, slower, place) for _ in range(60)]
    before, _, _ = summary(gaps_of_times(jobs, checked=False))
    checked = [job.gaps(checked=True) for job in jobs]
    gap, half_width, inside = summary([gaps["time"] for gaps in checked])
    assert gap < max(0.005, before / 4)
    assert inside >= 0.95
    assert half_width < 0.02
    assert gap < before + 0.001, "checks do no harm"
    _, _, inside = summary([gaps["energy"] for gaps in checked])
    assert inside >= 0.95


def test_wholes_on_both_cards_are_as_precise_as_their_checks():
    """Without checks, the interval of the wholes contains all of their difference."""
    generator = np.random.default_rng(3)
    same_in_all = dict.fromkeys(EQUAL, 0.03)
    jobs = [
        simulated_job(generator, same_in_all, "wholes on both, half of the tuples on each")
        for _ in range(40)
    ]
    _, before, _ = summary(gaps_of_times(jobs, checked=False))
    _, half_width, inside = summary(gaps_of_times(jobs, checked=True))
    assert half_width < before / 2
    assert inside >= 0.95


def test_the_interval_holds_if_operators_of_a_kind_differ_more_than_repeated_readings():
    generator = np.random.default_rng(5)
    place = "whole on one card, tuples on the other"
    jobs = [simulated_job(generator, OPPOSITE, place, spread=4.0) for _ in range(100)]
    _, half_width, inside = summary(gaps_of_times(jobs, checked=True))
    assert inside >= 0.9
    assert half_width > 0.02


def figures(ratios: Mapping[str, float], noise: float = 0.0) -> list[CardFigure]:
    """Three figures of memory on each card; every second value is larger by ``noise``."""
    made = []
    for number in range(FIGURES):
        for place, (card_id, ratio) in enumerate(ratios.items()):
            time = math.log(100 * ratio) + noise * ((number + place) % 2)
            made.append(CardFigure((f"figure {number}",), "memory", card_id, time, None))
    return made


def test_a_level_is_relative_to_the_mean_of_the_cards():
    levels = levels_of(figures({"a": 1.0, "b": 1.04, "c": 1.02}), "abc")
    (level,) = levels.values()
    assert level.of_card["b"] - level.of_card["a"] == pytest.approx(math.log(1.04), rel=0.01)
    assert sum(level.of_card.values()) == pytest.approx(0)
    assert level.figures == FIGURES


def test_figures_that_differ_widen_the_interval_and_noise_restates_nothing():
    (precise,) = levels_of(figures({"a": 1.0, "b": 1.04}), "ab").values()
    (noisy,) = levels_of(figures({"a": 1.0, "b": 1.04}, noise=0.03), "ab").values()
    assert noisy.half_width > 3 * precise.half_width
    (equal,) = levels_of(figures({"a": 1.0, "b": 1.001}, noise=0.01), "ab").values()
    assert set(equal.of_card.values()) == {0.0}


def test_a_figure_that_one_card_lacks_does_not_count():
    lacking = [each for each in figures({"a": 1.0, "b": 1.04}) if each.card_id == "a"]
    assert levels_of(lacking, "ab") == {}


def add_check(
    session,
    card_id: str,
    slower: Mapping[str, float],
    hungrier: Mapping[str, float],
    *,
    job_id: str = "",
    state: str = "done",
    **columns,
) -> None:
    """Store a check of a card. ``columns``: of its readings."""
    request = Request(sweep=Sweep(CARD_CHECK, {}, "check"))
    job_id = job_id or f"check-{card_id[4:8]}"
    rows.job(session, request, job_id, state=state)
    for name, (flops, bytes_moved) in CHECKED.items():
        for number in range(FIGURES):
            label = f"check {number}"
            key = f"{name}-{label}".replace(" ", "")
            if session.get(tables.Operator, key) is None:
                rows.operator(session, name, label, flops, bytes_moved)
                session.flush()
            time_us = 100.0 * (number + 1) * slower[name]
            energy_mj = 50.0 * (number + 1) * hungrier[name]
            more = {"created_at_s": 1000.0} | columns
            reading_id = rows.reading(session, key, time_us, energy_mj, card_id, **more)
            rows.item(session, job_id, "tuple", key, reading_id=reading_id, card_id=card_id)


ONES = dict.fromkeys(CHECKED, 1.0)


@pytest.fixture
def job(any_database):
    """Convolutions and the whole on one card, additions on the other; all read at 1,000 s."""
    rows.model_job(any_database)
    with any_database.write() as session:
        for reading in session.exec(select(tables.ReadingRow)):
            reading.created_at_s = 1000.0
    return any_database


def verdict_of(database):
    with database.read() as session:
        return JobResults(session, session.get_one(tables.Job, "job1"), 1).verdict()


def test_a_tuple_is_restated_to_the_card_of_the_whole(job):
    before = verdict_of(job)
    with job.write() as session:
        add_check(session, rows.CARD, ONES, ONES)
        add_check(session, rows.OTHER_CARD, SLOWER, HUNGRIER)
    after = verdict_of(job)
    costs = {line.subject.label: line.cost for line in after.tuples if line.cost}
    for line in before.tuples:
        if line.cost is None:
            continue
        restated = costs[line.subject.label]
        is_other = line.card_id == rows.OTHER_CARD
        slower, hungrier = (1.10, 1.05) if is_other else (1.0, 1.0)
        assert restated.time_us.value == pytest.approx(line.cost.time_us.value / slower, rel=1e-3)
        assert restated.energy_mj.value == pytest.approx(
            line.cost.energy_mj.value / hungrier, rel=1e-2
        )
    assert "Card checks of 2 cards (9 figures) restate the tuples" in after.systematic_note
    assert "-0.9% of the time" in after.systematic_note
    assert "do not include" not in after.systematic_note
    # The canary is a convolution, 2 % slower on the other card: the checks explain it.
    assert before.systematic_time == pytest.approx(1.5 / 151.5)
    assert after.systematic_time < 0.001


@pytest.mark.parametrize(
    "columns",
    [
        {"created_at_s": 1000.0 + LONGEST_AGE_S + 1},
        {"created_at_s": 1000.0 - LONGEST_AGE_S - 1},
        {"flags": ["shared"]},
        {"software_id": "other"},
        {"state": "cancelled"},
    ],
    ids=str,
)
def test_a_check_that_says_nothing_about_the_readings_changes_no_verdict(job, columns):
    before = verdict_of(job)
    with job.write() as session:
        session.add(tables.SoftwareRow(id="other", torch="2.12.0"))
        session.flush()
        add_check(session, rows.CARD, ONES, ONES)
        add_check(session, rows.OTHER_CARD, SLOWER, HUNGRIER, **columns)
    assert verdict_of(job) == before


def test_of_several_checks_of_a_card_the_nearest_counts(job):
    """A card that was repaired since has other levels."""
    with job.write() as session:
        add_check(session, rows.CARD, ONES, ONES)
        add_check(session, rows.OTHER_CARD, SLOWER, HUNGRIER)
    near = verdict_of(job)
    much_slower = {name: 1.3 for name in CHECKED}
    with job.write() as session:
        for number, age_s in enumerate((-3600.0, 7200.0)):
            columns = {"created_at_s": 1000.0 + age_s, "job_id": f"other{number}"}
            add_check(session, rows.OTHER_CARD, much_slower, ONES, **columns)
    assert verdict_of(job) == near


def test_without_canaries_the_checks_are_in_the_interval(job):
    with job.write() as session:
        for item in session.exec(select(tables.Item).where(tables.Item.role == "canary")):
            item.reading_id = None
    assert "do not include their differences" in verdict_of(job).systematic_note
    with job.write() as session:
        add_check(session, rows.CARD, ONES, ONES)
        add_check(session, rows.OTHER_CARD, SLOWER, HUNGRIER)
    note = verdict_of(job).systematic_note
    assert "No canary compares the 2 cards. Card checks" in note


def test_one_card_without_a_check_changes_no_verdict(job):
    before = verdict_of(job)
    with job.write() as session:
        add_check(session, rows.OTHER_CARD, SLOWER, HUNGRIER)
    assert verdict_of(job) == before


def test_the_tuples_of_the_job_do_not_count_in_a_level(job):
    before = verdict_of(job)
    with job.write() as session:
        add_check(session, rows.CARD, ONES, ONES)
        add_check(session, rows.OTHER_CARD, SLOWER, HUNGRIER)
        # The job has the same tuples as the check.
        capture = session.exec(select(tables.Capture)).one()
        checked = session.exec(
            select(tables.Operator).where(col(tables.Operator.label).contains("check"))
        )
        for number, operator in enumerate(checked):
            session.add(
                tables.Call(capture_id=capture.id, call_index=100 + number, operator_id=operator.id)
            )
    after = verdict_of(job)
    assert "restate" not in after.systematic_note
    assert after.time.total == before.time.total


def test_simulated_differences_are_as_large_as_they_say():
    job = simulated_job(
        np.random.default_rng(1), OPPOSITE, "whole on one card, tuples on the other"
    )
    memory = job.cards.levels["memory", "time"].of_card
    assert math.exp(memory["card-2"] - memory["card-1"]) == pytest.approx(1.04, abs=0.01)
