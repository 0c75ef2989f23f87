"""One item is measured by one holder, accepted once, and never lost, on both databases."""

from __future__ import annotations

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import event, update
from sqlmodel import select

from farm.devices.simulated import SOFTWARE
from farm.jobs import cards, items, jobs, leases
from farm.jobs.cards import holder_name, holder_of_process
from farm.jobs.items import Claim, DeclineReason
from farm.store import tables
from farm.store.database import Database
from farm.store.tables import ItemState
from farm.types.details import Details
from farm.types.figure import Figure
from farm.types.protocol import Stopping
from tests.farms import store_operators
from tests.planned import READING, claim, complete, items_of, plan, readings, register, sweep
from tests.statements import meanwhile, values_at_once
from tests.store.conftest import any_database  # noqa: F401 - claims are transactions


@pytest.fixture
def card(any_database):
    return register(any_database, 0)[0]


def only(database, job_id):
    (item,) = items_of(database, job_id)
    return item


def test_a_claimed_item_is_nobody_elses(any_database, card):
    item = only(any_database, plan(any_database, [card]))
    assert isinstance(claim(any_database, item), Claim)
    assert claim(any_database, item, "another").why is DeclineReason.GONE
    assert isinstance(claim(any_database, item), Claim), (
        "the holder itself starts over after its process died"
    )
    assert only(any_database, item.job_id).attempts == 2


def test_a_completed_item_asks_for_its_aggregation_and_is_not_measured_again(any_database, card):
    item = only(any_database, plan(any_database, [card]))
    closed = complete(any_database, claim(any_database, item), card)
    assert closed.accepted
    assert closed.rounds == ((item.job_id, 1),)
    assert claim(any_database, item).why is DeclineReason.GONE
    assert only(any_database, item.job_id).state == ItemState.DONE


@pytest.mark.parametrize("figure", ["time_us", "time_median_us", "time_trimmed_us"])
@pytest.mark.parametrize("value", [-28_000.0, 0.0])
def test_a_time_that_is_not_positive_is_a_reason_and_no_reading(any_database, card, figure, value):
    item = only(any_database, plan(any_database, [card]))
    wrong = dataclasses.replace(
        READING, **{figure: Figure(value) if figure == "time_us" else value}
    )
    closed = complete(any_database, claim(any_database, item), card, reading=wrong)
    assert (closed.accepted, closed.rounds) == (True, ((item.job_id, 1),))
    item = only(any_database, item.job_id)
    assert (item.state, item.reason, item.reading_id) == (ItemState.FAILED, "not_positive", None)
    assert f"{figure} is {value:.6g}" in item.message
    assert readings(any_database) == 0


@pytest.mark.parametrize(
    "wrong", [{"energy_mj": Figure(-3.0)}, {"energy_mj": Figure(0.0), "power_w": Figure(0.0)}]
)
def test_an_energy_that_is_not_positive_is_absent_and_flagged(any_database, card, wrong):
    item = only(any_database, plan(any_database, [card]))
    found = dataclasses.replace(READING, **wrong)
    assert complete(any_database, claim(any_database, item), card, reading=found).accepted
    with any_database.read() as session:
        row = session.exec(select(tables.ReadingRow)).one()
    assert (row.time_us, row.energy_mj, row.energy_half_width_mj, row.power_w) == (
        10.0,
        None,
        None,
        None,
    )
    assert row.flags == ["no_energy"]


def test_the_lease_lets_another_in_and_the_token_keeps_the_late_one_out(any_database, card):
    item = only(any_database, plan(any_database, [card]))
    late = claim(any_database, item, lease_s=-1)
    assert leases.renew(any_database, "nobody", 60) == 0
    newer = claim(any_database, item, "another")
    assert isinstance(newer, Claim)
    assert not complete(any_database, late, card).accepted
    assert not items.fail(any_database, late, "raised", "late").accepted
    assert complete(any_database, newer, card).accepted
    item = only(any_database, item.job_id)
    assert (item.state, item.repeated, readings(any_database)) == (ItemState.DONE, 2, 1)


def test_a_late_result_counts_while_nobody_else_has_taken_the_item(any_database, card):
    item = only(any_database, plan(any_database, [card]))
    assert complete(any_database, claim(any_database, item, lease_s=-1), card).accepted


