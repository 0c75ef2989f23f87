"""The plan of what lies in slow memory, on steps whose best placement is known."""

import dataclasses
import itertools
import re
from types import SimpleNamespace

import pytest

from farm.addons.memory import offload_plan
from farm.addons.memory.offload_plan import SlowCosts, plan_offload
from farm.addons.memory.plans import sentences
from farm.addons.memory.transfers import Copied, Move, Wire, moves_of
from farm.errors import UsageError
from farm.training.tensor_lifetime import Life
from tests.training.test_tensor_lifetime import step, tensor

KB = 512
TIMES = (10.0, 10.0, 10.0, 10.0)


def life_of(tensors, times=TIMES):
    return Life(step(*tensors, calls=len(times)), times)


def planned(tensors, slow_us, fast, *, moves=False, times=TIMES, bytes_per_s=1e9):
    life = life_of(tensors, times)
    costs = SlowCosts(slow_us, 0.0, bytes_per_s, "made up")
    return plan_offload(life, costs, fast * KB, moves_bytes_per_s=bytes_per_s if moves else None)


WEIGHT = tensor(0, 4 * KB, -1, None, (0, 3), "parameter")
FIRST = tensor(1, 2 * KB, 0, 2, (0, 2))
SECOND = tensor(2, 3 * KB, 1, 3, (1, 3))
COSTS = {0: 50.0, 1: 7.0, 2: 9.0}


def test_with_enough_fast_memory_everything_is_fast():
    found = planned([WEIGHT, FIRST, SECOND], COSTS, 9)
    assert found.plan.slow == frozenset()
    assert (found.plan.time_us, found.all_fast.time_us, found.all_slow_us) == (40.0, 40.0, 106.0)
    assert found.plan.peak_bytes == found.all_fast.peak_bytes == 9 * KB


@pytest.mark.parametrize(("fast", "slow", "time_us"), [(8, {1}, 47.0), (7, {1}, 47.0)])
def test_what_costs_least_of_what_suffices_is_slow(fast, slow, time_us):
    found = planned([WEIGHT, FIRST, SECOND], COSTS, fast)
    assert (found.plan.slow, found.plan.time_us, found.plan.gap) == (slow, time_us, 0.0)


def test_no_placement_that_suffices_is_faster():
    lives = [(number, number % 4, number % 4 + 2) for number in range(10)]
    tensors = [
        tensor(number, (number % 3 + 1) * KB, born, end, (born, end)) for number, born, end in lives
    ]
    slow_us = {number: float((number * 7) % 11 + 1) for number in range(10)}
    found = planned(tensors, slow_us, 10, times=(10.0,) * 6)
    held = [[one for one in tensors if one.born <= call <= one.released] for call in range(6)]

    def suffices(slow):
        return all(
            sum(one.size_bytes for one in there if one.number not in slow) <= 10 * KB
            for there in held
        )

    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(10), size) for size in range(11)
    )
    best = min(
        sum(slow_us[number] for number in slow) for slow in map(set, subsets) if suffices(slow)
    )
    assert best > 0
    assert suffices(found.plan.slow)
    assert found.plan.time_us - 60.0 == pytest.approx(best)


def test_the_curve_falls_from_the_least_to_the_peak():
    curve = planned([WEIGHT, FIRST, SECOND], COSTS, 8).curve
    assert [point.time_us for point in curve] == sorted(
        (point.time_us for point in curve), reverse=True
    )
    assert (curve[0].fast_bytes, curve[-1].fast_bytes) == (7 * KB, 9 * KB)
    assert all(point.peak_bytes <= point.fast_bytes for point in curve)


def test_less_than_the_largest_operator_needs_is_refused_in_one_line():
    with pytest.raises(
        UsageError,
        match=r"too little .* operator \(call 3\) reads and writes 3",
    ):
        planned([WEIGHT, FIRST, SECOND], COSTS, 6)


def test_each_amount_has_a_plan():
    life = Life(step(WEIGHT, FIRST, SECOND, calls=4), TIMES)
    found = plan_offload(life, SlowCosts(COSTS, 0.0, 1e9, "made up"), 9 * KB, 7 * KB)
    assert [(plan.fast_bytes, plan.slow) for plan in found.plans] == [
        (9 * KB, frozenset()),
        (7 * KB, {1}),
    ]
    assert found.plan is found.plans[0]


def test_an_amount_of_the_curve_without_a_plan_in_time_is_left_out_and_told(monkeypatch):
    solve, asked = offload_plan._solve, []

    def solved(*about):
        asked.append(about)
        return solve(*about) if len(asked) != 2 else SimpleNamespace(x=None)

    monkeypatch.setattr(offload_plan, "_solve", solved)
    tensors = [WEIGHT, FIRST, SECOND]
    found = planned(tensors, COSTS, 8)
    assert found.unsolved == (7 * KB,)
    assert found.curve[0].fast_bytes > 7 * KB
    assert any(
        line.startswith("The curve has no point at 3.58 kB:")
        for line in sentences(life_of(tensors), found)
    )


