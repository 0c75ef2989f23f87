"""Alembic's entry: runs the migrations on the connection that `farm.store.database.Database.upgrade` opened.

The program is its own migration tool (``farm db upgrade``), so there is no alembic.ini, no second place for the URL
and no offline mode. The transaction is the caller's: a failed upgrade leaves the database as it was.
"""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from sqlmodel import AutoString, SQLModel

import farm.store.tables  # noqa: F401  (fills SQLModel.metadata)


def render_item(kind: str, item: Any, _context: Any) -> str | Literal[False]:
    """Write SQLModel's string as SQLAlchemy's own: a migration must not change when SQLModel does."""
    if kind == "type" and isinstance(item, AutoString):
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
