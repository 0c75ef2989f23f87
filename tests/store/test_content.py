"""Rows that never change are written by many at once, and as many as a sweep has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlmodel import select

from farm.errors import Unreadable
from farm.store.content import find_tokens, store_operators, store_tokens
from farm.store.tables import Operator, TokenInput
from farm.types.tokens import Tokens
from farm.types.tuple import Cost, OperatorTuple
from tests.statements import values_at_once


def operators(*numbers: int) -> dict[OperatorTuple, Cost]:
    return {
        OperatorTuple("torch.add", "function", arguments=(number, 1)): Cost(1, 1)
        for number in numbers
    }


def test_two_that_store_the_same_operators_in_opposite_orders_wait_for_each_other(any_database):
    both_begin = threading.Barrier(2)

    def store(wanted):
        both_begin.wait(10)
        with any_database.write() as session:
            store_operators(session, wanted)

    for begin in range(0, 1500, 500):
        numbers = range(begin, begin + 500)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(store, [operators(*numbers), operators(*reversed(numbers))]))
    with any_database.read() as session:
        assert len(session.exec(select(Operator.id)).all()) == 1500


def test_a_large_sweep_asks_with_few_values_in_a_statement(any_database):
    with values_at_once(any_database) as numbers, any_database.write() as session:
        store_operators(session, operators(*range(1200)))
        store_operators(session, operators(*range(1300)))
    assert max(numbers) < 600
    with any_database.read() as session:
        assert len(session.exec(select(Operator.id)).all()) == 1300


def test_token_ids_are_stored_once_and_found_whole(any_database):
    tokens = Tokens.of_rows([[5, 6, 7], [8]], 4, pad=0, padding="left")
    for _ in range(2):
        with any_database.write() as session:
            assert store_tokens(session, tokens) == tokens.id
    with any_database.read() as session:
        assert find_tokens(session, tokens.id) == tokens
        assert len(session.exec(select(TokenInput.id)).all()) == 1
        with pytest.raises(Unreadable, match="the text with the token ids"):
            find_tokens(session, "0" * 32)


@pytest.mark.parametrize(
    "change", [{"packed": b"x"}, {"batch": 3}, {"row_lengths": [3, 2]}, {"row_lengths": None}]
)
def test_token_ids_that_somebody_changed_are_not_taken(database, change):
    tokens = Tokens.of_rows([[5, 6, 7], [8]], 4, pad=0, padding="left")
    with database.write() as session:
        store_tokens(session, tokens)
    with database.write() as session:
        row = session.get(TokenInput, tokens.id)
        for name, value in change.items():
            setattr(row, name, value)
    with database.read() as session, pytest.raises(Unreadable, match="were changed"):
        find_tokens(session, tokens.id)
