"""The oldest schema that this program can migrate. A new database is created from
`farm.store.tables` instead.
"""

from __future__ import annotations

revision = "0010"
down_revision = None


def upgrade() -> None:
    pass
