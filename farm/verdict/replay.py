"""What a replay of all calls in order says about a sum: its time, its energy, and the power of
waiting kernels.

A process replays all calls of a model in their order, each with its own tuple, without events
between them (`farm.types.reading.InOrder`). So the replay has the neighbours of the model, and
neither the scatter of the single tuples nor the errors of their neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from farm.types.figure import Figure, PassCost
from farm.verdict.checked_cards import CheckedCards
from farm.verdict.corrections import POWER_PER_C, WAITING, cost_in_model
from farm.verdict.cost_line import CostLine
from farm.verdict.figures import ReadingView, Whole

LEAST_WAITING = 0.1  # least half-width of the share of a waiting kernel, if it is measured


def of_launch(wholes: Iterable[Whole], launch: str) -> list[ReadingView]:
    """Return the readings of the wholes with this launch."""
    return [whole.reading for whole in wholes if whole.reading and whole.launch in ("", launch)]


def measured_lines(
    parts: Sequence[CostLine],
    wholes: Iterable[Whole],
    launch: str,
    cards: CheckedCards | None = None,
) -> list[CostLine]:
    """Return the lines with a reading, with what one call adds to the sum. Only wholes with this
    `launch` are considered. With `cards`, the readings are restated to the cards of the wholes.
    """
    readings = of_launch(wholes, launch)
    if cards is not None:
        parts = cards.restated(parts, readings)
    measured = _with_costs(parts, readings, WAITING)
    if len(measured) < len(parts):
        return measured
    for correction in CORRECTIONS_OF_CALLS:
        if correction.applies(measured, readings):
            measured = correction.correct(measured, readings)
    return measured


def _with_costs(
    lines: Iterable[CostLine], wholes: Sequence[ReadingView], waiting: Figure
) -> list[CostLine]:
    measured = []
    for line in lines:
        if line.reading:
            cost = cost_in_model(line.reading, wholes, line.subject.operator_id, waiting)
            measured.append(replace(line, cost=cost))
    return measured


class CorrectionOfCalls(Protocol):
    """One difference between the loops and the model that only all calls together show. It is asked
    only if all parts of the model are measured.

    `correct` is called only if `applies` is True."""

    def applies(self, measured: Sequence[CostLine], wholes: Sequence[ReadingView]) -> bool: ...

    def correct(
        self, measured: Sequence[CostLine], wholes: Sequence[ReadingView]
    ) -> list[CostLine]: ...


class WaitingPower:
    """The power of a waiting kernel lies between that of the card without work (0) and the
    operator's own power (1). Without a measurement it is `WAITING`: the middle, known to a half.

    It follows from the energy of all calls, replayed in order from the tuples: minus the energy of
    the loops, it is the energy of the waits. The model's own energy has no influence. Its
    half-width contains the scatter of loops and replay and the errors that all loops share.

    Evidence: replays of models on H200s and H100s (docs/design/waiting-power.md)."""

    def applies(self, measured: Sequence[CostLine], wholes: Sequence[ReadingView]) -> bool:
        return self.share(measured, wholes) != WAITING

    def correct(
        self, measured: Sequence[CostLine], wholes: Sequence[ReadingView]
    ) -> list[CostLine]:
        return _with_costs(measured, wholes, self.share(measured, wholes))

    def share(self, measured: Sequence[CostLine], wholes: Sequence[ReadingView]) -> Figure:
        """Return where the power lies; `WAITING` if the replay is missing or too imprecise."""
        replay = replayed(wholes)
        if replay is None or replay.energy_mj is None:
            return WAITING

        energies_mj, half_widths_mj = list[float](), list[float]()
        swings_mj, shared_mj = list[float](), list[float]()
        for line in measured:
            _, cost = line.measured
            if cost.energy_mj is None:
                return WAITING
            energies_mj.append(line.count * cost.energy_mj.value)
            half_widths_mj.append(line.count * cost.energy_mj.half_width)
            swings_mj.append(line.count * cost.waiting_mj)
            shared_mj.append(line.count * cost.loop_unsure_mj)
        swing_mj = math.fsum(swings_mj)
        if not swing_mj:
            return WAITING

        scatter_mj = math.hypot(replay.energy_mj.half_width, *half_widths_mj)
        error_mj = math.hypot(scatter_mj, math.fsum(shared_mj))
        half_width = max(LEAST_WAITING, error_mj / abs(swing_mj))
        missing_mj = replay.energy_mj.value - math.fsum(energies_mj)
        measured_share = WAITING.value + missing_mj / swing_mj
        if wholes[0].details.cards.ranks:
            # No upper limit: the share was 2.4 to 2.7 in four decodings on two H100s and two H200s.
            return Figure(max(0.0, measured_share), half_width + max(0.0, -measured_share))
        if half_width >= WAITING.half_width:
            return WAITING
        share = min(1.0, max(0.0, measured_share))
        return Figure(share, half_width + abs(measured_share - share))


#: In the order in which they apply.
CORRECTIONS_OF_CALLS: tuple[CorrectionOfCalls, ...] = (WaitingPower(),)


def replayed(wholes: Sequence[ReadingView]) -> PassCost | None:
    """Return the cost of a replay of all calls in order, with the energy at the temperature of the
    whole; None if not exactly one whole has it.
    """
    if len(wholes) != 1:
        return None
    whole, replay = wholes[0], wholes[0].details.order.in_order
    if replay is None or replay.energy_mj is None:
        return None

    colder_c = 0.0
    if replay.temperature_c is not None and whole.temperature_c is not None:
        colder_c = whole.temperature_c - replay.temperature_c
    energy_mj = replay.energy_mj
    unsure_mj = POWER_PER_C.half_width * abs(colder_c) * energy_mj.value
    energy_mj = Figure(
        energy_mj.value * (1 + POWER_PER_C.value * colder_c),
        math.hypot(energy_mj.half_width, unsure_mj),
    )
    return PassCost(replay.time_us, energy_mj)
