"""The floor of a decode: weights and cache over the bandwidth, and the copies beside it."""

from dataclasses import replace

from farm.types.roofline import Roofline
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant
from farm.verdict.token_floor import has_floor, implementation_of, token_floor

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


def test_a_floor_is_of_a_decode_on_one_card():
    decode = Variant("llama-3.2-1b", 8, 0, phase="decode", length=1, cache=1024)
    assert has_floor(decode)
    assert "static cache" in implementation_of(decode)
    assert not has_floor(replace(decode, compile="default"))
    assert implementation_of(replace(decode, compile="default")) == "the kernels of torch.compile"
    assert not has_floor(replace(decode, phase="prefill", cache=0, length=512))
    assert implementation_of(Variant("resnet18", 8, 224)) == ""
    assert implementation_of(None) == ""
