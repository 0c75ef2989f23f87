"""The interface of a handler: it answers one kind of request in a benchmark process.

`HANDLERS` are those of the core. An add-on of the host registers others
(`farm.types.add_on.AddOn.handlers`). A message names a kind of request, never a module. A process
without a handler for the kind refuses it with the reason ``not_available``.

A handler keeps this contract. `tests/contracts/test_handlers.py` checks it for every handler:

- ``request`` is a frozen dataclass with a `name` that no other kind has, a type of its `answer`,
  and a verb phrase `doing`. ``from_json(kind, to_json(request)) == request``.
- ``answer`` returns a value of the type `request.answer`. It raises `Unmeasurable`, with a reason
  of an item, if the card cannot do it or the subject fails, and `FarmError` if the request is
  wrong. After another exception, the process checks its CUDA context.
- ``answer`` leaves no tensor, stream or thread in use.
- ``answer`` calls ``on_phase(name, details)`` when a phase of a long work begins.
- The module imports no torch at load time: a worker without a card loads it, too.

Example::

    def _copy(request: CopyRequest, card: OpenCard, on_phase: OnPhase) -> float:
        on_phase("window", {})
        return copy_bytes_per_s(card.torch_device)

    HANDLERS = (Handler(CopyRequest, _copy),)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from farm.benchmark_process.requests import (
    FingerprintRequest,
    MeasureRequest,
    ProcessRequest,
    TurnsRequest,
)
from farm.devices.device import Device
from farm.types.protocol import OnPhase
from farm.types.reading import Reading

if TYPE_CHECKING:
    import torch

    from farm.benchmark.bench import Bench


@dataclass(frozen=True)
class OpenCard:
    """The card of a benchmark process, as a handler uses it."""

    device: Device  # its sensors
    torch_device: torch.device
    bench: Bench  # measures subjects on it
    #: What handlers keep from one request to the next, by name. The process may end in between.
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Handler:
    """Answers one kind of request on a real card."""

    request: type[ProcessRequest[Any]]
    answer: Callable[[Any, OpenCard, OnPhase], Any]


def _measure(request: MeasureRequest, card: OpenCard, on_phase: OnPhase) -> Reading:
    return card.bench.measure(request.subject, request.protocol, request.stopping, on_phase)


def _time_in_turn(request: TurnsRequest, card: OpenCard, on_phase: OnPhase) -> list[int]:
    pairs = list(zip(request.subjects, request.protocols, strict=True))
    return card.bench.time_in_turn(pairs, request.stopping, request.calls, on_phase)


def _take_fingerprint(
    request: FingerprintRequest, card: OpenCard, on_phase: OnPhase
) -> dict[str, Any]:
    from farm.benchmark import fingerprinting

    return fingerprinting.take(card.bench)


HANDLERS = (
    Handler(MeasureRequest, _measure),
    Handler(TurnsRequest, _time_in_turn),
    Handler(FingerprintRequest, _take_fingerprint),
)