def test_a_gap_is_that_of_the_plan_as_it_was_repaired(monkeypatch):
    """Rounded to a plan with too much fast memory; the cheapest tensor there leaves first."""
    solve = offload_plan._solve

    def solved(*about):
        found = solve(*about)
        return SimpleNamespace(
            x=[0.4] * len(found.x), mip_dual_bound=found.mip_dual_bound, status=0
        )

    monkeypatch.setattr(offload_plan, "_solve", solved)
    small, large = tensor(0, KB, 0, 1, (0, 1)), tensor(1, 2 * KB, 0, 1, (0, 1))
    kept = tensor(2, 2 * KB, -1, None, (2,), "parameter")
    found = planned([small, large, kept], {0: 5.0, 1: 6.0, 2: 50.0}, 3).plan
    assert (found.slow, found.gap) == ({0, 1}, pytest.approx(1 - 6 / 11, abs=1e-6))


def waiting(number):
    """4 pieces that wait from call 1 to call 4: out, and back, in 2.05 us each at 1 GB/s."""
    return tensor(number, 4 * KB, 0, 5, (0, 5))


LARGE = tensor(2, 8 * KB, 2, 3, (2, 3))
WAITS = {0: 30.0, 1: 20.0, 2: 90.0}


def test_what_waits_long_enough_lies_elsewhere_meanwhile():
    times = (10.0, 5.0, 50.0, 50.0, 5.0, 10.0)
    moved = planned([waiting(0), LARGE], WAITS, 8, times=times, moves=True)
    assert (moved.plan.moved, moved.plan.slow, moved.plan.time_us) == (
        ((0, 0),),
        frozenset(),
        130.0,
    )
    assert moved.plan.peak_bytes == 8 * KB
    assert planned([waiting(0), LARGE], WAITS, 8, times=times).plan.time_us == 160.0
    short = (10.0, 1.0, 50.0, 50.0, 1.0, 10.0)  # call 2 begins before it is out
    assert planned([waiting(0), LARGE], WAITS, 8, times=short, moves=True).plan.moved == ()


def test_what_nobody_needs_is_not_moved():
    times = (10.0, 50.0, 50.0, 50.0, 50.0, 10.0)
    small, large = waiting(0), dataclasses.replace(waiting(1), size_bytes=8 * KB)
    found = plan_offload(
        Life(step(small, large, LARGE, calls=6), times),
        SlowCosts(WAITS, 0.0, 1e9, ""),
        12 * KB,
        moves_bytes_per_s=1e9,
    )
    assert (found.plan.moved, found.plan.slow, found.plan.peak_bytes) == (
        ((1, 0),),
        frozenset(),
        12 * KB,
    )
    program = offload_plan._Program(
        Life(step(small, large, LARGE, calls=6), times), found.costs, 1e9
    )
    moved = [True, True]
    program._leave_in_place(12, [False] * 3, moved)
    assert moved == [False, True]


def test_moves_are_told_by_the_calls_at_which_they_begin_and_have_to_be_done():
    over_the_end = [
        tensor(number, 4 * KB, -1, None, uses, "parameter")
        for number, uses in ((1, (1, 2)), (2, (2,)))
    ]
    life = Life(step(waiting(0), *over_the_end, calls=6), (10.0, 5.0, 50.0, 50.0, 5.0, 10.0))
    assert moves_of(life, [(0, 0), (1, 0), (2, 0)], 1e9) == [
        Move(0, out=1, gone=2, back=4, used=5),
        Move(1, out=3, gone=4, back=6, used=1),  # behind the last call
        Move(2, out=3, gone=4, back=1, used=2),
    ]


def test_what_copies_get_and_cost_the_step_is_told_and_the_slowest_beside_it_counts():
    alone = (Copied(55e9, None), Copied(None, 54e9), Copied(50e9, 49e9))
    beside = (
        Copied(53e9, None, 10_050.0),
        Copied(None, 52e9, 10_100.0),
        Copied(47e9, 48e9, 10_200.0),
    )
    wire = Wire(10_000.0, alone, beside)
    assert wire.bytes_per_s == 47e9
    tensors = [WEIGHT, FIRST, SECOND]
    found = dataclasses.replace(planned(tensors, COSTS, 8), wire=wire)
    without, during = sentences(life_of(tensors), found)[-2:]
    rates = re.compile(r"[\d.]+ GB/s(?: back)?")
    assert rates.findall(without) == ["55.0 GB/s", "54.0 GB/s back", "50.0 GB/s", "49.0 GB/s back"]
    assert rates.findall(during) == ["53.0 GB/s", "52.0 GB/s back", "47.0 GB/s", "48.0 GB/s back"]
    assert re.findall(r"\+[\d.]+ %", during) == ["+0.5 %", "+1.0 %", "+2.0 %"]
    assert "10 ms without copies" in during


def test_one_transfer_at_a_time_goes_each_way():
    found = planned(
        [waiting(0), waiting(1), LARGE],
        WAITS,
        8,
        times=(10.0, 5.0, 50.0, 50.0, 5.0, 10.0),
        moves=True,
    )
    assert (found.plan.moved, found.plan.slow, found.plan.time_us) == (((0, 0),), {1}, 150.0)
