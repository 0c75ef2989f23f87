"""The ranks of a group: processes on several cards of one host that measure one subject together.

All ranks must run the same passes, or one waits for the others for ever. So whatever depends on a clock or on free
memory is decided together: `largest` returns the largest value of all ranks. A process that is no rank decides alone.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist

from farm.errors import Unmeasurable

#: The client ends ranks that wait too long (`farm.benchmark_process.group`); this limit must be longer than any item's.
NO_LIMIT = datetime.timedelta(days=1)
#: Settings of NCCL that change no algorithm.
_NEUTRAL = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_IFNAME", "NCCL_VERSION")
_FILES = ("/etc/nccl.conf", "~/.nccl.conf")


def join(device: torch.device, rank: int, world: int, rendezvous: str) -> str:
    """Join a group and wait for the other ranks. Return the communication library, and the settings that change it.

    Args:
        rendezvous: a file in a private folder; no port is opened outside of the host.

    Raises:
        Unmeasurable: not_available: PyTorch lacks the communication library.
    """
    cuda = device.type == "cuda"
    if not dist.is_available() or (cuda and not dist.is_nccl_available()):
        raise Unmeasurable(
            "not_available",
            f"PyTorch {torch.__version__} on this host has no {'NCCL' if cuda else 'torch.distributed'}.",
            "Install a build of PyTorch for Linux that includes it.",
        )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(rendezvous, world),
        rank=rank,
        world_size=world,
        timeout=NO_LIMIT,
        device_id=device if cuda else None,
    )
    largest(0.0)
    return _library(cuda)


def _library(cuda: bool) -> str:
    if not cuda:
        return "gloo"
    settings: dict[str, str] = {}
    for name in _FILES:
        path = Path(os.environ.get("NCCL_CONF_FILE") or name).expanduser()
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        settings |= dict(line.split("=", 1) for line in lines if line.startswith("NCCL_") and "=" in line)
    settings |= {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    shown = [f"{name}={value}" for name, value in sorted(settings.items()) if name not in _NEUTRAL]
    return " ".join(["nccl", ".".join(map(str, torch.cuda.nccl.version())), *shown])


def world() -> int:
    """The number of ranks in this process's group; 1 if it is no rank."""
    return dist.get_world_size() if dist.is_initialized() else 1


def largest(value: float) -> float:
    """The largest value of all ranks, which must call this equally often; `value` if this process is no rank."""
    if world() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)
