"""Capture public models as a user does, and tell what became of each.

    python -m pip install --constraint constraints.txt -r benchmarks/public_models/requirements.txt
    python -m benchmarks.public_models outcome.jsonl                    # all models, forward passes
    python -m benchmarks.public_models outcome.jsonl --step training
    python -m benchmarks.public_models outcome.jsonl --models torch_cond vit_navit

For each model, two processes are forked from this one, which has imported PyTorch:

1. One runs the model on the CPU with values, without the farm. PyTorch's `FlopCounterMode` counts
   the FLOPs, and PyTorch's profiler the operators of aten that compute (`benchmarks/public_models/
   plain_run.py`).
2. One runs ``farm operators models.py:NAME --json``. Then it rebuilds each tuple, as a worker does,
   runs it on the CPU under the same profiler, and adds up the operators of all calls.

Outcomes are appended to the file as they come; a model that the file has is not tried again."""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models.py"
TIME_LIMIT_S = 300
KEPT_DIFFERENCES = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="JSON lines with the outcomes")
    parser.add_argument("--step", choices=["forward", "training"], default="forward")
    parser.add_argument("--models", nargs="+", help="only these models")
    options = parser.parse_args()

    load()
    tried = {(row["model"], row["step"]) for row in rows_of(options.file)}
    for name in options.models or model_names():
        if (name, options.step) in tried:
            continue
        row = outcome(name, options.step)
        with options.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['outcome']:10} {name:32} {row.get('reason', '')[:120]}", flush=True)
    print_totals(rows_of(options.file))


def load() -> None:
    """Import what all forks need. Forks are safe while the process has one thread."""
    import torch
    import transformers  # noqa: F401

    import cli.main  # noqa: F401
    import farm.report.operators
    import farm.training.extract  # noqa: F401
    from benchmarks.public_models import models  # noqa: F401

    torch.set_num_threads(1)


def model_names() -> list[str]:
    """The names of the functions of models.py that return a model, in their order."""
    from benchmarks.public_models import models

    return [
        name
        for name, function in vars(models).items()
        if inspect.isfunction(function)
        and function.__module__ == models.__name__
        and inspect.signature(function).return_annotation == "Any"
        and not inspect.signature(function).parameters
    ]


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def outcome(name: str, step: str) -> dict[str, Any]:
    """What becomes of one model: captured, differs (in FLOPs or operators), partial, refused or
    failed."""
    begin = time.monotonic()
    row: dict[str, Any] = {"model": name, "step": step}
    captured = in_fork(captured_by_command, name, step)
    row["seconds"] = round(time.monotonic() - begin, 1)

    if "end" in captured:
        return row | {"outcome": "failed", "reason": captured["end"]}
    if captured["exit_code"] != 0:
        reason = error_of(captured["stderr"])
        failed = "bug in farm" in reason or "Traceback" in captured["stderr"]
        return row | {"outcome": "failed" if failed else "refused", "reason": reason}

    capture = json.loads(captured["stdout"])
    row |= {key: capture[key] for key in ("calls", "tuples", "flops")}
    if capture["gaps"] or capture["mismatches"]:
        reasons = [*map(str, capture["gaps"]), *capture["mismatches"].values()]
        return row | {"outcome": "partial", "reason": "; ".join(sorted(set(reasons)))}
    plain = in_fork(plain_counts, name, step)
    return row | compared(capture["flops"], captured.get("operators", {}), plain)


