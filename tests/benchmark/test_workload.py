"""How many copies the residency policies ask for."""

from __future__ import annotations

import pytest

from farm.benchmark.workload import MAX_COPIES, copies_wanted

MIB = 2**20
CACHE = 50 * MIB


def test_small_activations_need_copies_of_the_weights_until_twice_the_cache() -> None:
    copies, reached = copies_wanted("resident", 10 * MIB, 0, 0, CACHE)
    assert (copies, reached) == (11, True)


def test_activations_that_flood_the_cache_need_no_copies() -> None:
    assert copies_wanted("resident", 10 * MIB, 60 * MIB, 60 * MIB, CACHE) == (1, True)


def test_an_operator_without_weights_is_run_on_the_same_input() -> None:
    assert copies_wanted("resident", 0, MIB, MIB, CACHE) == (1, True)


def test_weights_too_small_to_fill_the_cache_are_said_to_be_so() -> None:
    assert copies_wanted("resident", 1024, 0, 0, CACHE) == (MAX_COPIES, False)


def test_a_stream_exceeds_the_cache_four_times() -> None:
    assert copies_wanted("stream", 10 * MIB, 10 * MIB, MIB, CACHE) == (10, True)


@pytest.mark.parametrize("residency", ["reuse", "chain"])
def test_reuse_and_chain_copy_nothing(residency: str) -> None:
    assert copies_wanted(residency, 10 * MIB, 10 * MIB, MIB, CACHE) == (1, True)
