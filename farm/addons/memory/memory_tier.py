"""Slow memory: memory that a card accesses over a link. One interface for all kinds, and copies to
and from it.

- A GPU uses pinned host memory, mapped into its address space: kernels and graphs access it in
  place. Managed memory is unsuitable, because its pages migrate to the accessing device.
- A CPU uses the memory of the farthest NUMA node.

On a GPU, Python enqueues the copies on one stream for each direction, and copy engines run them in
order. The copies cannot be part of a CUDA graph, because a graph must join all forked work before
it ends. A CPU copies between its calls."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from farm.addons.memory.transfers import Copied, Move, Wire
from farm.benchmark.call_context import bytes_of
from farm.benchmark.passes import free_bytes
from farm.devices.cpu import NODES, ONE_NODE, farthest_node
from farm.errors import Unmeasurable
from farm.types.format import count_of

SHARE = 0.8  # of the available host memory may be used for slow tensors
_CAN_MAP_HOST_MEMORY, _UNIFIED_ADDRESSING = 19, 41  # CUdevice_attribute
_MPOL_BIND = 2
_HOST = torch.device("cpu")


class SlowMemory(ABC):
    """Allocates slow memory and frees it when this object is deleted."""

    name: str  # the kind of memory, for the reading

    @abstractmethod
    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        """Allocate uninitialized memory for operators. Raises `Unmeasurable` (out_of_memory) with
        the limit.
        """

    def check_room(self, *sizes_bytes: int) -> None:  # noqa: B027 - optional
        """Raise `Unmeasurable` (out_of_memory) if there is no room for tensors of these sizes;
        allocate nothing.
        """

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        """Allocate slow memory as bytes, for copies. Host memory gives a CPU tensor. Raises as
        `storage`.
        """
        return bytes_of(self.storage(size_bytes))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate an uninitialized slow tensor with the same shape, strides and storage offset."""
        storage = self.storage(tensor.untyped_storage().nbytes())
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to slow memory and return the copy."""
        return self.like(tensor).copy_(tensor.detach())


def slow_memory_of(device: torch.device) -> SlowMemory:
    """Return the slow memory of a device; raises `Unmeasurable` (not_available) if it has none."""
    return of_gpu(device) if device.type == "cuda" else FarNode()


class PinnedMemory(SlowMemory):
    """Pinned host memory, mapped into a GPU."""

    name = "pinned host memory"

    def __init__(self, device: torch.device) -> None:
        """Raises `Unmeasurable` (not_available) if the card cannot map host memory."""
        if not _maps_host_memory(device.index or 0):
            raise Unmeasurable(
                "not_available", "This card cannot map the host's memory, so it has no slow memory."
            )
        self._device = torch.device("cuda", device.index or 0)
        self._held: list[torch.Tensor] = []

    @staticmethod
    def check_room(*sizes_bytes: int) -> None:
        # PyTorch rounds up like this
        pinned_bytes = sum(1 << max(0, size - 1).bit_length() for size in sizes_bytes)
        if pinned_bytes > SHARE * free_bytes(_HOST):
            raise cannot_pin(pinned_bytes)

    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        return storage_at(self.host_bytes(size_bytes).data_ptr(), size_bytes, self._device)

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        self.check_room(size_bytes)
        try:
            host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError) as error:
            raise cannot_pin(size_bytes) from error
        self._held.append(host)
        return host


#: The slow memory of a GPU. A study replaces it in its own benchmark process.
of_gpu: Callable[[torch.device], SlowMemory] = PinnedMemory


def storage_at(address: int, size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Return memory that another object owns as a storage of the device."""
    return torch._C._construct_storage_from_data_pointer(address, device, size_bytes)  # type: ignore[attr-defined, return-value]


def cannot_pin(size_bytes: int) -> Unmeasurable:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit_text = "unlimited" if limit == resource.RLIM_INFINITY else count_of(limit, "B")
    text = (
        f"{count_of(size_bytes, 'B')} of host memory cannot be pinned: "
        f"{count_of(free_bytes(_HOST), 'B')} are "
        f"available, and the limit of locked memory (`ulimit -l`) is {limit_text}."
    )
    return Unmeasurable(
        "out_of_memory",
        text,
        "Raise the limit, free memory on the host, or choose a smaller batch.",
    )


