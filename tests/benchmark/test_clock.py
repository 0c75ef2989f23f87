"""What rounds tell of the host that launched them."""

from __future__ import annotations

import pytest

from farm.benchmark.clock import LONGEST_PAUSE_S, TimedRound, paused_share, starved_share


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


def test_a_wait_for_the_host_between_two_rounds_counts_beyond_the_longest_pause() -> None:
    waited = [entry._replace(paused_s=0.002 + LONGEST_PAUSE_S) for entry in rounds(2, 2, late=(0, 1))]
    in_time = [entry._replace(paused_s=LONGEST_PAUSE_S / 2) for entry in rounds(2, 2)]
    total_s = sum(entry.took_s + entry.paused_s for entry in (*waited, *in_time))
    assert starved_share([*waited, *in_time]) == pytest.approx(0.004 / total_s)
    assert starved_share(in_time) == 0


def test_the_share_of_pauses_is_that_of_the_time_of_the_rounds_and_of_their_pauses() -> None:
    assert paused_share([]) == paused_share(rounds(2, 2)) == 0
    one = TimedRound(1.0, 0.9, 1, paused_s=0.1)
    assert paused_share([one]) == pytest.approx(0.1)
    assert paused_share([one, TimedRound(2.0, 0.6, 1, paused_s=0.4)]) == pytest.approx(0.25)
    assert paused_share([one, TimedRound(3.0, 1.0, 1)]) == pytest.approx(0.05)
