"""Answers questions about the card's capability without a CUDA context.

`torch.cuda.get_device_capability` creates a context on the card, and some packages, such as
torchao, ask it while they are imported. A command that captures models would then be a process on
the card, and all readings beside it would have the flag `shared`. The driver's management library
(NVML) answers the same question without a context."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from farm.types.replacement import replaced

Capability = tuple[int, int]


@contextlib.contextmanager
def without_context() -> Iterator[None]:
    """While active, `torch.cuda.get_device_capability` creates no CUDA context.

    The answer is the same. If this process has a context already, or if NVML does not answer (AMD
    cards, no driver), PyTorch's own function answers."""
    import torch

    answer = functools.partial(_capability, torch.cuda.get_device_capability)
    with replaced(torch.cuda, "get_device_capability", answer):
        yield


def _capability(original: Callable[..., Capability], device: Any = None) -> Capability:
    """The compute capability (major, minor) of a card; None is the first visible one."""
    import torch

    if torch.cuda.is_initialized() or torch.version.cuda is None:
        return original(device)
    try:
        return _capability_of_nvml(0 if device is None else device)
    except Exception:  # no driver, an index without a card, or a release of PyTorch without the map
        return original(device)


def _capability_of_nvml(device: Any) -> Capability:
    import pynvml
    import torch

    index = torch.cuda._get_nvml_device_index(device)
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    finally:
        pynvml.nvmlShutdown()
    return major, minor
