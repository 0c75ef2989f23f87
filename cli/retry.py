"""``farm retry``: measure again what failed."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import resume as resuming


def retry(
    job: Annotated[str, typer.Argument(help="The job's id, or its beginning.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")] = False,
) -> None:
    """Measure again only what failed in a job, or was cancelled with it, with all its attempts; its newest verdict is made anew."""
    resuming.resume(job, failed=True, wait=wait)
