"""Compare the packaged readings with the operator tables of NVIDIA's aiconfigurator.

    git clone https://github.com/ai-dynamo/aiconfigurator
    python benchmarks/aiconfigurator.py aiconfigurator [--cards h200 h100] [--detail vllm/0.24.0
    ...]

The tables are an independent test: no row of them enters the package. They are files ``gemm_perf``,
``context_attention_perf`` and ``generation_attention_perf`` (.txt or .parquet) in folders named
after system, backend and version. Compared are all shapes that both sides have: matrix products
(bfloat16, fp8), attention of a prompt and of one decoded token (bfloat16). A ratio is table /
reading, of the time and, if the table has it, of the power. A shape with several readings or rows
counts once, with their median.

The output is Markdown: one row for each table, then the ratios by duration for the tables of
``--detail`` (default: the newest version of each backend, and versions with power). At last it
prints the power of the tables' own bfloat16 products of nearly equal arithmetic rate, by duration.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from farm.exchange.export import as_table
from farm.exchange.packaged import database_of, packaged_named
from farm.settings import settings
from farm.store.query import parse

SYSTEMS = {
    "h200": "h200_sxm",
    "h100": "h100_sxm",
}  # name of the packaged readings -> folder of the tables
KINDS = {
    "gemm": "matrix product",
    "context_attention": "attention of a prompt",
    "generation_attention": "decoding",
}
DTYPES = {"bfloat16": "bfloat16", "float8_e4m3fn": "fp8"}  # ours -> theirs
LIMITS_US = (10, 20, 50, 100)
RATES_TFLOPS = (500.0, 600.0)

Key = tuple[Hashable, ...]


class Figures(NamedTuple):
    """Of one shape. The burst time is the time before the power limit lowers the clocks; tables
    have one time only.
    """

    time_us: float
    power_w: float | None
    burst_us: float


def readings_of(name: str) -> dict[Key, Figures]:
    """The packaged readings of a card by shape: key -> medians over cards and jobs."""
    folder = packaged_named(name)
    if folder is None:
        sys.exit(f"The package has no readings named '{name}'. Choose from {', '.join(SYSTEMS)}.")
    with database_of([folder], settings().state_dir / "packaged").read() as session:
        rows = as_table(
            session, "readings", parse(["launch=graph", "residency=resident"])
        ).to_pylist()
    found = defaultdict(list)
    for row in rows:
        if (
            not row["placement"]
            and row["subject_kind"] == "operator"
            and (key := key_of_reading(row))
        ):
            found[key].append(
                Figures(row["time_us"], row["power_w"], row["burst_time_us"] or row["time_us"])
            )
    return medians(found)


def key_of_reading(row: Mapping[str, Any]) -> Key | None:
    """The shape of a reading in the tables' terms; None if the tables have no such operator."""
    dtype = DTYPES.get(row["dtype"])
    if dtype and row["operator"] in ("Linear", "linear") and row["products"] == 1:
        return "gemm", dtype, row["m"], row["n"], row["k"]
    if dtype == "bfloat16" and row["operator"] == "scaled_dot_product_attention":
        query, key = json.loads(row["input_shapes"])[:2]
        if len(query) == 4:
            batch, heads, length, head_dim = query
            past = key[2] - 1
            if length == 1 and past:
                return "generation_attention", batch, past, heads, key[1], head_dim
            if length == key[2] and json.loads(row["parameters"]).get("is_causal"):
                return "context_attention", batch, length, heads, key[1], head_dim
    return None


def key_of_row(kind: str, row: Mapping[str, Any]) -> Key | None:
    """The shape of a row of a table; None if the farm has no such operator (fp8 cache, sliding
    window, beams).
    """
    if kind == "gemm":
        return "gemm", row["gemm_dtype"], int(row["m"]), int(row["n"]), int(row["k"])
    plain = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16" and int(row["beam_width"]) == 1
    if not plain or int(row.get("window_size") or 0) > 0:
        return None
    heads = int(row["num_heads"])
    length = int(row["isl" if kind == "context_attention" else "step"])
    return (
        kind,
        int(row["batch_size"]),
        length,
        heads,
        int(row["num_key_value_heads"]) or heads,
        int(row["head_dim"]),
    )


def medians(found: Mapping[Key, list[Figures]]) -> dict[Key, Figures]:
    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return median(known) if known else None

    return {
        key: Figures(*(middle(values) for values in zip(*rows, strict=True)))
        for key, rows in found.items()
    }


def table_files(checkout: Path, system: str) -> dict[tuple[str, str], list[Path]]:
    """(backend, version) -> the files of a system's tables."""
    found = defaultdict(list)
    for kind in KINDS:
        for path in sorted(checkout.rglob(f"{kind}_perf.*")):
            if path.suffix in (".txt", ".parquet") and system in path.parts:
                found[path.parent.parent.name, path.parent.name].append(path)
    return dict(sorted(found.items(), key=lambda entry: (entry[0][0], version_key(entry[0][1]))))


def version_key(version: str) -> list[tuple[int, int | str]]:
    """Sorts "1.3.0rc5" before "1.3.0rc10"."""
    return [
        (0, int(part)) if part.isdigit() else (1, part)
        for part in re.findall(r"\d+|[a-z]+", version)
    ]


