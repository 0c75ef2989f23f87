"""The interface of a phase, and what the phases of one measurement share.

A phase adds figures to a reading whose window has ended, or corrects it. Example::

    class Bursts(FigurePhase):
        name = "burst"

        def applies(self, measurement: Measurement) -> bool:
            return measurement.limited

        def measure(self, measurement: Measurement, details: Details) -> Details:
            burst = measure_bursts(measurement.workload, measurement.windows.device)
            return replace(details, burst=burst)

A phase of another kind stores a record of its own: `Details.recording`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from farm.benchmark import ranks
from farm.benchmark.call_context import Player
from farm.benchmark.passes import Passes
from farm.benchmark.policies import WindowPolicy
from farm.benchmark.steady import Windows
from farm.benchmark.workload import Workload
from farm.errors import error_text
from farm.types.details import Absent, Details
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject


@dataclass
class Measurement:
    """One subject that is being measured, after its window."""

    subject: Subject
    protocol: Protocol
    stopping: Stopping
    policy: WindowPolicy
    workload: Workload
    windows: Windows
    pass_s: float  # of the slowest rank
    limited: bool  # the power limit slowed the window, and the card counts energy
    #: Builds the passes of another subject of this kind.
    build: Callable[[Subject], Passes]
    #: Replays the calls of a whole model; `phases.order.Places` makes it.
    player: Player | None = None

    @property
    def torch_device(self) -> torch.device:
        return self.windows.torch_device

    @property
    def passes(self) -> Passes:
        assert self.workload.passes is not None
        return self.workload.passes

    @property
    def in_context(self) -> bool:
        """True if the times among other operators are measured."""
        return self.windows.cuda and self.protocol.measures_context

    @property
    def in_model_order(self) -> bool:
        """True if the calls of a model are timed in their order."""
        return self.in_context and self.passes.order is not None


class Phase(ABC):
    """Adds to a reading, or corrects it."""

    name: ClassVar[str]  # also in `Reading.cost_s`
    #: `on_phase` is called with the name before the phase runs.
    announced: ClassVar[bool] = True

    @abstractmethod
    def applies(self, measurement: Measurement) -> bool:
        """True if the phase has anything to do for a subject whose kind lists it. It must not touch
        the card.
        """

    @abstractmethod
    def run(self, measurement: Measurement, reading: Reading) -> Reading:
        """Measure, and return the reading with the result."""


#: The name of what comes before the first phase.
WINDOW = "window"


def with_added(phases: Sequence[Phase], added: Mapping[str, Phase]) -> list[Phase]:
    """Insert phases into the order of others: each after the phase that is named beside it, or
    after the `WINDOW`. Example: ``with_added([Bursts(), Context()], {"burst": Third()})``.

    Raises:
        ValueError: no phase has that name.
    """
    ordered = list(phases)
    for earlier, phase in added.items():
        names = [WINDOW, *(other.name for other in ordered)]
        if earlier not in names:
            raise ValueError(
                f"The phase {phase.name!r} follows {earlier!r}, which is none of {names}."
            )
        ordered.insert(names.index(earlier), phase)
    return ordered


class FigurePhase(Phase):
    """Adds figures in another state than that of the window.

    A tuple that runs alone has other clocks and caches than in its model. The reading is valid
    without the figures: if they fail, the details say why."""

    #: The figure that can be missing, with the reason in the details. None: a failure raises.
    figure: ClassVar[Absent | None] = None

    @abstractmethod
    def measure(self, measurement: Measurement, details: Details) -> Details:
        """Measure, and return the details with the figures."""

    def run(self, measurement: Measurement, reading: Reading) -> Reading:
        return with_figures(
            reading,
            lambda: self.measure(measurement, reading.details),
            self.figure,
            measurement.torch_device,
        )


def with_figures(
    reading: Reading,
    measure: Callable[[], Details],
    figure: Absent | None,
    torch_device: torch.device,
) -> Reading:
    """Return the reading with the details of `measure`. If that fails, the details say why the
    figure is missing. Raise the error if `figure` is None, if other ranks do not fail, or if the
    CUDA context is unusable."""
    try:
        return dataclasses.replace(reading, details=measure())
    except Exception as error:
        if figure is None or not ranks.failed_everywhere():
            raise
        torch.cuda.synchronize(torch_device)
        reason = f"{type(error).__name__}: {error_text(error)}".split("\n")[0][:200]
        return reading.lacking(figure, reason)