def test_only_what_is_in_work_is_renewed(any_database, card):
    item = only(any_database, plan(any_database, [card]))
    claim(any_database, item, "holder", lease_s=-1)
    assert leases.renew(any_database, "holder", 60, set()) == 0
    assert isinstance(claim(any_database, item, "another", lease_s=-1), Claim)
    assert leases.renew(any_database, "another", 60, {item.id}) == 1
    assert claim(any_database, item, "third").why is DeclineReason.GONE


def test_attempts_are_bounded_and_the_last_reason_is_kept(any_database, card):
    item = only(any_database, plan(any_database, [card]))
    for _ in range(2):
        held = claim(any_database, item, max_attempts=2)
        items.fail(any_database, held, "crashed", "signal SIGSEGV", again=True)
    refused = claim(any_database, item, max_attempts=2)
    assert refused.why is DeclineReason.EXHAUSTED
    assert refused.closed.rounds == ((item.job_id, 1),)
    item = only(any_database, item.job_id)
    assert (item.state, item.reason, item.message) == (
        ItemState.FAILED,
        "crashed",
        "signal SIGSEGV",
    )


def test_an_item_whose_last_attempt_nobody_ends_is_closed_without_a_card(any_database, card):
    operators = store_operators(any_database, [""])
    last, other = (
        only(any_database, plan(any_database, [card], operators=operators)) for _ in range(2)
    )
    late = claim(any_database, last, "first", lease_s=-1, max_attempts=2)
    assert not close_exhausted(any_database).accepted, "it may be begun once more"
    late = claim(any_database, last, "second", max_attempts=2)
    assert claim(any_database, other).why is DeclineReason.DEFERRED
    assert not close_exhausted(any_database).accepted, "it is being measured"
    leases.renew(any_database, "second", -30)
    assert not close_exhausted(any_database, after_s=60).accepted, "its reading may wait in a spool"
    assert not close_exhausted(any_database, farm="embedded:there:1:abc").accepted
    closed = close_exhausted(any_database, farm="", job_id=last.job_id)
    assert (closed.rounds, closed.woken) == (((last.job_id, 1),), (other.id,))
    last = only(any_database, last.job_id)
    assert (last.state, last.reason) == (ItemState.FAILED, "attempts_exhausted")
    assert not complete(any_database, late, card).accepted
    assert isinstance(claim(any_database, other), Claim)


def close_exhausted(database, *, after_s=0.0, **of):
    return items.close_exhausted(database, max_attempts=2, after_s=after_s, **of)


def test_an_item_handed_back_waits_and_its_attempt_does_not_count(any_database, card):
    worker = holder_name(card, "here_1", 7, "ab")
    item, other, spooled = items_of(any_database, plan(any_database, [card], number=3))
    held = claim(any_database, item, worker)
    claim(any_database, other, holder_name(card, "here_1", 77, "ab"))
    claim(any_database, spooled, worker)
    assert (
        leases.hand_back(any_database, holder_of_process(card, "here_1", 7), spooled=[spooled.id])
        == 1
    )
    item, other, spooled = items_of(any_database, item.job_id)
    assert (item.state, item.attempts) == (ItemState.WAITING, 0)
    assert {(one.state, one.attempts) for one in (other, spooled)} == {(ItemState.CLAIMED, 1)}
    assert not complete(any_database, held, card).accepted


def test_two_jobs_that_share_a_tuple_measure_it_once(any_database, card):
    operators = store_operators(any_database, [""])
    first, second = (
        only(any_database, plan(any_database, [card], operators=operators)) for _ in range(2)
    )
    held = claim(any_database, first)
    assert claim(any_database, second).why is DeclineReason.DEFERRED
    closed = complete(any_database, held, card)
    assert set(closed.rounds) == {(first.job_id, 1), (second.job_id, 1)}
    second = only(any_database, second.job_id)
    assert (second.state, second.reused, readings(any_database)) == (ItemState.DONE, True, 1)


LOOSE = dataclasses.replace(READING, time_us=Figure(10.0, 0.3), flags=("not_converged",))
SHARED = dataclasses.replace(READING, flags=("shared",))


