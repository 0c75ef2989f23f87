"""What the farm knows: models, operator tuples, measurement, the store, jobs and verdicts.

Nothing in this package knows Celery or a terminal (``cli -> tasks -> farm``, never back). Its
public names load when they are asked for: `import farm` alone loads nothing else, and whatever room
imports it is in no circle with another."""

# ruff: noqa: F401 - the imports are for type checkers; `__all__` comes from `_MODULES` and add-ons

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The names of the farm's own add-ons. At run time, `farm.extensions` finds them.
    from farm.addons.memory.queries import fits, step_memory
    from farm.addons.predict.estimate import Estimate
    from farm.addons.predict.queries import estimate, predict
    from farm.addons.predict.summary import Summary, summary
    from farm.api.measure import measure_model
    from farm.api.notebook import JobReport, job_report
    from farm.api.queries import (
        calls,
        compare,
        export,
        import_readings,
        lookup,
        open_database,
        readings,
        why,
    )
    from farm.benchmark.block import Window
    from farm.errors import FarmError
    from farm.jobs.in_process import TupleReading, measure_tuples, window
    from farm.models.catalog import variant
    from farm.store.database import Database
    from farm.training.captured_model import CapturedModel, capture_model
    from farm.types.protocol import Protocol, Stopping
    from farm.types.release import __version__
    from farm.types.request import Request, Sweep
    from farm.types.tuple import OperatorTuple
    from farm.types.variant import Variant

_MODULES = {
    "farm.api.measure": "measure_model",
    "farm.api.notebook": "JobReport job_report",
    "farm.api.queries": "calls compare export import_readings lookup open_database readings why",
    "farm.benchmark.block": "Window",
    "farm.errors": "FarmError",
    "farm.jobs.in_process": "TupleReading measure_tuples window",
    "farm.models.catalog": "variant",
    "farm.store.database": "Database",
    "farm.training.captured_model": "CapturedModel capture_model",
    "farm.types.protocol": "Protocol Stopping",
    "farm.types.variant": "Variant",
    "farm.types.release": "__version__",
    "farm.types.request": "Request Sweep",
    "farm.types.tuple": "OperatorTuple",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

if not TYPE_CHECKING:

    def __getattr__(name):
        import importlib

        if name == "__all__":
            return sorted(_HOMES | _added())
        home = _HOMES.get(name)
        if home is None and name[0] not in "_":
            home = _added().get(name)
        if home is None:
            raise AttributeError(f"module 'farm' has no attribute '{name}'")
        return vars(importlib.import_module(home))[name]

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})

    def _added():
        """The names that add-ons add, each with its module."""
        import importlib

        return importlib.import_module("farm.extensions").public_names()
