"""Add items that several cards of one host measure together, and the links of cards."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("item", sa.Column("cards", sa.Integer(), nullable=False, server_default="1"))
    op.add_column("item", sa.Column("put_off_at_s", sa.Float(), nullable=True))
    put_off = sa.text("put_off_at_s IS NOT NULL")
    op.create_index(
        "ix_item_put_off", "item", ["put_off_at_s"], sqlite_where=put_off, postgresql_where=put_off
    )
    op.add_column("card", sa.Column("links", sa.JSON(), nullable=True))
    op.add_column("card", sa.Column("group_item_id", sa.BigInteger(), nullable=True))
    op.add_column("card", sa.Column("group_token", sa.String(), nullable=False, server_default=""))
