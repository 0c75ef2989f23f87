"""Measured training steps, from zero_grad to the optimizer's step."""

from __future__ import annotations

import dataclasses
import functools

import torch

from farm.benchmark.passes import (
    Pass,
    Passes,
    as_launched,
    check_cards,
    host_steps,
    working_set,
    zero_out,
)
from farm.benchmark.subjects.model_variant import Observation, WholeModelKind
from farm.operators.captured import CapturedPass
from farm.subjects.collective_calls import local_part
from farm.subjects.encoding import tensors_in
from farm.types.details import Details, MemoryUse
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.tensor_kinds import bytes_of, is_plain
from farm.types.variant import Variant


class TrainingStepKind(WholeModelKind):
    """One training step of a model, from zero_grad to the optimizer's step. All passes use the same
    tensors."""

    def passes(self, subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
        from farm.training.capture import capture_step
        from farm.training.extract import build_step

        variant = subject.variant
        check_cards(str(variant), variant.cards)
        elsewhere_bytes = _allocated_without_workspaces(device)
        step = build_step(variant, device, launch=protocol.launch)
        if protocol.data == "zeros":
            zero_out(tensors_in(step.inputs))
        peaks = _memory_of_step(step.run, elsewhere_bytes, device)
        in_cache = working_set(step.run, step.model, protocol, device)
        memory = dataclasses.replace(
            peaks,
            parameter_bytes=in_cache.parameter_bytes,
            activation_peak_bytes=in_cache.activation_peak_bytes,
            found_again=in_cache.found_again,
        )
        observe = functools.partial(capture_step, step, device_type=device.type, warmed_up=True)
        steps = host_steps(step.run, protocol, device)
        return Passes(
            first=steps.around(step.run),
            activation_bytes=bytes_of(tensors_in(step.inputs)),
            details=steps.noted(Details(memory=memory)),
            written=[local_part(tensor) for tensor in step.model.parameters() if is_plain(tensor)],
            order=lambda: as_launched(steps.around(observe), protocol, device),
        )

    def observation(
        self, subject: Subject, protocol: Protocol, device: torch.device
    ) -> Observation:
        from farm.operators.profiler import compare_with_unwatched
        from farm.training.capture import capture_step
        from farm.training.extract import build_step

        step = build_step(subject.variant, device, launch=protocol.launch)
        observe = functools.partial(capture_step, step, device_type=device.type, warmed_up=True)

        def plainly() -> None:
            step.count_from_one()
            step.run()

        return Observation(
            functools.partial(compare_with_unwatched, plainly, observe, device, grad_enabled=True),
            lambda around: observe(around=around),
        )

    def capture_rank(
        self, variant: Variant, protocol: Protocol, device: torch.device
    ) -> CapturedPass:
        from farm.training.capture import capture_step
        from farm.training.extract import build_step

        step = build_step(variant, device, launch=protocol.launch)
        step.run()  # a distributed optimizer plans its second step when it runs
        return as_launched(
            lambda: capture_step(step, device_type=device.type, warmed_up=True), protocol, device
        )


def _allocated_without_workspaces(device: torch.device) -> int:
    """Free the workspaces of cuBLAS. Return the bytes that PyTorch's allocator has still allocated;
    0 on a CPU.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)


def _memory_of_step(run: Pass, elsewhere_bytes: int, device: torch.device) -> MemoryUse:
    """The memory of an eager step by PyTorch's allocator: its peaks, and the workspaces of
    libraries. Empty on a CPU.

    `elsewhere_bytes` were allocated before the step was built; they do not count.
    """
    if device.type != "cuda":
        return MemoryUse()
    run()  # libraries allocate their workspaces in the first run
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    after_bytes = torch.cuda.memory_allocated(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return MemoryUse(
        allocated_peak_bytes=peaks[0] - elsewhere_bytes,
        reserved_peak_bytes=peaks[1],
        workspace_bytes=after_bytes - _allocated_without_workspaces(device),
    )
