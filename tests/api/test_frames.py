"""Readings and calls as frames, with and without pandas."""

from __future__ import annotations

import sys

import pytest
import torch

import farm
from farm.errors import UnknownOperator, UsageError
from farm.settings import settings


@pytest.fixture
def measured(database: farm.Database, monkeypatch: pytest.MonkeyPatch) -> farm.CapturedModel:
    """A model of three operators that a simulated card has read."""
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    monkeypatch.setenv("FARM_SIMULATED_ITEM_S", "0")
    settings.cache_clear()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    captured = farm.capture_model(model.eval(), torch.randn(3, 4))
    farm.measure_model(captured, database=database)
    return captured


def test_readings_and_calls_are_frames_and_can_be_narrowed(
    database: farm.Database, measured: farm.CapturedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(farm.readings(database).subject_id) == {*measured.counts, measured.variant.id}
    linear = farm.readings(database, "Linear", "in_features=4", card="simulated")
    assert list(linear.out_features) == [8]
    assert (linear.time_us > 0).all()
    assert list(farm.calls(database).module_path) == ["0", "1", "2"]
    with pytest.raises(UnknownOperator):
        farm.readings(database, "Linaer")
    with pytest.raises(UsageError, match="no_such_column"):
        farm.readings(database, "no_such_column=1")
    monkeypatch.setitem(sys.modules, "pandas", None)
    table = farm.readings(database, "Linear")
    assert table.schema.field("time_us").metadata[b"unit"].decode() == "µs"
    assert table.num_rows == 2
