"""Alembic's entry point: run the migrations on the connection of
`farm.store.database.Database.upgrade`.

There is no alembic.ini: only the settings define the URL. The caller opens the transaction, so a
failed upgrade leaves the database unchanged."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlmodel import AutoString, SQLModel

import farm.store.tables  # noqa: F401  (fills SQLModel.metadata)


def render_item(item_type: str, item: Any, _context: Any) -> str | Literal[False]:
    """Replace SQLModel's string type by SQLAlchemy's: a new SQLModel version must not change a
    migration.
    """
    if item_type == "type" and isinstance(item, AutoString):
        return f"sa.String(length={item.length})" if item.length else "sa.String()"
    return False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    render_as_batch=True,  # SQLite cannot alter a table in place
    render_item=render_item,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
