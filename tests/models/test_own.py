"""A user's own models: found by name, fed as their functions say, extracted with masks and all."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

from farm.errors import CaptureError, SettingsError, UnknownModel, UnsupportedModel, UsageError
from farm.models import catalog, own
from farm.requests.partial_request import PartialRequest, complete
from farm.settings import settings
from farm.training import extract as extraction
from farm.training.extract import extract
from farm.training.version import versioned
from farm.types.protocol import Variant

TEXT = """
import torch
from torch import nn
from torch.nn import functional

class Text(nn.Module):
    # Words and a mask in, as BERT takes them.

    def __init__(self):
        super().__init__()
        self.embedding, self.project, self.out = nn.Embedding(100, 16), nn.Linear(16, 48), nn.Linear(16, 2)

    def forward(self, input_ids, *, attention_mask=None, scale=1.0):
        query, key, value = self.project(self.embedding(input_ids)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        # BERT too looks whether there is anything to mask: that needs the values.
        nothing_masked = attention_mask is None or bool(attention_mask.all())
        mask = None if nothing_masked else attention_mask[:, None, None, :].bool()
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        return self.out(mixed.transpose(1, 2).flatten(2))

WORDS = torch.arange(24).reshape(2, 12)
MASK = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])

def by_name(): return Text(), {"attention_mask": MASK, "input_ids": WORDS, "scale": 0.5}
def both_ways(): return Text(), ((WORDS,), {"attention_mask": MASK})
def unmasked(): return Text(), (WORDS,)

