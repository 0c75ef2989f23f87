"""Models of a person's own through the command line: what they do wrong is said, and what they
print is no result.
"""

from __future__ import annotations

import json

import pytest

from farm.settings import settings

MODELS = """
import sys
import torch
from torch import nn

class Gap(nn.Module):
    def forward(self, values):
        scale, zero = torch.ones(1), torch.zeros(1)
        return torch._fake_quantize_learnable_per_tensor_affine(values, scale, zero, 0, 255)

class Gapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain, self.first, self.second = nn.Linear(8, 8), Gap(), Gap()

    def forward(self, values):
        return self.second(self.first(self.plain(values)))

class Loud(nn.Linear):
    def forward(self, values):
        print("in the model")
        return nn.functional.relu(super().forward(values))

class Ends(nn.Module):
    def forward(self, values):
        sys.exit("no licence")

class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, values):
        return self.layer(values[values[:, 0] > 0])

def chosen(): return Chosen(), torch.ones(6, 8)
def chosen_other(): return Chosen(), torch.ones(6, 8) * torch.tensor([[1.0]] * 2 + [[-1.0]] * 4)
def gapped(): return Gapped(), torch.ones(2, 8)
def ends(): return Ends(), torch.ones(2, 8)
def ends_early(): sys.exit("no such card")
def nothing(): return nn.Identity(), torch.ones(2, 8)
def half(): return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).half(), torch.ones(2, 8).half()

def loud():
    print("in the function")
    return Loud(8, 8), torch.ones(2, 8)
"""


@pytest.fixture(autouse=True)
def _models(monkeypatch, tmp_path):
    (tmp_path / "models_that_do_wrong.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("gapped", "ends", "ends_early", "nothing", "loud", "half", "chosen", "chosen_other")
    monkeypatch.setenv(
        "FARM_MODELS", json.dumps({name: f"models_that_do_wrong:{name}" for name in names})
    )
    settings.cache_clear()


@pytest.mark.parametrize("verb", ["operators", "run"])
def test_an_input_size_that_would_be_ignored_is_refused(farm, verb):
    said = farm(verb, "loud", "--input-size", "64")
    assert (said.code, said.stdout) == (2, "")
    assert "--input-size cannot change them" in said.stderr


def test_a_model_with_gaps_is_listed_and_refused_each_reason_once(farm):
    said = farm("operators", "gapped", "--json")
    listed = json.loads(said.stdout)
    assert (said.code, len(listed["gaps"])) == (1, 2)
    assert said.stderr.count("is not in this version's allow-list") == 1
    name = "torch._fake_quantize_learnable_per_tensor_affine"
    assert f"(at 'first' in {name}; at 'second' in {name})" in said.stderr
    assert "→ The sum would miss these calls." in said.stderr
    shown = farm("operators", "gapped")
    assert (shown.code, shown.stderr) == (1, said.stderr)
    assert "Linear 8->8" in shown.stdout


def test_one_of_several_that_cannot_be_extracted_is_left_out_and_alone_an_error(
    farm, monkeypatch, tmp_path
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    written = tmp_path / "jobs.yml"
    written.write_text("- {model: gapped}\n- {model: loud, batch: [1, 4]}\n")
    for what in (("gap*", "loud"), ("-f", written)):
        said = farm("run", *what, "--dry-run")
        assert (said.code, "loud 2x8 float32 on 1 card" in said.stdout) == (1, "-f" not in what), (
            said.stderr
        )
        assert "Nothing was started" in said.stdout
        at_once, _, end = said.stderr.partition("error: ")
        where = f"{written}:1: " if "-f" in what else ""
        assert f"{where}gapped 2x8 float32 is left out: gapped cannot" in at_once
        refused = f"1 of {3 if where else 2} requests cannot be measured:"
        assert f"{refused}\n  gapped 2x8 float32: gapped cannot be" in end
    foreseen = farm("run", "-f", written, "--dry-run", "--json")
    (refused,) = json.loads(foreseen.stdout)["refused"]
    assert (foreseen.code, refused["title"]) == (1, "gapped 2x8 float32")
    assert refused["reason"].startswith("gapped cannot be extracted completely: ")
    alone = farm("run", "gapped", "-b", "1,2", "--dry-run")
    assert (alone.code, alone.stdout) == (1, "")
    assert "error: gapped cannot be extracted completely" in alone.stderr


def test_what_a_model_prints_is_no_result(farm):
    said = farm("operators", "loud", "--json")
    assert json.loads(said.stdout)["operators"]
    assert "in the function" in said.stderr
    assert "in the model" in said.stderr


@pytest.mark.parametrize(
    ("model", "code", "message"),
    [
        (
            "ends_early",
            2,
            "'models_that_do_wrong:ends_early' could not build the model 'ends_early': "
            "SystemExit: no such card",
        ),
        ("ends", 1, "SystemExit: no licence"),
        ("nothing", 1, "nothing has no operators"),
    ],
)
def test_a_model_that_ends_the_program_or_has_no_operators_is_refused_with_the_reason(
    farm, model, code, message
):
    said = farm("operators", model)
    assert (said.code, said.stdout) == (code, "")
    assert message in said.stderr
    assert "→ " in said.stderr


def test_what_differs_from_the_users_model_is_said_in_a_line_each(farm):
    said = farm("operators", "half", "--dtype", "float32")
    assert said.code == 0
    assert "float16; they are measured as float32" in said.stderr
    assert "is measured in eval mode" in said.stderr
    as_it_is = farm("operators", "half", "--mode", "train", "--json")
    assert as_it_is.code == 0
    assert "half" not in as_it_is.stderr
    rows = json.loads(as_it_is.stdout)["operators"]
    assert all("fp16" in row["label"] for row in rows)


def test_the_calls_that_another_input_changes_are_listed(farm):
    said = farm("operators", "chosen")
    assert "(the batch of its example inputs)" in said.stdout
    assert "sizes or branches depend on values (getitem)" in said.stderr
    compared = farm("operators", "chosen", "--compare-inputs", "chosen_other", "--json")
    found = json.loads(compared.stdout)
    assert [row["label_a"] for row in found["calls"]] == [
        "getitem | 6x8 + 6 fp32 6 marked",
        "Linear 8->4 | 6x8 fp32",
    ]
    assert found["calls"][1]["label_b"] == "Linear 8->4 | 2x8 fp32"
    assert (found["flops_a"], found["flops_b"]) == (3 * found["flops_b"], 2 * 2 * 8 * 4)
    shown = farm("operators", "chosen", "--compare-inputs", "chosen_other")
    assert "1 of them equal; 384 FLOP and 128 FLOP" in shown.stdout


def test_another_input_that_no_function_gives_is_one_line(farm):
    said = farm("operators", "chosen", "--compare-inputs", "chosen_othr")
    assert (said.code, said.stdout) == (2, "")
    assert "chosen_other" in said.stderr
