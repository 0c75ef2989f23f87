"""The gate of a comparison: the rows that it looks at, the uncertainty of a change, and the rule
for paired rounds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from xml.etree import ElementTree

import pytest
import scipy.stats
from sqlalchemy import select, update

from farm.errors import BelowTarget, UsageError
from farm.report.card_spread import USUAL_SPREADS
from farm.report.compare import compare
from farm.report.gate import (
    Gate,
    RowValue,
    card_spread,
    judge,
    judge_rounds,
    round_values,
    student_t,
)
from farm.settings import settings
from farm.store import tables
from farm.types.figure import Figure
from farm.types.variant import Variant
from tests.cli.conftest import farm  # noqa: F401
from tests.report import filled
from tests.report.measured import measured

NEWER = dataclasses.replace(filled.SOFTWARE, torch="2.12.0")
OLDER = dataclasses.replace(filled.SOFTWARE, torch="2.10.0")
CONV = ("time", "type", "Conv2d")


def judged(database, first="torch=2.11", second="torch=2.12", **options):
    gate = Gate.parse(**{"limit": "5%", **options})
    with database.read() as session:
        return judge(session, compare(session, first, second), gate)


def scale(database, torch, short_name, **factors):
    """Multiply the readings of an operator type that were taken with a version of torch."""
    with database.write() as session:
        ids = select(tables.Operator.id).where(tables.Operator.short_name == short_name)
        software = select(tables.SoftwareRow.id).where(tables.SoftwareRow.torch == torch)
        where = (tables.ReadingRow.subject_id.in_(ids), tables.ReadingRow.software_id.in_(software))
        values = {
            name: getattr(tables.ReadingRow, name) * factor for name, factor in factors.items()
        }
        session.execute(update(tables.ReadingRow).where(*where).values(**values))


def findings(judgement):
    return {(row.quantity, row.level, row.name) for row in judgement.findings}


def test_only_rows_of_the_scope_can_fail(any_database):
    filled.fill(any_database)
    filled.fill(any_database, software=NEWER)
    scale(any_database, "2.12.0", "Conv2d", energy_mj=1.5)
    assert ("energy", "type", "Conv2d") in findings(judged(any_database))
    assert findings(judged(any_database, scopes="energy:type")) == {("energy", "type", "Conv2d")}
    tuples = findings(judged(any_database, scopes="energy:tuple", min_share="0"))
    assert len(tuples) > 5
    assert all(name.startswith("Conv2d") for _, _, name in tuples)
    assert findings(judged(any_database, scopes="time:type,time:sum,time:tuple")) == set()


def test_a_row_with_a_small_share_cannot_fail(database):
    filled.fill(database)
    filled.fill(database, software=NEWER)
    scale(database, "2.12.0", "MaxPool2d", time_us=1.3, energy_mj=1.3)
    (row,) = judged(database, scopes="time:type", min_share="0").findings
    assert row.name == "MaxPool2d"
    assert row.share < 0.5
    assert not judged(database, scopes="time:type", min_share=f"{100 * row.share + 0.1}%").findings
    assert judged(database, scopes="time:type", min_share=f"{100 * row.share - 0.1}%").findings


def test_a_change_fails_only_if_its_lower_bound_exceeds_the_limit(database):
    filled.fill(database, half_width=0.02)
    filled.fill(database, software=NEWER, slower=1.1, half_width=0.02)
    (row,) = (row for row in judged(database, scopes="time:tuple", min_share="0").rows[:1])
    assert row.change == pytest.approx(0.1)
    assert row.low == pytest.approx(0.1 - 1.1 * 0.02 * 2**0.5)
    assert judged(database, limit="6.8%", scopes="time:tuple").findings
    assert not judged(database, limit="7%", scopes="time:tuple").findings


def test_the_spread_between_cards_is_part_of_the_uncertainty_if_the_sides_ran_on_different_cards(
    any_database,
):
    filled.fill(any_database, card="GPU-0")
    filled.fill(any_database, card="GPU-1", software=NEWER, slower=1.04)
    unknown = judged(any_database, limit="1%")
    assert (unknown.rows, "spread is unknown" in unknown.unknown) == ((), True)
    with pytest.raises(BelowTarget, match="on different cards"):
        unknown.check()
    # An older version was measured on both cards, which differ by 5 %.
    filled.fill(any_database, card="GPU-0", software=OLDER)
    filled.fill(any_database, card="GPU-1", software=OLDER, slower=1.05)
    with any_database.read() as session:
        assert card_spread(session, "NVIDIA H200") == {
            "time": pytest.approx(0.05),
            "energy": pytest.approx(0.05),
        }
    apart = judged(any_database, limit="1%")
    assert apart.rows
    assert not apart.findings
    assert apart.card_spread["time"] == pytest.approx(0.05)
    # The same change on one card fails.
    filled.fill(
        any_database,
        card="GPU-0",
        software=dataclasses.replace(filled.SOFTWARE, torch="2.13.0"),
        slower=1.04,
    )
    assert judged(any_database, "torch=2.11", "torch=2.13", limit="1%").findings
    # Two card models are compared as they are.
    filled.fill(any_database, card="GPU-2", model="NVIDIA H100", slower=1.04)
    assert judged(any_database, "torch=2.11 card=H200", "card=H100", limit="1%").card_spread == {}


def test_a_comparison_of_single_cards_includes_what_cards_of_one_model_differ_by(database):
    filled.fill(database, card="GPU-0")
    filled.fill(database, card="GPU-9", model="NVIDIA H100", slower=1.03)

    def change():
        with database.read() as session:
            return compare(session, "card=H200 torch=2.11", "card=H100").total.time

    usual = USUAL_SPREADS["time"]
    assert change().between_cards == pytest.approx(usual), "nothing is known about other cards"
    assert change().verdict == "same"

    # An older version was measured on two H200s, which differ by 5 %.
    filled.fill(database, card="GPU-0", software=OLDER)
    filled.fill(database, card="GPU-1", software=OLDER, slower=1.05)
    time = change()
    assert time.between_cards == pytest.approx(math.hypot(0.05, usual) / 2**0.5)
    assert time.change.half_width > 1.03 * time.between_cards
    assert time.verdict == "same"


def test_jobs_say_on_which_cards_they_ran(database):
    measured(database, Variant("resnet18", 2, 64), "before")
    with database.read() as session:
        side = compare(session, "before", "before").a
    assert len(side.cards) == 1
    assert judged(database, "before", "before").card_spread == {}


def test_a_scope_without_figures_is_no_pass(database):
    filled.fill(database)
    filled.fill(database, software=NEWER)
    with database.write() as session:
        session.execute(update(tables.ReadingRow).values(energy_mj=None))
    with pytest.raises(BelowTarget, match="No row of energy:type has figures"):
        judged(database, scopes="energy:type").check()
    judged(database).check()


@pytest.mark.parametrize("text", ["time", "power:type", "time:kernel", "", "time:type,"])
def test_a_wrong_scope_is_refused(text):
    with pytest.raises(UsageError, match="--scope does not accept"):
        Gate.parse("5%", text)


def test_at_a_terminal_each_finding_has_a_line(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database)
    filled.fill(database, software=NEWER, slower=1.1)
    sides = ("compare", "torch=2.11", "torch=2.12")
    said = farm(*sides, "--fail-above", "5%", "--scope", "time:type,energy:type")
    assert said.code == 5
    head, *lines = said.stderr.splitlines()
    assert head == f"error: B takes over 5 % more than A in {len(lines)} rows:"
    assert any(line.startswith("  time of Conv2d: +10.0 %, at least +9.9 %, ") for line in lines)
    gate = json.loads(farm(*sides, "--fail-above", "5%", "--scope", "time:type", "--json").stdout)[
        "gate"
    ]
    assert (gate["limit"], gate["scope"], gate["min_share"]) == (0.05, ["time:type"], 0.05)
    assert {row["name"] for row in gate["rows"] if row["fails"]} == {
        line.split()[2][:-1] for line in gate["findings"]
    }
    assert farm(*sides, "--scope", "time:type").code == 2
    assert farm(*sides, "--card", "cpu").code == 2
    assert farm(*sides, "--fail-above", "5%", "--min-share", "much").code == 2


# ---- paired rounds


def rounds_of(changes, share=1.0, key=CONV):
    return [
        {key: RowValue(Figure(100.0), Figure(100.0 * (1 + change)), share)} for change in changes
    ]


def test_quantiles_of_student():
    for degrees in (1, 2, 5, 8, 29, 59):
        for probability in (0.5, 0.9, 0.99, 0.9995):
            assert student_t(probability, degrees) == pytest.approx(
                scipy.stats.t.ppf(probability, degrees), abs=1e-6
            )


def test_paired_rounds_alarm_in_one_of_a_hundred_comparisons_whose_change_is_the_limit():
    noise, alarms = random.Random(7), 0
    gate = Gate(0.03, (CONV[:2],))
    for _ in range(3000):
        rounds = [
            {**one, **other}
            for one, other in zip(
                rounds_of([1.03 * (1 + noise.gauss(0, 0.02)) - 1 for _ in range(6)]),
                rounds_of(
                    [1.03 * (1 + noise.gauss(0, 0.02)) - 1 for _ in range(6)],
                    key=("time", "type", "Linear"),
                ),
                strict=True,
            )
        ]
        alarms += bool(judge_rounds(rounds, gate).findings)
    low, high = (scipy.stats.binom.ppf(level, 3000, 0.01) for level in (0.001, 0.999))
    assert low <= alarms <= high


def test_paired_rounds_find_a_change_that_is_larger_than_the_noise():
    found = judge_rounds(rounds_of([0.052, 0.049, 0.05, 0.047, 0.053, 0.05]), Gate(0.03))
    (row,) = found.findings
    assert row.change == pytest.approx(0.05, abs=0.001)
    assert 0.03 < row.low < row.change < row.high
    assert row.rounds == 6
    assert not judge_rounds(rounds_of([0.3, -0.1, 0.1, -0.2, 0.25, -0.05]), Gate(0.03)).findings
    small = judge_rounds(rounds_of([0.05] * 6, share=0.04), Gate(0.03))
    assert (small.rows, "5.0 %" in small.unknown) == ((), True)
    with pytest.raises(BelowTarget):
        judge_rounds(rounds_of([0.05] * 2), Gate(0.03)).check()


def test_a_round_with_a_doubtful_reading_does_not_count_for_the_rows_with_it(database):
    for job_id in ("one", "two"):
        measured(database, Variant("resnet18", 2, 64), job_id)
    gate = Gate()
    with database.read() as session:
        every = round_values(session, "one", "two", gate)
    assert {key[:2] for key in every if key[0] == "time"} == {
        ("time", level) for level in ("whole", "sum", "type")
    }
    with database.write() as session:
        item = session.execute(
            select(tables.Item)
            .join(tables.Operator, tables.Operator.id == tables.Item.subject_id)
            .where(tables.Item.job_id == "two", tables.Operator.short_name == "MaxPool2d")
        ).scalar_one()
        where = tables.ReadingRow.id == item.reading_id
        session.execute(update(tables.ReadingRow).where(where).values(flags=["throttled_thermal"]))
    with database.read() as session:
        left = round_values(session, "one", "two", gate)
    assert {key[1:] for key in every.keys() - left.keys()} == {
        ("sum", "sum of the tuples"),
        ("type", "MaxPool2d"),
    }
    with database.write() as session:
        session.execute(
            update(tables.ReadingRow)
            .where(where)
            .values(flags=["not_converged", "throttled_power"])
        )
    with database.read() as session:
        assert round_values(session, "one", "two", gate).keys() == every.keys()


def test_ci_systems_get_a_markdown_summary_a_junit_report_and_a_list_of_failed_rows(
    database, farm, monkeypatch
):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database)
    filled.fill(database, software=NEWER)
    scale(database, "2.12.0", "Conv2d", energy_mj=1.5)
    arguments = ("compare", "torch=2.11", "torch=2.12", "--fail-above", "5%")
    summary = farm(*arguments, "--format", "markdown")
    failed = json.loads(farm(*arguments, "--format", "json").stdout)["gate"]["failed"]
    assert summary.code == 5
    assert (
        f"**{len(failed)} rows failed** (limit 5.0 %). A: `torch=2.11`, B: `torch=2.12`."
        in summary.stdout
    )
    assert "| energy of Conv2d |" in summary.stdout
    assert summary.stdout.count("**fail**") == len(failed) > 1
    cases = ElementTree.fromstring(farm(*arguments, "--format", "junit").stdout)
    assert len(cases.findall("testcase/failure")) == len(failed)
    assert farm(*arguments[:3], "--format", "markdown").code == 0, "no limit: no row fails"
    wrong = farm(*arguments, "--format", "html")
    assert (wrong.code, wrong.stdout) == (2, "")
    assert "table, json, markdown, junit" in wrong.stderr
