"""``farm run`` measures on this host, with a broker and workers of its own; ``farm submit`` on a
running farm.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from cli import follow, output
from cli.options import CliOptions
from cli.output import Interrupted, emit_json, say
from farm.errors import UsageError

if TYPE_CHECKING:
    from farm.devices.device import Card
    from farm.store.database import Database
    from farm.types.protocol import Variant
    from tasks.submissions import PlannedJob, Submissions

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE_S = 5.0  # an interruption without effect for this long was lost, and is raised again
CONTINUES = "Every reading taken so far is kept: the same command continues where it stopped."
OF_A_CPU = (
    " A CPU times up to 64 items in turn, then stores them. Items that were not stored are timed "
    "again."
)


def run(options: CliOptions) -> None:
    """Measure models on this host and show the report. Starts and stops its own broker and
    workers.
    """
    interruptible(lambda ending: _run(options, ending))


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
        if (
            ending.requested
        ):  # an interrupted import or connection turned the interruption into another error
            raise Interrupted(ending.hint) from error
        raise


class Ending:
    """End the run in order after SIGTERM, Ctrl-C or SIGHUP: servers and workers are stopped.

    The signal is stored and raised as KeyboardInterrupt. Python drops an exception that is raised
    in a finalizer, or in C code during an import, and prints a traceback; `_dropped` suppresses it.
    Only the first signal is raised: a second one would interrupt the stopping of the servers."""

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
    def held(self) -> Iterator[None]:
        """Do not interrupt this block; raise a requested end after it as `KeyboardInterrupt`."""
        self.closing = True
        try:
            yield
        finally:
            self.closing = False
        self.check()

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if an end was requested and the exception was lost."""
        self.closing = False
        if self.requested:
            raise KeyboardInterrupt


def _run(options: CliOptions, ending: Ending) -> None:
    from farm.devices.cpu import no_slow_memory
    from farm.settings import settings
    from farm.store.database import is_there
    from tasks.submissions import Submissions, plan

    requests = options.requests()
    cards = output.chosen_own_cards(options.card or [])
    planned = plan(requests, cards, target=settings().target)
    output.say_differences(variants_of(planned))
    if any(one.request.placements != "none" for one in planned):
        for why in filter(None, map(no_slow_memory, cards)):
            raise UsageError(why, "Leave --placements out, or choose another card with --card.")
    submissions = Submissions(say)
    if options.dry_run:
        there = output.open_database() if is_there(settings().database) else None
        follow.preview(
            submissions.previews(there, planned, own=cards), submissions, as_json=options.as_json
        )
        return
    with output.writable_database(may_upgrade=True) as database:
        if left := submissions.still_to_do(database, planned):
            measure(database, [left], cards, submissions, ending)
        follow.conclude(database, submissions, as_json=options.as_json, check=options.check)


def variants_of(planned: Iterable[PlannedJob]) -> list[Variant]:
    """The model variants of the jobs; a sweep has none."""
    return [job.request.variant for job in planned if job.request.variant is not None]


def measure(
    database: Database,
    batches: Iterable[Sequence[PlannedJob]],
    cards: list[Card],
    submissions: Submissions,
    ending: Ending,
) -> None:
    """Start a farm for this command and measure the batches of jobs, one batch after the other."""
    # Celery loads only when there is something to do.
    from farm.doctor.host import disturbances
    from farm.settings import settings
    from tasks.embedded import EmbeddedFarm

    ending.hint = CONTINUES + (OF_A_CPU if any(card.kind == "cpu" for card in cards) else "")

    def starting() -> None:
        for check in disturbances(cards, settings()):
            say(f"warning: {check.message}.")
            say(f"→ {check.next_step}")
        say(f"Starting workers for {'; '.join(str(card) for card in cards)}")

    with EmbeddedFarm(settings(), database, cards, starting=starting, held=ending.held) as farm:

        def tend() -> None:
            ending.check()
            farm.tend()

        try:
            for planned in batches:
                before = len(submissions.job_ids)
                submissions.submit_all(database, planned, progress=follow.working, farm=farm)
                tend()
                follow.follow(database, submissions.job_ids[before:], tend=tend)
        finally:
            ending.closing = True  # stop interrupting until the farm has stopped
    ending.check()


def submit(options: CliOptions, wait: bool = False) -> None:
    """Hand models to a running farm; its workers measure what the database does not know yet."""
    from farm.jobs.cards import serving_cards
    from farm.requests.card_selection import choose_cards
    from farm.settings import settings
    from tasks.app import check_broker
    from tasks.submissions import Submissions, plan

    if options.check and not wait and not options.dry_run:
        raise UsageError(
            "--check needs the verdicts, but `farm submit` does not wait for them.", "Add --wait."
        )
    requests = options.requests(locations=False)
    check_broker(settings())
    database = output.open_database()
    cards = choose_cards(serving_cards(database, options.card or []), options.card or [])
    planned = plan(requests, cards, target=settings().target)
    output.say_differences(variants_of(planned))
    submissions = Submissions(say)
    if options.dry_run:
        follow.preview(
            submissions.previews(database, planned), submissions, as_json=options.as_json
        )
        return
    try:
        left = submissions.still_to_do(database, planned)
        submissions.submit_all(database, left, progress=follow.working, pinned=bool(options.card))
        if wait:
            follow.follow(database, submissions.job_ids)
    except KeyboardInterrupt as interruption:
        jobs = " ".join(submissions.job_ids)
        hint = (
            f"The jobs continue: `farm status {jobs} --watch` shows their progress, `farm cancel "
            f"{jobs}` ends them."
        )
        raise Interrupted(hint if jobs else "No job was created.") from interruption
    if wait:
        follow.conclude(database, submissions, as_json=options.as_json, check=options.check)
        return
    if options.as_json:
        emit_json(
            {
                "jobs": [one.to_json() for one in submissions.submitted],
                **follow.left_out(submissions),
            }
        )
    elif submissions.job_ids:
        say(f"→ Follow the progress with `farm status {' '.join(submissions.job_ids)} --watch`.")
    submissions.check_refused(len(submissions.submitted) + len(submissions.skipped))
