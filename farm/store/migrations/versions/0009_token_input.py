"""The token ids that language models read: stored with a variant, so that workers on other hosts find them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "token_input",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("row_lengths", sa.JSON(), nullable=False),
        sa.Column("padding", sa.String(), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_token_input")),
    )
