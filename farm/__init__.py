"""What the farm knows: models, operator tuples, measurement, the store, jobs and verdicts.

Nothing in this package knows Celery or a terminal (``cli -> tasks -> farm``, never back). Its public names load when
they are asked for: `import farm` alone loads nothing else, and whatever room imports it is in no circle with another.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "CapturedModel",
    "Database",
    "Estimate",
    "FarmError",
    "JobReport",
    "OperatorTuple",
    "Protocol",
    "Request",
    "Stopping",
    "Summary",
    "Sweep",
    "TupleReading",
    "Variant",
    "Window",
    "__version__",
    "calls",
    "capture_model",
    "compare",
    "estimate",
    "export",
    "import_readings",
    "job_report",
    "lookup",
    "measure_model",
    "measure_tuples",
    "open_database",
    "predict",
    "readings",
    "step_memory",
    "summary",
    "variant",
    "window",
]

if TYPE_CHECKING:
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
    from farm.estimation.estimate import Estimate
    from farm.models.catalog import variant
    from farm.store.database import Database
    from farm.types.protocol import Protocol, Stopping, Variant
    from farm.types.request import Request, Sweep
    from farm.types.tuple import OperatorTuple
else:
    _HOMES = {
        "CapturedModel": "farm.api.capture",
        "Database": "farm.store.database",
        "Estimate": "farm.estimation.estimate",
        "FarmError": "farm.errors",
        "JobReport": "farm.api.notebook",
        "OperatorTuple": "farm.types.tuple",
        "Protocol": "farm.types.protocol",
        "Request": "farm.types.request",
        "Stopping": "farm.types.protocol",
        "Summary": "farm.api.summary",
        "Sweep": "farm.types.request",
        "TupleReading": "farm.api.measure",
        "Variant": "farm.types.protocol",
        "Window": "farm.api.window",
        "calls": "farm.api.queries",
        "capture_model": "farm.api.capture",
        "compare": "farm.api.queries",
        "estimate": "farm.api.queries",
        "export": "farm.api.queries",
        "import_readings": "farm.api.queries",
        "job_report": "farm.api.notebook",
        "lookup": "farm.api.queries",
        "measure_model": "farm.api.measure",
        "measure_tuples": "farm.api.measure",
        "open_database": "farm.api.queries",
        "predict": "farm.api.queries",
        "readings": "farm.api.queries",
        "step_memory": "farm.api.queries",
        "summary": "farm.api.summary",
        "variant": "farm.models.catalog",
        "window": "farm.api.window",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'farm' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__():
        return sorted({*globals(), *__all__})
