"""An item changes only by the transitions of one table: nothing else sets its state, and the docs
show the table.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import random
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlmodel import select

from farm.devices.simulated import SOFTWARE
from farm.jobs import items, jobs, leases
from farm.jobs.closing import close_round
from farm.jobs.moving import give_up, move_items, rebalance
from farm.store import item_state, tables
from farm.store.tables import CLOSED, Item, ItemState
from tests.farms import store_operators
from tests.planned import READING, claim, plan, plan_model, register

TABLE = tuple(way for way in vars(item_state).values() if isinstance(way, item_state.Transition))

ROOT = Path(__file__).parent.parent.parent
CLAIM = ("token", "holder", "claim_key", "lease_until_s")


def row(way: item_state.Transition) -> str:
    """A transition as a row of the table in docs/design/item-states.md, without the last column."""
    written = list(way.written)
    if set(CLAIM) <= set(written):
        written = ["claim", *(column for column in written if column not in CLAIM)]
    cells = (
        way.event,
        ", ".join(way.found) or "-",
        way.next or "as found",
        ", ".join(word if word == "claim" else f"`{word}`" for word in written) or "-",
    )
    return f"| {' | '.join(cells)} |"


def test_the_documentation_shows_the_table():
    page = (ROOT / "docs" / "design" / "item-states.md").read_text()
    table = page.partition("| event | from | to | written | when |\n")[2].partition("\n\n")[0]
    rows = [line.removesuffix(" |").rpartition(" | ") for line in table.splitlines()[1:]]
    wanted = [row(way) for way in TABLE]
    replace = "replace the rows of the table in docs/design/item-states.md:\n" + "\n".join(wanted)
    assert [f"{first} |" for first, _, _ in rows] == wanted, replace
    assert all(when.strip() for _, _, when in rows)


@functools.cache
def sources():
    """The syntax trees of all files with a state of something, except the table of transitions
    itself.
    """
    paths = [
        path for room in ("farm", "tasks", "cli") for path in sorted((ROOT / room).rglob("*.py"))
    ]
    paths.remove(Path(item_state.__file__))
    return {
        str(path.relative_to(ROOT)): ast.parse(text)
        for path in paths
        if "state" in (text := path.read_text())
    }


def names_in(node):
    """Every name and attribute of an expression: `tables.ItemState.DONE` has all three."""
    return {getattr(inner, "attr", getattr(inner, "id", "")) for inner in ast.walk(node)}


def states_written(tree):
    """The expressions that a file writes into a column or attribute `state`, and those that it
    gives to a new item.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(
                        target.elts, node.value.elts, strict=False
                    )  # one of them may be starred
                yield from (
                    value
                    for one, value in pairs
                    if isinstance(one, ast.Attribute) and one.attr == "state"
                )
        elif isinstance(node, ast.Dict):
            yield from (
                value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
                and key.value == "state"
                and "ItemState" in names_in(value)
            )
        elif isinstance(node, ast.Call):
            stated = [one.value for one in node.keywords if one.arg == "state"]
            called = names_in(node.func) if stated else set()
            new = {"Item", "insert", "update", "setattr"} & called
            yield from (value for value in stated if new or "ItemState" in names_in(value))
            match node.args:
                case [_, ast.Constant("state"), value, *_] if "setattr" in names_in(node.func):
                    yield value


def test_every_event_of_the_table_happens():
    names = [
        name for name, way in vars(item_state).items() if isinstance(way, item_state.Transition)
    ]
    assert len({way.event for way in TABLE}) == len(names) == len(TABLE)
    used = {
        node.attr
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "item_state"
    }
    assert set(names) <= used


def test_nothing_but_the_table_sets_an_items_state():
    # A state that is written must be visibly one of a job, a card or a check; whatever else it is
    # may be an item's.
    others = {"JobState", "CardState", "state"}
    found = [
        f"{path}:{value.lineno} {ast.unparse(value)}"
        for path, tree in sources().items()
        for value in states_written(tree)
        if "ItemState" in names_in(value) or not others & names_in(value)
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "item.state = ItemState.DONE",
        "item.state, item.reason = 'done', ''",
        "session.execute(insert(tables.Item), [{'state': tables.ItemState.DONE}])",
        "Item(job_id='a', state='done')",
        "update(Item).where(its).values(state=ItemState.WAITING)",
        "setattr(item, 'state', found)",
    ],
)
def test_the_ways_around_the_table_are_noticed(code):
    assert list(states_written(ast.parse(code)))


def test_an_imported_item_has_a_state_of_the_table():
    columns = item_state.IMPORT.values(reading_id="r", reused=False, ended_at_s=1.0)
    assert columns == {
        "state": ItemState.DONE,
        "reading_id": "r",
        "reused": False,
        "ended_at_s": 1.0,
    }


def test_a_way_that_does_not_begin_in_an_items_state_is_refused():
    item = Item(state=ItemState.DONE)
    with pytest.raises(ValueError, match=r"'give up' .* only from: waiting, claimed"):
        item_state.GIVE_UP.apply(item)
    with pytest.raises(TypeError, match="'move' needs the columns"):
        item_state.MOVE.update(token="")


def watched(database):
    """Write down every insert and update of an item, from which state to which."""
    with database.write() as session:
        session.execute(text("CREATE TABLE went (before TEXT, after TEXT)"))
        session.execute(
            text(
                "CREATE TRIGGER made AFTER INSERT ON item BEGIN INSERT INTO went VALUES ('', "
                "new.state); END"
            )
        )
        session.execute(
            text(
                "CREATE TRIGGER changed AFTER UPDATE ON item BEGIN INSERT INTO went VALUES "
                "(old.state, new.state); END"
            )
        )


