"""An estimate of a decode shows its floor and its copies."""

import farm


def test_the_packaged_decode_of_llama_shows_its_copies():
    """51.8 ms, of which weights and cache alone need 5.5 ms at the measured bandwidth."""
    found = farm.estimate("llama-3.1-8b", card="H200", batch=64, phase="decode", dtype="bfloat16")
    assert "static cache" in found.implementation
    assert 14.9e9 < found.floor.weights_bytes < 15.1e9
    assert found.floor.cache_bytes == 32 * 2 * 64 * 8 * 1024 * 128 * 2
    assert 5e3 < found.floor.time_us < 6e3
    assert 0.6 < found.floor.copies_us / found.time.value < 0.8
    assert farm.estimate("gpt2", card="H200", batch=8, phase="prefill", length=1024).floor is None
