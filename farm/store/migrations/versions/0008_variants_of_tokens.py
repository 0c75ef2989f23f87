"""Variants of models that take tokens: length, padding, phase, cache, layers kept, and the text."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for name in ("length", "cache", "layers"):
        op.add_column("model_variant", sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
    op.add_column("model_variant", sa.Column("padded", sa.Boolean(), nullable=False, server_default=sa.false()))
    for name in ("phase", "text"):
        op.add_column("model_variant", sa.Column(name, sa.String(), nullable=False, server_default=""))
