"""A config.json of transformers is data: what it may contain, and what hostile ones are
answered.
"""

from __future__ import annotations

import inspect
import json
import re

import pytest

from farm.errors import CaptureError, FarmError, SettingsError, UnsupportedModel
from farm.models import catalog, config_file, configurations, transformers
from farm.settings import settings
from farm.training.extract import extract
from tests import slow

pytest.importorskip("transformers")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
CLIP = {
    "architectures": ["CLIPModel"],
    "vocab_size": 1000,
    "vision_config": {"image_size": 32, "patch_size": 16},
}


def of_class(name, **more):
    return {"architectures": [name], "vocab_size": 1000, **more}


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture
def of_text(tmp_path, monkeypatch):
    """The name of a model whose folder has a config.json with this text."""

    def made(text):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        monkeypatch.setattr(settings(), "models", {"hostile": str(tmp_path)})
        return "hostile"

    return made


@pytest.fixture
def of_config(of_text):
    return lambda config: of_text(json.dumps(config))


# Changes to a small llama -> what the error says.
OUT_OF_BOUNDS = [
    ({"num_hidden_layers": -2}, "'num_hidden_layers' .* from 1 to 1,000, not -2"),
    ({"num_hidden_layers": 0}, "'num_hidden_layers' .* from 1 to 1,000, not 0"),
    ({"num_hidden_layers": 10**9}, "'num_hidden_layers' .* from 1 to 1,000, not 1000000000"),
    ({"num_hidden_layers": 10**3000}, "'num_hidden_layers' .* a number with more than 60 digits"),
    ({"num_hidden_layers": 2.5}, "'num_hidden_layers' .* whole number, not 2.5"),
    ({"num_hidden_layers": "2"}, "'num_hidden_layers' .* whole number, not \"2\""),
    ({"num_hidden_layers": True}, "'num_hidden_layers' .* whole number, not true"),
    ({"num_hidden_layers": [2]}, "'num_hidden_layers' .* whole number, not a list"),
    ({"num_hidden_layers": None}, "'num_hidden_layers' expected int, got NoneType"),
    ({"hidden_size": 10**12}, "'hidden_size' .* from 1 to 1,048,576"),
    ({"hidden_size": -64}, "'hidden_size' .* from 1 to 1,048,576"),
    ({"hidden_size": 0}, "'hidden_size' .* from 1 to 1,048,576"),
    ({"hidden_size": "64"}, "'hidden_size' expected int, got str"),
    ({"hidden_size": 64.0}, "'hidden_size' expected int, got float"),
    ({"hidden_size": 63}, "hidden size .63. is not a multiple"),
    ({"intermediate_size": -1}, "'intermediate_size' .* from 0 to"),
    ({"vocab_size": 0}, "'vocab_size' .* from 1 to 16,777,216"),
    ({"vocab_size": 10**15}, "'vocab_size' .* from 1 to 16,777,216"),
    ({"vocab_size": {"a": 1}}, "'vocab_size' .* whole number, not a dict"),
    ({"vocab_size": None}, "'vocab_size' .* is missing"),
    ({"num_attention_heads": 0}, "'num_attention_heads' .* from 1 to 1,024"),
    ({"num_key_value_heads": 0}, "'num_key_value_heads' .* from 1 to 1,024"),
    ({"head_dim": 10**9}, "'head_dim' .* from 1 to 1,048,576"),
    ({"max_position_embeddings": 10**12}, "'max_position_embeddings' .* from 0 to 4,194,304"),
    ({"max_position_embeddings": "many"}, "'max_position_embeddings' .* whole number"),
    ({"pad_token_id": 10**9}, "'pad_token_id' .* from -1,000 to 16,777,216"),
    ({"eos_token_id": [0] * 1_000_000}, "'eos_token_id' .* at most 4,096 entries, not 1,000,000"),
    ({"eos_token_id": "end"}, "'eos_token_id' with value 'end'"),
    ({"rms_norm_eps": "small"}, "'rms_norm_eps' expected float, got str"),
    ({"rope_theta": 1e300}, "'rope_theta' .* at most 1e.12"),
    ({"rope_scaling": "linear"}, "'rope_parameters' with value 'linear'"),
    (
        {"rope_scaling": {"type": "evil", "factor": 2}},
        "does not know the value 'evil' of 'rope_scaling.type'",
    ),
    (
        {"rope_scaling": {"a": nested(500)}},
        "'rope_scaling.a' .* at most 8 lists or objects inside each other",
    ),
    (
        {"rope_scaling": {str(index): 1 for index in range(5000)}},
        "'rope_scaling' .* at most 4,096 entries",
    ),
    ({"hidden_act": "os.system"}, "does not know the value 'os.system' of 'hidden_act'"),
    ({"hidden_act": "x" * 5000}, "'hidden_act' .* at most 1,024 characters, not 5,000"),
    ({"attention_bias": "yes"}, "'attention_bias' expected bool"),
    ({"text_config": 5}, "'text_config' .* must be an object, not 5"),
    ({"vision_config": [1]}, "'vision_config' .* must be an object, not a list"),
    ({"architectures": "LlamaForCausalLM"}, "'architectures' .* list of names"),
    ({"architectures": [["x"]]}, "'architectures' .* list of names"),
    ({"architectures": [5]}, "'architectures' .* list of names"),
    ({"architectures": None}, "names no class in 'architectures'"),
    ({"architectures": ["\ud800"]}, "which no model of the catalog has"),
]