class Gate(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.mean().item() < 100 else x

class Marked(nn.Linear):
    def forward(self, x):
        marks = torch.ones(1100, 1100, dtype=torch.bool, device=x.device)  # more than a small result
        return super().forward(x) if marks.all().item() else x

def marked(): return Marked(4, 4), torch.ones(2, 4)
def gate(): return Gate(4, 4), torch.ones(2, 4)
def no_name(): return Text(), {1: WORDS}
"""


@pytest.fixture
def user_models(monkeypatch):
    def register(**models):
        monkeypatch.setattr(settings(), "models", models)

    return register


@pytest.fixture
def text_models(user_models, tmp_path, monkeypatch):
    (tmp_path / "text_models.py").write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    user_models(
        **{name: f"text_models:{name}" for name in ("by_name", "both_ways", "unmasked", "no_name", "gate", "marked")}
    )


@pytest.mark.parametrize("name", ["by_name", "both_ways"])
def test_a_model_takes_keyword_arguments_and_is_extracted_with_its_mask(text_models, name):
    apart = extract(Variant(name, batch=4, input_size=224))
    assert apart.refusal(name) is None
    assert apart.flops == apart.model_flops
    assert sum(call.module_path.endswith("project") for call in apart.capture.calls) == 1
    (attention,) = [spec for spec in apart.capture.tuples.values() if spec.short_name == "scaled_dot_product_attention"]
    assert [tensor.shape for tensor in attention.tensors if tensor.dtype == "bool"] == [(4, 1, 1, 12)]
    assert attention.keywords["scale"] == (0.5 if name == "by_name" else 1.0)


def test_a_model_that_reads_activations_runs_where_that_takes_little_memory(text_models, monkeypatch):
    apart = extract(Variant("gate", batch=2, input_size=224))
    assert [spec.short_name for spec in apart.capture.tuples.values()] == ["mean", "item", "linear"]
    assert apart.flops == apart.model_flops == 2 * 2 * 4 * 4
    monkeypatch.setattr(extraction, "MOST_RUN_BYTES", 79)
    with pytest.raises(CaptureError, match="real values is not possible: parameters and buffers take"):
        extract(Variant("gate", batch=2, input_size=224))


def test_a_model_that_reads_a_large_mask_computes_it_without_running(text_models, monkeypatch):
    monkeypatch.setattr(extraction, "MOST_RUN_BYTES", 0)
    apart = extract(Variant("marked", batch=2, input_size=224))
    assert [spec.short_name for spec in apart.capture.tuples.values()] == ["ones", "all", "item", "linear"]


def test_keyword_arguments_give_what_the_model_itself_gives(text_models):
    import text_models as module

    model, given = (
        catalog.build("by_name", device="cpu"),
        catalog.example_inputs(catalog.variant("by_name", 2), device="cpu"),
    )
    with torch.no_grad():
        assert torch.equal(model(*given), model.model(module.WORDS, attention_mask=module.MASK, scale=0.5))
        assert not torch.equal(model(*given), model.model(module.WORDS, scale=0.5))


def test_a_size_is_refused_by_a_model_that_brings_its_inputs(text_models):
    with pytest.raises(UsageError, match="unmasked defines its own example inputs"):
        catalog.variant("unmasked", input_size=128)
    assert catalog.variant("unmasked").input_size == 224


def test_an_argument_needs_a_name(text_models):
    with pytest.raises(SettingsError, match="the key 1, which is no text"):
        catalog.build("no_name")


def test_a_users_model_is_found_by_its_name_alone(user_models, tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def plain(): return torch.nn.Linear(4, 4)\n"
        "def with_input(): return torch.nn.Linear(4, 4), (torch.empty(3, 4, device='meta'),)\n"
        "def wrong(): return 7\n"
        "def one(): return torch.nn.Linear(4, 4), torch.ones(3, 4)\n"
        "def lazy(): return torch.nn.LazyLinear(4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    user_models(mine="my_models:plain", fed="my_models:with_input", bad="my_models:wrong", lost="nowhere:plain")
    user_models(**settings().models, one="my_models:one", lazy="my_models:lazy")
    assert {"mine", "fed"} <= set(catalog.names())
    assert catalog.find("mine").task == "user"
    assert type(catalog.build("mine")).__name__ == "Linear"
    assert catalog.example_inputs(catalog.variant("fed", 8), device="cpu")[0].shape == (8, 4)
    assert [tensor.shape for tensor in catalog.example_inputs(catalog.variant("one", 2), device="cpu")] == [(2, 4)]
    for name in ("bad", "lost", "lazy"):
        with pytest.raises(SettingsError):
            catalog.build(name)


def test_a_users_module_is_found_in_the_folder_of_the_settings_alone_and_after_all_that_is_installed(
    user_models, tmp_path, monkeypatch
):
    for name in ("beside", "torch"):
        (tmp_path / f"{name}.py").write_text("import torch\ndef net(): return torch.nn.Linear(4, 4)\n")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    user_models(beside="beside:net")
    with pytest.raises(SettingsError, match="No module named 'beside'") as caught:
        catalog.build("beside")
    assert "FARM_MODELS_PATH" in caught.value.next_step
    monkeypatch.setattr(settings(), "models_path", ".")
    assert type(catalog.build("beside")).__name__ == "Linear"
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize("models", [{"resnet50": "a:b"}, {"mine": "no_colon"}, {"mine": "a b:c"}])
def test_a_wrong_registration_is_refused(user_models, models):
    user_models(**models)
    with pytest.raises(SettingsError):
        catalog.names()


def test_a_model_is_titled_by_what_goes_in(text_models):
    assert catalog.title_of(Variant("by_name", batch=4, input_size=224)) == "by_name 4x12 float32"
    assert catalog.title_of(Variant("unmasked", 8, 224, dtype="bfloat16")) == "unmasked 8x12 bfloat16"
    assert catalog.title_of(Variant("resnet18", batch=4, input_size=224)) == "resnet18 4x224 float32"


def test_a_model_of_ones_own_wins_its_name_of_all_but_torchvisions(user_models):
    user_models(gpt2="models_here:linear")
    assert catalog.find("gpt2").origin == "user"
    assert (catalog.find("transformers/gpt2").name, catalog.find("timm/resnet50").name) == (
        "transformers/gpt2",
        "timm/resnet50",
    )
    assert catalog.variant("transformers/gpt2").model == "transformers/gpt2"


@pytest.fixture
def here(monkeypatch, tmp_path):
    """An empty current folder. Registrations in the environment end with the test."""
    monkeypatch.setenv("FARM_MODELS", "{}")
    monkeypatch.setenv("FARM_MODELS_PATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    settings.cache_clear()
    yield tmp_path
    settings.cache_clear()


NET = """
import torch
def net(): return torch.nn.Linear(64, 4), torch.randn(16, 64)
def bad(): return helper()
def helper(): raise ValueError("no width")
"""


@pytest.mark.parametrize(
    ("module", "location"), [("one", "{0}.py:net"), ("two", "{1}/{0}.py:net"), ("three", "{0}:net")]
)
def test_a_model_is_given_by_the_location_of_its_function(here, module, location):
    module, name = f"located_{module}", f"located_{module}:net"
    (here / f"{module}.py").write_text(NET)
    variant = complete(PartialRequest(model=location.format(module, here), dtype="bf16"), "cuda", target=0.95).variant
    assert (variant.model, variant.batch, variant.dtype) == (name, 16, "bfloat16")
    assert json.loads(os.environ["FARM_MODELS"]) == {name: name}
    assert os.environ["FARM_MODELS_PATH"] == str(here)
    assert catalog.variant(name, 8).batch == 8
    assert catalog.title_of(variant) == f"{name} 16x64 bfloat16"


def test_a_location_in_a_message_imports_nothing(here):
    (here / "in_message.py").write_text("raise SystemExit('imported')\n")
    for name in ("in_message:net", "in_message.py:net"):
        with pytest.raises(UnknownModel):
            catalog.build(Variant(name, 1, 224))
    assert "in_message" not in sys.modules


def test_a_wrong_location_is_refused(here):
    (here / "json.py").write_text(NET)
    for location, message in (
        ("none.py:net", "There is no file 'none.py'"),
        ("json.py:net", "'json.py' cannot be imported: the name 'json' means the module"),
        ("two words:net", "the form must be 'module:function'"),
    ):
        with pytest.raises((UsageError, SettingsError), match=message):
            own.register(location)


def test_an_error_of_the_users_function_is_shown_with_its_line(here):
    (here / "raises_here.py").write_text(NET)
    with pytest.raises(SettingsError, match="ValueError: no width") as caught:
        catalog.build(own.register("raises_here.py:bad"))
    assert caught.value.next_step.endswith('raises_here.py, line 5: def helper(): raise ValueError("no width")')
    with pytest.raises(SettingsError, match="'raises_here:badd' could not build its model") as caught:
        catalog.build(own.register("raises_here.py:badd"))
    assert caught.value.next_step == "Did you mean bad?"


def test_an_error_of_the_users_forward_is_shown_with_its_line(here):
    (here / "raises_there.py").write_text(
        "from torch import nn, ones\nclass Net(nn.Module):\n    def forward(self, x):\n        return x @ ones(3, 3)\n"
        "def net(): return Net(), (ones(2, 16),)\n"
    )
    with pytest.raises(CaptureError, match=r"raises_there.py, line 4: return x @ ones\(3, 3\)\)"):
        extract(catalog.variant("raises_there.py:net", 2))


ENDS = """
import os, sys, threading
from torch import nn, ones

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__

class Stop(BaseException):
    pass

class Net(nn.Linear):
    def __init__(self, end):
        super().__init__(4, 4)
        self.end = end

    def forward(self, x):
        self.end()
        return super().forward(x)

def raises(error):
    raise error

def swallowed():
    try:
        os._exit(0)
    except Exception:
        pass

def forked():
    if os.fork() == 0:
        os._exit(0)
    os.wait()

def while_running(end):
    return lambda: (Net(end), ones(2, 4))

runs_sys_exit = while_running(lambda: sys.exit(0))
runs_os_exit = while_running(lambda: os._exit(0))
runs_swallowed = while_running(swallowed)
runs_mute = while_running(lambda: raises(Mute()))
runs_stop = while_running(lambda: raises(Stop("here")))
runs_forked = while_running(forked)
def makes_sys_exit(): sys.exit(0)
def makes_os_exit(): os._exit(0)
def makes_mute(): raise Mute()
def makes_stop(): raise Stop("here")
"""


@pytest.mark.parametrize(
    ("function", "error", "reason"),
    [
        ("makes_sys_exit", SettingsError, "SystemExit: 0"),
        ("makes_os_exit", SettingsError, r"EndsProcess: os._exit\(0\)"),
        ("makes_mute", SettingsError, r"Mute: \(its text cannot be shown\)"),
        ("makes_stop", SettingsError, "EndsProcess: Stop: here"),
        ("runs_sys_exit", CaptureError, "SystemExit: 0"),
        ("runs_os_exit", CaptureError, r"EndsProcess: os._exit\(0\)"),
        ("runs_swallowed", CaptureError, r"EndsProcess: os._exit\(0\)"),
        ("runs_mute", CaptureError, r"Mute: \(its text cannot be shown\)"),
        ("runs_stop", CaptureError, "Stop: here"),
    ],
)
def test_code_of_the_user_that_would_end_the_process_is_an_error(here, function, error, reason):
    (here / f"ends_{function}.py").write_text(ENDS)
    with pytest.raises(error, match=reason) as caught:
        extract(catalog.variant(own.register(f"ends_{function}.py:{function}"), 2))
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("exits", "import sys; sys.exit(0)"),
        ("exits_at_once", "import os; os._exit(0)"),
        ("exits_by_name", "from os import _exit; _exit(0)"),
    ],
)
def test_a_module_that_ends_the_process_is_an_error(here, module, text):
    (here / f"{module}.py").write_text(text)
    with pytest.raises(SettingsError, match=rf"'{module}:net' could not build its model: \w+: .*0") as caught:
        catalog.build(own.register(f"{module}.py:net"))
    assert caught.value.next_step.endswith(f"{module}.py, line 1: {text}")


def test_a_child_process_of_the_users_code_may_end(here):
    (here / "forks.py").write_text(ENDS)
    exit_at_once = os._exit
    assert extract(catalog.variant(own.register("forks.py:runs_forked"), 2)).capture.calls
    assert os._exit is exit_at_once


def test_a_location_that_is_not_complete_is_answered_with_its_form(here):
    (here / "tiny").mkdir()
    (here / "tiny" / "config.json").write_text("{}")
    for name, step in (("net.py", "net.py:net"), ("tiny", "./tiny")):
        with pytest.raises(UnknownModel) as caught:
            catalog.known(name)
        assert step in caught.value.next_step


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


def test_a_folder_with_a_config_is_a_model_with_phases_and_a_version(here):
    pytest.importorskip("transformers")
    (here / "tiny").mkdir()
    (here / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    name = own.register("./tiny")
    assert (name, catalog.find(name).phases, catalog.find(name).longest) == ("tiny", ("prefill", "decode"), 256)
    prompt = catalog.variant(name, 2, length=8)
    module = catalog.build(prompt, device="cpu")
    assert {str(tensor.dtype) for tensor in module.parameters()} == {"torch.float32"}
    assert module(*catalog.example_inputs(prompt, device="cpu")).logits.shape == (2, 1, 1000)
    first = versioned(prompt)
    (here / "tiny" / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 32}))
    assert versioned(prompt).version != first.version
    assert catalog.variant(name, 2, phase="decode").cache == 256


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"auto_map": {"AutoModel": "code.Model"}}, "needs code from its folder"),
        ({"quantization_config": {}}, "needs quantized weights"),
        ({"architectures": ["Strange"]}, "names Strange"),
    ],
)
def test_a_config_that_the_farm_cannot_use_is_refused(here, more, message):
    (here / "odd").mkdir()
    (here / "odd" / "config.json").write_text(json.dumps({**CONFIG, **more}))
    with pytest.raises(UnsupportedModel, match=message):
        catalog.find(own.register("./odd"))


def test_a_name_that_no_file_can_have_is_an_unknown_model(here):
    name = "a" * 5000
    for location in (name, f"./{name}", f"{name}/{name}"):
        with pytest.raises(UnknownModel, match="There is no model named"):
            catalog.known(location)
    with pytest.raises(UsageError, match="There is no file"):
        own.register(f"{name}.py:net")


def test_the_name_of_a_hub_suggests_the_catalogs():
    with pytest.raises(UnknownModel) as caught:
        catalog.find("microsoft/phi-2")
    assert "Did you mean phi-2" in caught.value.next_step
