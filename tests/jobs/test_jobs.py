"""Planning asks the database first, spreads what is left over the cards, and holds each card
against itself.
"""

from __future__ import annotations

import os
import subprocess

import pytest

from farm.errors import NoSuchCard, UsageError
from farm.jobs import cards, jobs, listing
from farm.jobs.items import Claim
from farm.settings import settings
from farm.store import tables
from farm.store.database import read_clock_s
from farm.store.tables import ItemState
from tests.farms import store_operators
from tests.planned import claim, complete, items_of, plan, plan_model, readings, register, sweep


def measure_all(database, job_id):
    for item in items_of(database, job_id):
        if item.state == ItemState.WAITING and isinstance(held := claim(database, item), Claim):
            complete(database, held, item.card_id)


@pytest.fixture
def two_cards(any_database):
    return register(any_database, 0, 1)


@pytest.mark.parametrize(
    ("reuse", "same_card", "new"),
    [("model", False, 0), ("card", True, 0), ("card", False, 2), ("none", True, 2)],
)
def test_what_was_read_is_not_read_again_unless_asked(
    any_database, two_cards, reuse, same_card, new
):
    first, second = two_cards
    operators = store_operators(any_database, ["", ""])
    measure_all(any_database, plan(any_database, [first], operators=operators))
    chosen = first if same_card else second
    planned = jobs.create(any_database, sweep(2, reuse=reuse), [chosen], operator_ids=operators)
    assert (planned.new, planned.reused) == (new, 2 - new)


def test_tuples_are_spread_over_the_cards_with_a_whole_and_a_canary_on_each(
    any_database, two_cards
):
    job_id = plan_model(any_database, two_cards, ["Conv2d", "ReLU", "Linear", "add"])
    by_role = {role: items_of(any_database, job_id, role) for role in ("tuple", "whole", "canary")}
    assert sorted(item.card_id for item in by_role["tuple"]) == ["SIM-0", "SIM-0", "SIM-1", "SIM-1"]
    assert sorted(item.card_id for item in by_role["whole"]) == two_cards
    assert sorted(item.card_id for item in by_role["canary"]) == two_cards
    assert len({item.subject_id for item in by_role["canary"]}) == 1


def test_a_card_that_has_work_ahead_is_given_less(any_database, two_cards):
    busy, free = two_cards
    plan(any_database, [busy], number=4)
    spread = items_of(any_database, plan(any_database, two_cards, number=4))
    assert [item.card_id for item in spread].count(free) == 4


def test_a_job_whose_command_was_killed_says_so_and_measures_nothing(any_database, two_cards):
    job_id = plan(any_database, two_cards, number=4)
    claim(any_database, items_of(any_database, job_id)[0])

    def told(farm):
        with any_database.write() as session:
            session.get_one(tables.Job, job_id).farm = farm
        with any_database.read() as session:
            found = jobs.progress(session, job_id)
        assert found.over is found.abandoned is bool(found.message)
        return found.message, len(found.current)

    ended = subprocess.Popen(["true"])
    ended.wait()
    here = settings().host
    assert told(cards.farm_name(here, os.getpid(), "ab")) == ("", 1)
    assert told(cards.farm_name("another", ended.pid, "ab")) == ("", 1), "only its host could tell"
    assert told(cards.farm_name(here, ended.pid, "ab")) == (jobs.ABANDONED, 0)


def test_a_farm_is_gone_if_another_process_has_its_id():
    farm = cards.farm_name("here", os.getpid(), "ab")
    assert not cards.is_gone(farm, "here")
    prefix, _, rest = farm.rpartition(f"{os.getpid()}:")
    started = rest.partition(":")[0]
    assert cards.is_gone(f"{prefix}{os.getpid()}:{int(started) - 1}:ab", "here"), (
        "a process that began earlier"
    )
    assert not cards.is_gone(f"{prefix}{os.getpid()}:ab", "here"), (
        "names without a start go by the id alone"
    )
    assert not cards.is_gone(farm, "another")
    assert not cards.is_gone("", "here")


def test_a_runs_job_is_taken_over_when_its_workers_are_long_unseen_or_the_run_is_known_to_have_ended(
    any_database,
):
    (card_id,) = register(any_database, 0)
    job_id = plan(any_database, [card_id])
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = settings().host

    def taken_from(farm, unseen_s=0.0):
        with any_database.write() as session:
            session.get_one(tables.Job, job_id).farm = farm
            card = session.get_one(tables.CardRow, card_id)
            card.worker = cards.holder_name(card_id, here, 1, "tag", farm)
            card.last_seen_at_s = read_clock_s(session) - unseen_s
        taken = jobs.take_over(any_database, job_id, "another", heartbeat_s=5.0)
        with any_database.read() as session:
            assert session.get_one(tables.Job, job_id).farm == ("another" if taken else farm)
        return taken

    assert not taken_from(cards.farm_name(here, os.getpid(), "ab"))
    assert taken_from(cards.farm_name(here, os.getpid(), "ab"), unseen_s=60.0)
    assert taken_from(cards.farm_name(here, ended.pid, "ab"))
    assert not taken_from(cards.farm_name("elsewhere", ended.pid, "ab")), "only its host could tell"


def test_a_canary_is_read_beside_the_tuple_it_repeats(any_database, two_cards):
    job_id = plan_model(any_database, two_cards, ["Conv2d", "ReLU"])
    measure_all(any_database, job_id)
    assert readings(any_database) == 2 + 2 + 1, (
        "on its own card the canary is served by the tuple's reading"
    )


def test_cards_of_several_kinds_or_none_are_refused(any_database):
    register(any_database, 0)
    register(any_database, 1, model="another card")
    with pytest.raises(UsageError, match="several card models"):
        plan(any_database, ["SIM-0", "SIM-1"])
    with pytest.raises(NoSuchCard):
        plan(any_database, ["SIM-9"])
    with pytest.raises(NoSuchCard):
        plan(any_database, [])


def test_a_job_whose_card_died_in_the_middle_of_an_item_says_what_it_waits_for(any_database):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card])
    (item,) = items_of(any_database, job_id)
    claim(any_database, item, lease_s=60)
    with any_database.write() as session:
        row = session.get_one(tables.CardRow, card)
        row.last_seen_at_s -= 3600
        session.add(row)
    with any_database.read() as session:
        assert jobs.progress(session, job_id).current == ((card, item_label(session, item)),)
    with any_database.write() as session:
        row = session.get_one(tables.Item, item.id)
        row.lease_until_s -= 3600
        session.add(row)
    with any_database.read() as session:
        told = jobs.progress(session, job_id)
    assert told.current == ()
    assert told.message.startswith("1 item waits for SIM-0 (lost)")


def item_label(session, item):
    return session.get_one(tables.Operator, item.subject_id).label


def test_progress_counts_what_is_left(any_database, two_cards):
    job_id = plan(any_database, two_cards[:1], number=3)
    first = items_of(any_database, job_id)[0]
    complete(any_database, claim(any_database, first), first.card_id)
    with any_database.read() as session:
        progress = jobs.progress(session, job_id)
    assert (progress.closed, progress.total) == (1, 3)
    assert progress.expected_left_s == pytest.approx(2 * first.expected_s)
    assert jobs.cancel(any_database, job_id) == 2
    assert jobs.cancel(any_database, job_id) == 0
    with any_database.read() as session:
        progress, (row,) = jobs.progress(session, job_id), listing.jobs(session, 1)
    assert (progress.state, progress.closed, progress.total) == ("cancelled", 1, 3)
    assert (row["closed"], row["items"]) == (1, 3)
