"""``farm run``: the whole job on this host, with nothing installed beforehand."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from cli import follow, opening
from cli.options import CliOptions, request_options
from cli.output import Interrupted, say

if TYPE_CHECKING:
    from farm.devices.device import Card
    from farm.store.database import Database
    from tasks.submissions import PlannedJob, Submissions

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE_S = 5.0  # an interruption that was raised and came to nothing in this time got lost
INTERRUPTED_HINT = "Every reading taken so far is kept: the same command continues where it stopped."


@request_options
def run(options: CliOptions) -> None:
    """Measure models on this host's cards: starts its own broker and workers, shows the report, leaves nothing behind."""
    ending = _Ending()
    try:
        with ending:
            _run(options, ending)
    except KeyboardInterrupt as interruption:
        raise Interrupted(INTERRUPTED_HINT) from interruption
    except Exception as error:
        if ending.asked:  # the interruption came out as another error, of a half-begun import or connection
            raise Interrupted(INTERRUPTED_HINT) from error
        raise


class _Ending:
    """SIGTERM, Ctrl-C and a terminal that closes alike end the run in order: servers and workers are stopped on the way out.

    They are remembered as well as raised, because an exception that arises in a finalizer, or in some C code while a
    module is imported, is dropped; Python would show it with a traceback, which `_dropped` keeps quiet.

    Only the first is raised: a second, of who presses Ctrl-C until something happens, would cut the way out short.
    """

    def __init__(self) -> None:
        self.asked = False
        self.closing = False
        self._raised_s = -PATIENCE_S

    def __enter__(self) -> None:
        self._show_dropped = sys.unraisablehook
        sys.unraisablehook = self._dropped
        self._before = {number: signal.signal(number, self._end) for number in ENDING_SIGNALS}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # Who asked for the end gets it: nothing is left to do but the message.
            signal.signal(number, signal.SIG_IGN if self.asked else handler)
        sys.unraisablehook = self._show_dropped

    def _dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            self._raised_s = -PATIENCE_S
        else:
            self._show_dropped(dropped)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        self.asked = True
        if not self.closing and now_s - self._raised_s >= PATIENCE_S:
            self._raised_s = now_s
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def uncut(self) -> Iterator[None]:
        """What is around this block is closed undisturbed, however the block ends; call `check` after that."""
        try:
            yield
        finally:
            self.closing = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What starts in this block starts whole: an end that is asked for meanwhile is raised after it.

        Raises:
            KeyboardInterrupt: it was.
        """
        self.closing = True
        try:
            yield
        finally:
            self.closing = False
        self.check()

    def check(self) -> None:
        """Raises:
        KeyboardInterrupt: an end was asked for and the exception got lost.
        """
        self.closing = False
        if self.asked:
            raise KeyboardInterrupt


def _run(options: CliOptions, ending: _Ending) -> None:
    from farm.settings import settings
    from farm.store.database import Database, is_there
    from tasks.submissions import Submissions, plan

    requests = options.requests()
    cards = opening.chosen_own_cards(options.card or [])
    planned = plan(requests, cards, target=settings().target)
    _check_slow_memory(planned, cards)
    submissions = Submissions(say)
    if options.dry_run:
        there = opening.open_database() if is_there(settings().database) else None
        follow.preview(submissions.previews(there, planned, own=cards), submissions, as_json=options.as_json)
        return
    database = Database(settings().database)
    try:
        database.upgrade()
        if left := submissions.still_to_do(database, planned):
            _measure(database, left, cards, submissions, ending)
        follow.conclude(database, submissions, as_json=options.as_json, check=options.check)
    finally:
        database.close()


def _check_slow_memory(planned: list[PlannedJob], cards: list[Card]) -> None:
    """
    Raises:
        UsageError: a request places tensors in slow memory, and a card has none.
    """
    from farm.devices.cpu import no_slow_memory
    from farm.errors import UsageError

    if any(one.request.placements != "none" for one in planned):
        for why in filter(None, map(no_slow_memory, cards)):
            raise UsageError(why, "Leave --placements out, or choose another card with --card.")


def _measure(
    database: Database,
    planned: list[PlannedJob],
    cards: list[Card],
    submissions: Submissions,
    ending: _Ending,
) -> None:
    # Celery loads only when there is something to do.
    from farm.doctor.host import disturbances
    from farm.settings import settings
    from tasks.embedded import EmbeddedFarm

    def starting() -> None:
        for check in disturbances(cards, settings()):
            say(f"warning: {check.message}.")
            say(f"→ {check.next_step}")
        say(f"Starting workers for {'; '.join(str(card) for card in cards)}")

    embedded = EmbeddedFarm(settings(), database, cards, starting=starting, held=ending.held)
    with embedded as farm, ending.uncut():

        def tend() -> None:
            ending.check()
            farm.tend()

        submissions.submit_all(database, planned, progress=follow.working, farm=farm)
        tend()
        follow.follow(database, submissions.job_ids, tend=tend)
    ending.check()
