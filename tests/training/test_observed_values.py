"""What a running model's calls see, and rebuilt operators that get the like."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from farm.benchmark.subjects import prepare
from farm.benchmark.subjects.operator_tuple import set_values
from farm.operators.capture import capture
from farm.operators.rebuild import rebuild
from farm.settings import settings
from farm.training import observed_values
from farm.training.observed_values import (
    describe_held,
    describe_values,
    observe_values,
    watch_values,
)
from farm.types.protocol import Protocol
from farm.types.value_profiles import class_of
from farm.types.variant import Variant
from tests.benchmark.operators import linear


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.clip = nn.ReLU(inplace=True)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(batch))
        return self.clip(self.second(hidden) + hidden)


def test_each_call_tells_what_its_activations_held() -> None:
    torch.manual_seed(0)
    model, batch = Small(), torch.randn(256, 64)
    found = watch_values(model, (batch,))
    first, second = (
        found["first", "torch.nn.Linear"][0][0],
        found["second", "torch.nn.Linear"][0][0],
    )
    assert first is not None
    assert (first["zeros"], first["least"] < 0) == (0, True)
    assert first["spread"] == pytest.approx(1, rel=0.05)
    assert second is not None
    assert second["zeros"] == pytest.approx(0.5, abs=0.1)
    assert second["least"] == 0
    assert found["clip", "torch.nn.ReLU"] == [[None]], (
        "what a call writes to is not what it was given"
    )
    (added,) = (calls for (path, operator), calls in found.items() if operator.endswith("add"))
    assert len(added[0]) == 2


def test_looking_changes_nothing_of_what_is_captured() -> None:
    model, batch = Small(), torch.randn(8, 64)
    looked_at = capture(model, (batch,), watch=lambda *call: None)
    plain = capture(model, (batch,))
    assert (looked_at.calls, looked_at.operators) == (plain.calls, plain.operators)
    watch_values(model, (batch,))


def test_a_catalog_model_is_run_with_its_seeded_weights_unless_it_is_huge() -> None:
    variant = Variant("resnet18", 32, 64)
    found = observe_values(variant)
    assert found is not None
    behind_relu = found["layer1.0.conv2", "torch.nn.Conv2d"][0][0]
    assert behind_relu is not None
    assert behind_relu["least"] == 0
    assert 0.2 < behind_relu["zeros"] < 0.9
    assert found == observe_values(variant)
    assert observe_values(variant, flops=10**16) is None


@pytest.mark.parametrize(
    ("data", "zeros", "positive"),
    [("zeros-50+", 0.5, True), ("zeros-25", 0.25, False), ("zeros-75+c90", 0.75, True)],
)
def test_a_rebuilt_operator_holds_data_of_its_class(
    data: str, zeros: float, positive: bool
) -> None:
    model, batch = Small(), torch.randn(512, 64)
    spec = next(s for s in capture(model, (batch,)).tuples.values() if s.short_name == "Linear")
    rebuilt = rebuild(spec, "cpu")
    weights = [tensor.clone() for tensor in rebuilt.weights]
    set_values(rebuilt, data)
    (given,) = rebuilt.activations
    assert (given == 0).float().mean().item() == pytest.approx(
        zeros, abs=0.1 if "c" in data else 0.02
    )
    assert (given.min().item() >= 0) is positive
    assert all(map(torch.equal, weights, rebuilt.weights))
    described = describe_values(given)
    assert described is not None
    assert class_of([described]) == data, "what was made of a class is seen as that class"


def test_what_an_operator_writes_stays_at_its_fixed_point() -> None:
    model, batch = Small(), torch.randn(8, 64)
    spec = next(s for s in capture(model, (batch,)).tuples.values() if s.short_name == "ReLU")
    one, other = rebuild(spec, "cpu"), rebuild(spec, "cpu")
    set_values(other, "zeros-50")
    assert torch.equal(one.activations[0], other.activations[0])


class Adds(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        left = torch.relu(left)
        left += right
        return left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("word", ["normal-c90", "zeros-25+", "zeros-25+c90", "zeros-75+"])
def test_what_is_added_in_place_is_of_its_class_and_too_small_to_move_the_sum(
    word: str, dtype: torch.dtype
) -> None:
    left, right = (torch.randn(4, 64, 14, 14, dtype=dtype) for _ in range(2))
    spec = next(s for s in capture(Adds(), (left, right)).tuples.values() if "add" in s.operator)
    rebuilt = rebuild(spec, "cpu")
    set_values(rebuilt, f"normal,{word}")
    target, addend = rebuilt.activations
    described = describe_values(addend.float() * 2.0**40)
    assert described is not None
    assert class_of([described]) == word
    before = target.clone()
    for _ in range(2000):
        rebuilt.run()
    assert (target - before).abs().max() < 0.01 * before.abs().max()


class SecondHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(16, 16, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch.chunk(2, 1)[1])


def test_a_tensor_with_strides_gets_its_channels_too() -> None:
    spec = next(
        s
        for s in capture(SecondHalf(), (torch.randn(8, 32, 14, 14),)).tuples.values()
        if s.short_name == "Conv2d"
    )
    rebuilt = rebuild(spec, "cpu")
    set_values(rebuilt, "normal-c90")
    described = describe_values(rebuilt.activations[0])
    assert described is not None
    assert class_of([described]) == "normal-c90"


def test_zeros_are_put_nowhere_where_they_would_be_divided_by() -> None:
    class Divides(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return torch.rsqrt(left / right)

    taken = capture(Divides(), (torch.rand(8, 8) + 1, torch.rand(8, 8) + 1)).tuples.values()
    assert len(taken) == 2
    for spec in taken:
        rebuilt = rebuild(spec, "cpu")
        set_values(rebuilt, "zeros")
        found = rebuilt.run()
        assert isinstance(found, torch.Tensor)
        assert found.isfinite().all()


def test_a_class_for_another_number_of_activations_is_a_reason() -> None:
    from farm.errors import Unmeasurable

    with pytest.raises(Unmeasurable) as raised:
        prepare(
            linear(8, 8, 8), Protocol(launch="eager", data="zeros-50+,normal"), torch.device("cpu")
        )
    assert raised.value.reason == "rejected"


class Cached(nn.Module):
    """Attention over caches that are buffers: empty, half used, or full."""

    def __init__(self, used: int) -> None:
        super().__init__()
        for name in ("keys", "values"):
            cache = torch.zeros(2, 4, 64, 16)
            cache[:, :, :used] = torch.randn(2, 4, used, 16)
            self.register_buffer(name, cache)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, self.keys, self.values)


@pytest.mark.parametrize(
    ("used", "word"),
    [(0, "normal/zeros-100"), (32, "normal/used-50d2"), (64, "normal")],
    ids=["empty", "half", "full"],
)
def test_what_a_cache_holds_is_part_of_the_class_and_the_tuple_gets_the_like(
    used: int, word: str
) -> None:
    model, query = Cached(used), torch.randn(2, 4, 1, 16)
    ((seen,),) = watch_values(model, (query,)).values()
    assert class_of(seen) == word
    (spec,) = capture(model, (query,)).tuples.values()
    rebuilt = rebuild(spec, "cpu")
    set_values(rebuilt, word)
    caches = [tensor for tensor, one in zip(rebuilt.tensors, spec.tensors, strict=True) if one.held]
    assert len(caches) == 2
    for cache in caches:
        assert bool((cache[:, :, :used] != 0).all())
        assert bool((cache[:, :, used:] == 0).all())


def empty_cache() -> tuple[nn.Module, torch.Tensor]:
    return Cached(0), torch.randn(2, 4, 1, 16)


def test_of_a_model_that_is_too_large_to_be_run_the_buffers_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "FARM_MODELS", json.dumps({"cached": "tests.training.test_observed_values:empty_cache"})
    )
    settings.cache_clear()
    try:
        monkeypatch.setattr(observed_values, "MOST_PARAMETERS", -1)
        ((seen,),) = observe_values(Variant("cached", 2, 224)).values()
    finally:
        settings.cache_clear()
    assert seen[0] is None
    assert class_of(seen) == "normal/zeros-100"


def test_the_examined_elements_are_of_every_index() -> None:
    """Also if the size of a dimension has an odd factor in common with the usual step."""
    for rows, columns in ((750_000, 3), (3_000, 768), (9_000, 255)):
        values = torch.arange(columns).float().expand(rows, columns)
        described = describe_values(values)
        assert described is not None
        assert described["zeros"] == pytest.approx(1 / columns, rel=0.01)
        assert len(set(observed_values._sample(values).tolist())) == columns


def test_the_used_part_is_that_of_all_samples() -> None:
    cache = torch.zeros(2, 8, 16)
    cache[1, :4] = 1.0
    cache[0, :2] = 1.0
    assert describe_held(cache)["used"] == 0.5
    cache[1] = 1.0
    assert "used" not in describe_held(cache)


class FailsOnTheCpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(64, 64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.device.type == "cpu" and not batch.is_meta and len(batch) == 2:
            raise ValueError("a batch of 2")
        return batch @ self.table


def fails_on_the_cpu() -> tuple[nn.Module, torch.Tensor]:
    return FailsOnTheCpu(), torch.randn(4, 64)


def test_why_activations_have_no_values_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(
        "FARM_MODELS", json.dumps({"fails": "tests.training.test_observed_values:fails_on_the_cpu"})
    )
    settings.cache_clear()
    try:
        with caplog.at_level("WARNING"):
            ((seen,),) = observe_values(Variant("fails", 4, 224)).values()
    finally:
        settings.cache_clear()
    assert seen[0] is None
    assert "with batch 2 on the CPU failed" in caplog.text
    assert "a batch of 2" in caplog.text
