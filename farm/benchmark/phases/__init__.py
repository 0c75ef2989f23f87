"""The phases of a measurement after its window: `PHASES`, in the order in which they run.

The kind of a subject names those that it can need (`farm.benchmark.subjects.base`)."""

from __future__ import annotations

from farm.benchmark.phases.base import Phase
from farm.benchmark.phases.bursts import Bursts
from farm.benchmark.phases.context import Context
from farm.benchmark.phases.eager import EagerLaunch
from farm.benchmark.phases.order import InOrderReplay, Places, WithoutCollectives
from farm.benchmark.phases.overlapping import Overlapping
from farm.benchmark.phases.restoring import Restoring

PHASES: tuple[Phase, ...] = (
    Bursts(),
    EagerLaunch(),
    Places(),
    WithoutCollectives(),
    InOrderReplay(),
    Context(),
    Restoring(),
    Overlapping(),
)
