"""What rounds tell of the host that launched them."""

from __future__ import annotations

import pytest
import torch

from farm.benchmark.clock import Clock, TimedRound, starved_share
from farm.benchmark.workload import Workload, WorkloadRound


def rounds(*took_ms: float, late: tuple[int, ...] = ()) -> list[TimedRound]:
    return [TimedRound(0.0, value / 1e3, 4, index in late) for index, value in enumerate(took_ms)]


def test_what_late_rounds_take_beyond_the_usual_is_time_in_which_the_card_waited() -> None:
    assert starved_share(rounds(2, 2, 2, 6, 2, late=(3,))) == pytest.approx(4 / 14)
    assert starved_share(rounds(2, 2, 2, 2, late=(1, 2))) == 0, (
        "late by a moment that the card did not notice"
    )


def test_a_host_that_is_late_with_most_rounds_hides_behind_no_median_and_one_that_is_late_with_all_tells_no_time() -> (
    None
):
    assert starved_share(rounds(2, 6, 6, 6, 2, late=(1, 2, 3))) == pytest.approx(12 / 22)
    assert starved_share(rounds(6, 6, 6, late=(0, 1, 2))) == 1


def test_a_long_round_that_was_queued_in_time_is_the_cards_own() -> None:
    assert starved_share(rounds(2, 2, 2, 6, 2)) == 0


def test_pauses_count_as_far_as_they_have_passed() -> None:
    clock = Clock(Workload([WorkloadRound(lambda: None, 1)], torch.device("cpu"), round_s=0.01))
    clock.cuda = True
    for done_s, paused_s in ((1.01, 0.0), (1.03, 0.01), (1.04, 0.0), (1.055, 0.005)):
        clock.done.append(TimedRound(done_s, 0.01, 1, paused_s=paused_s))
        clock._paused_s.append(clock._paused_s[-1] + paused_s)
    for until_s, paused_s in (
        (0.9, 0),
        (1.01, 0),
        (1.015, 0.005),
        (1.02, 0.01),
        (1.04, 0.01),
        (1.043, 0.013),
        (2, 0.015),
    ):
        assert clock.paused_s(until_s) == pytest.approx(paused_s)
