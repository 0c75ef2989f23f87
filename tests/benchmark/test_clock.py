"""What rounds tell of the host that launched them."""

from __future__ import annotations

import pytest

from farm.benchmark.clock import TimedRound, starved_share


def rounds(*took_ms: float, late: tuple[int, ...] = ()) -> list[TimedRound]:
    return [TimedRound(0.0, value / 1e3, 4, index in late) for index, value in enumerate(took_ms)]


def test_what_late_rounds_take_beyond_the_usual_is_time_in_which_the_card_waited() -> None:
    assert starved_share(rounds(2, 2, 2, 6, 2, late=(3,))) == pytest.approx(4 / 14)
    assert starved_share(rounds(2, 2, 2, 2, late=(1, 2))) == 0, "late by a moment that the card did not notice"


def test_a_host_that_is_late_with_most_rounds_hides_behind_no_median_and_one_that_is_late_with_all_tells_no_time() -> (
    None
):
    assert starved_share(rounds(2, 6, 6, 6, 2, late=(1, 2, 3))) == pytest.approx(12 / 22)
    assert starved_share(rounds(6, 6, 6, late=(0, 1, 2))) == 1


def test_a_long_round_that_was_queued_in_time_is_the_cards_own() -> None:
    assert starved_share(rounds(2, 2, 2, 6, 2)) == 0


def test_the_pause_before_a_round_that_the_host_launched_late_counts_as_a_wait() -> None:
    waited = [entry._replace(paused_s=0.002) for entry in rounds(2, 2, late=(0, 1))]
    in_time = [entry._replace(paused_s=0.002) for entry in rounds(2, 2)]
    total_s = sum(entry.took_s + entry.paused_s for entry in (*waited, *in_time))
    assert starved_share([*waited, *in_time]) == pytest.approx(0.004 / total_s)
    assert starved_share(in_time) == 0
