"""Add to an item whether its message is used up, and to a round when its planner last made
progress.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.add_column(
        "item", sa.Column("message_used", sa.Boolean(), nullable=False, server_default=sa.false())
    )
    op.add_column("job_round", sa.Column("planning_at_s", sa.Float(), nullable=True))
    item = sa.table(
        "item",
        sa.column("published_at_s", sa.Float()),
        sa.column("put_off_at_s", sa.Float()),
        sa.column("message_used", sa.Boolean()),
    )
    # An item that the old rule takes for published may have no message: one message too many is
    # harmless.
    put_off = item.c.put_off_at_s.is_not(None)
    op.execute(item.update().where(put_off).values(message_used=True))
    job_round = sa.table(
        "job_round", sa.column("progress_at_s", sa.Float()), sa.column("planning_at_s", sa.Float())
    )
    op.execute(job_round.update().values(planning_at_s=job_round.c.progress_at_s))
