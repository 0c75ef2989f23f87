"""Compiled models through the command line, on a real CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.settings import settings
from tests import slow
from tests.operators.compiled_models import needs_compiler

FOLDER = Path(__file__).parent.parent / "operators"
QUICK = ("--quick", "--window", "0.1", "--card", "cpu", "--json")


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    models = {name: f"compiled_models:{name}" for name in ("two", "pooled", "refused")}
    monkeypatch.setenv("FARM_MODELS", json.dumps(models))
    monkeypatch.setenv("FARM_MODELS_PATH", str(FOLDER))
    settings.cache_clear()


@needs_compiler
@slow.PROCESS
def test_compiled_models_end_with_a_verdict_and_a_list_of_kernels_is_used_again(farm, tmp_path):
    file = tmp_path / "jobs.yml"
    file.write_text("- {model: [refused, two, pooled], compile: default}\n")
    said = farm("run", "-f", file, *QUICK)
    assert said.code == 0, said.stderr
    refused, report, pooled = json.loads(said.stdout)["reports"]
    assert report["title"].endswith("compiled default")
    assert {row["short_name"] for row in report["types"]} == {"addmm", "fused"}
    assert sum(row["calls"] for row in report["types"]) == 3
    assert [one["reason"] for one in report["rounds"]] == ["first", "the card listed its kernels"]
    assert {row["short_name"] for row in pooled["types"]} == {"convolution", "fused"}
    for one in (report, pooled):
        assert one["verdict"]["coverage"] == 1.0
        # On a busy machine the short windows may not converge: no verdict.
        assert one["verdict"]["sum_time_us"] > 0
        assert one["verdict"]["whole_time_us"] > 0

    # Another model of the file fails in one line, with the compiler's reason and the next step.
    assert refused["verdict"]["outcome"] == "none"
    (whole,) = refused["verdict"]["wholes"]
    first, *more = whole["reason"].splitlines()
    assert "RuntimeError: no shape is known. Check" in first
    assert "without --compile" in first
    assert "and this is the second line" in " ".join(more)  # only the JSON has the whole reason
    (reason,) = refused["verdict"]["reasons"]
    assert first in reason
    assert "second line" not in reason

    said = farm("run", "two", "--compile", "--reuse", "none", *QUICK)
    (again,) = json.loads(said.stdout)["reports"]
    assert "3 calls of 3 operator tuples" in said.stderr
    assert [one["reason"] for one in again["rounds"]] == ["first"]
    assert {row["operator_id"] for row in again["tuples"]} == {
        row["operator_id"] for row in report["tuples"]
    }


@pytest.mark.parametrize(
    ("options", "message", "step"),
    [
        (["--compile=fast"], "compile 'fast' is unknown", "default, max-autotune"),
        (
            ["--compile", "reduce-overhead"],
            "reduce-overhead runs the kernels of default",
            "--compile default",
        ),
        (
            ["--compile", "--placements", "all"],
            "--placements does not work with --compile",
            "Omit --placements",
        ),
        (
            ["--compile", "--data", "seen"],
            "--data seen does not work with --compile",
            "Omit --data",
        ),
        (
            ["--compile", "--operators", "auto"],
            "--operators auto does not work with --compile",
            "pointwise",
        ),
        (["--compile", "--operators", "poitwise"], "has no operator named 'poitwise'", "pointwise"),
        (["--data", "copied"], "--data copied needs a compiled model", "--compile"),
    ],
)
def test_what_does_not_work_with_a_compiled_model_is_refused_in_one_line(
    farm, options, message, step
):
    said = farm("run", "two", *options, "--card", "cpu", "--dry-run")
    assert (said.code, said.stdout) == (2, "")
    first, second = said.stderr.strip().splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("→ ")
    assert step in second


def test_an_unknown_mode_in_a_file_is_refused_with_its_line(farm, tmp_path):
    for mode in ("fast", "reduce-overhead"):
        file = tmp_path / "jobs.yml"
        file.write_text(f"- model: two\n  compile: {mode}\n")
        said = farm("run", "-f", file, "--dry-run")
        assert said.code == 2
        assert f"{file}:2: " in said.stderr
        assert "max-autotune" in said.stderr


@slow.FAULT
def test_a_simulated_card_cannot_compile(farm, monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    settings.cache_clear()
    said = farm("run", "two", "--compile", "--quick", "--json")
    assert "A simulated card cannot compile a model" in said.stdout


def test_python_compiles_models_of_the_catalog_only():
    import torch

    import farm
    from farm.errors import UsageError

    captured = farm.capture_model(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(UsageError, match="A captured model cannot be compiled"):
        farm.measure_model(captured, database=None, card="cpu", compile="default")
