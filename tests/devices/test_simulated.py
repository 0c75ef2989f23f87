"""Simulated cards."""

from __future__ import annotations

import pytest

from farm.devices.host import discover, find_card, open_device
from farm.devices.simulated import SimulatedDevice
from farm.errors import NoSuchCard
from farm.settings import settings


@pytest.fixture(autouse=True)
def _two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "2")
    monkeypatch.setenv("FARM_HOST", "here")
    settings.cache_clear()


def test_when_asked_for_they_are_the_only_cards() -> None:
    assert [card.id for card in discover(settings())] == ["SIM-here-0", "SIM-here-1"]
    assert {card.kind for card in discover(settings())} == {"simulated"}


def test_their_figures_depend_on_the_subject_alone() -> None:
    first, second = (open_device(card) for card in discover(settings()))
    assert isinstance(first, SimulatedDevice)
    assert isinstance(second, SimulatedDevice)
    assert first.time_us("a") == second.time_us("a") != first.time_us("b")
    assert 10 <= first.time_us("a") <= 1000
    assert 150 <= first.power_w("a") <= 650


def test_a_card_beyond_the_last_is_not_there() -> None:
    with pytest.raises(NoSuchCard, match="SIM-here-2"):
        find_card("SIM-here-2", settings())
