"""Copies between a card's memory and slow memory: tensors of a step moved while they wait, and what the wire gives copies beside it.

On a GPU copy engines do them, from and to pinned memory, on one stream for each way, in order; Python only enqueues. That cannot be part
of a graph: what is forked inside one has to be joined before its end. A CPU copies by itself, where the step stands.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch

from farm.slow_memory.memory_tier import SlowMemory
from farm.slow_memory.transfers import Copied, Move, Wire

OUT, BACK = 0, 1
PIECE_BYTES = 64 * 2**20
PIECES = 4  # of each way that are enqueued at once
ALONE_S = 0.3  # for so long each way is timed alone


@functools.cache
def side_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """For copies out, and back."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Mover:
    """Moves a tensor in one period of a step that is run again and again. Its room in fast memory is kept for it.

    Nothing comes back before it went out: where a period goes over the end of the step, the first run finds the tensor there.

    Attributes:
        room: its bytes in fast memory; None where it has none there, and is not moved.
        away: whether what counts is the copy in slow memory.
    """

    def __init__(self, move: Move, host: torch.Tensor, device: torch.device) -> None:
        """
        Args:
            host: bytes of slow memory as the host sees them, as many as the tensor has.
        """
        self.move = move
        self.room: torch.Tensor | None = None
        self._host, self._device = host, device
        self.away = False
        self._done = [torch.cuda.Event() for _ in (OUT, BACK)] if device.type == "cuda" else []

    def found(self, storage: torch.UntypedStorage | None) -> None:
        """Learn where it lies when it is to go out."""
        if storage is None or storage.device.type != self._device.type:
            return
        if storage.device.type == "cuda":  # the step lets go of it as ever; in its graphs it keeps the address
            address, size_bytes = storage.data_ptr(), storage.nbytes()
            storage = torch._C._construct_storage_from_data_pointer(address, storage.device, size_bytes)  # type: ignore[attr-defined, assignment]
        self.room = _bytes_of(storage)[: self._host.nbytes]

    def acts(self) -> list[tuple[int, Callable[[], None]]]:
        """What to do before which call; of several before one, copies begin before anything is waited for."""
        move = self.move
        return [(move.out, self.go), (move.back, self.come), (move.gone, self.be_gone), (move.used, self.be_back)]

    def go(self) -> None:
        if self.room is not None:
            self._copy(OUT, self._host[: self.room.nbytes], self.room)
            self.away = True

    def come(self) -> None:
        if self.away and self.room is not None:
            self._copy(BACK, self.room, self._host[: self.room.nbytes])
            self.away = False

    def be_gone(self) -> None:
        if self.away:
            self._wait_for(OUT)

    def be_back(self) -> None:
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


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


# ------------------------------------------------------------------------------------------ the wire


def wire_beside(
    step_us: Callable[[Callable[[], None] | None], float], memory: SlowMemory, device: torch.device
) -> Wire:
    """Copies of 64 MiB one behind the other, each way and both at once, alone and beside a step.

    Args:
        step_us: times the step, and calls what it is given all the while.

    Raises:
        Unmeasurable: out_of_memory: there is no room for them.
    """
    without_us = step_us(None)
    ends = [
        (memory.host_bytes(PIECE_BYTES), torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device))
        for _ in (OUT, BACK)
    ]
    if device.type != "cuda":
        return Wire(without_us, (Copied(_rate(*ends[OUT]), _rate(*reversed(ends[BACK]))),), ())
    alone, beside = [], []
    for ways in ((OUT,), (BACK,), (OUT, BACK)):
        traffic = _Traffic(device, ways, ends)
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < ALONE_S:
            traffic.keep_up()
        alone.append(Copied(traffic.rate(OUT), traffic.rate(BACK)))
        traffic = _Traffic(device, ways, ends)
        traffic.keep_up()  # once at least: a step may have ended before anybody looks
        loaded_us = step_us(traffic.keep_up)
        beside.append(Copied(traffic.rate(OUT), traffic.rate(BACK), loaded_us))
    return Wire(without_us, tuple(alone), tuple(beside))


class _Traffic:
    """Copies without a pause for as long as somebody has it keep up."""

    def __init__(
        self, device: torch.device, ways: Sequence[int], ends: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._device, self._ends = device, ends
        self._ended: dict[int, list[torch.cuda.Event]] = {way: [] for way in ways}
        self._left = dict.fromkeys(ways, 0)  # the first that is not known to have ended

    def keep_up(self) -> None:
        for way, ended in self._ended.items():
            while self._left[way] < len(ended) and ended[self._left[way]].query():
                self._left[way] += 1
            while len(ended) - self._left[way] < PIECES:
                host, room = self._ends[way]
                stream = side_streams(self._device)[way]
                with torch.cuda.stream(stream):
                    (host if way == OUT else room).copy_(room if way == OUT else host, non_blocking=True)
                ended.append(torch.cuda.Event(enable_timing=True))
                ended[-1].record(stream)

    def rate(self, way: int) -> float | None:
        """Unit: bytes/s."""
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
