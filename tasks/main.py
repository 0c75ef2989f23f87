"""``python -m tasks.main``: a worker's process (see `tasks.worker`).

Nothing that a module makes while it is imported is garbage: looking for some would be a fifth of a worker's start.
A process of the pool imports this module before anything else (so it is no `__main__` of the package, which it would not):
what Celery looks for by name later is loaded then, wherever the worker was started.
"""

import gc
import sys

gc.disable()
from tasks.worker import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    code = main()
    gc.freeze()  # nor for those that it leaves as it ends
    sys.exit(code)
