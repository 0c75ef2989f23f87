"""What the farm knows: models, operator tuples, measurement, the store, jobs and verdicts.

Nothing in this package knows Celery or a terminal (``cli -> tasks -> farm``, never back). Its public names load when
they are asked for: `import farm` alone loads nothing else, and whatever room imports it is in no circle with another.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = ["Database", "FarmError", "Protocol", "Request", "Stopping", "Sweep", "Variant", "__version__"]

if TYPE_CHECKING:
    from farm.errors import FarmError
    from farm.store.database import Database
    from farm.words.protocol import Protocol, Stopping, Variant
    from farm.words.request import Request, Sweep
else:
    _HOMES = {
        "Database": "farm.store.database",
        "FarmError": "farm.errors",
        "Protocol": "farm.words.protocol",
        "Request": "farm.words.request",
        "Stopping": "farm.words.protocol",
        "Sweep": "farm.words.request",
        "Variant": "farm.words.protocol",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module 'farm' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)

    def __dir__():
        return sorted({*globals(), *__all__})
