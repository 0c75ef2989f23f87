"""What a training step is: fields of a variant, and whose part each of its calls is."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    for name in ("step", "optimizer", "amp", "recompute"):
        op.add_column("model_variant", sa.Column(name, sa.String(), nullable=False, server_default=""))
    op.add_column("model_variant", sa.Column("accumulate", sa.Integer(), nullable=False, server_default="1"))
    for name in ("part", "owner"):
        op.add_column("call", sa.Column(name, sa.String(), nullable=False, server_default=""))
