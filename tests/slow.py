"""The tests that `make test` leaves out, each with its reason.

    from tests import slow

    @slow.FAULT
    def test_the_database_is_frozen(): ...

`.ci/run` also runs the slow tests of `IN_CI`: what they show, no other test shows. Those that repeat
a test with other models or sizes, and those that take a minute, run with `make test-slow`, before a
release. (`FARM_SLOW_TESTS=ci` and `FARM_SLOW_TESTS=1` select them in any run of pytest.)"""

from __future__ import annotations

import pytest

#: Another test, or another row of its parameters, shows the same.
ALIKE = pytest.mark.slow(reason="it repeats a test with other models, seeds or sizes")
SOAK = pytest.mark.slow(reason="it runs for a minute or more")

FAULT = pytest.mark.slow(reason="it starts a farm of its own, or waits for time limits to end")
PROCESS = pytest.mark.slow(reason="it starts processes that import torch, or a browser")
COMPILER = pytest.mark.slow(reason="it compiles models with the C++ compiler")
MEASURED = pytest.mark.slow(reason="it captures or measures many models or readings")
OTHER_DATABASE = pytest.mark.slow(reason="the same test runs on SQLite")

#: The reasons whose tests `.ci/run` runs.
IN_CI = frozenset(
    mark.kwargs["reason"] for mark in (FAULT, PROCESS, COMPILER, MEASURED, OTHER_DATABASE)
)


def is_left_out(item: pytest.Item, wanted: str) -> str:
    """Return why a test does not run, or an empty text if it runs.

    Args:
        wanted: which slow tests run: ``"1"`` all, ``"ci"`` those of `IN_CI`, ``""`` none.
    """
    mark = item.get_closest_marker("slow")
    if mark is None:
        return ""
    reason = str(mark.kwargs["reason"])
    runs = wanted not in ("", "ci") or (wanted == "ci" and reason in IN_CI)
    return "" if runs else f"{reason}; `make test-slow` runs it"
