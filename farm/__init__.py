"""What the farm knows: models, operator tuples, measurement, the store, jobs and verdicts.

Nothing in this package knows Celery or a terminal (``cli -> tasks -> farm``, never back). Its public names load when
they are asked for: `import farm` alone loads nothing else, and whatever room imports it is in no circle with another.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "CapturedModel",
    "Database",
    "FarmError",
    "JobReport",
    "OperatorTuple",
    "Protocol",
    "Request",
    "Stopping",
    "Sweep",
    "TupleReading",
    "Variant",
    "__version__",
    "calls",
    "capture_model",
    "job_report",
    "measure_model",
    "measure_tuples",
    "open_database",
    "readings",
    "step_memory",
    "variant",
]

if TYPE_CHECKING:
    from farm.api.capture import CapturedModel, capture_model
    from farm.api.measure import TupleReading, measure_model, measure_tuples
    from farm.api.notebook import JobReport, job_report
    from farm.api.queries import calls, open_database, readings, step_memory
    from farm.errors import FarmError
    from farm.models.catalog import variant
    from farm.store.database import Database
    from farm.types.protocol import Protocol, Stopping, Variant
    from farm.types.request import Request, Sweep
    from farm.types.tuple import OperatorTuple
else:
    _HOMES = {
        "CapturedModel": "farm.api.capture",
        "Database": "farm.store.database",
        "FarmError": "farm.errors",
        "JobReport": "farm.api.notebook",
        "OperatorTuple": "farm.types.tuple",
        "Protocol": "farm.types.protocol",
        "Request": "farm.types.request",
        "Stopping": "farm.types.protocol",
        "Sweep": "farm.types.request",
        "TupleReading": "farm.api.measure",
        "Variant": "farm.types.protocol",
        "calls": "farm.api.queries",
        "capture_model": "farm.api.capture",
        "job_report": "farm.api.notebook",
        "measure_model": "farm.api.measure",
        "measure_tuples": "farm.api.measure",
        "open_database": "farm.api.queries",
        "readings": "farm.api.queries",
        "step_memory": "farm.api.queries",
        "variant": "farm.models.catalog",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'farm' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__():
        return sorted({*globals(), *__all__})
