"""Commands and functions that store something say in one line that the database is read-only, and
what to do.
"""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

import farm as api
from farm.errors import DatabaseUnreachable
from farm.settings import settings
from tests.planned import plan, register

STORING = [
    "run resnet18 --card simulated",
    "import h100",
    "cancel {job}",
    "resume {job}",
    "cards drain {card}",
    "cards release {card}",
    "db significant --add Conv2d",
]


@pytest.fixture
def read_only_url(postgres_database, monkeypatch):
    url = postgres_database.url.update_query_dict(
        {"options": "-c default_transaction_read_only=on"}
    )
    monkeypatch.setenv("FARM_DATABASE_URL", url.render_as_string(hide_password=False))
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()
    return url


def test_a_read_only_database_is_told_in_one_line(
    farm, postgres_database, read_only_url, broker, monkeypatch
):
    (card,) = register(postgres_database, 0)
    job = plan(postgres_database, [card], number=1)
    monkeypatch.setenv("FARM_BROKER_URL", broker.url)
    settings.cache_clear()
    for words in STORING:
        said = farm(*words.format(job=job, card=card).split())
        assert (said.code, said.stdout) == (3, ""), (words, said)
        *_, message, step = said.stderr.splitlines()
        assert "is read-only: cannot execute" in message, (words, said)
        assert step.startswith("→ Make the database writable"), words
    assert farm("jobs").code == 0


def test_functions_say_it_too(read_only_url):
    database = api.open_database(make_url(read_only_url).render_as_string(hide_password=False))
    with pytest.raises(DatabaseUnreachable, match="is read-only"):
        api.import_readings("h100", database=database)
    with pytest.raises(DatabaseUnreachable, match="is read-only"):
        api.measure_model("resnet18", database=database, card="simulated")
    database.close()
