"""Add the version of a user's own model to each variant."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column(
        "model_variant", sa.Column("version", sa.String(), nullable=False, server_default="")
    )
