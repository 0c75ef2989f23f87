"""Records on which streams of a card the calls of a split model run, and how the streams wait for
each other.

DDP and FSDP2 run their collectives beside the computation. They order the two by CUDA events, and
by streams of the communication library."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from farm.operators.captured import Launch
from farm.types.replacement import replaced

COMMUNICATION = -1  # the stream of the communication library, which runs asynchronous collectives


class Streams:
    """The streams of one pass. `launches` has an entry for each call after `launch`; it stays empty
    on a CPU.
    """

    def __init__(self, device_type: str) -> None:
        self.launches: list[Launch] = []
        self._on_card = device_type == "cuda" and torch.cuda.is_initialized()
        self._main = self._current() if self._on_card else 0
        self._last: dict[int, int] = {}  # stream -> its last call
        # stream -> calls for which its next call waits
        self._waits: dict[int, set[int]] = defaultdict(set)
        self._events: dict[int, set[int]] = {}  # event -> calls that it marks

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While active, events that Python code records, and waits for them, are noted."""
        if not self._on_card:
            yield
            return
        record, wait = torch.cuda.Event.record, torch.cuda.Event.wait

        def noted_record(event: torch.cuda.Event, stream: Any = None) -> None:
            self._events[id(event)] = self._before(self._number(stream))
            record(event, stream)

        def noted_wait(event: torch.cuda.Event, stream: Any = None) -> None:
            self._waits[self._number(stream)] |= self._events.get(id(event), set())
            wait(event, stream)

        with (
            replaced(torch.cuda.Event, "record", noted_record),
            replaced(torch.cuda.Event, "wait", noted_wait),
        ):
            yield

    def launch(self, call: int, *, asynchronous: bool) -> None:
        """Note that a call runs on the current stream; ``asynchronous``: on that of the
        communication library, which waits for the current stream."""
        if not self._on_card:
            return
        stream, priority = self._number(None), torch.cuda.current_stream().priority
        if asynchronous:
            self._waits[COMMUNICATION] |= self._before(stream)
            stream, priority = COMMUNICATION, 0
        self.launches.append(Launch(stream, tuple(sorted(self._waits.pop(stream, ()))), priority))
        self._last[stream] = call

    def _before(self, stream: int) -> set[int]:
        """The calls after which work that is given to a stream now begins."""
        last = self._last.get(stream)
        return self._waits[stream] | (set() if last is None else {last})

    def _number(self, stream: Any) -> int:
        address = self._current() if stream is None else stream.cuda_stream
        return 0 if address == self._main else address

    def _current(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)
