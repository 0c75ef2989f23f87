"""Add indexes for items that need a message and for the newest item of a card; comparisons read an
index alone.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"

CIRCUMSTANCES = [
    *(
        "card_model",
        "software_id",
        "protocol_id",
        "subject_id",
        "method",
        "subject_kind",
        "time_us",
    ),
    *("time_half_width_us", "energy_mj", "energy_half_width_mj", "card_id", "id"),
]
UNSENT = sa.text("published_at_s IS NULL AND state IN ('waiting', 'claimed')")


def upgrade() -> None:
    op.drop_index("ix_reading_circumstances", "reading")
    op.create_index("ix_reading_circumstances", "reading", CIRCUMSTANCES)
    op.create_index("ix_card_worker", "card", ["worker"])
    op.create_index("ix_item_card_started", "item", ["card_id", "started_at_s"])
    columns = ["job_id", "card_id", "id"]
    op.create_index("ix_item_unsent", "item", columns, sqlite_where=UNSENT, postgresql_where=UNSENT)
