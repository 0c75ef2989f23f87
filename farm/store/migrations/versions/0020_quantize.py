"""Add the scheme of a quantised model to each variant."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column(
        "model_variant", sa.Column("quantize", sa.String(), nullable=False, server_default="")
    )
