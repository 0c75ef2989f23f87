"""Add indexes for the items that need a message and for the newest item of a card."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"


UNSENT = sa.text("published_at_s IS NULL AND state IN ('waiting', 'claimed')")


def upgrade() -> None:
    op.create_index("ix_item_card_started", "item", ["card_id", "started_at_s"])
    columns = ["job_id", "card_id", "id"]
    op.create_index("ix_item_unsent", "item", columns, sqlite_where=UNSENT, postgresql_where=UNSENT)