def went(database):
    with database.read() as session:
        return {
            (before, after)
            for before, after in session.execute(text("SELECT before, after FROM went"))
        }


#: From and to which state a row may go. A reading that is there closes an item before it is first
#: written down.
ALLOWED = {("", ItemState.DONE)} | {
    (before, way.next or before) for way in TABLE for before in (way.found or ("",))
}


def sound(item: Item) -> bool:
    """What each state promises of the other columns."""
    nobodys = (item.token, item.holder, item.claim_key, item.lease_until_s) == ("", "", None, 0.0)
    return {
        ItemState.WAITING: nobodys and item.ended_at_s is None,
        ItemState.DEFERRED: nobodys and bool(item.subject_key),
        ItemState.CLAIMED: bool(item.token and item.holder)
        and item.ended_at_s is None
        and not item.reading_id,
        ItemState.DONE: bool(item.reading_id) == (item.role != "compile")
        and item.claim_key is None,
        ItemState.FAILED: bool(item.reason and item.message)
        and item.claim_key is None
        and not item.reading_id,
        ItemState.CANCELLED: item.ended_at_s is not None
        and not (item.claim_key and item.reading_id),
    }[ItemState(item.state)]


class Farm:
    """Two cards and jobs that share their tuples; every event happens to whatever is there."""

    def __init__(self, database, seed):
        self.database, self.random = database, random.Random(seed)
        self.cards = register(database, 0, 1)
        self.operators = store_operators(database, ["", ""])
        self.claims = []
        self.jobs = []

    def step(self):
        self.random.choice(
            [self.claim] * 8
            + [self.complete] * 2
            + [
                self.fail,
                self.note,
                self.renew,
                self.release_card,
                self.hand_back,
                self.exhaust,
                self.wake,
            ]
            + [self.move, self.rebalance, self.give_up, self.cancel, self.retry, self.close]
            + [self.plan] * 2
        )()

    def plan(self):
        if len(self.jobs) < 6:
            self.jobs.append(
                self.random.choice(
                    [
                        lambda: plan(self.database, self.some_cards(), operators=self.operators),
                        lambda: plan_model(self.database, self.some_cards(), ["Conv2d", "ReLU"]),
                    ]
                )()
            )

    def some_cards(self):
        return self.random.sample(self.cards, self.random.choice([1, 2]))

    def rows(self):
        with self.database.read() as session:
            return list(session.exec(select(Item).order_by(Item.id)))

    def card_rows(self, ids):
        with self.database.read() as session:
            return [session.get_one(tables.CardRow, card_id) for card_id in ids]

    def claim(self):
        if found := [item for item in self.rows() if item.state not in CLOSED]:
            item, lease_s = self.random.choice(found), self.random.choice([60.0, 60.0, -1.0])
            got = claim(
                self.database,
                item,
                self.random.choice("ab"),
                lease_s=lease_s,
                max_attempts=self.random.choice([1, 2, 3]),
            )
            if isinstance(got, items.Claim):
                self.claims.append((got, item.card_id))

    def a_claim(self):
        """One of the latest claims, which may be long over."""
        return self.random.choice(self.claims[-4:] or [(None, "")])

    def complete(self):
        held, card_id = self.a_claim()
        if held:
            read = dataclasses.replace(
                READING, flags=self.random.choice([(), ("shared",), ("shared",)])
            )
            items.complete(self.database, held, read, card_id=card_id, software_id=SOFTWARE.id)

    def fail(self):
        held, _ = self.a_claim()
        if held:
            items.fail(self.database, held, "raised", "no")

    def note(self):
        held, _ = self.a_claim()
        if held:
            items.fail(self.database, held, "crashed", "signal", again=True)

    def renew(self):
        leases.renew(self.database, self.random.choice("ab"), self.random.choice([60.0, -1.0]))

    def release_card(self):
        leases.release_card(self.database, self.random.choice(self.cards))

    def hand_back(self):
        leases.hand_back(self.database, self.random.choice("ab"))

    def exhaust(self):
        items.close_exhausted(self.database, max_attempts=2, after_s=0.0)

    def wake(self):
        items.wake_orphans(self.database)

    def away_and_there(self):
        away, there = self.random.sample(self.cards, 2)
        return away, self.card_rows([there])

    def move(self):
        away, there = self.away_and_there()
        move_items(self.database, away, there, in_work=self.random.random() < 0.5)

    def rebalance(self):
        rebalance(self.database, self.card_rows(self.cards), idle_within_s=10.0)

    def give_up(self):
        away, there = self.away_and_there()
        give_up(self.database, [away], there)

    def cancel(self):
        if self.jobs and self.random.random() < 0.5:
            jobs.cancel(self.database, self.random.choice(self.jobs))

    def retry(self):
        if self.jobs:
            jobs.retry_failed(self.database, self.random.choice(self.jobs))

    def close(self):
        if self.jobs:
            close_round(self.database, self.random.choice(self.jobs), 1)


def test_no_sequence_of_events_leaves_the_table(database):
    """All in one database, which is quicker: the farms share nothing but their cards."""
    watched(database)
    for seed in range(3):
        farm = Farm(database, seed)
        for number in range(100):
            farm.step()
            unsound = [item for item in farm.rows() if not sound(item)]
            assert not unsound, f"after step {number} of seed {seed}: {unsound}"
    changes = went(database)
    assert changes <= ALLOWED
    assert {after for _, after in changes} == set(ItemState)
