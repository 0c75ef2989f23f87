"""The loop of the reconciler: when a pass begins, the pause after it, and the sign that passes are
completed.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from farm.errors import DatabaseUnreachable
from farm.jobs.outage import LATE_HEARTBEATS, Outage, SteadyAnswers
from farm.settings import Settings
from farm.store.database import Database
from tasks.broker_probe import check_broker_works
from tasks.control import AggregationRequests, reconcile_now
from tasks.queues import note_completed_pass, own_farm, reserves_pass

log = logging.getLogger("farm.worker")

#: With a million open items a pass takes seconds. The pause after it is so many times as long, so
#: that passes use only a part of the database's time. It is never longer than `LONGEST_PAUSE_S`.
PAUSE_PER_WORK = 4
LONGEST_PAUSE_S = 60.0

#: A completed pass is a sign of work until the next one has failed this many times to appear.
MISSED_PASSES = 3
#: The least time for which a completed pass is a sign of work. Unit: s.
SIGN_S = 10.0


@dataclass
class Pace:
    """The duration of passes, without waiting for the database.

    Work lengthens every pass. Waiting, for a database that is frozen or locked, lengthens one. So
    the shorter of the last two passes of this process shows the work."""

    _last_s: float = 0.0

    def work_s(self, pass_s: float) -> float:
        """Return the work of a pass that took ``pass_s``."""
        shorter_s = min(self._last_s, pass_s)
        self._last_s = pass_s
        return shorter_s


@dataclass
class Reconciler:
    """Makes passes in turn with the reconcilers of other hosts (`tasks.control.reconcile_now`)."""

    current: Settings
    database: Database
    _answers: SteadyAnswers = field(init=False)
    _outage: Outage = field(init=False)
    _requests: AggregationRequests = field(default_factory=AggregationRequests, init=False)
    _pace: Pace = field(default_factory=Pace, init=False)

    def __post_init__(self) -> None:
        self._answers = SteadyAnswers(LATE_HEARTBEATS * self.current.heartbeat_s)
        self._outage = Outage(log, "Jobs are not repaired, and no message is published again")

    def run(self, ended: threading.Event) -> None:
        """Make passes until the event is set."""
        while not ended.wait(self.current.reconcile_s):
            self.make_pass()

    def make_pass(self) -> None:
        """Make a pass, unless another host has made one just now."""
        if not reserves_pass(self.current.reconcile_s):
            return
        begin_s = time.monotonic()
        try:
            reconcile_now(
                self.database,
                self.current,
                own_farm(),
                answers=self._answers,
                requests=self._requests,
            )
            if self._outage.lasts:
                # a pass that publishes nothing does not show that the broker works
                check_broker_works(self.current)
            self._outage.over()
            self._completed(time.monotonic() - begin_s)
        except Exception as error:
            if isinstance(error, DatabaseUnreachable):
                self._answers.interrupted()
            self._outage.note(error)

    def _completed(self, pass_s: float) -> None:
        work_s = self._pace.work_s(pass_s)
        pause_s = min(PAUSE_PER_WORK * work_s, LONGEST_PAUSE_S)
        next_s = max(pause_s, self.current.reconcile_s)
        if pause_s > self.current.reconcile_s:
            reserves_pass(pause_s, longer=True)
        note_completed_pass(MISSED_PASSES * (work_s + next_s) + SIGN_S)
