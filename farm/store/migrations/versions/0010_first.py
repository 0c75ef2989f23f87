"""The oldest schema that this program reads. A new database is created from `farm.store.tables` and stamped."""

from __future__ import annotations

revision = "0010"
down_revision = None


def upgrade() -> None:
    pass