def rows_of(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            sys.exit(
                f"{path} is a Git LFS pointer, not a table. Run `git lfs pull` in the checkout."
            )
    if path.suffix == ".parquet":
        yield from pq.read_table(path).to_pylist()
    else:
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def read_table(paths: Iterable[Path]) -> dict[Key, Figures]:
    found = defaultdict(list)
    for path in paths:
        kind = path.stem.removesuffix("_perf")
        for row in rows_of(path):
            if key := key_of_row(kind, row):
                time_us = float(row["latency"]) * 1e3
                found[key].append(
                    Figures(time_us, float(row["power"]) if row.get("power") else None, time_us)
                )
    return medians(found)


def summary(ratios: list[float]) -> list[str]:
    """Count, median ratio, median absolute deviation from it in %, 90th percentile of |ratio - 1|
    in %.
    """
    if not ratios:
        return ["0", "", "", ""]
    values = np.array(ratios)
    middle = float(np.median(values))
    spread, most = (
        np.median(np.abs(values - middle)) * 100,
        np.quantile(np.abs(values - 1), 0.9) * 100,
    )
    return [str(len(ratios)), f"{middle:.3f}", f"{spread:.1f}", f"{most:.1f}"]


def group_of(time_us: float) -> str:
    for low, high in zip((0, *LIMITS_US), LIMITS_US, strict=False):
        if time_us < high:
            return f"{low} to {high} us" if low else f"below {high} us"
    return f"above {LIMITS_US[-1]} us"


GROUPS = [group_of(time_us - 1) for time_us in LIMITS_US] + [group_of(LIMITS_US[-1])]


def compare(
    ours: Mapping[Key, Figures], theirs: Mapping[Key, Figures]
) -> dict[tuple[str, str, str], list[float]]:
    """(kind, group of our duration, quantity) -> ratios. The group "all" has all durations."""
    ratios = defaultdict(list)
    for key in ours.keys() & theirs.keys():
        one, other = ours[key], theirs[key]
        kind = f"{KINDS[str(key[0])]}, {key[1] if key[0] == 'gemm' else 'bfloat16'}"
        for group in ("all", group_of(one.time_us)):
            ratios[kind, group, "time"].append(other.time_us / one.time_us)
            ratios[kind, group, "burst time"].append(other.time_us / one.burst_us)
            if one.power_w and other.power_w:
                ratios[kind, group, "power"].append(other.power_w / one.power_w)
    return ratios


def own_powers(table: Mapping[Key, Figures]) -> dict[str, list[float]]:
    """The table's own power by duration, of bfloat16 products of nearly equal arithmetic rate."""
    found = defaultdict(list)
    for (kind, dtype, *sizes), figures in table.items():
        if kind == "gemm" and dtype == "bfloat16" and figures.power_w:
            tflops = 2 * np.prod([float(size) for size in sizes]) / figures.time_us / 1e6
            if RATES_TFLOPS[0] <= tflops < RATES_TFLOPS[1]:
                found[group_of(figures.time_us)].append(figures.power_w)
    return found


def print_table(*rows: Iterable[str]) -> None:
    head, *others = (list(row) for row in rows)
    print(
        "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *others)),
        end="\n\n",
    )


def version_of(checkout: Path) -> str:
    """The version and commit of the checkout, as far as it shows them."""
    found = []
    if (project := checkout / "pyproject.toml").exists():
        found.append(tomllib.loads(project.read_text())["project"]["version"])
    commit = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return ", ".join(
        ["aiconfigurator", *found, *([f"commit {commit.stdout.strip()}"] if commit.stdout else [])]
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("checkout", type=Path, help="folder of a checkout of aiconfigurator")
    options.add_argument("--cards", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options.add_argument(
        "--detail", nargs="*", help="tables to show by duration, such as vllm/0.24.0"
    )
    given = options.parse_args()
    print(f"{version_of(given.checkout)}\n")
    for card in given.cards:
        files = table_files(given.checkout, SYSTEMS[card])
        if not files:
            sys.exit(
                f"{given.checkout} has no tables of {SYSTEMS[card]}. Give the folder of a "
                "complete checkout."
            )
        ours = readings_of(card)
        tables = {
            f"{backend}/{version}": read_table(paths) for (backend, version), paths in files.items()
        }
        compared = {name: compare(ours, table) for name, table in tables.items()}
        powered = [
            name for name in tables if any(quantity == "power" for *_, quantity in compared[name])
        ]
        newest = {name.partition("/")[0]: name for name in tables}.values()
        head = ["count", "median ratio", "median deviation %", "90th percentile %"]
        print(f"## {card}: table / reading\n")
        lines = [
            [name, kind, quantity, *summary(ratios)]
            for name, found in compared.items()
            for (kind, group, quantity), ratios in sorted(found.items())
            if group == "all"
        ]
        print_table(["table", "operator", "quantity", *head], *lines)
        for name in given.detail or dict.fromkeys([*newest, *powered]):
            print(f"### {card}: {name} by duration of the reading\n")
            kinds = sorted({(kind, quantity) for kind, _, quantity in compared.get(name, {})})
            lines = [
                [kind, quantity, group, *summary(compared[name][kind, group, quantity])]
                for kind, quantity in kinds
                for group in GROUPS
                if (kind, group, quantity) in compared[name]
            ]
            print_table(["operator", "quantity", "duration", *head], *lines)
        for name in powered:
            low, high = RATES_TFLOPS
            print(
                f"### {card}: power in {name}, its own bfloat16 products of {low:.0f} to "
                f"{high:.0f} TFLOP/s\n"
            )
            powers = own_powers(tables[name])
            lines = [
                [group, str(len(powers[group])), f"{median(powers[group]):.0f}"]
                for group in GROUPS
                if powers[group]
            ]
            print_table(["duration", "count", "median power W"], *lines)


if __name__ == "__main__":
    main()