@pytest.mark.parametrize("reading", [LOOSE, SHARED], ids=["too loose", "beside another process"])
def test_a_reading_that_is_not_good_enough_for_a_deferred_item_wakes_it(
    any_database, card, reading
):
    operators = store_operators(any_database, [""])
    quick = sweep(stopping=Stopping(time_half_width=0.05))
    first = only(
        any_database, jobs.create(any_database, quick, [card], operator_ids=operators).job_id
    )
    alike = only(
        any_database, jobs.create(any_database, quick, [card], operator_ids=operators).job_id
    )
    wants_more = only(any_database, plan(any_database, [card], operators=operators))
    held = claim(any_database, first)
    for behind in (alike, wants_more):
        assert claim(any_database, behind).why is DeclineReason.DEFERRED
    closed = items.complete(any_database, held, reading, card_id=card, software_id=SOFTWARE.id)
    served = {alike.id} if reading is LOOSE else set()
    assert set(closed.woken) == {alike.id, wants_more.id} - served
    assert closed.rounds == tuple(
        sorted((item.job_id, 1) for item in (first, alike) if item.id in {first.id, *served})
    )
    assert isinstance(claim(any_database, wants_more), Claim)


def test_a_deferred_item_wakes_when_the_other_fails(any_database, card):
    operators = store_operators(any_database, [""])
    first, second = (
        only(any_database, plan(any_database, [card], operators=operators)) for _ in range(2)
    )
    held = claim(any_database, first)
    claim(any_database, second)
    assert items.wake_orphans(any_database) == ()
    assert items.fail(any_database, held, "raised", "no").woken == (second.id,)
    assert isinstance(claim(any_database, second), Claim)


def test_a_deferred_item_wakes_when_the_other_is_lost(any_database, card):
    operators = store_operators(any_database, [""])
    first, second = (
        only(any_database, plan(any_database, [card], operators=operators)) for _ in range(2)
    )
    claim(any_database, first)
    claim(any_database, second)
    leases.release_card(any_database, card)
    assert items.wake_orphans(any_database, farm="embedded:there:1:abc") == ()
    assert items.wake_orphans(any_database) == (second.id,)


def does(database, waits, how):
    """What another does meanwhile with a deferred item, and the state that it then has."""
    if how == "cancelled":
        return lambda: jobs.cancel(database, waits.job_id), ItemState.CANCELLED
    return lambda: claim(database, waits, "another"), ItemState.CLAIMED


def one_behind_the_other(database, card):
    """Two items of one subject and the claim on the first, whose lease has ended; the second is
    deferred.
    """
    operators = store_operators(database, [""])
    first, second = (only(database, plan(database, [card], operators=operators)) for _ in range(2))
    held = claim(database, first)
    assert claim(database, second).why is DeclineReason.DEFERRED
    leases.renew(database, "somebody", -1)
    return held, second


@pytest.mark.parametrize("how", ["cancelled", "taken"])
def test_what_another_does_with_a_deferred_item_just_before_it_wakes_stands(
    any_database, card, how
):
    _, second = one_behind_the_other(any_database, card)
    act, state = does(any_database, second, how)
    with meanwhile(any_database, "UPDATE item SET state=", act):
        items.wake_orphans(any_database)
    assert only(any_database, second.job_id).state == state


@pytest.mark.parametrize("how", ["cancelled", "taken"])
def test_so_it_does_when_the_first_fails(any_database, card, how):
    held, second = one_behind_the_other(any_database, card)
    act, state = does(any_database, second, how)
    with meanwhile(any_database, "UPDATE item SET state=.* item.state = .* RETURNING", act):
        items.fail(any_database, held, "raised", "no")
    assert only(any_database, second.job_id).state == state


def test_a_deferred_item_that_closes_just_before_it_wakes_stays_closed(any_database, card):
    held, second = one_behind_the_other(any_database, card)
    with meanwhile(
        any_database, "UPDATE item SET state=", lambda: complete(any_database, held, card)
    ):
        items.wake_orphans(any_database)
    second = only(any_database, second.job_id)
    assert (second.state, second.reading_id is None) in {
        (ItemState.DONE, False),
        (ItemState.WAITING, True),
    }


def test_to_look_for_what_wakes_waits_for_no_writer(any_database, card):
    one_behind_the_other(any_database, card)
    leases.renew(any_database, "somebody", 60)
    with any_database.write():
        assert items.wake_orphans(any_database) == ()


