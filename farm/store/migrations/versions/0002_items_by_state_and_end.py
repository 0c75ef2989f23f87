"""Items by state and end: what waits and what was done lately is counted without looking at all that was ever done."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("ix_item_state_ended", "item", ["state", "ended_at_s"])
