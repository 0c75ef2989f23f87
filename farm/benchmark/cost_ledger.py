"""The card time of a measurement, by phase: `Reading.cost_s`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class CostLedger:
    """The seconds that each phase of a measurement took. If blocks are nested, time counts for the
    innermost name.
    """

    def __init__(self) -> None:
        self.cost_s: dict[str, float] = {}
        self._inner_s = 0.0  # time in the open block that other names were charged with

    def charge(self, name: str, seconds: float) -> None:
        """Add seconds of the open block to a name."""
        self.cost_s[name] = self.cost_s.get(name, 0.0) + seconds
        self._inner_s += seconds

    @contextlib.contextmanager
    def charged(self, name: str) -> Iterator[None]:
        """Add the time of the block to a name, without the time that the block itself charges to
        other names.
        """
        outer_s, self._inner_s = self._inner_s, 0.0
        began_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began_s
            self.charge(name, took_s - self._inner_s)
            self._inner_s = outer_s + took_s
