"""Give the items that compile a model a role of their own. They were whole models that failed with
the reason `kernels_listed`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"

_ITEM, _JOB, _ROUND, _CAPTURE, _VARIANT = (
    sa.table(name, *map(sa.column, columns.split()))
    for name, columns in (
        ("item", "job_id round role state reason message reading_id"),
        ("job", "id variant_id"),
        ("job_round", "job_id number capture_id"),
        ("capture", "id compiled"),
        ("model_variant", "id compile"),
    )
)


def upgrade() -> None:
    listed = (_ITEM.c.role == "whole", _ITEM.c.reason == "kernels_listed")
    closed = _ITEM.update().where(*listed, _ITEM.c.state == "failed")
    op.execute(closed.values(role="compile", state="done", reason="", message=""))
    # The whole model of a round without a list of kernels would compile it now: also if the job is
    # tried again.
    compiles = (
        sa.select(_JOB.c.id)
        .join(_VARIANT, _VARIANT.c.id == _JOB.c.variant_id)
        .join(_ROUND, _ROUND.c.job_id == _JOB.c.id)
        .join(_CAPTURE, _CAPTURE.c.id == _ROUND.c.capture_id)
        .where(
            _JOB.c.id == _ITEM.c.job_id,
            _ROUND.c.number == _ITEM.c.round,
            _VARIANT.c.compile != "",
            _CAPTURE.c.compiled.is_(None),
        )
        .correlate(_ITEM)
    )
    unmeasured = (
        _ITEM.c.role == "whole",
        _ITEM.c.reading_id.is_(None),
        _ITEM.c.state != "done",
        compiles.exists(),
    )
    op.execute(_ITEM.update().where(*unmeasured).values(role="compile"))