LOADING = [
    ({"auto_map": {"AutoModel": "owner/name--code.Model"}}, r"code from its folder \(auto_map\)"),
    (
        {"custom_pipelines": {"a": {"impl": "code.Pipeline"}}},
        r"code from its folder \(custom_pipelines\)",
    ),
    (
        {"quantization_config": {"quant_method": "gptq"}},
        r"quantized weights \(quantization_config\)",
    ),
    ({"compression_config": {"format": "int"}}, r"quantized weights \(compression_config\)"),
    ({"attn_implementation": "owner/name"}, "'attn_implementation' .* no part of transformers"),
    (
        {"_attn_implementation": "owner/name:function"},
        "'_attn_implementation' .* no part of transformers",
    ),
    (
        {"_attn_implementation_internal": "owner/name"},
        "'_attn_implementation_internal' .* no part of transformers",
    ),
    (
        {"attn_implementation": {"": "owner/name"}},
        "'attn_implementation' .* no part of transformers",
    ),
    ({"attn_implementation": ["eager"]}, "'attn_implementation' .* no part of transformers"),
    (
        {"attn_implementation": "paged|owner/name"},
        "'attn_implementation' .* no part of transformers",
    ),
    (
        {"attn_implementation": "flash_attention_2"},
        "'attn_implementation' .* the package flash_attn",
    ),
    (
        {"experts_implementation": "owner/name"},
        "'experts_implementation' .* no part of transformers",
    ),
]

# Texts that are no configuration -> what the error says.
TEXTS = [
    ("", "is no JSON object"),
    ("[1, 2]", "is no JSON object"),
    ('[["architectures", ["LlamaForCausalLM"]]]', "is no JSON object"),
    ("null", "is no JSON object"),
    ('{"a": 1', "is no JSON object"),
    ("\ufeff{}", "is no JSON object"),
    ('{"rms_norm_eps": NaN}', "it has the value NaN"),
    ('{"rms_norm_eps": -Infinity}', "it has the value -Infinity"),
    (json.dumps(LLAMA)[:-1] + ', "rms_norm_eps": 1e999}', "'rms_norm_eps' .* not Infinity"),
    ("[" * 200_000, "nested too deeply"),
    ('{"a": ' * 100_000, "nested too deeply"),
    ('{"vocab_size": ' + "9" * 5000 + "}", "4300 digits"),
    ('{"a": "' + "x" * 5_000_000 + '"}', "more than 4,194,304 bytes"),
]

# Configurations of other classes, whose loops and tables depend on other keys.
OTHERS = [
    (
        of_class("GPTNeoForCausalLM", attention_types=[[["global"], 10**9]]),
        "'attention_types' .* from 0 to 1,024",
    ),
    (of_class("FunnelModel", block_sizes=[10**9]), "'block_sizes' .* from 0 to 1,024"),
    (
        of_class("MobileBertModel", num_feedforward_networks=10**9),
        "'num_feedforward_networks' .* from 0 to 1,024",
    ),
    (of_class("AlbertModel", inner_group_num=10**9), "'inner_group_num' .* from 0 to 1,024"),
    (of_class("Qwen3MoeForCausalLM", num_experts=10**9), "'num_experts' .* from 0 to 1,024"),
    (of_class("MambaForCausalLM", state_size=10**9), "'state_size' .* from 0 to 1,048,576"),
    (
        of_class("LongformerModel", attention_window=[10**9] * 12),
        "'attention_window' .* from 0 to 4,194,304",
    ),
    (of_class("LongformerModel", attention_window=[512]), "attention_window"),
    (of_class("Wav2Vec2Model", conv_dim=[], conv_stride=[], conv_kernel=[]), "IndexError"),
    (of_class("Gemma3ForCausalLM", layer_types=["evil"] * 26), "`layer_types` entries must be in"),
    (
        of_class("T5ForConditionalGeneration", feed_forward_proj="gated-evil-x"),
        "`feed_forward_proj`",
    ),
    (of_class("OpenAIGPTLMHeadModel", n_positions=2**22), "creates a tensor of .* GiB"),
    (of_class("ViTModel", image_size=10**6, patch_size=1), "creates a tensor of .* GiB"),
    (of_class("ViTModel", image_size=224, patch_size=0), "'patch_size' .* from 1"),
    (of_class("ViTModel", image_size=[224, 224]), "'image_size' .* whole number"),
    (of_class("ViTModel"), "'image_size' .* is missing"),
    (
        {**CLIP, "text_config": {"num_hidden_layers": 10**9}},
        "'text_config.num_hidden_layers' .* from 1 to 1,000",
    ),
    ({**CLIP, "text_config_dict": {"hidden_size": -1}}, "'text_config_dict.hidden_size' .* from 1"),
    ({**CLIP, "text_config": {"auto_map": {}}}, r"code from its folder \(auto_map\)"),
    (
        {**CLIP, "text_config": {"attn_implementation": "a/b"}},
        "'attn_implementation' .* no part of transformers",
    ),
    ({**CLIP, "vision_config": {"image_size": "big"}}, "'image_size' .* whole number"),
    (
        of_class(
            "EsmModel", is_folding_model=True, esmfold_config={"trunk": {"num_blocks": 10**9}}
        ),
        "'esmfold_config.trunk.num_blocks' .* from 0 to 1,024",
    ),
]


