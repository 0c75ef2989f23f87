"""Outages of the broker and the database: a log with one line for each cause (`Outage`), and the
time since the database answers without delay (`SteadyAnswers`), before which no card counts as
lost."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from farm.errors import BrokerUnreachable, DatabaseUnreachable, FarmError

#: An outage that returns within this time is the same outage: causes that it has logged are not
#: logged again. Unit: s.
SAME_OUTAGE_S = 60.0
#: An answer of the database that takes this many heartbeats was delayed by an outage.
LATE_HEARTBEATS = 2


class Outage:
    """The outage of one part of the farm, as one loop meets it."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        """``what``: begins the lines of the log, such as "Waiting for the database"."""
        self._log, self._what = log, what
        self._logged: set[str] = set()  # the causes of the present or the last outage
        self.lasts = False
        self._is_news = False  # the present outage has written a line
        self._over_s = -SAME_OUTAGE_S

    def note(self, error: Exception) -> None:
        """Log an error, with its next step, unless this outage has logged the same cause."""
        if not self.lasts:
            self.lasts, self._is_news = True, False
            if time.monotonic() - self._over_s >= SAME_OUTAGE_S:
                self._logged.clear()
        message = error.message if isinstance(error, FarmError) else str(error)
        # The details of a broker's error depend on the command that met it.
        cause = message.partition(": ")[0] if isinstance(error, BrokerUnreachable) else message
        if cause not in self._logged:
            self._logged.add(cause)
            self._is_news = True
            if isinstance(error, FarmError):
                self._log.warning("%s: %s %s", self._what, message, error.next_step)
            else:  # its text does not show its origin
                self._log.warning("%s: %s ", self._what, message, exc_info=error)

    def over(self) -> None:
        """Log that the outage is over, if there was one."""
        if self.lasts:
            self.lasts, self._over_s = False, time.monotonic()
            if self._is_news:
                self._log.warning("%s: it works again", self._what)


class SteadyAnswers:
    """Since when a database answers without delay, and its clock does not jump.

    While it does not answer, no heartbeats arrive. Until the next ones, all cards look lost. An
    answer after a delay is the end of an outage, too: a frozen or locked database does not refuse,
    it answers late. After its clock was set forward, all heartbeats look old."""

    def __init__(self, late_s: float) -> None:
        """``late_s``: an answer that takes longer is late."""
        self._late_s = late_s
        self._since_s = time.monotonic()
        self._ahead_s: float | None = None  # the database's clock, less that of this process

    @property
    def steady_for_s(self) -> float:
        return time.monotonic() - self._since_s

    def interrupted(self) -> None:
        """An outage has just ended, or lasts."""
        self._since_s = time.monotonic()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Context manager of a short query."""
        begin_s = time.monotonic()
        try:
            yield
        except DatabaseUnreachable:
            self.interrupted()
            raise
        if time.monotonic() - begin_s > self._late_s:
            self.interrupted()

    def clock_was_read(self, now_s: float) -> None:
        """Note a time of the database's clock that was read just now."""
        ahead_s = now_s - time.monotonic()
        if self._ahead_s is not None and abs(ahead_s - self._ahead_s) > self._late_s:
            self.interrupted()
        self._ahead_s = ahead_s
