"""Work moves away from cards that are gone and towards cards that run dry; nothing is lost or
doubled on the way.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
from sqlalchemy import update
from sqlmodel import select

from farm.devices.simulated import SOFTWARE
from farm.jobs import items, jobs
from farm.jobs.balance import CardQueue, QueuedItem, assign, balance
from farm.jobs.closing import Closing, close_round
from farm.jobs.moving import give_up, move_items, rebalance
from farm.jobs.rounds import add_round
from farm.store import content, tables
from farm.store.tables import ItemState
from farm.types.request import Request
from tests.planned import claim, complete, items_of, plan, plan_model, register
from tests.statements import meanwhile


def cards_of(database, ids):
    with database.read() as session:
        return [session.get_one(tables.CardRow, card_id) for card_id in ids]


def test_a_lost_cards_items_move_and_its_late_write_is_fenced_out(any_database):
    lost, peer = register(any_database, 0, 1)
    job_id = plan(any_database, [lost], number=3)
    first = items_of(any_database, job_id)[0]
    held = claim(any_database, first)
    assert len(move_items(any_database, lost, [])) == 0, "without a peer they wait"
    assert sorted(move_items(any_database, lost, cards_of(any_database, [peer]))) == [
        item.id for item in items_of(any_database, job_id)
    ]
    assert {(item.card_id, item.state) for item in items_of(any_database, job_id)} == {
        (peer, ItemState.WAITING)
    }
    assert not complete(any_database, held, lost).accepted
    assert complete(
        any_database, claim(any_database, items_of(any_database, job_id)[0]), peer
    ).accepted


def test_of_a_job_that_is_cancelled_meanwhile_nothing_is_left_to_measure(any_database):
    lost, idle = register(any_database, 0, 1)
    for what in ("move", "balance"):
        job_id = plan_model(any_database, [lost], ["Conv2d", "ReLU", "Linear"])
        with meanwhile(any_database, "UPDATE item SET", partial(jobs.cancel, any_database, job_id)):
            if what == "move":
                move_items(any_database, lost, cards_of(any_database, [idle]))
            else:
                rebalance(any_database, cards_of(any_database, [lost, idle]), idle_within_s=10.0)
        assert {item.state for item in items_of(any_database, job_id)} == {"cancelled"}


def test_a_draining_card_finishes_what_it_has_in_work(any_database):
    draining, peer = register(any_database, 0, 1)
    job_id = plan(any_database, [draining], number=3)
    held = claim(any_database, items_of(any_database, job_id)[0])
    assert (
        len(move_items(any_database, draining, cards_of(any_database, [peer]), in_work=False)) == 2
    )
    assert complete(any_database, held, draining).accepted


def measure(database, job_id, *, on=None):
    """Everything that waits, or what waits on one card."""
    for item in items_of(database, job_id):
        if item.state == ItemState.WAITING and on in (None, item.card_id):
            held = claim(database, item)
            if isinstance(held, items.Claim):  # a canary's reading may be there by then
                complete(database, held, item.card_id)


def states(database, job_id, role="whole"):
    return {item.card_id: item.state for item in items_of(database, job_id, role)}


def verdict_of(database, job_id):
    with database.read() as session:
        return session.exec(
            select(tables.VerdictRow).where(tables.VerdictRow.job_id == job_id)
        ).one()


def test_a_whole_does_not_move_but_waits_and_the_card_that_steps_in_measures_its_own(any_database):
    lost, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [lost], ["Conv2d", "ReLU"])
    move_items(any_database, lost, cards_of(any_database, [peer]))
    assert states(any_database, job_id) == {lost: "waiting", peer: "waiting"}
    assert {item.card_id for item in items_of(any_database, job_id, "tuple")} == {peer}


def test_cards_that_are_away_for_a_moment_one_after_the_other_find_their_wholes(any_database):
    pair = register(any_database, 0, 1)
    job_id = plan_model(any_database, pair, ["Conv2d", "ReLU", "Linear", "Add"])
    for away, there in (pair, reversed(pair)):
        peers = cards_of(any_database, [there])
        move_items(any_database, away, peers)
        assert give_up(any_database, [away], peers) == []
    assert set(states(any_database, job_id).values()) == set(
        states(any_database, job_id, "canary").values()
    )
    assert set(states(any_database, job_id).values()) == {"waiting"}
    measure(any_database, job_id)
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    assert verdict_of(any_database, job_id).accuracy_time is not None


def test_a_card_that_comes_back_from_a_drain_reads_the_whole_for_what_it_gives(any_database):
    drained, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [drained, peer], [f"Type{number}" for number in range(12)])
    move_items(any_database, drained, cards_of(any_database, [peer]), in_work=False)
    assert give_up(any_database, [drained], cards_of(any_database, [peer])) == []
    rebalance(any_database, cards_of(any_database, [drained, peer]), idle_within_s=10.0)
    measure(any_database, job_id)
    assert drained in {item.card_id for item in items_of(any_database, job_id, "tuple")}
    assert states(any_database, job_id) == {drained: "done", peer: "done"}


def test_the_whole_of_a_card_that_stays_away_is_given_up_when_its_job_waits_for_nothing_else(
    any_database,
):
    lost, other, third = register(any_database, 0, 1, 2)
    job_id = plan_model(any_database, [lost, other, third], ["Conv2d", "ReLU", "Linear"])
    peers = cards_of(any_database, [third])
    move_items(any_database, lost, peers)
    move_items(any_database, other, peers)
    for item in items_of(any_database, job_id, "tuple")[:-1]:
        complete(any_database, claim(any_database, item), item.card_id)
    assert give_up(any_database, [lost, other], peers) == [], "a tuple is open"
    measure(any_database, job_id, on=third)
    assert give_up(any_database, [lost, other], []) == [], "nobody else is there"
    assert close_round(any_database, job_id, 1).closing is Closing.OPEN
    assert give_up(any_database, [lost, other], peers) == []
    assert states(any_database, job_id) == {lost: "failed", other: "failed", third: "done"}
    assert {item.reason for item in items_of(any_database, job_id) if item.state == "failed"} == {
        "card_left"
    }
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    assert verdict_of(any_database, job_id).accuracy_time is not None


def test_a_card_that_gave_to_the_sum_is_waited_for_longer_than_one_that_did_not(any_database):
    gave, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [gave, peer], ["Conv2d", "ReLU"], reuse="none")
    (of_it,) = [item for item in items_of(any_database, job_id, "tuple") if item.card_id == gave]
    complete(any_database, claim(any_database, of_it), gave)
    measure(any_database, job_id, on=peer)
    peers = cards_of(any_database, [peer])
    give_up(any_database, [gave], peers, for_now=[gave])
    assert states(any_database, job_id) == {gave: "waiting", peer: "done"}
    give_up(any_database, [gave], peers)
    assert states(any_database, job_id) == {gave: "failed", peer: "done"}

    job_id = plan_model(any_database, [gave, peer], ["Conv2d", "ReLU"], reuse="none")
    move_items(any_database, gave, peers)
    measure(any_database, job_id, on=peer)
    give_up(any_database, [gave], peers, for_now=[gave])
    assert states(any_database, job_id) == {gave: "failed", peer: "done"}


def test_where_no_whole_would_be_left_a_card_that_is_there_reads_one(any_database):
    lost, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [lost], ["Conv2d", "ReLU"])
    for item in items_of(any_database, job_id, "tuple"):
        complete(any_database, claim(any_database, item), lost)
    (asked,) = give_up(any_database, [lost], cards_of(any_database, [peer]))
    assert [(item.id, item.card_id) for item in items_of(any_database, job_id, "whole")][1:] == [
        (asked, peer)
    ]
    # The other goes as well, and the first is back: the row that was given up is taken up again.
    (again,) = give_up(any_database, [peer], cards_of(any_database, [lost]))
    assert again == items_of(any_database, job_id, "whole")[0].id
    measure(any_database, job_id)
    assert states(any_database, job_id) == {lost: "done", peer: "failed"}
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    assert verdict_of(any_database, job_id).accuracy_time is not None


def test_a_whole_that_cannot_be_read_is_not_tried_on_a_card_after_the_other(any_database):
    lost, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [lost, peer], ["Conv2d", "ReLU"])
    move_items(any_database, lost, cards_of(any_database, [peer]))
    (whole,) = [item for item in items_of(any_database, job_id, "whole") if item.card_id == peer]
    items.fail(any_database, claim(any_database, whole), "out_of_memory", "no")
    measure(any_database, job_id, on=peer)
    assert give_up(any_database, [lost], cards_of(any_database, [peer])) == []
    assert states(any_database, job_id) == {lost: "failed", peer: "failed"}


def test_what_a_draining_card_has_in_work_is_not_given_up(any_database):
    draining, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [draining], ["Conv2d"])
    held = claim(any_database, items_of(any_database, job_id, "whole")[0])
    move_items(any_database, draining, cards_of(any_database, [peer]), in_work=False)
    measure(any_database, job_id, on=peer)
    assert give_up(any_database, [draining], cards_of(any_database, [peer])) == []
    assert complete(any_database, held, draining).accepted


def test_a_card_that_first_gives_in_a_further_round_reads_the_whole_too(any_database):
    first, second = register(any_database, 0, 1)
    job_id = plan_model(
        any_database, [first, second], ["Conv2d", "ReLU", "Linear"], scope=("Conv2d",)
    )
    measure(any_database, job_id)
    (whole,) = items_of(any_database, job_id, "whole")
    with any_database.write() as session:
        job = session.get_one(tables.Job, job_id)
        capture_id = session.get_one(tables.Round, (job_id, 1)).capture_id
        add_round(session, job, scope=("all",), capture_id=capture_id, reason="below the target")
    assert {item.card_id for item in items_of(any_database, job_id, "tuple")} == {first, second}
    wholes = items_of(any_database, job_id, "whole")
    assert {(item.round, item.state) for item in wholes if item.id != whole.id} == {(2, "waiting")}
    assert {item.card_id for item in wholes} == {first, second}


def test_an_idle_card_takes_half_of_what_waits_on_the_fullest(any_database):
    full, idle = register(any_database, 0, 1)
    job_id = plan(any_database, [full], number=9)
    held = claim(any_database, items_of(any_database, job_id)[0])
    moved = rebalance(any_database, cards_of(any_database, [full, idle]), idle_within_s=1.0)
    assert len(moved) == 4
    assert held.item_id not in moved
    assert {item.card_id for item in items_of(any_database, job_id) if item.id in moved} == {idle}
    assert rebalance(any_database, cards_of(any_database, [full, idle]), idle_within_s=1.0) == []


def test_what_two_hosts_would_move_at_the_same_time_moves_once(any_database):
    full, idle = register(any_database, 0, 1)
    plan(any_database, [full], number=9)
    both = cards_of(any_database, [full, idle])
    with meanwhile(
        any_database, "UPDATE item SET", partial(rebalance, any_database, both, idle_within_s=1.0)
    ) as second:
        first = rebalance(any_database, both, idle_within_s=1.0)
    assert (len(first), second) == (4, [[]]), "each that is moved gets one message more"


def pin(database, job_id):
    """As if its cards had been named by a person."""
    with database.write() as session:
        job = session.get_one(tables.Job, job_id)
        job.request = {**job.request, "pinned": True}
        session.add(job)


def test_an_idle_card_takes_nothing_of_a_job_for_which_a_person_named_another(any_database):
    full, idle = register(any_database, 0, 1)
    pin(any_database, plan(any_database, [full], number=9))
    assert rebalance(any_database, cards_of(any_database, [full, idle]), idle_within_s=1.0) == []


def test_a_job_for_which_a_person_named_cards_is_balanced_among_those(any_database):
    full, named, other = register(any_database, 0, 1, 2)
    job_id = plan(any_database, [full], number=8)
    with any_database.write() as session:
        job = session.get_one(tables.Job, job_id)
        job.request = {**job.request, "cards": [full, named]}
        session.add(job)
    pin(any_database, job_id)
    free = plan(any_database, [full], number=4)
    assert rebalance(any_database, cards_of(any_database, [full, named, other]), idle_within_s=1.0)
    assert {item.card_id for item in items_of(any_database, job_id)} == {full, named}
    assert other in {item.card_id for item in items_of(any_database, free)}


def test_a_lost_cards_items_stay_where_a_person_named_no_other(any_database):
    lost, peer, third = register(any_database, 0, 1, 2)
    alone, pair = plan(any_database, [lost], number=2), plan(any_database, [lost, peer], number=4)
    pin(any_database, alone)
    pin(any_database, pair)
    anywhere = plan(any_database, [lost], number=9)
    move_items(any_database, lost, cards_of(any_database, [peer, third]))
    assert {item.card_id for item in items_of(any_database, alone)} == {lost}
    assert {item.card_id for item in items_of(any_database, pair)} == {peer}
    assert {item.card_id for item in items_of(any_database, anywhere)} == {peer, third}


def test_no_card_that_nobody_named_reads_a_whole_in_anothers_place(any_database):
    lost, peer = register(any_database, 0, 1)
    job_id = plan_model(any_database, [lost], ["Conv2d"])
    pin(any_database, job_id)
    (item,) = items_of(any_database, job_id, "tuple")
    complete(any_database, claim(any_database, item), lost)
    assert give_up(any_database, [lost], cards_of(any_database, [peer])) == []
    assert states(any_database, job_id) == {lost: "waiting"}


def test_a_job_says_what_it_waits_for(any_database):
    from farm.jobs import cards

    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=2)
    with any_database.read() as session:
        assert jobs.progress(session, job_id).message == ""
    cards.quarantine(any_database, card, "a wrong sum")
    with any_database.read() as session:
        message = jobs.progress(session, job_id).message
    assert "2 items wait for SIM-0 (quarantined)" in message
    assert "farm cards release SIM-0" in message
    with any_database.write() as session:
        row = session.get_one(tables.CardRow, card)
        row.state, row.last_seen_at_s = "idle", row.last_seen_at_s - 1000
        session.add(row)
    with any_database.read() as session:
        assert "farm worker" in jobs.progress(session, job_id).message
    with any_database.write() as session:
        session.get_one(tables.Job, job_id).farm = "farm-of-a-command"
    with any_database.read() as session:
        assert "when you repeat it" in jobs.progress(session, job_id).message


def test_retrying_failures_makes_the_newest_verdict_anew(any_database):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=2)
    good, bad = items_of(any_database, job_id)
    complete(any_database, claim(any_database, good), card)
    items.fail(any_database, claim(any_database, bad), "raised", "no")
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    assert close_round(any_database, job_id, 1).closing is Closing.ALREADY
    assert jobs.retry_failed(any_database, job_id) == 1
    again = items_of(any_database, job_id)[1]
    assert (again.state, again.attempts, again.reason) == (ItemState.WAITING, 0, "")
    complete(any_database, claim(any_database, again), card)
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    with any_database.read() as session:
        assert len(session.exec(tables.VerdictRow.__table__.select()).all()) == 1  # type: ignore[attr-defined]


def done(database, job_id):
    """Whether a finished job is found that asked the same as this one."""
    with database.read() as session:
        request = Request.from_json(session.get_one(tables.Job, job_id).request)
        return request.id in jobs.done_entries(session, [request])


def test_retrying_a_cancelled_job_takes_along_what_was_cancelled_and_keeps_what_was_read_since(
    any_database,
):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=5)
    failed, read, in_work, let_go, _ = items_of(any_database, job_id)
    items.fail(any_database, claim(any_database, failed), "raised", "no")
    late, still = claim(any_database, read), claim(any_database, in_work)
    claim(any_database, let_go, "gone", lease_s=-1)
    jobs.cancel(any_database, job_id)
    complete(any_database, late, card)
    assert jobs.retry_failed(any_database, job_id) == 4
    assert [item.state for item in items_of(any_database, job_id)] == [
        "waiting",
        "done",
        "claimed",
        "waiting",
        "waiting",
    ]
    assert complete(any_database, still, card).accepted
    assert close_round(any_database, job_id, 1).closing is Closing.OPEN
    measure(any_database, job_id)
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    assert states(any_database, job_id, "tuple") == {card: "done"}
    assert done(any_database, job_id)


def test_a_job_that_was_read_to_its_end_after_its_cancel_gets_its_verdict_when_it_is_tried_again(
    any_database,
):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card])
    held = claim(any_database, items_of(any_database, job_id)[0])
    jobs.cancel(any_database, job_id)
    complete(any_database, held, card)
    assert not done(any_database, job_id)
    assert jobs.retry_failed(any_database, job_id) == 0
    assert close_round(any_database, job_id, 1).closing is Closing.DONE
    assert done(any_database, job_id)


@pytest.mark.parametrize("how", ["cancelled", "of another software"])
def test_a_job_with_something_cancelled_or_of_several_softwares_is_not_done(any_database, how):
    (card,) = register(any_database, 0)
    job_id = plan(any_database, [card], number=2)
    newer = dataclasses.replace(SOFTWARE, torch="9.9.9")
    with any_database.write() as session:
        content.store_software(session, newer)
    one, other = items_of(any_database, job_id)
    complete(any_database, claim(any_database, one), card)
    assert close_round(any_database, job_id, 1).closing is Closing.OPEN
    held = claim(any_database, other, software_id=newer.id)
    complete(any_database, held, card, software_id=SOFTWARE.id if how == "cancelled" else newer.id)
    close_round(any_database, job_id, 1)
    assert done(any_database, job_id) == (how == "cancelled")
    with any_database.write() as session:
        session.execute(
            update(tables.Item).where(tables.Item.id == other.id).values(state=ItemState.CANCELLED)
        )
    assert not done(any_database, job_id)


# -------------------------------------------------------------------------------------------- the
# arithmetic


def test_longest_first_onto_the_card_that_ends_it_first():
    placed = assign(
        [QueuedItem(0, 3.0), QueuedItem(1, 2.0), QueuedItem(2, 2.0)], {"a": 0.0, "b": 0.0}
    )
    assert placed == {0: "a", 1: "b", 2: "b"}


@pytest.mark.parametrize("slowness", [1.0, 4.0])
def test_balancing_leaves_nobody_idle_and_gains_time(slowness):
    queues = [
        CardQueue("full", [QueuedItem(number, 1.0) for number in range(100)], 0.5),
        CardQueue("dry", [], 0.0, slowness),
    ]
    moves = balance(queues, idle_within_s=2.0)
    assert set(moves.values()) == {"dry"}
    ends = (100 - len(moves) + 0.5, len(moves) * slowness)
    assert max(ends) < 1.1 * 100.5 / (1 + 1 / slowness)


def test_cards_with_enough_to_do_are_left_alone():
    queues = [
        CardQueue("a", [QueuedItem(n, 1.0) for n in range(50)]),
        CardQueue("b", [QueuedItem(99, 10.0)]),
    ]
    assert balance(queues, idle_within_s=5.0) == {}


def test_the_last_item_is_not_handed_to_and_fro():
    queues = [CardQueue("a", [QueuedItem(1, 1.0)]), CardQueue("b", [])]
    assert balance(queues, idle_within_s=10.0) == {}


def test_a_hundred_cards_end_within_5_percent_of_the_best_possible():
    """One four times slower, one dying half-way, expectations off by 20 %."""
    from benchmarks.simulated_cards import simulate

    assert simulate(100, 10_000, seed=0)["over"] < 0.05


def test_what_belongs_to_an_embedded_farm_stays_in_it(any_database):
    from farm.jobs import cards

    full, idle = register(any_database, 0, 1)
    job_id = plan(any_database, [full], number=4)
    with any_database.write() as session:
        job = session.get_one(tables.Job, job_id)
        job.farm = "embedded:here:1:abc"
        session.add(job)
    both = cards_of(any_database, [full, idle])
    assert rebalance(any_database, both, idle_within_s=1.0) == []
    assert move_items(any_database, full, both[1:]) == []
    assert len(rebalance(any_database, both, idle_within_s=1.0, farm="embedded:here:1:abc")) == 2
    assert (
        cards.farm_of(cards.holder_name("GPU-1", "here", 7, "ab", "embedded:here:1:abc"))
        == "embedded:here:1:abc"
    )
    assert cards.farm_of(cards.holder_name("GPU-1", "here", 7, "ab")) == ""
