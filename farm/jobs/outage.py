"""Log an outage once per cause, and once that it is over, however often a loop meets it."""

from __future__ import annotations

import logging
import time

from farm.errors import BrokerUnreachable

#: An outage that returns within this time is the same outage: it is not logged again. Unit: s.
SAME_OUTAGE_S = 60.0


class Outage:
    """The outage of one part of the farm, as one loop meets it. ``what`` does not work; it begins the lines of the
    log."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log, self._what = log, what
        self._logged: set[str] = set()  # the causes of the present or the last outage
        self.lasts = self._is_news = False
        self._over_s = -SAME_OUTAGE_S

    def note(self, error: Exception) -> None:
        """Log an error, with its next step, unless this outage has logged the same cause."""
        if not self.lasts:
            self.lasts, self._is_news = True, False
            if time.monotonic() - self._over_s >= SAME_OUTAGE_S:
                self._logged.clear()
        message = getattr(error, "message", str(error))
        # The details of a broker's error depend on the command that met it.
        cause = message.partition(": ")[0] if isinstance(error, BrokerUnreachable) else message
        if cause not in self._logged:
            self._logged.add(cause)
            self._is_news = True
            step = getattr(error, "next_step", None)
            trace = error if step is None else None  # the text of an unexpected error does not show its origin
            self._log.warning("%s: %s %s", self._what, message, step or "", exc_info=trace)

    def over(self) -> None:
        """Log that the outage is over, if there was one."""
        if self.lasts:
            self.lasts, self._over_s = False, time.monotonic()
            if self._is_news:
                self._log.warning("%s: it works again", self._what)
