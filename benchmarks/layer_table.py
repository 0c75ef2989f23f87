"""Write docs/results/layers.md: which layers of torch.nn and functions of torch.nn.functional can be captured, in a
forward pass and in a training step.

    python benchmarks/layer_table.py           # writes the page
    python benchmarks/layer_table.py Conv2d    # prints the rows of these names

The examples are in `layer_examples.py`. Each runs through `farm.training.extract.extract`, as for
`farm operators benchmarks/layer_examples.py:Conv2d --step training`.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path

import torch

import farm
from benchmarks.layer_examples import FUNCTIONS, LAYERS, NO_FUNCTIONS, NO_LAYERS
from farm.models import own
from farm.training.extract import extract

PAGE = Path(__file__).resolve().parent.parent / "docs/results/layers.md"
EXAMPLES = Path(__file__).with_name("layer_examples.py")
CAPTURED = "captured"
#: Functions without a derivative in PyTorch.
WITHOUT_BACKWARD = {"native_channel_shuffle"}

OPENING = """# Layers

This page lists all layers of `torch.nn` and functions of `torch.nn.functional` of PyTorch {torch}: whether the farm captures a
forward pass that contains them, and a training step. `benchmarks/layer_table.py` writes it. Each row is one example
(`benchmarks/layer_examples.py`); other arguments may call other operators.

{counts}
"""


def outcome(name: str, *, training: bool) -> str:
    """`captured`, or why the example is refused."""
    if training and name in WITHOUT_BACKWARD:
        return "no derivative in PyTorch"
    registered = own.register(f"{EXAMPLES}:{name}")
    options = {"step": "training", "optimizer": "sgd"} if training else {}
    try:
        refusal = extract(farm.variant(registered, 4, **options)).refusal(name)
    except farm.FarmError as error:
        refusal = error
    return CAPTURED if refusal is None else f"refused: {_plain(refusal.message, name)}"


def _plain(message: str, name: str) -> str:
    text = message.replace(f"{name} cannot be extracted completely: ", "").replace("|", "/")
    text = re.sub(r" \(/.*", "", text)  # a line of the example
    return " ".join(text.split()).removesuffix(".")


def table(title: str, names: dict[str, tuple[str, str]], left_out: dict[str, str]) -> str:
    lines = [f"## {title}", "", "| name | forward pass | training step |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {forward} | {step} |" for name, (forward, step) in names.items()]
    lines += ["", "Left out:", ""]
    for reason, words in left_out.items():
        listed = ", ".join(f"`{word}`" for word in words.split())
        lines.append(f"- {reason}: {listed}")
    return "\n".join(lines) + "\n"


def rows(names: list[str]) -> dict[str, tuple[str, str]]:
    return {
        name: (outcome(name, training=False), outcome(name, training=True))
        for name in sorted(names, key=str.lower)
    }


def page() -> str:
    layers, functions = rows(list(LAYERS)), rows(list(FUNCTIONS))
    counts = []
    for what, found in (("layers", layers), ("functions", functions)):
        forward = sum(row[0] == CAPTURED for row in found.values())
        step = sum(row[1] == CAPTURED for row in found.values())
        counts.append(
            f"Of {len(found)} {what}, {forward} are captured in a forward pass and {step} in a training step."
        )
    opening = OPENING.format(torch=torch.__version__.partition("+")[0], counts="\n".join(counts))
    return "\n".join(
        [
            opening,
            table("torch.nn", layers, NO_LAYERS),
            table("torch.nn.functional", functions, NO_FUNCTIONS),
        ]
    )


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = sys.argv[1:]
    if names:
        for name, (forward, step) in rows(names).items():
            print(f"{name}: {forward} / {step}")
        return
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
