"""How far a round is planned and published, and by whom: one publisher at a time, and another when it gets on no more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("job_round", sa.Column("planned_at_s", sa.Float(), nullable=True))
    op.add_column("job_round", sa.Column("publisher", sa.String(), nullable=True))
    op.add_column("job_round", sa.Column("progress_at_s", sa.Float(), nullable=True))
    op.execute("UPDATE job_round SET planned_at_s = created_at_s, progress_at_s = created_at_s")
