"""The neutral witness: what PyTorch's profiler saw running, whether or not anything observed it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

MARK = "spin_kernel"  # of `torch.cuda._sleep`, which no model calls
RANGE = "farm.call "  # how a range begins that names an operator call to the profiler


class Profiled:
    """What the profiler saw: kernels on CUDA, innermost aten operators with shapes on the CPU.

    Innermost, since a dispatch mode adds a second event for the outer ones; the kernels below are the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts: Counter[str] = Counter()
        self.times_us: Counter[str] = Counter()  # on CUDA: how long the card ran each kernel, all its launches summed

    def __enter__(self) -> Profiled:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize(self.device)
        self.profile = torch.profiler.profile(activities=activities, record_shapes=self.device.type == "cpu")
        self.profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.profile.__exit__(*error)
        events = self.profile.events() or []
        for event in events:
            if self.device.type == "cuda":
                if is_kernel(event):
                    self.counts[event.name] += 1
                    self.times_us[event.name] += event.time_range.elapsed_us()
            elif event.name.startswith("aten::") and not _has_aten_below(event) and not _is_view(event.name):
                # With a mode active, linear adds its bias out of place: the same arithmetic, another name.
                self.counts[f"{event.name.rstrip('_')} {event.input_shapes}"] += 1


def is_kernel(event: Any) -> bool:
    """Whether an event of the profiler is a kernel on the card: no copy, and no range that a program named."""
    return (
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Mem", RANGE))
        and not getattr(event, "is_user_annotation", False)
    )


def mark(device: torch.device) -> None:
    """Launch what stands between kernels that are to be told apart: a graph that is replayed names no ranges."""
    if device.type == "cuda":
        torch.cuda._sleep(1)


def kernels_between_marks(events: Iterable[Any]) -> list[list[Any]]:
    """The kernels after each mark and before the next, in the order in which they ran; the last list is behind the last
    mark."""
    between: list[list[Any]] = []
    for event in sorted(filter(is_kernel, events), key=lambda event: event.time_range.start):
        if MARK in event.name:
            between.append([])
        elif between:
            between[-1].append(event)
    return between


def launched_kernels(run: Callable[[], object], device: torch.device) -> Counter[str]:
    """The kernels that one run launches on a card, by name. Only the card's side is recorded, which is cheap."""
    # The first profile of this kind after one of another kind sees nothing: what shows none is looked at once more.
    return _launched(run, device) or _launched(run, device)


def _launched(run: Callable[[], object], device: torch.device) -> Counter[str]:
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize(device)
    return Counter(event.name for event in profile.events() or [] if is_kernel(event))


@functools.cache
def _is_view(name: str) -> bool:
    # A view is taken in other words (view, _reshape_alias) when a mode is active, at no cost either way.
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    return packet is not None and any(getattr(packet, overload).is_view for overload in packet.overloads())


def _has_aten_below(event: Any) -> bool:
    return any(child.name.startswith("aten::") or _has_aten_below(child) for child in event.cpu_children)
