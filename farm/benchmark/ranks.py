"""The ranks of a group: processes on several cards of one host that measure one subject together.

All ranks must run the same passes, or one waits for the others for ever. So whatever depends on a
clock or on free memory is decided together: `largest` returns the largest value of all ranks,
`some` and `every` combine a condition. A process that is no rank decides alone."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from farm.devices.software import nccl_of, packaged_version
from farm.errors import Unmeasurable

T = TypeVar("T")
FAILURE_S = 10.0  # longest time between the failures of two ranks that fail for the same reason


def join(device: torch.device, rank: int, world: int, rendezvous: str) -> str:
    """Join a group and wait for the other ranks. Return the communication library, and the settings
    that change it.

    Args:
        rendezvous: a file in a private folder; no port is opened outside of the host.

    Raises:
        Unmeasurable: not_available: PyTorch lacks the communication library.
    """
    cuda = device.type == "cuda"
    if not dist.is_available() or (cuda and not dist.is_nccl_available()):
        raise Unmeasurable(
            "not_available",
            f"PyTorch {torch.__version__} on this host has no "
            f"{'NCCL' if cuda else 'torch.distributed'}.",
            "Install a build of PyTorch for Linux that includes it.",
        )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(rendezvous, world),
        rank=rank,
        world_size=world,
        # longer than any item: `farm.benchmark_process.group` ends ranks that wait
        timeout=datetime.timedelta(days=1),
        device_id=device if cuda else None,
    )
    largest(0.0)
    return (
        nccl_of(packaged_version("nccl") or ".".join(map(str, torch.cuda.nccl.version())))
        if cuda
        else "gloo"
    )


def world() -> int:
    """The number of ranks in this process's group; 1 if it is no rank."""
    return dist.get_world_size() if dist.is_initialized() else 1


def largest(value: float) -> float:
    """The largest value of all ranks, which must call this equally often; `value` if this process
    is no rank.
    """
    if world() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def some(condition: bool) -> bool:
    """True if a condition holds on some rank; all ranks must call this equally often."""
    return bool(largest(condition))


def every(condition: bool) -> bool:
    """True if a condition holds on every rank; all ranks must call this equally often."""
    return not largest(not condition)


def together(make: Callable[[], T]) -> T:
    """Return ``make()`` if it succeeds on all ranks. It must not communicate.

    Raises:
        Exception: the error of this rank; RuntimeError: another rank failed.
    """
    try:
        made = make()
    except Exception:
        some(True)
        raise
    if some(False):
        raise RuntimeError("Another rank failed; see its log.")
    return made


def failed_everywhere(wait_s: float = FAILURE_S) -> bool:
    """True if all ranks call this within `wait_s`. If not, another rank may wait in a collective
    for this one, for ever, and the group must end."""
    if world() == 1:
        return True
    store, until_s = dist.distributed_c10d._get_default_store(), time.monotonic() + wait_s
    # Each rank counts its failures in the store: equal numbers mean the same failure.
    key = f"failure {store.add(f'failures of rank {dist.get_rank()}', 1)}"
    failed = store.add(key, 1)
    while failed < world() and time.monotonic() < until_s:
        time.sleep(0.05)
        failed = store.add(key, 0)
    return failed == world()
