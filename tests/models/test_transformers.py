"""transformers' models by name: what each takes, what it refuses in one line, and that it runs as
it says.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farm.errors import UnsupportedModel, UsageError
from farm.models import catalog, configurations, transformers
from farm.requests.measurement_file import load
from farm.settings import settings
from tests import slow
from tests.benchmark.asking import capturing

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_names_need_neither_torch_nor_transformers():
    code = (
        "import sys; from farm.models import catalog; catalog.names(); "
        "catalog.find('transformers/bert-base');"
        "assert not {'torch', 'transformers', 'timm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_are_more_than_45_architectures():
    assert len({about["class"] for about in configurations.TABLE.values()}) > 45


@pytest.mark.parametrize(
    ("model", "said", "title"),
    [
        ("bert-base", {}, "bert-base 8x128 tokens float32"),
        ("bert-base", {"length": 512, "padded": True}, "bert-base 8x512 tokens float32 padded"),
        ("gpt2", {}, "gpt2 prefill 8x512 tokens float32"),
        (
            "llama-3.1-8b",
            {"phase": "decode", "dtype": "bfloat16"},
            "llama-3.1-8b decode 8 beside 1024 tokens bfloat16",
        ),
        ("llama-3.1-8b", {"layers": 4}, "llama-3.1-8b prefill 8x512 tokens float32 of 4 layers"),
        ("t5-base", {"phase": "encode"}, "t5-base 8x128 tokens float32"),
        ("clip-vit-base", {}, "clip-vit-base 8x77 tokens and 224 px float32"),
        ("wav2vec2-base", {}, "wav2vec2-base 8x160000 float32"),
        ("vit-base", {}, "vit-base 8x224 float32"),
    ],
)
def test_a_variant_is_titled_by_what_goes_in(model, said, title):
    assert str(catalog.variant(model, 8, **said)) == title


def test_what_is_said_as_by_default_is_the_same_variant():
    assert catalog.variant("gpt2", 8, phase="prefill", length=512, layers=12) == catalog.variant(
        "transformers/gpt2", 8
    )


@pytest.mark.parametrize(
    ("model", "said", "problem", "step"),
    [
        (
            "bert-base",
            {"length": 513},
            "takes at most 512 tokens; --length is 513",
            "--length 512 or less",
        ),
        ("bert-base", {"length": 2}, "too short for a text", "--length 3 or more"),
        (
            "gpt2",
            {"phase": "decode", "cache": 2048},
            "takes at most 1024 tokens; --cache is 2048",
            "--cache 1024",
        ),
        (
            "gpt2",
            {"phase": "decode", "cache": 4},
            "A cache of 4 tokens is too short",
            "--cache 12 or more",
        ),
        ("gpt2", {"phase": "decode", "length": 8}, "one token per sequence", "--cache"),
        ("gpt2", {"cache": 512}, "no cache of tokens in prefill", "--phase decode"),
        ("bert-base", {"phase": "decode"}, "bert-base has no phase 'decode'", "Choose encode."),
        (
            "resnet18",
            {"phase": "decode"},
            "resnet18 has no phase 'decode'",
            "the model has no phases",
        ),
        ("resnet18", {"length": 128}, "--length 128 has no meaning", "--input-size"),
        ("resnet18", {"layers": 2}, "cannot be cut", "--layers"),
        ("resnet18", {"padded": True}, "takes no padded sequences", ""),
        ("bert-base", {"input_size": 224}, "bert-base takes no images", "--length"),
        ("bert-base", {"layers": 13}, "has 12 layers, not 13", ""),
        ("whisper-base-encoder", {"length": 100}, "a length of 3000 only", ""),
    ],
)
def test_what_a_model_has_no_use_for_is_refused(model, said, problem, step):
    with pytest.raises(UsageError, match=problem) as caught:
        catalog.variant(model, **said)
    assert step in caught.value.next_step


def test_a_class_that_transformers_no_longer_has_is_refused_with_that_reason():
    with pytest.raises(
        UnsupportedModel, match="Transformer-XL, which transformers 5 no longer has"
    ):
        catalog.find("transfo-xl")


def test_without_the_package_names_are_listed_and_building_says_what_to_install(monkeypatch):
    monkeypatch.setattr(transformers.Transformers, "package", "transformers_that_is_not_there")
    assert "bert-base" in catalog.names()
    with pytest.raises(UnsupportedModel) as caught:
        catalog.build("bert-base")
    assert caught.value.next_step == "Install it: pip install 'operator-farm[language]'"


@pytest.mark.parametrize(
    ("model", "said", "shape"),
    [
        ("bert-base", {"padded": True, "length": 16}, (2, 16, 768)),
        ("gpt2", {"length": 16}, (2, 1, 50257)),
        ("t5-small", {"length": 16}, (2, 16, 32128)),
        ("t5-small", {"length": 16, "phase": "encode"}, (2, 16, 512)),
        ("vit-base", {}, (2, 197, 768)),
    ],
)
def test_a_model_runs_on_its_example(model, said, shape):
    import torch

    variant = catalog.variant(model, 2, layers=2, **said)
    with torch.no_grad():
        found = catalog.build(variant, device="cpu")(*catalog.example_inputs(variant, device="cpu"))
    assert next(iter(found.values())).shape == shape


def test_what_goes_in_are_the_ids_of_a_text_with_what_the_model_puts_around_it():
    import torch

    ids, mask = catalog.example_inputs(
        catalog.variant("bert-base", 4, length=64, padded=True), device="cpu"
    )
    assert set(ids[:, 0].tolist()) == {101}
    assert torch.equal(ids == 0, mask == 0)
    assert [row[int(length) - 1].item() for row, length in zip(ids, mask.sum(1), strict=True)] == [
        102
    ] * 4
    full, other, *_ = catalog.example_inputs(catalog.variant("t5-base", 2, length=64), device="cpu")
    assert full.unique().numel() < 100
    assert not torch.equal(full, other)
    assert other.storage_offset() == 0


def test_a_token_is_written_into_a_filled_cache_as_often_as_it_is_asked_for():
    import torch

    variant = catalog.variant("gpt2", 2, phase="decode", cache=32, layers=2, dtype="bfloat16")
    model, (ids,) = (
        catalog.build(variant, device="cpu"),
        catalog.example_inputs(variant, device="cpu"),
    )
    before = model.cached_keys_1.clone()
    assert before.shape == (2, 12, 32, 64)
    assert before.std().item() == pytest.approx(1, rel=0.05)
    with torch.no_grad():
        first, again = model(ids), model(ids)
    assert first.shape == (2, 1, 50257)
    assert torch.equal(first, again)
    assert (model.cached_keys_1 != before).any(dim=(0, 1, 3)).nonzero().flatten().tolist() == [
        21
    ]  # as in all 12 layers


@pytest.mark.parametrize("name", [pytest.param("gpt-neo-125m", marks=slow.ALIKE), "biogpt"])
def test_a_token_beside_a_growing_cache_gets_what_it_gets_at_the_end_of_the_text(name):
    import torch

    layers = {} if name == "gpt-neo-125m" else {"layers": 2}
    variant = catalog.variant(f"transformers/{name}", 2, phase="decode", cache=24, **layers)
    decoding = catalog.build(variant, device="cpu").eval()
    text = torch.arange(48).view(2, 24) + 100
    with torch.no_grad():
        expected = decoding.model(input_ids=text, use_cache=False).logits[:, -1]
        for index, layer in enumerate(
            decoding.model(input_ids=text[:, :-1], use_cache=True).past_key_values.layers
        ):
            decoding.get_buffer(f"cached_keys_{index}").copy_(layer.keys)
            decoding.get_buffer(f"cached_values_{index}").copy_(layer.values)
        first, again = decoding(text[:, -1:]), decoding(text[:, -1:])
    assert torch.allclose(first[:, -1], expected, atol=1e-4)
    assert torch.equal(first, again)  # the cache of a pass is not that of the next


def test_a_token_beside_a_growing_cache_needs_no_mask_while_a_graph_is_captured(
    tmp_path, monkeypatch
):
    from farm.training.extract import extract

    sizes = {
        "vocab_size": 64,
        "n_positions": 32,
        "n_embd": 16,
        "dff": 32,
        "n_layer": 1,
        "n_head": 2,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["CTRLLMHeadModel"]} | sizes)
    )
    monkeypatch.setattr(settings(), "models", {"small_ctrl": str(tmp_path)})
    variant = catalog.variant("small_ctrl", phase="decode", cache=16)
    eager = extract(variant).capture.counts
    with capturing():
        assert extract(variant).capture.counts == eager


def test_a_decode_of_a_few_layers_makes_the_calls_of_all():
    from farm.training.extract import extract

    two, all_of_them = (
        extract(catalog.variant("gpt2", 1, phase="decode", cache=16, layers=layers)).capture.counts
        for layers in (2, None)
    )
    assert set(two) == set(all_of_them)
    assert sum(two.values()) < sum(all_of_them.values())


def test_the_file_of_the_data_set_names_every_architecture_in_each_of_its_phases():
    from benchmarks.architectures import class_name
    from farm.requests.partial_request import complete

    requests = [
        complete(partial, "cuda", target=0.95) for partial in load([EXAMPLES / "transformers.yml"])
    ]
    asked = {(class_name(one.variant.model), one.variant.phase) for one in requests if one.variant}
    entries = transformers.Transformers().entries()
    assert asked == {
        (class_name(name), phase)
        for name, entry in entries.items()
        for phase in entry.phases or ("",)
    }
