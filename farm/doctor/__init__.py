"""What an operator would look at first when a farm misbehaves, as data: each check says ok, or what to do.

Nothing here changes anything, and nothing raises for what it finds: a part that does not answer is a finding. One
file for each place that is looked at; the broker is asked by `tasks.broker_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from farm.doctor.check import Check, ok, summary
from farm.doctor.database import database_checks
from farm.doctor.folders import folder_checks
from farm.doctor.hardware import hardware_checks
from farm.settings import NEXT_STEP, Settings

__all__ = ["Check", "examine", "ok", "summary", "wrong_settings"]


def wrong_settings(problems: Iterable[str]) -> Iterator[Check]:
    """What is wrong in the settings. The rest is examined with the defaults in its place, but no broker is asked."""
    for problem in problems:
        yield Check("settings", "problem", problem, NEXT_STEP)


def examine(current: Settings) -> Iterator[Check]:
    """Every check of this host and of the farm's database."""
    yield from database_checks(current)
    yield from hardware_checks(current)
    yield from folder_checks(current)