def _maps_host_memory(index: int) -> bool:
    """True if kernels of GPU `index` can use host addresses directly."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, device = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    return all(
        not driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) and value.value
        for attribute in (_CAN_MAP_HOST_MEMORY, _UNIFIED_ADDRESSING)
    )


class FarNode(SlowMemory):
    """Memory of the NUMA node that is farthest from the cores of this process."""

    def __init__(self, nodes: Path = NODES) -> None:
        """Raises `Unmeasurable` (not_available) if there is only one node, or no libnuma."""
        node = farthest_node(nodes)
        if node is None:
            raise Unmeasurable("not_available", ONE_NODE)
        self._node, self.name = node, f"NUMA node {node}"
        try:
            self._mbind = ctypes.CDLL("libnuma.so.1", use_errno=True).mbind
        except OSError:
            why = (
                "Slow memory on a CPU needs the library libnuma, which is not installed on this "
                "host."
            )
            raise Unmeasurable("not_available", why, "Install the package numactl.") from None

    def storage(self, size_bytes: int) -> torch.UntypedStorage:
        region = mmap.mmap(-1, size_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(region))
        mask = ctypes.byref(ctypes.c_ulong(1 << self._node))
        if self._mbind(
            ctypes.c_void_p(address),
            ctypes.c_ulong(size_bytes),
            _MPOL_BIND,
            mask,
            ctypes.c_ulong(64),
            0,
        ):
            why = os.strerror(ctypes.get_errno())
            raise Unmeasurable(
                "not_available", f"The system refuses to allocate memory on {self.name}: {why}."
            )
        return torch.frombuffer(
            region, dtype=torch.uint8
        ).untyped_storage()  # it keeps the region alive


OUT, BACK = 0, 1
PIECE_BYTES = 64 * 2**20
PIECES = 4  # copies in the queue, for each direction
ALONE_S = 0.3  # how long copies are measured without a step


@functools.cache
def side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the stream for copies to slow memory and the stream for copies back."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Mover:
    """Moves a tensor to slow memory and back, during one inactive period of a step that is run
    repeatedly. The tensor's fast memory remains allocated.

    `come` copies back only what `go` copied out. If the period crosses the end of the step, the
    first run therefore skips `come`."""

    def __init__(self, move: Move, host: torch.Tensor, device: torch.device) -> None:
        """``host`` is slow memory of the tensor's size, from `SlowMemory.host_bytes`."""
        self.move, self._host, self._device = move, host, device
        # its bytes in fast memory; None if they are elsewhere: it is not moved
        self.room: torch.Tensor | None = None
        self.away = False  # True while slow memory has the tensor's only valid values
        self._done = [torch.cuda.Event() for _ in (OUT, BACK)] if device.type == "cuda" else []

    def found(self, storage: torch.UntypedStorage | None) -> None:
        """Store the tensor's storage as `room`, before the copy to slow memory."""
        if storage is None or storage.device.type != self._device.type:
            return
        # a view: the step may free the tensor; its graphs keep the address
        if storage.device.type == "cuda":
            storage = storage_at(storage.data_ptr(), storage.nbytes(), storage.device)
        self.room = bytes_of(storage)[: self._host.nbytes]

    def actions(self) -> list[tuple[int, Callable[[], None]]]:
        """Return (index of a call, action before that call); actions that begin a copy come before
        those that wait.
        """
        move = self.move
        return [
            (move.out, self.go),
            (move.back, self.come),
            (move.gone, self.wait_gone),
            (move.used, self.wait_back),
        ]

    def go(self) -> None:
        if self.room is not None:
            self._copy(OUT, self._host[: self.room.nbytes], self.room)
            self.away = True

    def come(self) -> None:
        if self.away and self.room is not None:
            self._copy(BACK, self.room, self._host[: self.room.nbytes])
            self.away = False

    def wait_gone(self) -> None:
        if self.away:
            self._wait_for(OUT)

    def wait_back(self) -> None:
        self._wait_for(BACK)

    def _copy(self, way: int, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self._done:
            target.copy_(source)
            return
        stream = side_streams(self._device)[way]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        stream.wait_event(self._done[OUT])
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        self._done[way].record(stream)

    def _wait_for(self, way: int) -> None:
        if self._done:
            torch.cuda.current_stream(self._device).wait_event(self._done[way])


def wire_beside(
    step_us: Callable[[Callable[[], None] | None], float], memory: SlowMemory, device: torch.device
) -> Wire:
    """Measure the bandwidth of copies of 64 MiB: out, back and both at once; without a step and
    during a step. ``step_us`` returns the time of the step in us, and calls its argument repeatedly
    during the step. Raises `Unmeasurable` (out_of_memory)."""
    without_us = step_us(None)
    ends = []  # target and source, for each direction
    for way in (OUT, BACK):
        host, room = (
            memory.host_bytes(PIECE_BYTES),
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device),
        )
        ends.append((host, room) if way == OUT else (room, host))
    if device.type != "cuda":
        return Wire(without_us, (Copied(*itertools.starmap(_rate, ends)),), ())
    alone, beside = [], []
    for ways in ((OUT,), (BACK,), (OUT, BACK)):
        traffic = _Traffic(device, ways, ends)
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < ALONE_S:
            traffic.keep_up()
        alone.append(Copied(traffic.rate(OUT), traffic.rate(BACK)))
        traffic = _Traffic(device, ways, ends)
        traffic.keep_up()  # at least once: the step may end before the first call of its argument
        loaded_us = step_us(traffic.keep_up)
        beside.append(Copied(traffic.rate(OUT), traffic.rate(BACK), loaded_us))
    return Wire(without_us, tuple(alone), tuple(beside))


class _Traffic:
    """Continuous copies in the directions `ways`. The caller repeats `keep_up`, which keeps enough
    copies queued.
    """

    def __init__(
        self,
        device: torch.device,
        ways: Sequence[int],
        ends: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self._device, self._ends = device, ends
        self._ended: dict[int, list[torch.cuda.Event]] = {way: [] for way in ways}
        # for each direction, the index of the oldest unfinished copy
        self._left = dict.fromkeys(ways, 0)

    def keep_up(self) -> None:
        for way, ended in self._ended.items():
            while self._left[way] < len(ended) and ended[self._left[way]].query():
                self._left[way] += 1
            while len(ended) - self._left[way] < PIECES:
                target, source = self._ends[way]
                stream = side_streams(self._device)[way]
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                ended.append(torch.cuda.Event(enable_timing=True))
                ended[-1].record(stream)

    def rate(self, way: int) -> float | None:
        """Bandwidth of one direction; None if it has no copies. Unit: bytes/s."""
        if way not in self._ended:
            return None
        ended = self._ended[way]
        torch.cuda.synchronize(self._device)
        return PIECE_BYTES * (len(ended) - 1) / (ended[0].elapsed_time(ended[-1]) / 1e3)


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    target.copy_(source)
    began_s = time.perf_counter()
    for _ in range(PIECES):
        target.copy_(source)
    return PIECES * PIECE_BYTES / (time.perf_counter() - began_s)
