"""Calls timed where they stand with tensors in slow memory: many at a time, and one at a time."""

import pytest
import torch
from torch import nn

from benchmarks.studies.in_situ import ChangedCall, changes_of, time_changes, together
from farm.addons.memory.memory_tier import SlowMemory
from farm.operators.capture import capture

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.sigmoid(layer(x)) + 1.0
        return x


class Fake(SlowMemory):
    name = "fake"
    taken = 0

    def storage(self, size_bytes):
        Fake.taken += 1
        return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


@pytest.fixture(scope="module")
def seen():
    return capture(Net().eval(), (torch.randn(4, 8),))


def test_every_configuration_is_in_one_run_and_no_two_of_a_run_touch(seen):
    wanted = [ChangedCall(call.index, word) for call in seen.calls for word in ("in0", "out0")]
    runs = together(seen, wanted)
    assert sorted((one for run in runs for one in run), key=str) == sorted(wanted, key=str)
    assert len(runs) < len(wanted) / 2
    for run in runs:
        for number, one in enumerate(run):
            mine = seen.calls[one.call]
            for other in run[:number]:
                its = seen.calls[other.call]
                assert abs(one.call - other.call) > 1
                assert not {*mine.reads, *mine.writes} & {*its.reads, *its.writes}


def test_each_tuple_is_changed_at_its_first_call(seen):
    found = changes_of(seen, "each")
    linear, sigmoid, add = (
        seen.tuples[seen.calls[index].tuple_id].short_name for index in (0, 1, 2)
    )
    assert (linear, sigmoid, add) == ("Linear", "sigmoid", "add")
    assert [one.placement for one in found if one.call == 0] == [
        "in0",
        "in1",
        "in2",
        "out0",
        "in0-2+out0",
    ]
    assert {one.call for one in found} == {0, 1, 2}
    assert len(changes_of(seen, "each", 4)) == 4


def test_changed_calls_are_timed_and_what_cannot_be_placed_is_told(seen):
    changes = changes_of(seen, "each")
    Fake.taken = 0
    with torch.no_grad():
        many = time_changes(seen, together(seen, changes), Fake, CPU)
        single = time_changes(seen, [[one] for one in changes], Fake, CPU)
    assert set(many.found) == set(single.found)
    assert {*many.found, *many.left_out} == set(changes)
    assert all(one.half_width_us >= 0 for one in many.found.values())
    assert (single.runs, many.runs < single.runs) == (len(changes), True)
    assert Fake.taken
    assert all("slow memory" in why or "pool" in why for why in many.left_out.values())
