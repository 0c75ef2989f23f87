"""The plan of what lies in slow memory, on steps whose best placement is known."""

import itertools

import pytest

from farm.errors import UsageError
from farm.training.life import Life
from farm.training.placement import SlowCosts, placing
from tests.training.test_life import step, tensor

KB = 512
TIMES = (10.0, 10.0, 10.0, 10.0)


def planned(tensors, slow_us, fast, *, moves=False, times=TIMES, bytes_per_s=1e9):
    life = Life(step(*tensors, calls=len(times)), times)
    costs = SlowCosts(slow_us, {}, bytes_per_s, "made up")
    return placing(life, costs, fast * KB, moves=moves)


WEIGHT = tensor(0, 4 * KB, -1, None, (0, 3), "parameter")
FIRST = tensor(1, 2 * KB, 0, 2, (0, 2))
SECOND = tensor(2, 3 * KB, 1, 3, (1, 3))
COSTS = {0: 50.0, 1: 7.0, 2: 9.0}


def test_with_enough_fast_memory_everything_is_fast():
    found = planned([WEIGHT, FIRST, SECOND], COSTS, 9)
    assert found.plan.slow == frozenset()
    assert (found.plan.time_us, found.all_fast_us, found.all_slow_us) == (40.0, 40.0, 106.0)
    assert found.plan.peak_bytes == found.peak_bytes == 9 * KB


@pytest.mark.parametrize(("fast", "slow", "time_us"), [(8, {1}, 47.0), (7, {1}, 47.0)])
def test_what_costs_least_of_what_suffices_is_slow(fast, slow, time_us):
    found = planned([WEIGHT, FIRST, SECOND], COSTS, fast)
    assert (found.plan.slow, found.plan.time_us, found.plan.gap) == (slow, time_us, 0.0)


def test_no_placement_that_suffices_is_faster():
    lives = [(number, number % 4, number % 4 + 2) for number in range(10)]
    tensors = [tensor(number, (number % 3 + 1) * KB, born, end, (born, end)) for number, born, end in lives]
    slow_us = {number: float((number * 7) % 11 + 1) for number in range(10)}
    found = planned(tensors, slow_us, 10, times=(10.0,) * 6)
    held = [[one for one in tensors if one.born <= call <= one.released] for call in range(6)]

    def suffices(slow):
        return all(sum(one.size_bytes for one in there if one.number not in slow) <= 10 * KB for there in held)

    subsets = itertools.chain.from_iterable(itertools.combinations(range(10), size) for size in range(11))
    best = min(sum(slow_us[number] for number in slow) for slow in map(set, subsets) if suffices(slow))
    assert best > 0
    assert suffices(found.plan.slow)
    assert found.plan.time_us - 60.0 == pytest.approx(best)


def test_the_curve_falls_from_the_least_to_the_peak():
    curve = planned([WEIGHT, FIRST, SECOND], COSTS, 8).curve
    assert [point.time_us for point in curve] == sorted((point.time_us for point in curve), reverse=True)
    assert (curve[0].fast_bytes, curve[-1].fast_bytes) == (7 * KB, 9 * KB)
    assert all(point.peak_bytes <= point.fast_bytes for point in curve)


def test_less_than_the_largest_operator_needs_is_refused_in_one_line():
    with pytest.raises(UsageError, match="less than the largest operator needs: call at call 3 reads and writes 3"):
        planned([WEIGHT, FIRST, SECOND], COSTS, 6)


def waiting(number):
    """4 pieces that wait from call 1 to call 4: out, and back, in 2.05 us each at 1 GB/s."""
    return tensor(number, 4 * KB, 0, 5, (0, 5))


LARGE = tensor(2, 8 * KB, 2, 3, (2, 3))
WAITS = {0: 30.0, 1: 20.0, 2: 90.0}


def test_what_waits_long_enough_lies_elsewhere_meanwhile():
    times = (10.0, 5.0, 50.0, 50.0, 5.0, 10.0)
    moved = planned([waiting(0), LARGE], WAITS, 8, times=times, moves=True)
    assert (moved.plan.moved, moved.plan.slow, moved.plan.time_us) == (((0, 0),), frozenset(), 130.0)
    assert moved.plan.peak_bytes == 8 * KB
    assert planned([waiting(0), LARGE], WAITS, 8, times=times).plan.time_us == 160.0
    short = (10.0, 1.0, 50.0, 50.0, 1.0, 10.0)  # call 2 begins before it is out
    assert planned([waiting(0), LARGE], WAITS, 8, times=short, moves=True).plan.moved == ()


def test_one_transfer_at_a_time_goes_each_way():
    found = planned([waiting(0), waiting(1), LARGE], WAITS, 8, times=(10.0, 5.0, 50.0, 50.0, 5.0, 10.0), moves=True)
    assert (found.plan.moved, found.plan.slow, found.plan.time_us) == (((0, 0),), {1}, 150.0)
