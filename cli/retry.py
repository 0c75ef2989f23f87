"""``farm retry``: measure again what failed."""

from __future__ import annotations

from cli import resume as resuming
from cli.options import Follow, Job


def retry(
    job: Job,
    wait: Follow = False,
) -> None:
    """Measure again only what failed in a job, or was cancelled with it, with all its attempts; its newest verdict is made anew."""
    resuming.resume(job, failed=True, wait=wait)
