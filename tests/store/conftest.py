"""Tests of tables, statements and transactions run on both kinds of databases, in each run."""

from __future__ import annotations

import pytest

from farm.store.database import Database


@pytest.fixture(params=["sqlite", "postgresql"])
def any_database(request: pytest.FixtureRequest) -> Database:
    """A new database with all tables, of each kind in turn."""
    return request.getfixturevalue("database" if request.param == "sqlite" else "postgres_database")
