"""Counts what runs with PyTorch's profiler, and compares a watched pass with an unwatched one.

The profiler is independent of the capture: it works the same with and without a recorder.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farm.operators.capture import ForwardRecorder, capture
from farm.operators.captured import CapturedPass
from farm.operators.deciding_values import with_values
from farm.subjects.allow_list import registered

MARK = "spin_kernel"  # the kernel of `torch.cuda._sleep`, which no model calls
RANGE = "farm.call "  # prefix of the ranges that name an operator call to the profiler

#: Converts a run to the form that is measured, for example to the replay of a CUDA graph.
Record = Callable[[Callable[[], object]], Callable[[], object]]

# launches of each kernel and their time in us; on a CPU only operators
Counts = tuple[Counter[str], Counter[str]]


def profiled(run: Callable[[], object], device: torch.device) -> Counts:
    """Runs once, and counts kernels on CUDA, and innermost aten operators with their input shapes
    on the CPU.

    Outer operators are not counted: a dispatch mode adds a second event for them, but runs the same
    kernels."""
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities, record_shapes=not cuda) as profile:
        run()
        if cuda:
            torch.cuda.synchronize(device)
    counts, times_us = Counter[str](), Counter[str]()
    for event in profile.events() or []:
        if cuda:
            if is_kernel(event):
                counts[event.name] += 1
                times_us[event.name] += event.time_range.elapsed_us()
        elif (
            event.name.startswith("aten::")
            and not _has_aten_below(event)
            and not _is_view(event.name)
        ):
            # With a mode active, linear adds its bias out of place: the same arithmetic under
            # another name.
            counts[f"{event.name.rstrip('_')} {_input_shapes(event)}"] += 1
    return counts, times_us


def is_kernel(event: Any) -> bool:
    """True if a profiler event is a kernel on the card; False for copies and named ranges."""
    return (
        event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Mem", RANGE))
        and not getattr(event, "is_user_annotation", False)
    )


def mark(device: torch.device) -> None:
    """Launches a separator between kernels; named ranges do not appear in the replay of a CUDA
    graph.
    """
    if device.type == "cuda":
        torch.cuda._sleep(1)


def kernels_between_marks(events: Iterable[Any]) -> list[list[Any]]:
    """The kernels between each mark and the next, in execution order; the last list follows the
    last mark.
    """
    between: list[list[Any]] = []
    for event in sorted(filter(is_kernel, events), key=lambda event: event.time_range.start):
        if MARK in event.name:
            between.append([])
        elif between:
            between[-1].append(event)
    return between


@functools.cache
def _is_view(name: str) -> bool:
    # With a mode active, views run under other names (view, _reshape_alias); they cost nothing
    # either way.
    name = name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    return any(registered(f"{name}.{overload}").is_view for overload in packet.overloads())


def _has_aten_below(event: Any) -> bool:
    return any(
        child.name.startswith("aten::") or _has_aten_below(child) for child in event.cpu_children
    )


def _input_shapes(event: Any) -> Any:
    """The shapes with which the model calls an operator. A dispatch mode runs the operator again,
    under a transform such as `torch.vmap` with other shapes."""
    mode = event.cpu_parent
    if mode is None or mode.name != "PythonDispatchMode" or mode.cpu_parent is None:
        return event.input_shapes
    is_same = mode.cpu_parent.name == event.name
    return _input_shapes(mode.cpu_parent) if is_same else event.input_shapes


@dataclass(frozen=True)
class EagerPass:
    """An eagerly launched pass that runs other operators or kernels than the measured one. The
    counts are of innermost aten operators with their input shapes on the CPU, of kernels on
    CUDA."""

    capture: CapturedPass
    unobserved: Counter[str]  # counts of the unwatched pass
    # of each kernel in the unwatched pass, all launches together; empty on the CPU
    unobserved_times_us: Counter[str]


@dataclass(frozen=True)
class WatchedPass(EagerPass):
    """A watched pass compared with an unwatched one on a device; both are launched like the
    measured run.
    """

    observed: Counter[str]  # counts of the watched pass
    differences: list[str]  # messages about different counts; empty if watching changed nothing
    eager: EagerPass | None = None  # None if an eager pass runs the same


def verify_on_device(
    model: nn.Module,
    args: tuple[Any, ...],
    device: torch.device | str,
    *,
    grad_enabled: bool = False,
    record: Record | None = None,
) -> WatchedPass:
    """Captures ``model``, which is on ``device`` already, and compares the pass with an unwatched
    one.

    All passes run after one warm-up pass, so that one-time work of cuDNN and cuBLAS is not counted.
    ``record`` creates the measured run, if it is not a plain pass. The capture then contains the
    operators called during the creation; the counters count what a launch runs. An eager pass is
    compared with the launch."""
    device = torch.device(device)
    ForwardRecorder(model, device.type)  # builds the leaves on meta; the next recorder reuses them
    return compare_with_unwatched(
        lambda: model(*args),
        lambda: capture(model, args, device_type=device.type, grad_enabled=grad_enabled),
        device,
        grad_enabled=grad_enabled,
        record=record,
    )


def compare_with_unwatched(
    run: Callable[[], object],
    watch: Callable[[], CapturedPass],
    device: torch.device,
    *,
    grad_enabled: bool,
    record: Record | None = None,
) -> WatchedPass:
    """Compares a watched run with an unwatched one. ``run`` runs unwatched; ``watch`` returns the
    capture, of which the last counts; for ``record`` see `verify_on_device`. Values that decide how
    much work a call does cannot be read while a graph is recorded, so ``watch`` then runs once
    more."""
    passes: list[CapturedPass] = []
    runs: list[Callable[[], object]] = [run, lambda: passes.append(watch())]
    with torch.set_grad_enabled(grad_enabled):
        run()
        eager = unwatched = profiled(run, device)
        if record is not None:
            runs = list(map(record, runs))
            unwatched = profiled(runs[0], device)
        after, _ = profiled(runs[1], device)
        captured = passes[-1] if record is None else with_values(passes[-1], watch)
        otherwise = EagerPass(watch(), *eager) if eager[0] != unwatched[0] else None
    before, times_us = unwatched
    differences = [
        f"{name}: {before[name]} launches without capture, {after[name]} with capture"
        for name in sorted(before.keys() | after.keys())
        if before[name] != after[name]
    ]
    return WatchedPass(captured, before, times_us, after, differences, otherwise)
