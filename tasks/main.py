"""``python -m tasks.main``: the process of a worker (see `tasks.worker`).

Garbage collection is off during imports, which create no garbage: it would take a fifth of a worker's start. A pool
process imports this module first, so that everything that Celery looks up by name is loaded. A `__main__` of the
package would not be imported there.
"""

import gc
import sys

gc.disable()
from tasks.worker import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    code = main()
    gc.freeze()  # and no collection at exit
    sys.exit(code)
