"""What cannot lie in a card's memory is told before anything starts."""

import dataclasses

import pytest

from farm.devices.device import Card
from farm.errors import UsageError
from farm.models import catalog
from farm.requests.memory import check_fits, memory_of
from farm.settings import settings
from farm.types.variant import Variant

CARD = Card(id="GPU-1", kind="cuda", model="NVIDIA H200", memory_bytes=0, host="alpha")
IMAGE_BYTES = 3 * 224 * 224 * 4


def card(memory_bytes):
    return dataclasses.replace(CARD, memory_bytes=memory_bytes)


def variant(batch, model="resnet18", **more):
    return Variant(model, batch, 224, **more)


def test_inputs_and_parameters_that_are_more_than_the_memory_are_told_with_the_batch_that_leaves_room():
    memory = memory_of(variant(32))
    assert (memory.each_input, memory.inputs) == (IMAGE_BYTES, 32 * IMAGE_BYTES)
    assert memory.parameters == pytest.approx(11.7e6 * 4, rel=0.01)
    memory_bytes = memory.parameters + 100 * IMAGE_BYTES
    check_fits(variant(100), card(memory_bytes))
    check_fits(variant(200, dtype="bfloat16"), card(memory_bytes))
    with pytest.raises(
        UsageError, match=r"resnet18 101x224 float32 does not fit .* H200"
    ) as caught:
        check_fits(variant(101), card(memory_bytes))
    assert "parameters fit up to batch 100" in caught.value.next_step
    with pytest.raises(UsageError) as caught:
        check_fits(variant(1), card(memory.parameters))
    assert "a card with more memory" in caught.value.next_step
    check_fits(variant(101), card(0))  # nobody knows its memory


def test_a_cache_that_is_longer_than_the_memory_is_told_with_the_batch_that_leaves_room():
    one = catalog.variant("gpt2", 64, phase="decode", cache=1024, dtype="bfloat16")
    memory = memory_of(one)
    assert memory.cache == 64 * 1024 * 12 * 2 * 768 * 2
    with pytest.raises(
        UsageError, match=r"gpt2 decode 64 beside 1024 .* cache takes 2.4 GB"
    ) as caught:
        check_fits(one, card(memory.parameters + memory.cache // 2))
    assert "parameters fit up to batch 31" in caught.value.next_step


def test_inputs_of_ones_own_are_not_made_to_be_counted(monkeypatch, tmp_path):
    (tmp_path / "wide.py").write_text(
        "import torch\ndef wide():\n    return torch.nn.Linear(1000, 1), torch.zeros(2, 1000)\n"
    )
    monkeypatch.setenv("FARM_MODELS", '{"wide": "wide:wide"}')
    monkeypatch.setenv("FARM_MODELS_PATH", str(tmp_path))
    settings.cache_clear()
    with pytest.raises(UsageError, match=r"wide 2147483647x1000 .* its inputs take 8,589.9 GB"):
        check_fits(variant(2**31 - 1, "wide"), card(10**9))
