"""Captures by launch: a model may run other operators while a CUDA graph is captured than eagerly.

What earlier versions held against a card was an eagerly launched pass, so that is what their captures are.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    with op.batch_alter_table("capture") as batch:
        batch.add_column(sa.Column("launch", sa.String(), nullable=False, server_default="eager"))
        batch.drop_constraint("uq_capture_variant_id_device_type_grad_torch_origin", type_="unique")
        batch.create_unique_constraint(
            batch.f("uq_capture_variant_id_device_type_grad_torch_launch_origin"),
            ["variant_id", "device_type", "grad", "torch", "launch", "origin"],
        )
    with op.batch_alter_table("capture") as batch:
        batch.alter_column("launch", server_default=None)
