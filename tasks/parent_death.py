"""Tying a process to the one that started it, so that a killed farm leaves nothing running."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

#: By this a worker tells its pool process that it is to stop. Celery only waits for the task in work.
STOPPING = signal.SIGUSR2


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel to signal this process when its parent ends (Linux; elsewhere the parent stops it in order).

    Args:
        parent: the pid that should be the parent; when it is gone already, this process exits.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(0)
