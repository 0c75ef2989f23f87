"""Readings of other farms beside one's own: where they came from, and what an export tells of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "origin",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("file", sa.String(), nullable=False),
        sa.Column("farm_version", sa.String(), nullable=False),
        sa.Column("exported_at_s", sa.Float(), nullable=False),
        sa.Column("imported_at_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_origin")),
    )
    op.create_table(
        "imported_verdict",
        sa.Column("job_id", sa.String(length=16), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("origin", sa.String(), nullable=False),
        sa.Column("row", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "round", name=op.f("pk_imported_verdict")),
    )
    op.add_column("reading", sa.Column("origin", sa.String(), nullable=False, server_default=""))
    op.add_column("reading", sa.Column("method", sa.Integer(), nullable=True))
    op.add_column("reading", sa.Column("kernels", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("card", sa.Column("origin", sa.String(), nullable=False, server_default=""))
    op.drop_index("ix_reading_subject", table_name="reading")
    subject = ["subject_id", "card_model", "software_id", "protocol_id", "time_us", "energy_mj", "id"]
    op.create_index("ix_reading_subject", "reading", subject)
    circumstances = ["card_model", "software_id", "protocol_id", "subject_id", "method", "subject_kind"]
    figures = ["time_us", "time_half_width_us", "energy_mj", "energy_half_width_mj", "id"]
    op.create_index("ix_reading_circumstances", "reading", circumstances + figures)
    if op.get_bind().dialect.name == "sqlite":
        op.execute("UPDATE reading SET method = json_extract(details, '$.method') WHERE json_valid(details)")
    else:
        op.execute(
            "UPDATE reading SET method = (details ->> 'method')::integer WHERE details ->> 'method' ~ '^[0-9]{1,9}$'"
        )
