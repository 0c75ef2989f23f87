"""What each call takes where it stands in the running model, and which kernel belongs to which
call.
"""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from farm.benchmark.verification import attribute, time_in_model
from farm.operators.capture import capture, run_with_owners

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


@dataclass(frozen=True)
class Range:
    start: float
    end: float

    def elapsed_us(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Event:
    name: str
    id: int
    time_range: Range = field(default_factory=lambda: Range(0, 0))
    device_type: object = CPU
    is_user_annotation: bool = False
    cpu_parent: object = None
    kernels: tuple = ()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(1024, 1024), nn.Linear(1024, 8)

    def forward(self, x):
        return self.narrow(torch.relu(self.wide(x)).view(-1, 1024)).transpose(0, 1).softmax(0)


def test_every_call_that_costs_something_is_timed_and_views_are_not():
    model, x = Block().eval(), torch.randn(512, 1024)
    seen = capture(model, (x,))
    timed = time_in_model(
        lambda around: run_with_owners(model, (x,), device_type="cpu", around=around),
        seen,
        torch.device("cpu"),
    )
    assert [seen.tuples[call.tuple_id].short_name for call in seen.calls] == [
        "Linear",
        "relu",
        "Linear",
        "softmax",
    ]
    assert len(seen.slots) == 6  # view and transpose owned the slot as well
    times_us = [value for (value,) in timed.calls_us.values()]
    assert len(times_us) == 4
    assert all(value and value > 0 for value in times_us)
    assert times_us[0] == max(times_us)
    assert timed.source == "ranges"
    assert timed.sum_us == pytest.approx(sum(times_us), rel=1e-3)


def test_a_kernel_belongs_to_the_call_in_whose_range_it_was_launched():
    events = [
        Event("farm.call 0", 1, Range(0, 10)),
        Event("farm.call 1", 2, Range(12, 30)),
        Event("cudaLaunchKernel", 101, Range(3, 4)),
        Event("cudaLaunchKernel", 102, Range(13, 14)),
        Event("cuLaunchKernelEx", 103, Range(20, 21)),
        Event("cudaLaunchKernel", 104, Range(50, 51)),  # between passes
        Event("farm.call 0", 101, Range(100, 400), CUDA),  # the range again, on the card's side
        # The card runs them long after they were launched.
        Event("gemm", 101, Range(100, 150), CUDA),
        Event("add", 102, Range(150, 160), CUDA),
        Event("add", 103, Range(160, 175), CUDA),
        Event("Memset (Device)", 103, Range(175, 180), CUDA),
        Event("stray", 104, Range(180, 205), CUDA),
    ]
    times_us, share = attribute(events)
    assert times_us == {0: [50], 1: [25]}
    assert share == pytest.approx(0.75)


def test_kernels_that_run_side_by_side_count_once():
    events = [
        Event("farm.call 0", 1, Range(0, 10)),
        Event("cudaLaunchKernel", 101, Range(3, 4)),
        Event("cudaLaunchKernel", 102, Range(5, 6)),
        Event("group", 101, Range(100, 140), CUDA),
        Event("group", 102, Range(110, 150), CUDA),
    ]
    assert attribute(events) == ({0: [50]}, 1.0)


@dataclass(frozen=True)
class Linked:
    name: str
    duration: float


def test_where_the_clocks_disagree_kernels_are_found_through_their_operators():
    first, second = Event("farm.call 0", 1, Range(0, 10)), Event("farm.call 1", 2, Range(12, 30))
    outer = Event("aten::linear", 3, Range(1, 9), cpu_parent=first)
    inner = Event(
        "aten::addmm",
        4,
        Range(2, 8),
        cpu_parent=outer,
        kernels=(Linked("gemm", 50), Linked("Memset", 9)),
    )
    add = Event("aten::add", 5, Range(13, 20), cpu_parent=second, kernels=(Linked("add", 25),))
    events = [
        first,
        second,
        outer,
        inner,
        add,
        Event("cudaLaunchKernel", 101, Range(203, 204)),
        Event("cudaLaunchKernel", 102, Range(213, 214)),
        Event("gemm", 101, Range(300, 350), CUDA),
        Event("add", 102, Range(350, 375), CUDA),
    ]
    assert attribute(events) == ({0: [50], 1: [25]}, 1.0)


def test_ranges_of_the_profiler_stand_around_the_calls_and_change_no_operator():
    """What the card's way rests on, as far as a CPU shows it."""
    from torch.nn import TransformerEncoderLayer

    from farm.operators.capture import run_with_owners

    model = TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(2, 8, 32)
    seen = capture(model, (x,))

    def names(profile):
        return sorted(event.name for event in profile.events() if event.name.startswith("aten::"))

    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as plain,
    ):
        model(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as named:
        run_with_owners(
            model,
            (x,),
            device_type="cpu",
            around=lambda number: torch.profiler.record_function(f"farm.call {number}"),
        )
    ranges = [event for event in named.events() if event.name.startswith("farm.call ")]
    assert len(ranges) == len(seen.slots)
    assert names(named) == names(plain)
    below = [
        event for event in named.events() if event.name == "aten::_transformer_encoder_layer_fwd"
    ]
    assert below
    assert below[0].cpu_parent.name == "farm.call 0"
