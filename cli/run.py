"""``farm run`` measures on this host, with a broker and workers of its own; ``farm submit`` on a
running farm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cli import follow, output
from cli.interruption import CONTINUES, Ending, interruptible
from cli.options import CliOptions
from cli.output import Interrupted, emit_json, say, say_differences
from farm.errors import UsageError

if TYPE_CHECKING:
    from farm.devices.device import Card
    from farm.requests.resolved import ResolvedRequest
    from farm.store.database import Database
    from tasks.submissions import Submissions

OF_A_CPU = (
    " A CPU times up to 64 items in turn, then stores them. Items that were not stored are timed "
    "again."
)


def run(options: CliOptions) -> None:
    """Measure models on this host and show the report. Starts and stops its own broker and
    workers.
    """
    interruptible(lambda ending: _run(options, ending))


def _run(options: CliOptions, ending: Ending) -> None:
    from farm.jobs import slow_memory
    from farm.settings import settings
    from farm.store.database import is_there
    from tasks.submissions import Submissions, resolve_all

    partials = options.requests()
    cards = output.chosen_own_cards(options.card or [])
    requests = resolve_all(partials, cards, target=settings().target)
    say_differences(requests)
    for resolved in requests:
        slow_memory.check_cards(resolved.request, cards)
    submissions = Submissions(say)
    if options.dry_run:
        database = output.open_database() if is_there(settings().database) else None
        plans = submissions.previews(database, requests, own_cards=cards)
        follow.preview(plans, submissions, as_json=options.as_json)
        return
    with output.writable_database(may_upgrade=True) as database:
        left = submissions.still_to_do(database, requests)
        if left:
            measure(database, [left], cards, submissions, ending)
        follow.conclude(database, submissions, as_json=options.as_json, check=options.check)


def measure(
    database: Database,
    batches: Iterable[Sequence[ResolvedRequest]],
    cards: list[Card],
    submissions: Submissions,
    ending: Ending,
) -> None:
    """Start a farm for this command and measure the batches of requests, one after the other."""
    # Celery loads only when there is something to do.
    from farm.settings import settings
    from tasks.doctor.host import check_alone, disturbances
    from tasks.embedded import EmbeddedFarm

    ending.hint = CONTINUES + (OF_A_CPU if any(card.is_cpu for card in cards) else "")

    def starting() -> None:
        current = settings()
        check_alone(cards, current)
        # The GPUs have just been looked at.
        others = cards if current.allow_shared else [card for card in cards if card.is_cpu]
        for check in disturbances(others, current):
            say(f"warning: {check.message}.")
            say(f"→ {check.next_step}")
        say(f"Starting workers for {'; '.join(str(card) for card in cards)}")

    with EmbeddedFarm(
        settings(),
        database,
        cards,
        starting=starting,
        uninterrupted=ending.uninterrupted,
        say=say,
    ) as farm:

        def tend() -> None:
            ending.check()
            farm.tend()

        try:
            for requests in batches:
                before = len(submissions.job_ids)
                submissions.submit_all(database, requests, progress=follow.working, farm=farm)
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
    from tasks.submissions import Submissions, resolve_all

    if options.check and not wait and not options.dry_run:
        raise UsageError(
            "--check needs the verdicts, but `farm submit` does not wait for them.", "Add --wait."
        )
    partials = options.requests(locations=False)
    check_broker(settings())
    database = output.open_database()
    cards = choose_cards(serving_cards(database, options.card or []), options.card or [])
    pinned = bool(options.card)
    requests = resolve_all(partials, cards, target=settings().target, pinned=pinned)
    say_differences(requests)
    submissions = Submissions(say)
    if options.dry_run:
        plans = submissions.previews(database, requests)
        follow.preview(plans, submissions, as_json=options.as_json)
        return
    try:
        left = submissions.still_to_do(database, requests)
        submissions.submit_all(database, left, progress=follow.working)
        if wait:
            follow.follow(database, submissions.job_ids)
    except KeyboardInterrupt as interruption:
        raise Interrupted(hint_for(submissions.job_ids)) from interruption
    if wait:
        follow.conclude(database, submissions, as_json=options.as_json, check=options.check)
    else:
        say_submitted(submissions, as_json=options.as_json)


def hint_for(job_ids: Sequence[str]) -> str:
    """What to do after an interrupted `farm submit` with these jobs."""
    if not job_ids:
        return "No job was created."
    jobs = " ".join(job_ids)
    return (
        f"The jobs continue: `farm status {jobs} --watch` shows their progress, `farm cancel "
        f"{jobs}` ends them."
    )


def say_submitted(submissions: Submissions, *, as_json: bool) -> None:
    """Print the submitted jobs. Raises `Refused` if something cannot be measured."""
    if as_json:
        jobs = [plan.to_json() for plan in submissions.submitted]
        emit_json({"jobs": jobs, **follow.without_job(submissions)})
    elif submissions.job_ids:
        say(f"→ Follow the progress with `farm status {' '.join(submissions.job_ids)} --watch`.")
    submissions.check_refused(len(submissions.submitted) + len(submissions.skipped))
