"""Time under the tests' control."""

from __future__ import annotations

import pytest

from farm.benchmark import measure
from tests.benchmark.virtual_time import VirtualTime


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is read with a thread a core. Here each core has a test process, and threads would wait for each other."""
    monkeypatch.setattr(measure, "_physical_cores", lambda: 1)


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Time passes only with the passes of the measured operator, and with sleeping."""
    clock = VirtualTime()
    clock.install(monkeypatch)
    return clock
