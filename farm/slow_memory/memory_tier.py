"""Memory that a card reaches over a wire, behind one interface: by kind of card, or a test's own.

- a GPU: pinned host memory that is mapped into its address space. Kernels and graphs read and write it where it lies; it is
  never managed memory, whose pages would move to whoever touches them. In a process that a study gives a second GPU: that
  one's memory.
- a CPU: memory of the NUMA node that is farthest away.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch

from farm.devices.reach import NODES, ONE_NODE, farthest_node
from farm.errors import Unmeasurable
from farm.types.format import count_of

SHARE = 0.8  # of the host memory that is available, for all that is slow together
_CAN_MAP_HOST_MEMORY, _UNIFIED_ADDRESSING = 19, 41  # CUdevice_attribute
_MPOL_BIND = 2
_APART_BYTES = 512  # as the caching allocator aligns


class SlowMemory(ABC):
    """Hands out memory that lives as long as this object.

    Attributes:
        name: what it is, for the reading.
    """

    name: str

    @abstractmethod
    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        """Uninitialized memory that the card's operators take as their own.

        Raises:
            Unmeasurable: out_of_memory, with the limit.
        """

    def check_room(self, *sizes_bytes: int) -> None:  # noqa: B027 - not all can tell
        """
        Raises:
            Unmeasurable: out_of_memory: so much cannot be had, told before any of it is taken.
        """

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        """As many bytes of it as the host sees them, if it does, for copies.

        Raises:
            Unmeasurable: out_of_memory, with the limit.
        """
        storage = self.storage(size_bytes)
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of the same shape, strides and offset; its values are whatever was there."""
        storage = self.storage(tensor.untyped_storage().nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same with the same values."""
        return self.like(tensor).copy_(tensor.detach())


def slow_memory_of(device: torch.device) -> SlowMemory:
    """
    Raises:
        Unmeasurable: not_available: the card reaches no other memory.
    """
    return _of_gpu(device) if device.type == "cuda" else FarNode()


def take_from_peer(device: torch.device) -> None:
    """From now on what is slow in this process lies in another GPU's memory.

    Raises:
        Unmeasurable: not_available: the card reaches no other GPU's.
    """
    global _of_gpu
    PeerMemory(device)
    _of_gpu = PeerMemory


class PinnedMemory(SlowMemory):
    """Of the host, mapped into a GPU."""

    name = "pinned host memory"

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            Unmeasurable: not_available: the card cannot map it.
        """
        if not _maps_host_memory(device.index or 0):
            raise Unmeasurable("not_available", "This card cannot map the host's memory, so it has no slow memory.")
        self._device = torch.device("cuda", device.index or 0)
        self._held: list[torch.Tensor] = []

    def check_room(self, *sizes_bytes: int) -> None:
        check_room(*sizes_bytes)

    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        address = self.host_bytes(size_bytes).data_ptr()
        return torch._C._construct_storage_from_data_pointer(address, self._device, size_bytes)  # type: ignore[attr-defined, return-value]

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        check_room(size_bytes)
        try:
            host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            raise cannot_pin(size_bytes) from error
        self._held.append(host)
        return host


class PeerMemory(SlowMemory):
    """Of another GPU of the host, the second that this process sees, mapped into the first."""

    name = "memory of another GPU"

    def __init__(self, device: torch.device) -> None:
        """
        Raises:
            Unmeasurable: not_available: there is no second, or the first cannot reach its memory.
        """
        if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
            raise Unmeasurable(
                "not_available",
                "This card reaches no other GPU's memory: there is no peer access between the two.",
                "`nvidia-smi topo -p2p r` shows which cards have it; choose one of them with --card.",
            )
        self._device, self._peer = torch.device("cuda", 0), torch.device("cuda", 1)
        self._held: list[torch.Tensor] = []
        # A copy from the one to the other has PyTorch enable the access that the first one's kernels need, once a process,
        # also to memory that its allocator takes later, of whichever kind.
        torch.zeros(1, device=self._peer).copy_(torch.zeros(1, device=self._device))

    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        try:
            there = torch.empty(size_bytes + _APART_BYTES, dtype=torch.uint8, device=self._peer)
        except torch.OutOfMemoryError as error:
            free_bytes, all_bytes = torch.cuda.mem_get_info(self._peer)
            raise Unmeasurable(
                "out_of_memory",
                f"{count_of(size_bytes, 'B')} of the other GPU's memory cannot be had: {count_of(free_bytes, 'B')} of "
                f"{count_of(all_bytes, 'B')} are free.",
                "Choose a smaller batch.",
            ) from error
        self._held.append(there)
        # Behind the block's own first byte: the caching allocator tells by its address what it frees, of whichever card.
        address = there.data_ptr() + _APART_BYTES
        return torch._C._construct_storage_from_data_pointer(address, self._device, size_bytes)  # type: ignore[attr-defined, return-value]


_of_gpu: Callable[[torch.device], SlowMemory] = PinnedMemory


def check_room(*sizes_bytes: int) -> None:
    """Raises:
    Unmeasurable: so much host memory is not there to be pinned, in pieces of these sizes.
    """
    pinned_bytes = sum(1 << max(0, size - 1).bit_length() for size in sizes_bytes)  # PyTorch's pieces are powers of two
    if pinned_bytes > SHARE * _available_bytes():
        raise cannot_pin(pinned_bytes)


def cannot_pin(size_bytes: int) -> Unmeasurable:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if limit == resource.RLIM_INFINITY else count_of(limit, "B")
    return Unmeasurable(
        "out_of_memory",
        f"{count_of(size_bytes, 'B')} of host memory cannot be pinned: {count_of(_available_bytes(), 'B')} are available, "
        f"and the limit of locked memory (`ulimit -l`) is {told}.",
        "Raise the limit, free memory on the host, or choose a smaller batch.",
    )


def _available_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _maps_host_memory(index: int) -> bool:
    """Whether kernels may take a host address as it is."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, device = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    for attribute in (_CAN_MAP_HOST_MEMORY, _UNIFIED_ADDRESSING):
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) or not value.value:
            return False
    return True


class FarNode(SlowMemory):
    """Of the NUMA node that is farthest from the cores that this process runs on."""

    def __init__(self, nodes: Path = NODES) -> None:
        """
        Raises:
            Unmeasurable: not_available: there is one node, or no libnuma.
        """
        node = farthest_node(nodes)
        if node is None:
            raise Unmeasurable("not_available", ONE_NODE)
        self._node = node
        self.name = f"NUMA node {self._node}"
        try:
            self._mbind = ctypes.CDLL("libnuma.so.1", use_errno=True).mbind
        except OSError:
            raise Unmeasurable(
                "not_available", "This host has several NUMA nodes, and no libnuma to place memory.", "Install numactl."
            ) from None

    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        region = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        mask = ctypes.c_ulong(1 << self._node)
        bound = self._mbind(
            ctypes.c_void_p(address), ctypes.c_ulong(size_bytes), _MPOL_BIND, ctypes.byref(mask), ctypes.c_ulong(64), 0
        )
        if bound:
            why = os.strerror(ctypes.get_errno())
            raise Unmeasurable("not_available", f"Memory cannot be placed on {self.name}: {why}.")
        return torch.frombuffer(region, dtype=torch.uint8).untyped_storage()  # which holds the region
