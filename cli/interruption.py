"""The orderly end of a command that measures on this host: servers and workers are stopped."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from cli.output import Interrupted

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE_S = 5.0  # an interruption without effect for this long was lost, and is raised again
CONTINUES = "Every reading taken so far is kept: the same command continues where it stopped."


def interruptible(command: Callable[[Ending], None]) -> None:
    """Run a command that measures on this host. Raises `Interrupted` if a person or a signal ended
    it.
    """
    ending = Ending()
    try:
        with ending:
            command(ending)
    except KeyboardInterrupt as interruption:
        raise Interrupted(ending.hint) from interruption
    except Exception as error:
        if ending.requested:
            # An interrupted import or connection turned the interruption into another error.
            raise Interrupted(ending.hint) from error
        raise


class Ending:
    """End the run in order after SIGTERM, Ctrl-C or SIGHUP: servers and workers are stopped.

    The signal is stored and raised as KeyboardInterrupt. Python drops an exception that is raised
    in a finalizer, or in C code during an import, and prints a traceback; `_dropped` suppresses it.
    Only the first signal is raised: a second one would interrupt the stopping of the servers.

    Attributes:
        hint: the next step for a person who interrupted the command.
        requested: a signal has arrived.
        closing: no signal is raised now, because servers start or stop; `check` raises it later.
    """

    def __init__(self) -> None:
        self.hint = CONTINUES
        self.requested = False
        self.closing = False
        self._raised_s = -PATIENCE_S

    def __enter__(self) -> None:
        self._show_dropped = sys.unraisablehook
        sys.unraisablehook = self._dropped
        self._before = {number: signal.signal(number, self._end) for number in ENDING_SIGNALS}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # After a requested end, only the message is left to print.
            signal.signal(number, signal.SIG_IGN if self.requested else handler)
        sys.unraisablehook = self._show_dropped

    def _dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            self._raised_s = -PATIENCE_S
        else:
            self._show_dropped(dropped)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        self.requested = True
        if not self.closing and now_s - self._raised_s >= PATIENCE_S:
            self._raised_s = now_s
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Do not interrupt this block; raise a requested end after it as `KeyboardInterrupt`."""
        self.closing = True
        try:
            yield
        finally:
            self.closing = False
        self.check()

    def check(self) -> None:
        """Raise signals again from now on. Raise `KeyboardInterrupt` if an end was requested whose
        exception was lost or deferred.
        """
        self.closing = False
        if self.requested:
            raise KeyboardInterrupt