def test_many_items_wake_with_few_values_in_a_statement(any_database, card):
    plan(any_database, [card], number=1200)
    with any_database.write() as session:
        session.execute(
            update(tables.Item).values(state=ItemState.DEFERRED, subject_key="nobody's")
        )
    with values_at_once(any_database) as numbers:
        assert len(items.wake_orphans(any_database)) == 1200
    assert max(numbers) < 600


def test_the_last_two_items_closing_at_once_ask_for_the_aggregation(any_database, card):
    for _ in range(5):
        pair = items_of(any_database, plan(any_database, [card], number=2))
        held = [claim(any_database, item, f"holder {item.id}") for item in pair]
        with ThreadPoolExecutor(2) as pool:
            closed = list(pool.map(lambda one: complete(any_database, one, card), held))
        assert any(one.rounds for one in closed)


def test_of_many_that_claim_at_once_one_gets_it(any_database, card):
    for _ in range(3):
        item = only(any_database, plan(any_database, [card]))
        with ThreadPoolExecutor(4) as pool:
            got = list(
                pool.map(
                    lambda holder, item=item: claim(any_database, item, f"h{holder}"), range(4)
                )
            )
        assert sum(isinstance(one, Claim) for one in got) == 1


def test_a_card_that_drains_or_is_quarantined_is_given_nothing(any_database, card):
    item = only(any_database, plan(any_database, [card]))
    cards.drain(any_database, card)
    assert claim(any_database, item).why is DeclineReason.GONE
    cards.resume(any_database, card)
    cards.quarantine(any_database, card, "a wrong sum")
    assert claim(any_database, item).why is DeclineReason.GONE
    assert not cards.resume(any_database, card)
    assert cards.resume(any_database, card, quarantined=True)
    assert isinstance(claim(any_database, item), Claim)


def test_what_is_in_work_when_its_job_is_cancelled_is_kept(any_database, card):
    in_work, waiting = items_of(any_database, plan(any_database, [card], number=2))
    held = claim(any_database, in_work)
    assert jobs.cancel(any_database, in_work.job_id) == 2
    assert complete(any_database, held, card).accepted
    assert not complete(any_database, held, card).accepted
    assert claim(any_database, waiting).why is DeclineReason.GONE
    assert {item.state for item in items_of(any_database, in_work.job_id)} == {ItemState.CANCELLED}
    assert readings(any_database) == 1


def test_what_is_in_work_for_a_cancelled_job_serves_another_and_is_not_measured_beside_it(
    any_database, card
):
    operators = store_operators(any_database, [""])
    first, second = (
        only(any_database, plan(any_database, [card], operators=operators)) for _ in range(2)
    )
    held = claim(any_database, first)
    jobs.cancel(any_database, first.job_id)
    assert claim(any_database, second, "another").why is DeclineReason.DEFERRED
    assert leases.renew(any_database, "somebody", 60, {first.id}) == 1
    assert items.wake_orphans(any_database) == ()
    assert set(complete(any_database, held, card).rounds) == {(first.job_id, 1), (second.job_id, 1)}
    assert only(any_database, second.job_id).state == ItemState.DONE
    assert readings(any_database) == 1


@pytest.mark.parametrize(
    "end", ["it fails", "its lease ends", "its worker comes anew", "its worker is told to stop"]
)
def test_when_it_ends_without_a_reading_the_other_is_measured(any_database, card, end):
    worker = holder_name(card, "here", 7, "ab")
    operators = store_operators(any_database, [""])
    first, second = (
        only(any_database, plan(any_database, [card], operators=operators)) for _ in range(2)
    )
    held = claim(any_database, first, worker)
    claim(any_database, second, "another")
    jobs.cancel(any_database, first.job_id)
    assert claim(any_database, first, worker).why is DeclineReason.GONE
    if end == "it fails":
        assert items.fail(any_database, held, "raised", "no").woken == (second.id,)
    elif end == "its lease ends":
        leases.renew(any_database, worker, -1)
        assert items.wake_orphans(any_database) == (second.id,)
    elif end == "its worker comes anew":
        leases.release_card(any_database, card)
    else:
        leases.hand_back(any_database, holder_of_process(card, "here", 7))
    items.wake_orphans(any_database)
    again = claim(any_database, second, "another")
    assert isinstance(again, Claim)
    assert complete(any_database, again, card).accepted
    assert only(any_database, first.job_id).state == ItemState.CANCELLED


