"""A worker tells the versions that it runs, when ``farm doctor`` asks all of them over the broker.

Readings are kept apart by torch, CUDA, cuDNN and driver, which stand in the database with each card. The rest does not,
and is told by whoever runs it: what was loaded when the worker started, whatever is installed by now.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

from farm.devices.installed import program_versions
from tasks.diagnosis import QUESTION

_loaded = program_versions()


@inspect_command(name=QUESTION)
def farm_versions(_state: Any) -> dict[str, str]:
    """The versions of the farm and of what it runs on."""
    return _loaded
