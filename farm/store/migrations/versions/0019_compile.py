"""Give the items that compile a model a role of their own. They were whole models that failed with
the reason `kernels_listed`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"


def _table(name: str, *columns: str) -> sa.TableClause:
    return sa.table(name, *map(sa.column, columns))


def upgrade() -> None:
    item = _table("item", "job_id", "round", "role", "state", "reason", "message", "reading_id")
    job = _table("job", "id", "variant_id")
    job_round = _table("job_round", "job_id", "number", "capture_id")
    capture = _table("capture", "id", "compiled")
    variant = _table("model_variant", "id", "compile")

    listed = (item.c.role == "whole", item.c.reason == "kernels_listed")
    closed = item.update().where(*listed, item.c.state == "failed")
    op.execute(closed.values(role="compile", state="done", reason="", message=""))
    # The whole model of a round without a list of kernels would compile it now: also if the job is
    # tried again.
    compiles = (
        sa.select(job.c.id)
        .join(variant, variant.c.id == job.c.variant_id)
        .join(job_round, job_round.c.job_id == job.c.id)
        .join(capture, capture.c.id == job_round.c.capture_id)
        .where(
            job.c.id == item.c.job_id,
            job_round.c.number == item.c.round,
            variant.c.compile != "",
            capture.c.compiled.is_(None),
        )
        .correlate(item)
    )
    unmeasured = (
        item.c.role == "whole",
        item.c.reading_id.is_(None),
        item.c.state != "done",
        compiles.exists(),
    )
    op.execute(item.update().where(*unmeasured).values(role="compile"))