@pytest.mark.parametrize("text", ["a zero byte: \0", "half a surrogate: \ud800"])
def test_a_reason_that_is_no_text_is_told_as_far_as_it_is_one(any_database, text):
    (card,) = register(any_database, 0)
    (item,) = items_of(any_database, plan(any_database, [card]))
    held = claim(any_database, item)
    items.fail(any_database, held, "crashed", text, again=True)
    assert items_of(any_database, item.job_id)[0].message.startswith(text[:-1])
    items.fail(any_database, held, "raised", text)
    (item,) = items_of(any_database, item.job_id)
    assert (item.state, item.message[:-1]) == ("failed", text[:-1])
    cards.quarantine(any_database, card, text)


def test_a_reading_with_figures_that_are_none_is_kept_without_them(any_database):
    (card,) = register(any_database, 0)
    (item,) = items_of(any_database, plan(any_database, [card]))
    details = {"nan": math.nan, "deep": [{"inf": -math.inf, "text": "\0\ud800"}], "one": 1.0}
    read = dataclasses.replace(
        READING, power_w=Figure(math.nan), details=Details.from_json(details)
    )
    held = claim(any_database, item)
    assert items.complete(any_database, held, read, card_id=card, software_id=SOFTWARE.id).accepted
    with any_database.read() as session:
        (row,) = session.exec(select(tables.ReadingRow))
    assert row.power_w is None
    assert row.details == {"nan": None, "deep": [{"inf": None, "text": "\ufffd?"}], "one": 1.0}


def test_a_claim_and_a_result_need_one_session_each(any_database, card):
    """A process knows an item of the round that waits: which one, the database chooses. The result
    of this item needs one statement more, which finds another that waits."""
    job_id = plan(any_database, [card], number=5)
    sessions, statements = [], []
    event.listen(any_database.engine, "checkout", lambda *_: sessions.append(1))
    event.listen(
        any_database.engine, "before_cursor_execute", lambda *about: statements.append(about[2])
    )

    def measure(item):
        """Measure an item; return the number of sessions and of statements."""
        sessions.clear()
        statements.clear()
        assert complete(any_database, claim(any_database, item), card).rounds == ()
        begins = [statement for statement in statements if statement.startswith("BEGIN")]
        return len(sessions), len(statements) - len(begins)

    first, *others = items_of(any_database, job_id)
    measure(first)
    with any_database.read() as session:
        known_id = items.known_waiting_item(session, job_id, 1)
    (known,) = [item for item in others if item.id == known_id]
    assert measure(next(item for item in others if item is not known)) == (2, 5), statements
    assert measure(known) == (2, 6), statements


def test_the_last_of_items_that_close_at_once_finds_that_its_round_has_ended(any_database, card):
    """Each knows an item that waited when it looked; the other is no longer open when it looks
    again.
    """
    first, second, third = items_of(any_database, plan(any_database, [card], number=3))
    assert complete(any_database, claim(any_database, first), card).rounds == ()
    held = [claim(any_database, item, f"holder {item.id}") for item in (second, third)]
    with meanwhile(
        any_database, "INSERT INTO reading", lambda: complete(any_database, held[1], card)
    ) as other:
        closed = complete(any_database, held[0], card)
    assert sorted([closed.rounds, other[0].rounds])[-1] == ((first.job_id, 1),)


def test_a_heartbeat_is_one_session(any_database, card):
    sessions = []
    item = only(any_database, plan(any_database, [card]))
    claim(any_database, item, "holder-0", lease_s=1)
    event.listen(any_database.engine, "checkout", lambda *_: sessions.append(1))
    assert leases.renew(any_database, "holder-0", 60, {item.id}) == 1
    assert len(sessions) == 1
    assert only(any_database, item.job_id).lease_until_s > item.created_at_s + 50
    with any_database.read() as session:
        assert session.get_one(tables.CardRow, card).last_seen_at_s > item.created_at_s


def test_the_search_for_open_items_after_a_result_does_not_lock_the_database(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/state/farm.db")
    database.upgrade()
    begun: list[str] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def note(connection, cursor, statement, *rest):
        begun.extend([statement] * statement.startswith("BEGIN"))

    with database.write() as session:
        items._finished(session, {("a", 1)})
    assert begun == ["BEGIN IMMEDIATE", "BEGIN DEFERRED"]
