"""Add the output shapes of each operator tuple, computed on meta tensors."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    shapes_type = sa.JSON(none_as_null=True)
    op.add_column("operator", sa.Column("output_shapes", shapes_type, nullable=True))
    table = sa.table(
        "operator",
        sa.column("id"),
        sa.column("spec", sa.JSON()),
        sa.column("output_shapes", shapes_type),
    )
    stored = op.get_bind().execute(sa.select(table.c.id, table.c.spec)).all()
    if not stored:
        return
    from farm.operators.cost import cost
    from farm.subjects.parsing import parse

    for row in stored:
        try:
            shapes = cost(parse(row.spec)).output_shapes
        except Exception:  # this torch version cannot run it; its shapes stay unknown
            continue
        op.execute(table.update().where(table.c.id == row.id).values(output_shapes=shapes))
