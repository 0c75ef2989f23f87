"""An estimate of a decode shows its floor and its copies."""

import pytest

import farm
from farm.errors import UsageError


def test_the_packaged_decode_of_llama_shows_its_copies():
    """51.8 ms, of which weights and cache alone need 5.5 ms at the measured bandwidth."""
    found = farm.estimate("llama-3.1-8b", card="H200", batch=64, phase="decode", dtype="bfloat16")
    assert "static cache" in found.implementation
    assert 14.9e9 < found.floor.weights_bytes < 15.1e9
    assert found.floor.cache_bytes == 32 * 2 * 64 * 8 * 1024 * 128 * 2
    assert 5e3 < found.floor.time_us < 6e3
    assert 0.6 < found.floor.copies_us / found.time.value < 0.8
    assert farm.estimate("gpt2", card="H200", batch=8, phase="prefill", length=1024).floor is None


@pytest.mark.parametrize("card", ["L4", "RTX 4090"])
def test_no_low_end_from_a_data_sheet_is_below_the_floor(card):
    found = farm.estimate("llama-3.1-8b", card=card, batch=1, phase="decode", dtype="bfloat16")
    assert found.time.value >= found.time.low >= found.floor.time_us
    assert found.to_json()["time_low_us"] >= found.to_json()["floor"]["time_us"]
    for entry in found.missing:
        if entry.needed.short_name == "Linear":
            least_us = entry.needed.bytes_of("parameter") / found.floor.bytes_per_s * 1e6
            assert entry.predicted.time_us.low >= least_us * (1 - 1e-9)


def test_a_card_whose_name_differs_in_spaces_is_suggested_alone():
    with pytest.raises(UsageError) as caught:
        farm.estimate("gpt2", card="RTX4090", batch=1, phase="decode")
    assert caught.value.next_step == "Did you mean RTX 4090?"
