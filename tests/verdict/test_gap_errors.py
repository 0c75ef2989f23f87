"""Which errors the interval of a gap contains that the readings of the tuples do not."""

import math

import pytest

from farm.types.figure import Figure
from farm.verdict.corrections import CORRECTIONS
from farm.verdict.gap_errors import (
    BETWEEN_JOBS,
    CORRECTIONS_OF_GAPS,
    ErrorSources,
    GapErrors,
    errors_of_gap,
)
from farm.verdict.replay import CORRECTIONS_OF_CALLS

ALONE = ErrorSources(among_others=False, addresses=None, canaries={"time": 0.0, "energy": 0.0})


def errors(replay: Figure | None = None) -> GapErrors:
    """The errors of a sum of 100 us with a scatter of 3 us."""
    return GapErrors("time", 100.0, replay, independent=3.0)


def applied(errors: GapErrors, job: ErrorSources) -> list[str]:
    return [type(one).__name__ for one in CORRECTIONS_OF_GAPS if one.applies(errors, job)]


def job(**fields) -> ErrorSources:
    return ErrorSources(
        **{"among_others": True, "addresses": None, "canaries": {"time": 0.0}, **fields}
    )


def test_a_sum_of_loops_has_only_its_scatter():
    assert applied(errors(), ALONE) == []
    total = errors_of_gap(errors(), ALONE)
    assert (total.half_width, total.replay_difference, total.between_jobs) == (3.0, 0.0, 0.0)


def test_tuples_among_others_differ_between_jobs():
    assert applied(errors(), job()) == ["BetweenJobs"]
    total = errors_of_gap(errors(), job())
    assert (total.half_width, total.between_jobs) == (3.0, BETWEEN_JOBS["time"])
    assert job().between_jobs("energy") == BETWEEN_JOBS["energy"]


def test_a_replay_replaces_the_scatter_by_its_difference_from_the_sum():
    replayed = errors(Figure(99.0, 0.5))
    assert applied(replayed, job()) == ["BetweenJobs", "OrderReplay"]
    total = errors_of_gap(replayed, job())
    assert total.half_width == pytest.approx(0.5 + 1.0)
    assert (total.replay_difference, total.between_jobs) == (0.0, BETWEEN_JOBS["time"])


def test_measured_addresses_replace_the_differences_between_jobs():
    replayed, measured = errors(Figure(99.0, 0.5)), job(addresses=0.02)
    assert applied(replayed, measured) == ["BetweenJobs", "OrderReplay", "Addresses"]
    total = errors_of_gap(replayed, measured)
    half = 0.02 / math.sqrt(2)
    assert (total.replay_difference, total.between_jobs) == (
        pytest.approx(1.0),
        pytest.approx(half),
    )
    assert total.half_width == pytest.approx(1.0 + math.hypot(0.5, half * 100))
    assert measured.between_jobs("energy") == 0.02
    # A quantity that the replay does not have differs between jobs as before.
    assert errors_of_gap(errors(), measured).between_jobs == BETWEEN_JOBS["time"]


def test_the_changes_of_a_canary_are_common_to_all_tuples():
    changed = job(canaries={"time": 0.04})
    assert applied(errors(), changed) == ["BetweenJobs", "Canaries"]
    assert errors_of_gap(errors(), changed).half_width == pytest.approx(math.hypot(3.0, 4.0))


@pytest.mark.parametrize(
    "correction",
    [*CORRECTIONS, *CORRECTIONS_OF_CALLS, *CORRECTIONS_OF_GAPS],
    ids=lambda correction: type(correction).__name__,
)
def test_each_correction_states_its_evidence(correction):
    assert "Evidence: " in " ".join((type(correction).__doc__ or "").split())
