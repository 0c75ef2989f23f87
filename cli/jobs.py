"""``farm jobs``: the jobs of this farm, newest first."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import opening
from cli.options import AsJson
from cli.output import emit_json, show


def jobs(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=2**31 - 1, help="How many to show at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from farm.jobs import listing
    from farm.store.database import read_clock_s

    with opening.open_database().read() as session:
        rows, now_s = listing.jobs(session, limit), read_clock_s(session)
    if as_json:
        emit_json({"jobs": rows})
    else:
        from cli import lists

        show(lists.jobs(rows, now_s))
