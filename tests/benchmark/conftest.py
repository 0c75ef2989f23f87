"""Time under the tests' control."""

from __future__ import annotations

import pytest

from tests.benchmark.virtual_time import VirtualTime


@pytest.fixture
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Time passes only with the passes of the measured operator, and with sleeping."""
    clock = VirtualTime()
    clock.install(monkeypatch)
    return clock
