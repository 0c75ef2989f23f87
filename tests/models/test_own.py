"""A user's own models: found by name, fed as their functions say, extracted with masks and all."""

from __future__ import annotations

import json
import os
import resource
import sys

import pytest
import torch

from farm.errors import (
    CaptureError,
    SettingsError,
    UnknownModel,
    UnsupportedModel,
    UnsupportedTensor,
    UsageError,
)
from farm.models import catalog, own
from farm.models.user_modules import UserModules
from farm.requests.partial_request import PartialRequest, complete
from farm.settings import environment_of_children, settings
from farm.training import extract as extraction
from farm.training.extract import extract
from farm.training.version import versioned
from farm.types.variant import Variant


def title_of(variant):
    return catalog.resolve(variant.model).title_of(variant)


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
SETTING = """
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x + torch.zeros(4).to(x))

def net():
    torch.set_num_threads(3)
    return Net(4, 4), torch.ones(2, 4)
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
        **{
            name: f"text_models:{name}"
            for name in ("by_name", "both_ways", "unmasked", "no_name", "gate", "marked")
        }
    )


@pytest.mark.parametrize("name", ["by_name", "both_ways"])
def test_a_model_takes_keyword_arguments_and_is_extracted_with_its_mask(text_models, name):
    apart = extract(Variant(name, batch=4, input_size=224))
    assert apart.refusal(name) is None
    assert apart.flops == apart.model_flops
    assert sum(call.module_path.endswith("project") for call in apart.capture.calls) == 1
    (attention,) = [
        spec
        for spec in apart.capture.tuples.values()
        if spec.short_name == "scaled_dot_product_attention"
    ]
    assert [tensor.shape for tensor in attention.tensors if tensor.dtype == "bool"] == [
        (4, 1, 1, 12)
    ]
    assert attention.keywords["scale"] == (0.5 if name == "by_name" else 1.0)


def test_a_model_that_reads_activations_runs_where_that_takes_little_memory(
    text_models, monkeypatch
):
    apart = extract(Variant("gate", batch=2, input_size=224))
    assert [spec.short_name for spec in apart.capture.tuples.values()] == ["mean", "item", "linear"]
    assert apart.flops == apart.model_flops == 2 * 2 * 4 * 4
    monkeypatch.setattr(extraction, "MOST_RUN_BYTES", 79)
    with pytest.raises(CaptureError, match="not possible: parameters and buffers take"):
        extract(Variant("gate", batch=2, input_size=224))


def test_a_model_that_reads_a_large_mask_computes_it_without_running(text_models, monkeypatch):
    monkeypatch.setattr(extraction, "MOST_RUN_BYTES", 0)
    apart = extract(Variant("marked", batch=2, input_size=224))
    assert [spec.short_name for spec in apart.capture.tuples.values()] == [
        "ones",
        "all",
        "item",
        "linear",
    ]


def test_keyword_arguments_give_what_the_model_itself_gives(text_models):
    import text_models as module

    model, given = (
        catalog.build("by_name", device="cpu"),
        catalog.example_inputs(catalog.variant("by_name", 2), device="cpu"),
    )
    with torch.no_grad():
        assert torch.equal(
            model(*given), model.model(module.WORDS, attention_mask=module.MASK, scale=0.5)
        )
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
    user_models(
        mine="my_models:plain",
        fed="my_models:with_input",
        bad="my_models:wrong",
        lost="nowhere:plain",
    )
    user_models(**settings().models, one="my_models:one", lazy="my_models:lazy")
    assert {"mine", "fed"} <= set(catalog.names())
    assert catalog.find("mine").task == "user"
    assert type(catalog.build("mine")).__name__ == "Linear"
    assert catalog.example_inputs(catalog.variant("fed", 8), device="cpu")[0].shape == (8, 4)
    assert [
        tensor.shape for tensor in catalog.example_inputs(catalog.variant("one", 2), device="cpu")
    ] == [(2, 4)]
    for name in ("bad", "lost", "lazy"):
        with pytest.raises(SettingsError):
            catalog.build(name)


def test_a_users_module_is_found_in_the_folder_of_the_settings_alone_and_after_all_that_is_installed(
    user_models, tmp_path, monkeypatch
):
    for name in ("beside", "torch"):
        (tmp_path / f"{name}.py").write_text(
            "import torch\ndef net(): return torch.nn.Linear(4, 4)\n"
        )
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
    assert title_of(Variant("by_name", batch=4, input_size=224)) == "by_name 4x12 float32"
    assert title_of(Variant("unmasked", 8, 224, dtype="bfloat16")) == "unmasked 8x12 bfloat16"
    assert title_of(Variant("resnet18", batch=4, input_size=224)) == "resnet18 4x224 float32"


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
    variant = complete(
        PartialRequest(model=location.format(module, here), dtype="bf16"), "cuda", target=0.95
    ).variant
    assert (variant.model, variant.batch, variant.dtype) == (name, 16, "bfloat16")
    assert environment_of_children()["FARM_MODELS"] == json.dumps({name: name})
    assert environment_of_children()["FARM_MODELS_PATH"] == str(here)
    assert catalog.variant(name, 8).batch == 8
    assert title_of(variant) == f"{name} 16x64 bfloat16"


def test_a_look_up_changes_neither_the_environment_nor_the_settings(here):
    (here / "looked_up.py").write_text(NET)
    (here / "tiny").mkdir()
    (here / "tiny/config.json").write_text("{}")
    environment, loaded = dict(os.environ), settings()
    before = loaded.model_dump()
    assert catalog.matching("looked_up.py:net") == [
        catalog.resolve_given("looked_up:net").entry.name
    ]
    assert own.register("./tiny") == "tiny"
    assert dict(os.environ) == environment
    assert settings() is loaded
    assert loaded.model_dump() == before


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
        ("two words:net", "'two words:net' is no location of a function"),
        ("json.py:", "'json:' is no location of a function"),
        (":net", "':net' is no location of a function"),
    ):
        with pytest.raises((UsageError, SettingsError), match=message):
            own.register(location)


def test_a_folder_that_no_search_path_can_have_is_refused(here, monkeypatch):
    folder = here / "a:b"
    folder.mkdir()
    (folder / "in_colon.py").write_text(NET)
    with pytest.raises(UsageError, match="a:b' cannot be imported") as caught:
        own.register("a:b/in_colon.py:net")
    assert "without ':'" in caught.value.next_step
    monkeypatch.chdir(folder)
    for location in ("in_colon.py:net", "in_colon:net"):
        with pytest.raises(UsageError, match="a:b' cannot be imported"):
            own.register(location)
    assert own.register("torch.nn:Identity") == "torch.nn:Identity"
    assert str(folder) not in environment_of_children()["FARM_MODELS_PATH"]


def test_a_library_without_its_compiled_operators_is_named(here):
    (here / "detects.py").write_text(
        "import torch\n"
        "fake = torch.library.register_fake('absent_library::nms')\n"
        "def net(): return fake(lambda boxes: boxes)\n"
    )
    with pytest.raises(SettingsError, match="absent_library::nms does not exist") as caught:
        catalog.build(own.register("detects.py:net"))
    assert "install a build of it that suits PyTorch" in caught.value.next_step


def test_an_error_of_the_users_function_is_shown_with_its_line(here):
    (here / "raises_here.py").write_text(NET)
    with pytest.raises(SettingsError, match="ValueError: no width") as caught:
        catalog.build(own.register("raises_here.py:bad"))
    assert "raises_here.py, line 5: def helper()" in caught.value.next_step
    (here / "no_syntax.py").write_text("x = 1\ndef net(:\n")
    with pytest.raises(SettingsError, match="SyntaxError") as caught:
        catalog.build(own.register("no_syntax.py:net"))
    assert caught.value.next_step.endswith("no_syntax.py, line 2: def net(:")
    with pytest.raises(SettingsError, match="'raises_here:badd' could not build") as caught:
        catalog.build(own.register("raises_here.py:badd"))
    assert caught.value.next_step == "Did you mean bad?"


def test_an_error_of_the_users_forward_is_shown_with_its_line(here):
    (here / "raises_there.py").write_text(
        "from torch import nn, ones\nclass Net(nn.Module):\n    def forward(self, x):\n        "
        "return x @ ones(3, 3)\n"
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
    with pytest.raises(
        SettingsError, match=rf"'{module}:net' could not build its model: \w+: .*0"
    ) as caught:
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
    (here / "empty").mkdir()
    steps = ("net.py", "net.py:net"), ("tiny", "./tiny"), ("./empty", "has no config.json")
    for name, step in steps:
        with pytest.raises(UnknownModel) as caught:
            catalog.resolve_given(name)
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
    assert (name, catalog.find(name).phases, catalog.find(name).longest) == (
        "tiny",
        ("prefill", "decode"),
        256,
    )
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
            catalog.resolve_given(location)
    with pytest.raises(UsageError, match="There is no file"):
        own.register(f"{name}.py:net")


def test_the_name_of_a_hub_suggests_the_catalogs():
    with pytest.raises(UnknownModel) as caught:
        catalog.find("microsoft/phi-2")
    assert "Did you mean phi-2" in caught.value.next_step


KINDS = """
import collections
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

