"""Add models that are split over several cards, and the communication library of their readings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column(
        "software", sa.Column("communication", sa.String(), nullable=False, server_default="")
    )
    for name in ("tensor_parallel", "data_parallel", "distributed"):
        op.add_column(
            "model_variant", sa.Column(name, sa.Integer(), nullable=False, server_default="1")
        )
    op.add_column(
        "model_variant", sa.Column("sharding", sa.String(), nullable=False, server_default="ddp")
    )
