"""``farm submit``: jobs for a running farm."""

from __future__ import annotations

import typer

from cli import follow, opening
from cli.options import CliOptions
from cli.output import Interrupted, emit_json, say


def submit(
    options: CliOptions,
    wait: bool = typer.Option(False, "--wait", help="Follow the jobs and show their reports."),
) -> None:
    """Hand models to a running farm; its workers measure what the database does not know yet."""
    from farm.errors import UsageError
    from farm.jobs.card_choice import serving_cards
    from farm.requests.card_selection import choose_cards
    from farm.settings import settings
    from tasks.app import check_broker
    from tasks.submissions import Submissions, plan

    if options.check and not wait and not options.dry_run:
        raise UsageError("--check needs the verdicts, which are not there yet.", "Add --wait.")
    requests = options.requests()
    check_broker(settings())
    database = opening.open_database()
    cards = choose_cards(serving_cards(database, options.card or []), options.card or [])
    planned = plan(requests, cards, target=settings().target)
    submissions = Submissions(say)
    if options.dry_run:
        follow.preview(submissions.previews(database, planned), submissions, as_json=options.as_json)
        return
    try:
        left = submissions.still_to_do(database, planned)
        submissions.submit_all(database, left, progress=follow.working, pinned=bool(options.card))
        if wait:
            follow.follow(database, submissions.job_ids)
    except KeyboardInterrupt as interruption:
        jobs = " ".join(submissions.job_ids)
        hint = f"The farm goes on measuring. `farm status {jobs} --watch` follows, `farm cancel {jobs}` ends it."
        raise Interrupted(hint if jobs else "No job was made.") from interruption
    if wait:
        follow.conclude(database, submissions, as_json=options.as_json, check=options.check)
        return
    if options.as_json:
        emit_json({"jobs": [one.to_json() for one in submissions.submitted], **follow.left_out(submissions)})
    elif submissions.job_ids:
        say(f"→ Follow with `farm status {' '.join(submissions.job_ids)} --watch`.")
    submissions.check_refused(len(submissions.submitted) + len(submissions.skipped))