def compared(flops: int, operators: dict[str, int] | str, plain: dict[str, Any]) -> dict[str, Any]:
    """The outcome of a capture beside a run without the farm."""
    if "end" in plain:
        return {"outcome": "captured", "reason": f"the run to compare with: {plain['end']}"}
    row: dict[str, Any] = {"counted_flops": plain["flops"]}
    reasons = []
    if plain["flops"] is not None and plain["flops"] != flops:
        reasons.append(f"{flops:,} FLOP, PyTorch counts {plain['flops']:,}")
    if plain["operators"] is None:
        pass  # of a training step
    elif isinstance(operators, str):
        reasons.append(operators)
    else:
        differences = differing(operators, plain["operators"])
        row["operators"] = sum(plain["operators"].values())
        row["differences"] = differences[:KEPT_DIFFERENCES]
        if differences:
            reasons.append(f"{len(differences)} operators differ: {'; '.join(differences[:3])}")
    if plain["flops"] is None:
        row["note"] = "PyTorch's counter raises"
    if reasons:
        return row | {"outcome": "differs", "reason": "; ".join(reasons)}
    return row | {"outcome": "captured"}


def differing(of_tuples: dict[str, int], of_model: dict[str, int]) -> list[str]:
    """Lines about operators (with input shapes) whose number of calls differs."""
    return [
        f"{name}: {of_tuples.get(name, 0)} in the tuples, {of_model.get(name, 0)} in the model"
        for name in sorted(of_tuples.keys() | of_model.keys())
        if of_tuples.get(name, 0) != of_model.get(name, 0)
    ]


# ---- in a fork


def in_fork(function: Callable[[str, str], dict[str, Any]], *arguments: str) -> dict[str, Any]:
    """Call a function in a fork of this process. ``{"end": why}`` if it raises, ends the process,
    or takes longer than `TIME_LIMIT_S`."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def call() -> None:
        try:
            sender.send(function(*arguments))
        except BaseException as error:
            sender.send({"end": f"{type(error).__name__}: {error}"[:500]})

    process = context.Process(target=call)
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIME_LIMIT_S):
            process.kill()
            return {"end": f"no end after {TIME_LIMIT_S} s"}
        return receiver.recv()
    except EOFError:
        process.join()
        return {"end": f"the process ended with {process.exitcode}"}
    finally:
        process.join(5)
        process.kill()


def captured_by_command(name: str, step: str) -> dict[str, Any]:
    """Exit code and output of ``farm operators``, and the aten operators of all calls, each as its
    rebuilt tuple runs it on the CPU; a text if a tuple cannot run there."""
    import sys

    from benchmarks.public_models.plain_run import operators_of_tuples
    from farm.training import extract as extraction

    extractions = []
    extract = extraction.extract

    def kept(*arguments: Any, **named: Any) -> Any:
        extractions.append(extract(*arguments, **named))
        return extractions[-1]

    extraction.extract = kept
    command = ["farm", "operators", f"{MODELS}:{name}", "--json"]
    if step == "training":
        command += ["--step", "training"]
    sys.argv = command
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        exit_code = exit_code_of_command()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
        captured = {"exit_code": exit_code, "stdout": texts[0], "stderr": texts[1]}
        if exit_code == 0 and step == "forward":
            captured["operators"] = operators_of_tuples(extractions[-1].capture)
    return captured


def exit_code_of_command() -> int:
    """Run the command of `sys.argv` in this process."""
    import sys

    from cli.main import main as command

    try:
        command()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def plain_counts(name: str, step: str) -> dict[str, Any]:
    """FLOPs (None if PyTorch's counter raises) and aten operators of a run without the farm."""
    from benchmarks.public_models.plain_run import counts_of_forward, counts_of_step

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return counts_of_forward(name) if step == "forward" else counts_of_step(name)


def error_of(text: str) -> str:
    """The error message in the output of a command, in one line."""
    lines = [line.strip() for line in text.partition("nanobind:")[0].splitlines()]
    begin = next((n for n, line in enumerate(lines) if line.startswith("error")), 0)
    return " ".join(line for line in lines[begin:] if line)


def print_totals(rows: list[dict[str, Any]]) -> None:
    for step in sorted({row["step"] for row in rows}):
        counts = Counter(row["outcome"] for row in rows if row["step"] == step)
        total = sum(counts.values())
        shares = ", ".join(f"{number} {word}" for word, number in counts.most_common())
        print(f"{step}: {total} models: {shares}")


if __name__ == "__main__":
    main()
