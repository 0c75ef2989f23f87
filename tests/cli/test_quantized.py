"""A quantised model of two layers with weights from a file, measured on the CPU to the end."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests import slow

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), torch.randn(8, 256)
"""
TRANSFORMER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
}
OPTIONS = ["two.py:net", "--dtype", "bfloat16", "--quick"]
WEIGHTS = ["--weights", "two.safetensors"]


@slow.PROCESS
def test_int8_weights_end_with_a_verdict_beside_the_dense_model(farm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text(MODEL)
    shapes = {"0.weight": (512, 256), "0.bias": (512,), "2.weight": (256, 512), "2.bias": (256,)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, "two.safetensors")
    schemes = [*OPTIONS, *WEIGHTS, "--quantize", "none,int8-weights,int4-weights"]
    said = farm("compare", *schemes, "--run", "--json")
    assert said.code == 0, said.stderr
    dense, packed, refused = json.loads(said.stdout)["rows"]
    assert [dense["scheme"], packed["scheme"]] == ["none", "int8-weights"]
    assert (dense["size"], packed["size"]) == (8, 8)  # the batch of the example input
    assert packed["time_ratio"] == pytest.approx(packed["time_us"] / dense["time_us"])
    assert 2 * packed["memory_bytes"] == pytest.approx(dense["memory_bytes"], rel=0.1)
    calls = {entry["operator"]: entry["calls"] for entry in packed["operators"]}
    assert calls == {"Linear": 0, "ReLU": 1, "mm": 2, "mul": 2, "add_": 2, "_to_copy": 4}
    assert "needs a GPU" in refused["lacks"]
    assert "2 of 2 linear layers" in said.stderr

    report = json.loads(farm("report", packed["job"], "--json").stdout)
    assert "weights safetensors quantized int8-weights" in report["title"]
    assert report["verdict"]["coverage"] == 1
    assert "quantized" not in json.loads(farm("report", dense["job"], "--json").stdout)["title"]

    # What is measured is not measured again; another batch is named with its command.
    again = farm("compare", *schemes, "--run", "--json")
    assert [row["job"] for row in json.loads(again.stdout)["rows"]][:2] == [
        dense["job"],
        packed["job"],
    ]
    shown = farm("compare", *OPTIONS, *WEIGHTS, "--quantize", "none,int8-weights", "-b", "8,32")
    assert shown.code == 0, shown.stderr
    assert "int8-weights at batch 32: not measured" in shown.stdout
    assert "--batch 32" in shown.stdout.partition("Add --run")[2]

    # The model with random weights is another variant.
    plain = farm("compare", *OPTIONS, "--quantize", "none")
    assert "No job has measured" in plain.stderr
    refused = farm("submit", "resnet18", *WEIGHTS)
    assert refused.code == 2
    assert "accepts no file of weights" in refused.stderr


@slow.PROCESS
def test_the_schemes_of_a_transformer_have_tokens(farm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TRANSFORMER))
    options = ["./tiny", "--phase", "prefill", "--length", "16", "-b", "1,2", "--quick"]
    schemes = ["--dtype", "bfloat16", "--quantize", "none,int8-weights"]
    said = farm("compare", *options, *schemes, "--run", "--json")
    assert said.code == 0, said.stderr
    compared = json.loads(said.stdout)
    assert [(row["size"], row["scheme"]) for row in compared["rows"]] == [
        (1, "none"),
        (1, "int8-weights"),
        (2, "none"),
        (2, "int8-weights"),
    ]
    for row in compared["rows"]:
        assert row["tokens"] == 16 * row["size"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["time_us"] * 1e6)
    for row in compared["rows"][1::2]:
        calls = {entry["operator"]: entry["calls"] for entry in row["operators"]}
        assert (calls["Linear"], calls["mm"], calls["_to_copy"]) == (0, 8, 16)
    sizes = compared["trends"]["int8-weights"]["time"]
    assert sorted(sizes["gains_at"] + sizes["loses_at"] + sizes["equal_at"]) == [1, 2]


def test_wrong_comparisons_of_one_model_name_what_to_give(farm, database):
    for arguments, message in (
        ([], "nothing to compare A with"),
        (["-b", "8", "--fail-above", "3%"], "need two sides"),
        (["-b", "8", "--format", "junit"], "need two sides"),
        (["card=H100", "-b", "8"], "comparison of one model"),
        (["-b", "9", "--quantize", "none"], "No job has measured"),
        (["-b", "8,16", "--length", "8,16"], "over one size"),
    ):
        said = farm("compare", "resnet18", *arguments)
        assert said.code == 2, (arguments, said.stderr)
        assert message in said.stderr


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_misspelt_scheme_is_refused_with_those_that_exist(farm, command):
    said = farm(command, "resnet18", "--quantize", "none,int9")
    assert said.code == 2
    assert "int9" in said.stderr
    assert "int8-weights" in said.stderr
