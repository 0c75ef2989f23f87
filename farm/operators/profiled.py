"""The neutral witness: what PyTorch's profiler saw running, whether or not anything observed it."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch


class Profiled:
    """What the profiler saw: kernels on CUDA, innermost aten operators with shapes on the CPU.

    Innermost, since a dispatch mode adds a second event for the outer ones; the kernels below are the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.counts: Counter[str] = Counter()

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
                if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem"):
                    self.counts[event.name] += 1
            elif event.name.startswith("aten::") and not _has_aten_below(event) and not _is_view(event.name):
                # With a mode active, linear adds its bias out of place: the same arithmetic, another name.
                self.counts[f"{event.name.rstrip('_')} {event.input_shapes}"] += 1


@functools.cache
def _is_view(name: str) -> bool:
    # A view is taken in other words (view, _reshape_alias) when a mode is active, at no cost either way.
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    return packet is not None and any(getattr(packet, overload).is_view for overload in packet.overloads())


def _has_aten_below(event: Any) -> bool:
    return any(child.name.startswith("aten::") or _has_aten_below(child) for child in event.cpu_children)