def half(): return nn.Linear(8, 8).half().eval(), torch.randn(4, 8).half()
def double(): return nn.Linear(8, 8).double().eval(), torch.randn(4, 8).double()

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8).bfloat16()
        self.register_buffer("table", torch.randn(8, dtype=torch.complex64))

    def forward(self, values):
        found = self.inner(self.norm(values.float()).bfloat16()).float()
        return torch.view_as_real(found * self.table)

def mixed(): return Mixed().eval(), torch.randn(4, 8).bfloat16()

class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

    def forward(self, values):
        return torch.fft.irfft(torch.fft.rfft(values)[..., :16] @ self.weight, n=64)

def spectral(): return Spectral().eval(), torch.randn(8, 64)
def whole(): return nn.Linear(8, 8, bias=False).to(torch.float8_e4m3fn), torch.arange(8)

class Skipping(nn.Linear):
    def forward(self, values):
        return values if self.training and torch.rand([]) < 0.5 else super().forward(values)

def dropping(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Dropout(0.1)), torch.randn(4, 8)
def skipping(): return Skipping(8, 8), torch.randn(4, 8)
def fixed(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.LSTM(8, 8)), torch.randn(4, 8)
def ready(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval(), torch.randn(4, 8)

def frozen():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[1].eval()
    return model, torch.randn(4, 8)

class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("heads", torch.eye(4, dtype=torch.bool).to_sparse(), persistent=False)

    def forward(self, values):
        return self.inner(values)

def unused(): return Sparse().eval(), torch.randn(2, 8)

class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, values, adjacency):
        return adjacency @ self.inner(values)

