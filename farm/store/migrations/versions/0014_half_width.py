"""Add to an item how precise its reading must be for the sum of its job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.add_column("item", sa.Column("half_width", sa.Float(), nullable=False, server_default="0"))
