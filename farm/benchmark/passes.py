"""The passes of a subject, and what the kinds of subjects share when they build them.

A *pass* is one run of a subject. `farm.benchmark.subjects` builds the passes of each kind,
`farm.benchmark.workload` makes rounds of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from farm.benchmark import ranks
from farm.benchmark.cache import found_again
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.torch_device import capture_graph
from farm.errors import Unmeasurable
from farm.operators.captured import CapturedPass
from farm.operators.deciding_values import with_values
from farm.operators.rebuild import Rebuilt
from farm.types.details import Details, MemoryUse
from farm.types.protocol import Protocol
from farm.types.tensor_kinds import bytes_of

Pass = Callable[[], object]

CHAIN_LAYERS = 8
MEMORY_SHARE = 0.8  # the share of the free memory that all copies together may use


@dataclass(frozen=True)
class Offloaded:
    """An operator with some of its tensors in slow memory."""

    rebuilt: Rebuilt  # the operator; the placement's inputs are in slow memory
    run: Callable[[Rebuilt], Pass]  # makes a pass of the operator or of its replica
    details: Details
    pool: Any  # the memory pool from which a graph of the operator must allocate; None: any pool
    memory: object  # owns the slow memory; keep it as long as the passes


#: Puts the tensors of a protocol's placement in slow memory.
Offload = Callable[[Rebuilt, Protocol], Offloaded]


@dataclass
class Passes:
    """The passes of a subject, on its own tensors and on copies of them."""

    first: Pass
    # makes another pass on copies of the tensors; None: nothing to copy
    copy: Callable[[int], Pass] | None = None
    weight_bytes: int = 0
    activation_bytes: int = 0
    details: Details = field(default_factory=Details)
    inputs: list[torch.Tensor] = field(default_factory=list)
    # inputs that a CPU writes before each pass, as another operator of a model would
    rewritten: list[torch.Tensor] = field(default_factory=list)
    # inputs that the subject itself writes
    written: list[torch.Tensor] = field(default_factory=list)
    # captures the calls of a whole model, launched as in the window
    order: Callable[[], CapturedPass] | None = None
    pool: Any = None  # the memory pool from which graphs must allocate; None: they share a new pool
    keep: Any = None  # owns memory that the passes use


def host_steps(run: Pass, protocol: Protocol, device: torch.device) -> HostSteps:
    # Passes of several cards have no host steps: their ranks would have to agree about them.
    graph = device.type == "cuda" and protocol.launch == "graph" and ranks.world() == 1
    return HostSteps.of(run, device) if graph else HostSteps(device)


def check_cards(subject: str, cards: int) -> None:
    """Raise `Unmeasurable` if the group has another number of ranks than the subject needs."""
    if ranks.world() != cards:
        text = f"{subject} needs {cards} cards, and {ranks.world()} measure it."
        raise Unmeasurable("not_available", text, "Measure it on as many cards.")


def as_launched(
    observe: Callable[[], CapturedPass], protocol: Protocol, device: torch.device
) -> CapturedPass:
    """Call `observe` in the same way as the measured run. If the protocol launches graphs, call it
    in a graph capture.

    The reason: a model may query whether a graph capture is running, and then call other operators.
    The host cannot read values meanwhile, so it calls `observe` again if values decide how much
    work a call does."""
    if device.type != "cuda" or protocol.launch != "graph":
        return observe()
    observed: list[CapturedPass] = []
    capture_graph([lambda: observed.append(observe())], device)
    return with_values(observed[0], observe)


def working_set(
    run: Pass, model: torch.nn.Module, protocol: Protocol, device: torch.device
) -> MemoryUse:
    """Measure the bytes that one pass of a model touches, and the share that the cache keeps until
    the next pass.
    """
    parameter_bytes = bytes_of([*model.parameters(), *model.buffers()])
    if device.type != "cuda" or not protocol.measures_context:
        return MemoryUse(parameter_bytes=parameter_bytes)
    run()  # libraries allocate their workspaces in the first run
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    share = found_again(parameter_bytes + activation_bytes, device)
    return MemoryUse(
        parameter_bytes=parameter_bytes,
        activation_peak_bytes=activation_bytes,
        found_again=None if share is None else round(share, 3),
    )


@contextlib.contextmanager
def applied(protocol: Protocol) -> Iterator[None]:
    """Set the numeric flags and the grad mode of a protocol within the block: the mode of the
    subject's capture.
    """
    with numeric_flags(protocol), torch.set_grad_enabled(protocol.grad):
        yield


@contextlib.contextmanager
def numeric_flags(protocol: Protocol) -> Iterator[None]:
    """Set TF32 and cuDNN's flags as in the protocol, and restore them at the end."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = protocol.tf32
        cudnn.benchmark, cudnn.deterministic = (
            protocol.cudnn_benchmark,
            protocol.cudnn_deterministic,
        )
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def zero_out(tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.detach().zero_()


def free_bytes(device: torch.device) -> int:
    """The bytes that can still be allocated, including unused memory in PyTorch's allocator."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available