def sparse(): return Dense().eval(), (torch.randn(5, 8), torch.eye(5).to_sparse())
def nested(): return nn.Linear(8, 8).eval(), torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
def packed(): return nn.LSTM(8, 16).eval(), pack_sequence([torch.randn(3, 8), torch.randn(1, 8)])

class OfPair(nn.Linear):
    def forward(self, pair):
        return super().forward(pair.left) + pair.right

Pair = collections.namedtuple("Pair", "left right")

def pair(): return OfPair(8, 8).eval(), Pair(torch.randn(2, 8), torch.randn(2, 8))
def counted(): return Counted(8, 8).eval(), torch.randn(4, 8)

class Counted(nn.Linear):
    def forward(self, values):
        return super().forward(values)[values.sum(1) > -100]

class Unmovable(nn.Linear):
    def _apply(self, function, recurse=True):
        raise RuntimeError("it stays here")

def unmovable(): return Unmovable(8, 8).eval(), torch.randn(4, 8)
"""


@pytest.fixture
def kinds(here):
    """Registers a model of `KINDS` and returns its name. The module has a name of its own in each
    test.
    """
    module = f"kinds_{here.name.replace('-', '_')}"
    (here / f"{module}.py").write_text(KINDS)
    return lambda name: own.register(f"{module}.py:{name}")


def differences(variant):
    return catalog.resolve(variant.model).differences(variant)


def dtypes_of(variant):
    model = catalog.build(variant, device="cpu")
    return [
        str(tensor.dtype).removeprefix("torch.")
        for tensor in (*model.parameters(), *model.buffers())
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "all_dtypes"),
    [
        ("half", "float16", {"float16"}),
        ("double", "float64", {"float64"}),
        ("mixed", "bfloat16", {"bfloat16", "float32", "complex64"}),
        ("spectral", "float32", {"complex64"}),
        ("whole", "float32", {"float8_e4m3fn"}),
    ],
)
def test_a_model_keeps_its_dtypes(kinds, name, dtype, all_dtypes):
    variant = catalog.variant(kinds(name))
    assert variant.dtype == dtype
    assert set(dtypes_of(variant)) == all_dtypes
    assert differences(variant) == []
    if name != "whole":
        assert extract(variant).refusal(name) is None


def test_a_given_dtype_casts_real_numbers_and_says_so(kinds):
    variant = catalog.variant(kinds("mixed"), dtype="float32")
    assert dtypes_of(variant) == ["float32"] * 4 + ["complex64"]
    assert catalog.example_inputs(variant, device="cpu")[0].dtype == torch.float32
    (line,) = differences(variant)
    assert "bfloat16; they are measured as float32" in line
    assert "Tensors of complex64 are not changed" in line
    spectral = catalog.variant(kinds("spectral"), dtype="bfloat16")
    with pytest.raises(CaptureError) as caught:
        extract(spectral)
    assert "omit --dtype" in caught.value.next_step


def test_a_product_of_complex_numbers_is_measured_as_one(kinds):
    found = extract(catalog.variant(kinds("spectral")))
    (product,) = [spec for spec in found.capture.tuples.values() if spec.short_name == "matmul"]
    assert {tensor.dtype for tensor in product.tensors} == {"complex64"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("dropping", "2 modules (Dropout at '1' and 1 more)"),
        ("skipping", "1 module (Skipping)"),
        ("fixed", ""),
    ],
)
def test_a_model_that_arrives_in_train_mode_is_measured_in_eval_mode_with_a_line(
    kinds, name, shown
):
    variant = catalog.variant(kinds(name))
    assert variant.mode == "eval"
    assert not catalog.build(variant).training
    lines = differences(variant)
    assert len(lines) == bool(shown)
    assert all(shown in line and "--mode train" in line for line in lines)
    assert differences(catalog.variant(variant.model, mode="train")) == []
    assert differences(catalog.variant(kinds("ready"))) == []


def test_in_train_mode_a_module_that_the_user_has_frozen_stays_frozen(kinds):
    trained = catalog.build(catalog.variant(kinds("frozen"), mode="train"))
    assert [module.training for module in trained] == [True, False, True]
    assert not any(module.training for module in catalog.build(catalog.variant(kinds("frozen"))))
    assert all(
        module.training
        for module in catalog.build(catalog.variant(kinds("ready"), mode="train")).modules()
    )


def test_a_sparse_buffer_that_nothing_uses_is_left_out(kinds):
    variant = catalog.variant(kinds("unused"))
    assert [spec.short_name for spec in extract(variant).capture.tuples.values()] == ["Linear"]
    step = catalog.variant(variant.model, step="training")
    assert "addmm" in {spec.short_name for spec in extract(step).capture.tuples.values()}


@pytest.mark.parametrize("step", [None, "training"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sparse", r"(matmul in the model|aten.mm.default) has a sparse tensor"),
        ("nested", "Linear .* a nested tensor"),
    ],
)
def test_a_special_input_is_refused_by_name(kinds, name, kind, step):
    variant = catalog.variant(kinds(name), step=step)
    with pytest.raises(UnsupportedTensor, match=kind):
        extract(variant)
    assert title_of(variant)


def test_a_named_tuple_is_one_input(kinds):
    variant = catalog.variant(kinds("packed"))
    assert extract(variant).flops == 4 * 2 * 64 * (8 + 16)
    assert " 4x8 " in title_of(variant)
    found = extract(catalog.variant(kinds("pair")))
    assert [spec.short_name for spec in found.capture.tuples.values()] == ["linear", "add"]


def test_a_size_that_depends_on_values_costs_what_it_did_in_the_capture(kinds):
    found = extract(catalog.variant(kinds("counted"), 4))
    (picked,) = [spec for spec in found.capture.tuples.values() if spec.short_name == "getitem"]
    assert found.costs[picked.id].output_shapes == ((4, 8),)
    assert found.flops == found.model_flops


def test_an_error_of_a_users_module_while_it_is_moved_is_shown(kinds):
    with pytest.raises(CaptureError, match="cannot be captured: RuntimeError: it stays here"):
        extract(catalog.variant(kinds("unmovable")))


@pytest.mark.parametrize("file", ["my-model.py", "01_train.py", "class.py"])
def test_a_file_needs_no_name_of_python(here, file):
    (here / file).write_text(NET)
    name = own.register(f"{file}:net")
    assert catalog.resolve(name).usual_batch(1) == 16
    assert own.source_of(name) == here / file


def test_a_file_whose_name_cannot_be_imported_is_refused_with_a_name(here):
    for file, possible in (("model.v2.py", "model_v2.py"), ("my model.py", "my_model.py")):
        (here / file).write_text(NET)
        with pytest.raises(UsageError, match="cannot be imported") as caught:
            own.register(f"{file}:net")
        assert possible in caught.value.next_step


def test_a_path_may_lead_through_the_parent_folder_or_a_link(here, monkeypatch):
    (here / "models").mkdir()
    (here / "beside").mkdir()
    (here / "models" / "beside_it.py").write_text(NET)
    (here / "beside" / "linked_to.py").symlink_to(here / "models" / "beside_it.py")
    monkeypatch.chdir(here / "beside")
    for location in ("../models/beside_it.py:net", "linked_to.py:net"):
        assert catalog.resolve_given(location).usual_batch(1) == 16


def test_a_module_that_is_not_there_is_no_line_to_correct(here):
    with pytest.raises(SettingsError, match="No module named 'nowhere-here'") as caught:
        catalog.build(own.register("nowhere-here:net"))
    assert "Correct" not in caught.value.next_step


CLIP = {
    "architectures": ["CLIPModel"],
    "model_type": "clip",
    "projection_dim": 16,
    "text_config": {
        "vocab_size": 100,
        "hidden_size": 32,
        "max_position_embeddings": 20,
        "num_attention_heads": 4,
    },
    "vision_config": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "vocab_size": 100,
    "d_model": 32,
    "num_mel_bins": 20,
    "max_source_positions": 50,
    "pad_token_id": 0,
    **{
        f"{part}_{what}": number
        for part in ("encoder", "decoder")
        for what, number in (("layers", 1), ("ffn_dim", 64))
    },
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
}
ROBERTA = {
    "architectures": ["RobertaModel"],
    "vocab_size": 100,
    "hidden_size": 32,
    "max_position_embeddings": 34,
}


@pytest.mark.parametrize(
    ("config", "length", "longest"),
    [(CLIP, 20, 20), (WHISPER, 100, 0), (ROBERTA, 32, 32), (CONFIG, 256, 256)],
)
def test_a_folder_has_the_length_of_its_config(here, config, length, longest):
    (here / "sized").mkdir()
    (here / "sized" / "config.json").write_text(json.dumps(config))
    entry = catalog.find(own.register("./sized"))
    assert (entry.length, entry.longest) == (length, longest)


def test_the_folder_of_a_whisper_runs_and_says_what_is_measured(here):
    pytest.importorskip("transformers")
    (here / "heard").mkdir()
    (here / "heard" / "config.json").write_text(json.dumps(WHISPER))
    variant = catalog.variant(own.register("./heard"))
    assert catalog.example_inputs(variant)[0].shape == (1, 20, 100)
    assert extract(variant).refusal("heard") is None
    (line,) = differences(variant)
    assert "WhisperForConditionalGeneration; the farm measures the encoder" in line


def test_a_config_that_builds_no_model_is_refused_with_the_reason(here):
    pytest.importorskip("transformers")
    (here / "uneven").mkdir()
    (here / "uneven" / "config.json").write_text(json.dumps({**CONFIG, "num_key_value_heads": 3}))
    with pytest.raises(CaptureError, match=r"uneven cannot be captured|The model raised"):
        extract(catalog.variant(own.register("./uneven"), length=8))


def test_random_inputs_are_the_same_in_every_process_and_leave_the_generator_alone(here):
    (here / "random_here.py").write_text(
        "import torch\nGIVEN = torch.randn(2, 4)\ndef net(): return torch.nn.Linear(4, 4), "
        "(torch.randn(2, 4), GIVEN)\n"
    )
    name = own.register("random_here.py:net")
    before = torch.get_rng_state()
    first = [tensor.clone() for tensor in own.example(name).values]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    del sys.modules["random_here"]
    assert all(map(torch.equal, first, own.example(name).values))


def test_a_small_model_is_built_once_whenever_its_inputs_are_asked_for(here):
    (here / "counted_here.py").write_text(
        "import torch\nCALLS = []\ndef net():\n    CALLS.append(0)\n"
        "    return torch.nn.Linear(4, 4), torch.randn(2, 4)\n"
    )
    model = catalog.resolve_given("counted_here.py:net")
    variant = model.variant()
    calls = sys.modules["counted_here"].CALLS
    before = len(calls)
    model.example_inputs(variant)
    assert len(calls) == before + 1


BUILT = """
import torch
from torch import nn

