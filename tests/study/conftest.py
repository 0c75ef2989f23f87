"""What studies are made on where there is no GPU: two simulated cards of one host."""

import pytest

from farm.devices.simulated import simulated_cards
from farm.settings import settings


@pytest.fixture
def cards(monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "2")
    settings.cache_clear()
    return simulated_cards(settings())
