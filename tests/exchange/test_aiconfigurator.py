"""The comparison with aiconfigurator's tables, on artificial tables with their columns and
folders.
"""

from __future__ import annotations

import csv
import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farm.exchange.packaged import packaged_named

ROOT = Path(__file__).parent.parent.parent
PRODUCT = {
    "framework": "VLLM",
    "version": "0.9",
    "device": "NVIDIA H100",
    "op_name": "gemm",
    "kernel_source": "x",
}
ATTENTION = {
    **PRODUCT,
    "beam_width": 1,
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "bfloat16",
    "window_size": 0,
}


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged readings without calls and verdicts, whose import takes three times as long."""
    folder = tmp_path_factory.mktemp("packaged") / "h100"
    folder.mkdir()
    shutil.copy(packaged_named("h100") / "readings.parquet", folder)
    return folder


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, packaged: Path) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import aiconfigurator

    monkeypatch.setattr(aiconfigurator, "packaged_named", {"h100": packaged}.get)
    monkeypatch.setattr(
        aiconfigurator, "readings_of", functools.cache(aiconfigurator.readings_of)
    )  # the test and main
    return aiconfigurator


@pytest.fixture
def compare(script: ModuleType, monkeypatch, capsys) -> Callable[[Path], list[list[str]]]:
    def run(folder: Path) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", ["aiconfigurator.py", str(folder), "--cards", "h100"])
        script.main()
        return [
            line.strip("| ").split(" | ")
            for line in capsys.readouterr().out.splitlines()
            if line[:1] == "|"
        ]

    return run


def test_shapes_that_both_have_are_compared_in_time_and_power(
    tmp_path: Path, script, compare
) -> None:
    readings = script.readings_of("h100")
    of_kind = {kind: [key for key in readings if key[0] == kind] for kind in script.KINDS}
    old = tmp_path / "src/systems/data/h100_sxm/vllm/0.9"  # the earlier layout, with text files
    new = tmp_path / "core/systems/data/h100_sxm"  # the present layout, with Parquet files
    products, prompts = [], []
    for key in of_kind["gemm"]:
        _, dtype, m, n, k = key
        row = {
            **PRODUCT,
            "gemm_dtype": dtype,
            "m": m,
            "n": n,
            "k": k,
            "latency": readings[key].time_us * 1.1e-3,
        }
        products.append({**row, "power": readings[key].power_w * 0.5, "power_limit": 700.0})
    unknown = {**products[0], "m": 12345}
    for kind in ("context_attention", "generation_attention"):
        for _, batch, length, heads, kv_heads, head_dim in of_kind[kind]:
            isl, step = (length, 0) if kind == "context_attention" else (1, length)
            shape = {
                "batch_size": batch,
                "isl": isl,
                "step": step,
                "num_heads": heads,
                "head_dim": head_dim,
            }
            latency = readings[kind, batch, length, heads, kv_heads, head_dim].time_us * 2e-3
            row = {**ATTENTION, **shape, "num_key_value_heads": kv_heads, "latency": latency}
            if kind == "context_attention":
                prompts += [row, {**row, "window_size": 128, "latency": 9e9}]
            else:
                folder = new / "attention/vllm/0.10"
                folder.mkdir(parents=True, exist_ok=True)
                fp8_cache = {**row, "kv_cache_dtype": "fp8", "latency": 9e9}
                pq.write_table(
                    pa.Table.from_pylist([row, fp8_cache]), folder / f"{kind}_perf.parquet"
                )
    old.mkdir(parents=True)
    for name, rows in (("gemm", [*products, unknown]), ("context_attention", prompts)):
        with (old / f"{name}_perf.txt").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    lines = compare(tmp_path)
    of_all = {tuple(line[:3]): line[3:] for line in lines if line[0].startswith("vllm/")}
    count = str(len(products))
    assert of_all["vllm/0.9", "matrix product, bfloat16", "time"] == [count, "1.100", "0.0", "10.0"]
    assert of_all["vllm/0.9", "matrix product, bfloat16", "power"] == [
        count,
        "0.500",
        "0.0",
        "50.0",
    ]
    assert of_all["vllm/0.9", "attention of a prompt, bfloat16", "time"][:2] == [
        str(len(prompts) // 2),
        "2.000",
    ]
    assert of_all["vllm/0.10", "decoding, bfloat16", "time"][:2] == ["1", "2.000"]
    grouped = [line for line in lines if line[:2] == ["matrix product, bfloat16", "power"]]
    assert sum(int(line[3]) for line in grouped) == len(products)
    assert {line[4] for line in grouped} == {"0.500"}


def test_a_checkout_without_the_tables_is_refused_in_one_line(tmp_path: Path, compare) -> None:
    with pytest.raises(SystemExit, match=r"no tables of h100_sxm"):
        compare(tmp_path)
    table = tmp_path / "data/h100_sxm/vllm/0.9/gemm_perf.txt"
    table.parent.mkdir(parents=True)
    table.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(SystemExit, match=r"Git LFS pointer.*`git lfs pull`"):
        compare(tmp_path)
