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
    from farm.errors import FarmError
    from farm.interface.capturing import CapturedModel, capture_model
    from farm.interface.frames import calls, readings
    from farm.interface.measuring import TupleReading, measure_model, measure_tuples
    from farm.interface.memory import step_memory
    from farm.interface.opening import open_database
    from farm.interface.showing import JobReport, job_report
    from farm.models.catalog import variant
    from farm.store.database import Database
    from farm.words.protocol import Protocol, Stopping, Variant
    from farm.words.request import Request, Sweep
    from farm.words.tuple import OperatorTuple
else:
    _HOMES = {
        "CapturedModel": "farm.interface.capturing",
        "Database": "farm.store.database",
        "FarmError": "farm.errors",
        "JobReport": "farm.interface.showing",
        "OperatorTuple": "farm.words.tuple",
        "Protocol": "farm.words.protocol",
        "Request": "farm.words.request",
        "Stopping": "farm.words.protocol",
        "Sweep": "farm.words.request",
        "TupleReading": "farm.interface.measuring",
        "Variant": "farm.words.protocol",
        "calls": "farm.interface.frames",
        "capture_model": "farm.interface.capturing",
        "job_report": "farm.interface.showing",
        "measure_model": "farm.interface.measuring",
        "measure_tuples": "farm.interface.measuring",
        "open_database": "farm.interface.opening",
        "readings": "farm.interface.frames",
        "step_memory": "farm.interface.memory",
        "variant": "farm.models.catalog",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'farm' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__():
        return sorted({*globals(), *__all__})