def refusal(name):
    """The error of the first step that meets the configuration; nothing is computed."""
    with pytest.raises(FarmError) as caught:
        catalog.build(catalog.variant(name), device="meta")
    assert caught.value.next_step
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 2000
    return caught.value


@pytest.mark.parametrize(("changes", "message"), OUT_OF_BOUNDS)
def test_a_value_that_is_out_of_its_bounds_is_named_with_the_bound(of_config, changes, message):
    error = refusal(of_config({**LLAMA, **changes}))
    assert isinstance(error, SettingsError | UnsupportedModel)
    assert re.search(message, error.message)


@pytest.mark.parametrize(("changes", "message"), LOADING)
def test_a_key_that_loads_code_is_refused(of_config, changes, message):
    name = of_config({**LLAMA, **changes})
    with pytest.raises(UnsupportedModel, match=message):
        catalog.find(name)


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=range(len(TEXTS)))
def test_a_text_that_is_no_configuration_is_refused(of_text, text, message):
    assert re.search(message, refusal(of_text(text)).message)


@pytest.mark.parametrize(("config", "message"), OTHERS)
def test_loops_and_tables_of_every_class_are_bounded(of_config, config, message):
    assert re.search(message, refusal(of_config(config)).message)


def test_a_configuration_whose_parts_do_not_fit_does_not_run(of_config):
    with pytest.raises(CaptureError, match="must match"):
        extract(catalog.variant(of_config({**LLAMA, "num_key_value_heads": 3})))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_an_attention_of_transformers_is_used(of_config, implementation):
    name = of_config({**LLAMA, "attn_implementation": implementation})
    model = catalog.build(name).model
    assert model.config._attn_implementation == implementation


def test_other_keys_are_ignored_and_named_in_one_line(of_config, caplog):
    harmless = {
        "torch_dtype": "load",
        "id2label": {"a": "b"},
        "num_labels": 10**9,
        "do_sample": True,
        "_name_or_path": "/",
    }
    strange = {
        "sub_configs": {"a": "b"},
        "attribute_map": {"hidden_size": "vocab_size"},
        "base_model_tp_plan": {"a": "b"},
        "per_layer_config": {"0": {"hidden_size": 10**9}},
        "__class__": "x",
        "\x1b[31m\nevil": 1,
    }
    model = catalog.build(of_config({**LLAMA, **harmless, **strange})).model
    assert model.config.attribute_map == {}
    assert model.config.num_labels == 2
    lines = [record.getMessage() for record in caplog.records if "ignores" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].endswith(
        r": sub_configs, attribute_map, base_model_tp_plan, per_layer_config, \u001b[31m\nevil."
    )


def test_a_cut_model_has_the_first_entries_of_lists_with_one_entry_per_layer(of_config):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    name = of_config(
        {
            **LLAMA,
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": 4,
            "layer_types": kinds,
        }
    )
    model = catalog.build(catalog.variant(name, layers=2)).model
    assert model.config.layer_types == kinds[:2]
    assert len(model.model.layers) == 2


EXAMPLES = {about["class"]: name for name, about in configurations.TABLE.items()}
FAMILIES = (
    "BertModel",
    "CLIPModel",
    "GPTNeoForCausalLM",
    "Gemma3ForCausalLM",
    "T5ForConditionalGeneration",
)


@pytest.mark.parametrize(
    "class_name",
    [pytest.param(name, marks=() if name in FAMILIES else slow.ALIKE) for name in sorted(EXAMPLES)],
)
def test_the_published_form_of_every_class_of_the_catalog_is_accepted_unchanged(class_name):
    config_class = transformers._class_of(
        transformers.Transformers().entries()[EXAMPLES[class_name]]
    ).config_class
    silent = ("max_position_embeddings",)  # Funnel does not read it
    of_catalog = [
        about["config"] for about in configurations.TABLE.values() if about["class"] == class_name
    ]
    with transformers._quietly():
        for config in [config_class(), *map(config_class.from_dict, map(dict, of_catalog))]:
            published = json.loads(config.to_json_string())
            accepted = config_file.accepted(published, config_class, class_name, silent=silent)
            again = config_class.from_dict(dict(accepted.config)).to_dict()
            assert accepted.ignored == ()
            assert again == {key: value for key, value in config.to_dict().items() if key in again}
    read = set(
        re.findall(
            r'kwargs\.(?:pop|get|setdefault)\("(\w+)"',
            inspect.getsource(inspect.getmodule(config_class)),
        )
    )
    parts = {f"{part}_dict" for part in config_class.sub_configs}
    assert read <= config_file._keys_of(config_class) | config_file._SILENT | parts
