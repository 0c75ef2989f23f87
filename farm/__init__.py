"""What the farm knows: models, operator tuples, measurement, the store, jobs and verdicts.

Nothing in this package knows Celery or a terminal (``cli -> tasks -> farm``, never back). Its
public names load when they are asked for: `import farm` alone loads nothing else, and whatever room
imports it is in no circle with another."""

# ruff: noqa: F401 - the imports are for type checkers; `__all__` follows from `_MODULES`

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from farm.addons.predict.estimate import Estimate
    from farm.api.capture import CapturedModel, capture_model
    from farm.api.measure import TupleReading, measure_model, measure_tuples
    from farm.api.notebook import JobReport, job_report
    from farm.api.queries import (
        calls,
        compare,
        estimate,
        export,
        import_readings,
        lookup,
        open_database,
        predict,
        readings,
        step_memory,
    )
    from farm.api.summary import Summary, summary
    from farm.api.window import Window, window
    from farm.errors import FarmError
    from farm.models.catalog import variant
    from farm.store.database import Database
    from farm.types.protocol import Protocol, Stopping, Variant
    from farm.types.request import Request, Sweep
    from farm.types.tuple import OperatorTuple

_MODULES = {
    "farm.api.capture": "CapturedModel capture_model",
    "farm.api.measure": "TupleReading measure_model measure_tuples",
    "farm.api.notebook": "JobReport job_report",
    "farm.api.queries": (
        "calls compare estimate export import_readings lookup open_database predict readings "
        "step_memory"
    ),
    "farm.api.summary": "Summary summary",
    "farm.api.window": "Window window",
    "farm.errors": "FarmError",
    "farm.addons.predict.estimate": "Estimate",
    "farm.models.catalog": "variant",
    "farm.store.database": "Database",
    "farm.types.protocol": "Protocol Stopping Variant",
    "farm.types.request": "Request Sweep",
    "farm.types.tuple": "OperatorTuple",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_HOMES)]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'farm' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__():
        return sorted({*globals(), *__all__})
