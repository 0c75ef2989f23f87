"""The life of tensors over time, on a small step written down by hand and on captured ones."""

import dataclasses

import pytest

from farm.addons.memory.step_memory import largest_batch
from farm.addons.memory.transfers import offload
from farm.errors import UsageError
from farm.operators.captured import CapturedCall, CapturedPass, CapturedTensor
from farm.training.tensor_lifetime import Life, allocated_peak_bytes, least_peak_bytes


def tensor(number, size_bytes, born, released, uses, role="activation"):
    return CapturedTensor(
        number, f"t{number}", role, (size_bytes // 4,), "float32", size_bytes, born, released, uses
    )


def step(*tensors, calls):
    """A step whose calls use what the tensors say."""
    made = tuple(
        CapturedCall(
            index,
            "",
            "0" * 32,
            tuple(one.number for one in tensors if index in one.uses and index != one.born),
            tuple(one.number for one in tensors if index == one.born),
        )
        for index in range(calls)
    )
    return CapturedPass({}, made, tensors)


WEIGHT = tensor(0, 1000, -1, None, (1, 4), "parameter")
KEPT = tensor(1, 4000, 1, 4, (1, 4))
SHORT = tensor(2, 2000, 2, 3, (2, 3), "temporary")
OLD_GRADIENT = tensor(3, 1000, -1, -1, (), "gradient")
LIFE = Life(step(WEIGHT, KEPT, SHORT, OLD_GRADIENT, calls=6), (10.0, 20.0, 30.0, 40.0, 50.0, 60.0))


def test_a_tensor_waits_between_its_uses_and_over_the_end_where_it_lives_on():
    within, over = LIFE.periods[0]
    assert (within.begin, within.end, within.time_us, within.over_the_end) == (2, 4, 70.0, False)
    assert (over.begin, over.end, over.time_us, over.over_the_end) == (5, 1, 60.0 + 10.0, True)
    (kept,) = LIFE.periods[1]
    assert (kept.begin_us, kept.end_us) == (30.0, 100.0)
    assert LIFE.periods[2] == ()
    assert LIFE.inactive_byte_s == {0: 0.14, 1: 0.28, 2: 0.0}


def test_the_curve_is_what_is_held_and_tells_apart_what_is_used():
    assert LIFE.held_bytes == (1000, 5000, 7000, 7000, 5000, 1000) == LIFE.capture.memory_bytes
    assert LIFE.active_bytes == (0, 5000, 2000, 2000, 5000, 0)
    assert (LIFE.peak, LIFE.base_bytes) == (2, 1000)
    assert [one.number for one in LIFE.at_peak()] == [1, 2, 0]
    assert 3 not in LIFE.periods  # the gradient of the step before was gone before the first call
    assert allocated_peak_bytes(LIFE.capture) == 4096 + 2048 + 1024


def test_periods_are_counted_once_by_length_and_by_size():
    assert [row.periods for row in LIFE.by_length((70.0,))] == [0, 3]
    assert [(row.periods, row.size_bytes) for row in LIFE.by_size((2000.0,))] == [
        (2, 2000),
        (1, 4000),
    ]
    assert sum(row.byte_s for row in LIFE.by_size((2000.0,))) == pytest.approx(
        sum(LIFE.inactive_byte_s.values())
    )


def test_what_waits_long_enough_lies_elsewhere_meanwhile():
    kept, weight = tensor(0, 4000, 0, 5, (0, 5)), tensor(1, 1000, -1, None, (2, 3), "parameter")
    life = Life(step(kept, weight, calls=6), (10.0,) * 6)  # they wait 40 µs each
    found = offload(life, 400e6)  # 10 µs each way for what is kept, 2.5 µs for the weight
    assert (found.periods, found.long_enough, found.moved_bytes) == (2, 2, 5000)
    assert found.held_bytes == (
        4000,
        5000,
        1000,
        1000,
        5000,
        4000,
    )  # for calls that run while it is away, from begin to end
    assert found.link_share == pytest.approx(12.5 / 60)
    assert [period.tensor for period in offload(life, 150e6).hidden] == [
        1
    ]  # 27 µs each way is too long


def test_what_a_cpu_does_through_larger_tensors_is_not_in_the_least_that_a_card_needs():
    masked = step(WEIGHT, KEPT, SHORT, calls=6)
    owned = {1: "Linear", 2: "Dropout"}  # the second call and the third
    calls = tuple(
        dataclasses.replace(call, owner=owned.get(call.index, "")) for call in masked.calls
    )
    assert least_peak_bytes(dataclasses.replace(masked, calls=calls)) == 5000


def test_the_largest_batch_is_found_and_confirmed():
    asked = []

    def peak_of(batch):
        asked.append(batch)
        return 1000 + 37 * batch + batch % 3

    found = largest_batch(peak_of, 10_000, 32)
    assert (found.batch, found.exact) == (243, True)
    assert peak_of(found.batch) <= 10_000 < peak_of(found.batch + 1)
    assert len(found.peaks_bytes) < 8
    with pytest.raises(UsageError, match="Not even a batch of 1 fits"):
        largest_batch(peak_of, 1010, 32)
