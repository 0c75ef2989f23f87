"""When a window begins, when it ends and what it measures, for each use of a window.

`POLICIES` is the table. The kind of a subject chooses the row (`farm.benchmark.subjects.base`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

# usual duration of the work that is queued on a GPU: a busy host does not starve the GPU
QUEUED_S = 0.024
FLOOR_TICKS = 5  # a window has at least this many steps of the energy counter
WHOLE_WINDOW_S = 1.0  # the shortest window of a whole model, if the request allows it
#: The window of a whole model on several cards may be so many times longer: its power alternates
#: between products and waits, and the sensor samples it ten times a second. Steps of a decoding on
#: two H100s scattered by 14 %.
GROUP_WINDOWS = 4


@dataclass(frozen=True)
class WindowPolicy:
    """When a window begins, how long it is and whether it measures energy. Its main condition is
    the highest allowed rate of change of the chip's temperature, `slope_c_per_s`.

    Leakage grows with temperature, so a window that opens too early measures another power than a
    long run. The condition of a whole model is stricter, and its window opens only when the
    condition holds: every sum is compared with that reading. Tuples number in the hundreds: their
    windows open after the warm-up, and the condition must hold when they end."""

    slope_c_per_s: float
    # the slope is computed over this time: cards report whole degrees, ten times a second
    span_s: float
    ceiling_s: float  # longest total time of warm-up and waiting
    ahead: bool = True  # the condition must hold before the window opens, not at its end
    energy: bool = True  # False if the window measures time only
    flags: tuple[str, ...] = ()  # of its readings
    # a window may be as short as this, also if the request wants a longer one
    shortest_s: float = math.inf
    #: Of the energy counter in a window. 1: the first step is enough if the counter's period is
    #: known (`farm.benchmark.window.FIRST_STEP`).
    least_steps: int = FLOOR_TICKS
    #: A window shorter than the longest goes on until the half-width of the energy is this share of
    #: the requested one.
    energy_share: float = 1.0
    # between the rounds of the window, below the power limit (`farm.benchmark.clock.Clock`)
    pauses: bool = False
    queued_s: float = QUEUED_S  # duration of the work that is queued on a GPU
    #: Of the phase of context: the most passes in one graph, and the half-width of the effect, as a
    #: share of the time of a pass, with which the least number of replays is enough.
    context_passes: int = 24
    context_share: float = 0.002

    @property
    def settles(self) -> bool:
        """True if the chip's temperature has to be stable."""
        return math.isfinite(self.slope_c_per_s)


# For tuples of which a rough figure is enough (`Stopping.rough`): nothing waits for a stable
# temperature, and the end of a window waits for little queued work.
_ROUGH = WindowPolicy(
    math.inf,
    0.0,
    0.0,
    flags=("rough",),
    least_steps=1,
    queued_s=QUEUED_S / 3,
    context_passes=8,
    context_share=math.inf,
)

POLICIES: Mapping[str, WindowPolicy] = {
    "operator": WindowPolicy(4.5, 0.35, 0.8, ahead=False),
    "variant": WindowPolicy(1.0, 1.0, 4.0, energy_share=0.5, pauses=True),
    # For the replay of a whole model: its interval is a part of the interval of the sum.
    "replay": WindowPolicy(4.5, 0.5, 0.8, ahead=False, energy_share=0.5, pauses=True),
    "rough": _ROUGH,
    # For the copies that restore the inputs of a collective: they are much faster than copies
    # between cards, so the reading without them is as precise.
    "copies": dataclasses.replace(_ROUGH, flags=()),
    # For tuples with tensors in slow memory: they have many configurations, so the farm measures
    # only time, without waits.
    "timed": WindowPolicy(math.inf, 0.0, 0.0, energy=False, shortest_s=0.1),
}