def parts(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()

def fused():
    convolution, norm = parts()
    return nn.utils.fusion.fuse_conv_bn_eval(convolution, norm), torch.randn(1, 3, 8, 8)

def calibrated():
    model = parts()
    scale = float(model[0].weight.abs().max())
    with torch.no_grad():
        model[0].weight.div_(scale)
    return model, torch.randn(1, 3, 8, 8)

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8))
        self.stride = 64 / self.body(torch.zeros(1, 3, 64, 64)).shape[-1]

    def forward(self, images):
        return self.body(images) * self.stride

def dry_run(): return Detector().eval(), torch.randn(1, 3, 8, 8)

def wrong():
    model = parts()
    float(model[0].weight.sum())
    return model.missing

class Anchored(nn.Module):
    anchors = torch.empty(0)

    def _apply(self, function, recurse=True):
        self.anchors = function(self.anchors)
        return super()._apply(function, recurse)

    def forward(self, images):
        return images * 2 + self.anchors.numel()

def of_class(): return Anchored().eval(), torch.randn(1, 3, 8, 8)

class Terms(tuple):
    def __len__(self):
        raise NotImplementedError

class OfTerms(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.terms = Terms([1, 2])

def of_terms(): return OfTerms().eval(), torch.randn(4, 8)

def large(): return nn.Linear(48_000, 48_000).eval(), torch.randn(4, 48_000)

def large_and_read():
    model = nn.Linear(1_000_000, 1_000_000)
    float(model.weight[0, 0])
    return model

def exported():
    return torch.export.export(nn.ReLU().eval(), (torch.randn(4, 8),)).module(), torch.randn(4, 8)
"""


@pytest.fixture
def ways_to_build(here):
    module = f"built_{here.name.replace('-', '_')}"
    (here / f"{module}.py").write_text(BUILT)
    return lambda name: own.register(f"{module}.py:{name}")


@pytest.mark.parametrize("name", ["fused", "calibrated", "dry_run"])
def test_a_model_that_reads_its_weights_is_built_with_real_memory_and_moved_to_meta(
    ways_to_build, name
):
    variant = catalog.variant(ways_to_build(name))
    assert all(tensor.is_meta for tensor in catalog.build(variant).parameters())
    assert extract(variant).refusal(name) is None


def test_an_empty_tensor_of_a_class_stays_real(ways_to_build):
    module = catalog.build(catalog.variant(ways_to_build("of_class")))
    assert not type(module).anchors.is_meta


def test_a_sequence_that_refuses_its_length_is_searched_for_tensors(ways_to_build):
    assert extract(catalog.variant(ways_to_build("of_terms"))).refusal("of_terms") is None


def test_an_error_that_real_memory_does_not_mend_is_that_of_the_function(ways_to_build):
    with pytest.raises(SettingsError, match="has no attribute 'missing'") as caught:
        catalog.build(catalog.variant(ways_to_build("wrong")))
    assert "return model.missing" in caught.value.next_step


def test_a_large_model_takes_no_memory_until_it_is_measured(ways_to_build):
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    variant = catalog.variant(ways_to_build("large"), batch=4)
    assert extract(variant).flops == 2 * 4 * 48_000**2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before_kb + 2**20


def test_a_model_that_reads_weights_beyond_the_hosts_memory_is_refused_before_they_exist(
    ways_to_build,
):
    with pytest.raises(UsageError, match=r"take more than the .* GiB of memory"):
        catalog.build(catalog.variant(ways_to_build("large_and_read")))


def test_an_exported_module_keeps_its_mode(ways_to_build):
    module = catalog.build(catalog.variant(ways_to_build("exported")), device="cpu")
    assert torch.equal(module(-torch.ones(4, 8)), torch.zeros(4, 8))


def test_settings_that_a_file_of_models_changes_reach_no_other_model(
    user_models, tmp_path, monkeypatch
):
    (tmp_path / "setting_models.py").write_text(SETTING)
    monkeypatch.syspath_prepend(tmp_path)
    user_models(net="setting_models:net")
    threads = torch.get_num_threads()
    for _ in range(2):  # the file is imported the first time only
        assert catalog.build("net", device="cpu").weight.dtype is torch.float64
    found = extract(catalog.variant("net", 2))
    assert found.capture.mismatches == {}
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads
    (line,) = differences(catalog.variant("net", 2))
    for setting in ("torch.use_deterministic_algorithms", "torch.set_default_dtype"):
        assert setting in line
    assert "with the defaults of PyTorch" in line


def test_a_module_of_python_makes_no_folder_one_of_the_user():
    finder = UserModules()
    finder.make_importable("math")
    assert not finder.has_file(__file__)


def test_a_relative_import_of_a_module_outside_a_package_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "lone_net.py").write_text(
        "try:\n    from . import others\nexcept ImportError:\n    pass\ndef net(): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    finder = UserModules()
    assert finder.function("lone_net:net")
    assert [module.name for module in finder.loaded(["lone_net:net"])] == ["lone_net"]


def test_a_function_of_torch_does_not_make_torch_a_module_of_the_user():
    """The user's modules are imported again after an edit; torch cannot be imported twice."""
    finder = UserModules()
    finder.function("torch.nn:Identity")
    assert not list(finder.loaded(["torch.nn:Identity"]))
    finder.forget_edited(["torch.nn:Identity"])
    assert sys.modules["torch"] is torch
