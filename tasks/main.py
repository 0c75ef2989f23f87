"""``python -m tasks.main``: the process of a worker (see `tasks.worker`).

Garbage collection is off during imports: they create no garbage, and collection would take 20 % of
the start time. A pool process imports this module first; this loads everything that Celery finds by
name. It would not import a `__main__` module of the package."""

import gc
import sys

gc.disable()
from tasks.worker import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    code = main()
    gc.freeze()  # avoid a garbage collection at exit
    sys.exit(code)
