"""``python -m tasks``: a worker's process (see `tasks.worker`).

Nothing that a module makes while it is imported is garbage: looking for some would be a fifth of a worker's start.
"""

import gc
import sys

gc.disable()
from tasks.worker import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    sys.exit(main())
