"""What is looked at is the run that is measured, also of a model that runs something else while a
graph is captured.
"""

from __future__ import annotations

import json

import pytest
import torch

from farm.benchmark.verification import verify
from farm.settings import settings
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests.benchmark.asking import capturing, record

CPU = torch.device("cpu")


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FARM_MODELS", json.dumps({"asking": "tests.benchmark.asking:model"}))
    settings.cache_clear()
    variant = Variant("asking", 8, 224)
    with capturing(False):
        yield Subject("variant", variant.id, variant.to_json())
    settings.cache_clear()


def names(observed) -> list[str]:
    return [
        observed["tuples"][call["tuple_id"]]["operator"].rsplit(".", 1)[-1]
        for call in observed["calls"]
    ]


def test_the_operators_are_those_of_the_run_that_is_measured(asking):
    found = verify(asking, Protocol(launch="eager"), CPU, None)
    assert names(found.observed) == ["Linear", "add"]
    assert (found.launch, found.eagerly) == ("eager", None)

    found = verify(asking, Protocol(), CPU, None, record)
    assert names(found.observed) == ["Linear", "mul", "add"]
    assert found.launch == "graph"
    assert found.observer_effect == ()
    assert [len(times) for times in found.in_model.calls_us.values()] == [1, 1, 1]
    (apart,) = found.eagerly.operators
    assert (apart.label.split()[0], apart.launched, apart.eager) == ("mul", 1, 0)


def test_a_prediction_that_holds_eagerly_only_makes_a_list_of_what_was_captured(asking):
    eager = verify(asking, Protocol(launch="eager"), CPU, None).observed
    predicted = dict.fromkeys((call["tuple_id"] for call in eager["calls"]), 1)
    assert verify(asking, Protocol(launch="eager"), CPU, predicted).observed is None
    found = verify(asking, Protocol(), CPU, predicted, record)
    assert names(found.observed) == ["Linear", "mul", "add"]
    assert not found.matches
    (difference,) = found.differences
    assert "not predicted: 1x mul 0.5 | 8x64 fp32" in difference
