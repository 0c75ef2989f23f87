"""The floor of a decode: weights and cache over the bandwidth, and the copies beside it."""

import farm
from farm.addons.predict.token_floor import token_floor
from farm.types.roofline import Roofline
from farm.types.tuple import NeededTuple

PEAKS = Roofline(flops_per_s=1e14, bytes_per_s=1e12, launch_floor_us=2.0)


def needed(name, bytes_moved, calls, **shapes):
    tensors = [
        {"role": role, "shape": shape, "dtype": "bfloat16"} for role, shape in shapes.items()
    ]
    return NeededTuple(name, name, name, 0, bytes_moved, {"": calls}, {"tensors": tensors})


MODEL = [
    needed("Embedding", 100, 1, parameter=(32_000, 1000)),
    needed("Linear", 2_100_000, 4, parameter=(1000, 1000), activation=(8, 1000)),
    needed("index_copy_", 2_050_000, 2, buffer=(8, 125, 1000), activation=(8, 1, 1000)),
    needed("reshape", 8_000_000, 2, activation=(8, 125, 1000)),
    needed("to", 16_000, 2, activation=(8, 1000)),
]


def test_the_floor_is_of_the_weights_and_the_cache():
    floor = token_floor(MODEL, {"reshape": 10.0, "to": 3.0}, PEAKS)
    assert (floor.weights_bytes, floor.cache_bytes) == (4 * 2_000_000, 2 * 2_000_000)
    assert floor.time_us == 12.0
    assert floor.copies_us == 20.0  # of tensors as large as a cache only
    assert floor.in_words(120.0).endswith("the pass takes 10.0 times as long")
    assert floor.copies_in_words(40.0).startswith("20.0 µs, 50.0 % of the sum")
    assert token_floor(MODEL[-1:], {}, PEAKS) is None


def test_the_packaged_decode_of_llama_shows_its_copies():
    """51.8 ms, of which weights and cache alone need 5.5 ms at the measured bandwidth."""
    found = farm.estimate("llama-3.1-8b", card="H200", batch=64, phase="decode", dtype="bfloat16")
    assert "static cache" in found.implementation
    assert 14.9e9 < found.floor.weights_bytes < 15.1e9
    assert found.floor.cache_bytes == 32 * 2 * 64 * 8 * 1024 * 128 * 2
    assert 5e3 < found.floor.time_us < 6e3
    assert 0.6 < found.floor.copies_us / found.time.value < 0.8
    assert farm.estimate("gpt2", card="H200", batch=8, phase="prefill", length=1024).floor is None
