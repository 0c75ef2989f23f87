"""Weights of a model of one's own from a file of safetensors: names and shapes are checked, and they
are part of the version."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from farm.errors import SettingsError, UsageError
from farm.models import catalog
from farm.settings import environment_of_children, settings, user_models
from farm.training.version import versioned
from farm.types.request import Request
from farm.types.variant import Variant

MODELS = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids):
        return self.out(self.words(ids))

def net(): return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), torch.randn(2, 4)
def tied(): return Tied(), torch.arange(6).reshape(2, 3)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all tests: the name of a module means one file in a process."""
    folder = tmp_path_factory.mktemp("weighted")
    (folder / "weighted.py").write_text(MODELS)
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    yield folder
    user_models.forget()


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))


def model_of(function="net"):
    return catalog.resolve_given(f"weighted.py:{function}")


def test_a_model_is_built_with_the_values_of_the_file(here):
    trained = network()
    with torch.no_grad():
        trained[0].weight.fill_(3.0)
        trained[1].running_mean.fill_(5.0)
    save_file(trained.state_dict(), "net.safetensors")
    model = model_of()
    variant = model.variant(batch=2, weights="net.safetensors")
    assert variant.weights == "safetensors"
    assert "weights safetensors" in str(variant)
    built = model.build(variant, device="cpu")
    assert set(built.state_dict()) == set(trained.state_dict())
    for name, value in built.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name
    assert model.build(variant)[0].weight.is_meta
    cast = model.build(
        model.variant(batch=2, weights="safetensors", dtype="bfloat16"), device="cpu"
    )
    assert cast[0].weight.dtype == torch.bfloat16
    assert bool((cast[0].weight == 3).all())
    assert not bool((model.build(model.variant(batch=2), device="cpu")[0].weight == 3).all())


def test_one_name_of_a_shared_tensor_is_enough(here):
    model = model_of("tied")
    made = model.build(model.variant(batch=2), device="cpu")
    with torch.no_grad():
        made.words.weight.fill_(2.0)
    save_model(made, "tied.safetensors")
    built = model.build(model.variant(batch=2, weights="tied.safetensors"), device="cpu")
    assert built.out.weight is built.words.weight
    assert bool((built.out.weight == 2).all())


def test_other_values_are_another_version(here):
    model = model_of()
    plain = versioned(model.variant(batch=2), model)
    versions = {plain.version}
    for seed in (1, 2):
        torch.manual_seed(seed)
        save_file(network().state_dict(), "net.safetensors")
        versions.add(versioned(model.variant(batch=2, weights="net.safetensors"), model).version)
    assert len(versions) == 3
    assert plain == versioned(model.variant(batch=2), model)


def test_the_file_is_named_in_the_settings_and_for_child_processes_alone(here, monkeypatch):
    save_file(network().state_dict(), "net.safetensors")
    model = model_of()
    variant = versioned(model.variant(batch=2, weights="net.safetensors"), model)
    assert str(here) not in json.dumps(variant.to_json())
    children = environment_of_children()
    name = model.entry.own_name
    assert json.loads(children["FARM_WEIGHTS"]) == {name: str(here / "net.safetensors")}
    command = Request(variant=variant).command()
    assert "--weights FILE" in command
    assert str(here) not in command

    user_models.forget()
    model_of()  # registers the function again
    with pytest.raises(SettingsError, match="This host has no weights"):
        model_of().build(variant, device="cpu")
    monkeypatch.setenv("FARM_WEIGHTS", children["FARM_WEIGHTS"])
    settings.cache_clear()
    assert model_of().build(variant, device="cpu")[0].weight.shape == (8, 4)


def changed(**tensors):
    state = {**network().state_dict(), **tensors}
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (changed(**{"0.bias": None}), "no values for '0.bias' of the model"),
        (changed(**{"0.bias": None, "0.weight": None}), "'0.weight' and 1 more of the model"),
        (changed(extra=torch.zeros(1)), "has 'extra', which the model does not have"),
        (changed(**{"0.weight": torch.zeros(4, 8)}), "'0.weight' is 4 x 8 in .* and 8 x 4 in the"),
        (changed(**{"0.bias": torch.zeros(8, dtype=torch.int64)}), "of I64 in .* torch.float32"),
    ],
)
def test_a_file_of_another_model_is_refused(here, state, message):
    save_file(state, "net.safetensors")
    model = model_of()
    variant = model.variant(batch=2, weights="net.safetensors")
    for device in ("meta", "cpu"):
        with pytest.raises(SettingsError, match=message):
            model.build(variant, device=device)


def test_a_damaged_file_is_refused(here):
    (here / "net.safetensors").write_bytes(b"\x00" * 100)
    model = model_of()
    with pytest.raises(SettingsError, match="cannot be read"):
        model.build(model.variant(batch=2, weights="net.safetensors"), device="cpu")


def test_pickled_weights_and_absent_files_are_refused(here):
    torch.save(network().state_dict(), "net.pt")
    model = model_of()
    with pytest.raises(UsageError, match="no file of safetensors"):
        model.variant(batch=2, weights="net.pt")
    with pytest.raises(UsageError, match="There is no file"):
        model.variant(batch=2, weights="absent.safetensors")
    with pytest.raises(UsageError, match="your own models"):
        catalog.resolve("resnet18").variant(batch=2, weights="absent.safetensors")
    with pytest.raises(UsageError, match="your own models"):  # a variant of a message
        catalog.resolve("resnet18").build(Variant("resnet18", 2, 224, weights="safetensors"))


def test_without_a_file_ids_are_as_before():
    assert Variant("resnet18", 32, 224).weights == "random"
    assert "weights" not in str(Variant("resnet18", 32, 224))
