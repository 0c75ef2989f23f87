"""Add compiled models: the mode of a variant; the card model and the autotuning choices of a
capture.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_KEY = ("variant_id", "device_type", "grad", "torch", "launch", "origin")


def upgrade() -> None:
    op.add_column(
        "model_variant", sa.Column("compile", sa.String(), nullable=False, server_default="")
    )
    with op.batch_alter_table("capture") as table:
        table.add_column(sa.Column("card_model", sa.String(), nullable=False, server_default=""))
        table.add_column(sa.Column("compiled", sa.JSON(none_as_null=True), nullable=True))
        table.drop_constraint("uq_capture_" + "_".join(_KEY), type_="unique")
        table.create_unique_constraint(
            "uq_capture_" + "_".join([*_KEY, "card_model"]), [*_KEY, "card_model"]
        )
