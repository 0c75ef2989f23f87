"""A quantised model of two layers, measured on the CPU to the end."""

import json

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)), torch.randn(8, 256)
"""


def test_int8_weights_end_with_a_verdict_beside_the_dense_model(farm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.py").write_text(MODEL)
    options = ["--dtype", "bfloat16", "--quantize", "none,int8-weights", "--quick", "--json"]
    said = farm("run", "two.py:net", *options)
    printed = json.loads(said.stdout)
    dense, quantized = printed if isinstance(printed, list) else printed["reports"]
    assert "quantized int8-weights" in quantized["title"]
    assert "quantized" not in dense["title"]
    assert quantized["verdict"]["coverage"] == 1
    assert "2 of 2 linear layers" in said.stderr
