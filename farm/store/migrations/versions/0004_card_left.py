"""What was given up because its card was away has a reason of its own; it was known by its sentence before."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.execute(
        """
        UPDATE item SET reason = 'card_left' WHERE state = 'failed' AND reason = 'not_available'
        AND message = 'The card left the farm before it could be measured on it.'
        """
    )
