"""Who put a card in quarantine: what an embedded farm found for itself, the next one may try again by itself."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("card") as batch:
        batch.add_column(sa.Column("quarantined_by", sa.String(), nullable=False, server_default=""))
