"""Handlers of the core's requests on a real card."""

from __future__ import annotations

from typing import Any

from farm.benchmark_process.handlers import Handler, OpenCard
from farm.benchmark_process.requests import FingerprintRequest, MeasureRequest, TurnsRequest
from farm.types.protocol import OnPhase
from farm.types.reading import Reading


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
