"""Language models of every family are captured on fake tensors as they run on real ones: masks,
positions and caches read."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from benchmarks.replay_tuples import mismatches
from farm.operators.capture import capture, predict
from farm.operators.cost import cost, model_flops
from tests import slow
from tests.operators import families

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="needs transformers"
)

# Of the others each is much like one of these.
DIFFERENT = {
    "bert",
    "deberta_v2",
    "fnet",
    "gpt2",
    "llama",
    "longformer",
    "mixtral",
    "t5",
    "wav2vec2",
    "xlnet",
}
# Their modules are copies of those of another family, but for names and biases. The table of
# architectures (`test_architectures.py`) has them all.
COPIES = {
    "camembert": "roberta",
    "deit": "vit",
    "electra": "bert",
    "mbart": "bart",
    "pegasus": "marian",
    "qwen2": "llama",
    "stablelm": "phi",
    "xlm_roberta": "roberta",
}
EACH = [
    name if name in DIFFERENT else pytest.param(name, marks=slow.ALIKE)
    for name in sorted(families.FAMILIES.keys() - COPIES.keys())
]


def calls(found):
    """The calls without the values that decide their work: fake tensors have none."""
    plain = {id_: spec.without_values.id for id_, spec in found.tuples.items()}
    return [
        (call.module_path, plain[call.tuple_id], call.reads, call.writes) for call in found.calls
    ]


def check(model, args, kwargs):
    """That a prediction is what runs, and all of it."""
    twin, *again = copy.deepcopy((model, args, kwargs))  # a pass moves a cache on
    predicted = predict(model, args, kwargs)
    flops = model_flops(model, args, kwargs)
    ran = capture(twin, *again)
    assert calls(predicted) == calls(ran)
    assert predicted.tensors == ran.tensors
    assert predicted.gaps == predicted.overlaps == ()
    assert flops == sum(cost(predicted.tuples[call.tuple_id]).flops for call in predicted.calls)
    assert mismatches(ran, "cpu") == []
    return predicted


@pytest.mark.parametrize("name", EACH)
def test_a_family_is_captured_as_it_runs(name):
    model, given = families.make(name), families.inputs(name)
    with torch.no_grad():
        model(**given)  # some keep what a first pass makes
    found = [check(model, (), given)]
    if "attention_mask" in given:
        found.append(check(model, (), families.inputs(name, padded=True)))
    assert all(found)


class Decode(nn.Module):
    """One token after those that its cache holds."""

    def __init__(self, model, used):
        super().__init__()
        from transformers import StaticCache

        config = model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        size = config.hidden_size // config.num_attention_heads
        self.model, self.cache = model, StaticCache(config, max_cache_len=32)
        self.cache.early_initialization(2, heads, size, torch.float32, torch.device("cpu"))
        for number, layer in enumerate(self.cache.layers):
            layer.cumulative_length.fill_(used)
            self.register_buffer(f"keys_{number}", layer.keys)
            self.register_buffer(f"values_{number}", layer.values)

    def forward(self, tokens):
        return self.model(input_ids=tokens, past_key_values=self.cache).logits


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=slow.ALIKE)])
def test_a_cache_is_written_where_it_ends_and_stays_as_it_was(name):
    model = Decode(families.make(name), used=20).eval()
    found = check(model, (torch.tensor([[5], [6]]),), {})
    assert [int(layer.cumulative_length) for layer in model.cache.layers] == [20, 20]
    (placed,) = [spec for spec in found.tuples.values() if spec.short_name == "index_copy_"]
    row_bytes = placed.tensors[0].numel // 32 * 4
    assert placed.tensors[0].role == "buffer"
    assert cost(placed).bytes == 2 * row_bytes + 8  # a row taken and placed, and where to


def test_a_cache_as_an_argument_stays_as_it_was():
    decode = Decode(families.make("llama"), used=20)
    given = {"input_ids": torch.tensor([[5], [6]]), "past_key_values": decode.cache}
    check(decode.model, (), given)
    assert int(decode.cache.layers[0].cumulative_length) == 20


def test_a_decoder_of_many_layers_is_few_tuples():
    found = {}
    for layers in (2, 40):
        model = families.make("llama", num_hidden_layers=layers).to("meta")
        found[layers] = predict(model, (), families.inputs("llama"))
    assert found[40].tuples.keys() == found[2].tuples.keys()
    assert len(found[40].calls) > 19 * (len(found[2].calls) - 20)
