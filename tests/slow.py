"""The tests that `make test` leaves out, each with its reason.

    from tests import slow

    @slow.FAULT
    def test_the_database_is_frozen(): ...

`.ci/run` also runs the slow tests of `IN_CI`: of faults and complete farms, of the other kind of
database, and of compiled models. All others run with `make test-slow`, before a release.
(`FARM_SLOW_TESTS=ci` and `FARM_SLOW_TESTS=1` select them in any run of pytest.)"""

from __future__ import annotations

import pytest

ALIKE = pytest.mark.slow(reason="it repeats a test with other models, seeds or sizes")
SOAK = pytest.mark.slow(reason="it runs for a minute or more")
PROCESS = pytest.mark.slow(reason="it starts processes that import torch, or a browser")
MEASURED = pytest.mark.slow(reason="it captures or measures many models or readings")

FAULT = pytest.mark.slow(reason="it starts a farm of its own, or waits for time limits to end")
OTHER_DATABASE = pytest.mark.slow(reason="the same test runs on SQLite")
COMPILER = pytest.mark.slow(reason="it compiles models with the C++ compiler")

#: The reasons whose tests `.ci/run` runs.
IN_CI = frozenset(mark.kwargs["reason"] for mark in (FAULT, OTHER_DATABASE, COMPILER))


def is_left_out(item: pytest.Item, wanted: str) -> str:
    """Return why a test does not run, or an empty text if it runs.

    Args:
        wanted: which slow tests run: ``"1"`` all, ``"ci"`` those of `IN_CI`, ``""`` none.
    """
    reasons = {str(mark.kwargs["reason"]) for mark in item.iter_markers("slow")}
    if wanted == "ci":
        reasons -= IN_CI
    if not reasons or wanted not in ("", "ci"):
        return ""
    return f"{'; '.join(sorted(reasons))}; `make test-slow` runs it"
