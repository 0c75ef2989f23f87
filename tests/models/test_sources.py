"""The contract of `farm.models.source`, for every source of the catalog with one small model each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from farm.errors import UnsupportedModel, UsageError
from farm.models import catalog
from farm.models.entry import ModelEntry
from farm.models.resolved import shape_of
from farm.models.source import Source, install_line, is_installed
from farm.settings import settings, user_models
from farm.types.variant import Variant

SMALL = {
    "torchvision": "squeezenet1_1",
    "transformers": "gpt2",
    "timm": "mobilenetv3_small_050",
    "user": "small_net",
}
FIELDS = {"transformers": {"length": 8, "layers": 1, "dtype": "float32"}}


@pytest.fixture(params=catalog.SOURCES, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> Iterator[Source]:
    (tmp_path / "net_of_sources.py").write_text(
        "import torch\ndef net(): return torch.nn.Linear(4, 2), torch.randn(3, 4)\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    user_models.add("small_net", "net_of_sources:net", str(tmp_path))
    yield request.param
    sys.modules.pop("net_of_sources", None)


@pytest.fixture
def entry(source: Source) -> ModelEntry:
    return source.entries()[SMALL[source.name]]


def built(source: Source, seed: int = 0) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    if not is_installed(source):
        pytest.skip(f"needs {install_line(source)}")
    variant = small_variant(source)
    model = catalog.build(variant, device="cpu", seed=seed)
    return model, catalog.example_inputs(variant, device="cpu")


def small_variant(source: Source) -> Variant:
    name = f"{source.name}/{SMALL[source.name]}"
    return catalog.variant(name, batch=2, **FIELDS.get(source.name, {}))


def test_its_models_are_found_by_name(source: Source, entry: ModelEntry) -> None:
    assert catalog.source_named(source.name) is source
    for name in (f"{source.name}/{entry.own_name}", catalog.find(entry.own_name).name):
        model = catalog.resolve(name)
        assert model.source is source
        assert (model.entry.own_name, model.entry.origin) == (entry.own_name, source.name)


def test_it_lists_models_without_a_change_of_environment_or_settings(source: Source) -> None:
    environment, loaded, values = dict(os.environ), settings(), settings().model_dump()
    entries = source.entries()
    assert source.entries() == entries
    assert source.registered("no location") == "no location"
    assert isinstance(source.hint("no_model.py"), str)
    assert not entries.keys() & source.refused.keys()
    assert (dict(os.environ), settings().model_dump()) == (environment, values)
    assert settings() is loaded


def test_what_it_refuses_has_a_reason(source: Source) -> None:
    for name, reason in source.refused.items():
        with pytest.raises(UnsupportedModel, match=f"{name} is ") as caught:
            catalog.find(f"{source.name}/{name}")
        assert reason in caught.value.message
        assert caught.value.next_step


def test_its_module_runs_on_its_inputs(source: Source) -> None:
    model, inputs = built(source)
    assert not model.training
    assert all(shape[0] == 2 for shape in map(shape_of, inputs) if shape)
    with torch.no_grad():
        model(*inputs)


def test_equal_seeds_give_equal_weights_and_inputs(source: Source) -> None:
    (model, inputs), (again, inputs_again) = built(source), built(source)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    torch.testing.assert_close(inputs, inputs_again, rtol=0, atol=0)


def test_on_meta_it_has_the_same_shapes(source: Source) -> None:
    model, inputs = built(source)
    on_meta = catalog.build(small_variant(source), device="meta")
    for tensor, empty in zip(model.parameters(), on_meta.parameters(), strict=True):
        assert (empty.shape, empty.dtype, empty.is_meta) == (tensor.shape, tensor.dtype, True)
    empty_inputs = catalog.example_inputs(small_variant(source))
    assert list(map(shape_of, empty_inputs)) == list(map(shape_of, inputs))


def test_a_size_that_it_does_not_accept_is_refused_before_it_is_built(source: Source) -> None:
    name = f"{source.name}/{SMALL[source.name]}"
    with pytest.raises(UsageError, match=r"input-size|px") as caught:
        catalog.variant(name, input_size=5)
    assert caught.value.next_step


def test_what_a_model_brings_along_fits_its_variant(source: Source, entry: ModelEntry) -> None:
    inputs = source.example_inputs(entry)
    assert (inputs is None) == (source.usual_batch(entry) == 0)
    variant = small_variant(source)
    if source.usual_dtype(entry):
        assert variant.dtype == source.usual_dtype(entry)
    assert source.differences(entry, variant) == []
    assert isinstance(source.hint_about_inputs(entry, variant), str)
    assert source.has_versions == bool(source.code(entry, ""))


def test_a_model_without_a_plan_or_text_says_so(source: Source, entry: ModelEntry) -> None:
    if source.name == "transformers":
        pytest.skip("has texts and plans")
    with pytest.raises(UnsupportedModel, match="no plan for tensor parallelism"):
        source.tensor_parallel_plan(entry, None, 2)
    with pytest.raises(UsageError, match="takes no tokens and no text"):
        source.tokens_of(entry, small_variant(source), Path("text"), Path("tokenizer"))
