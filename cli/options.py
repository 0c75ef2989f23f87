"""Options that several verbs have alike, each declared once. `cli.run_options` has those of `run` and `submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="The model's name; `farm models` lists them.")]
InputSize = Annotated[int | None, typer.Option(help="Height and width of the input. Default: the model's own.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, float16 or bfloat16. Default: bfloat16 where the model generates text, else float32."),
]
MemoryFormat = Annotated[str, typer.Option(help="contiguous or channels_last.")]
Mode = Annotated[str, typer.Option(help="eval or train.")]
Length = Annotated[int | None, typer.Option(help="Tokens in each sequence. Default: the model's own.")]
Padded = Annotated[bool, typer.Option("--padded", help="Sequences of unequal length, filled up and masked.")]
Phase = Annotated[
    str | None,
    typer.Option(help="encode, prefill (a prompt) or decode (one token beside a cache). Default: the model's."),
]
Cache = Annotated[int | None, typer.Option(help="Tokens that decode is beside. Default: 1024.")]
Layers = Annotated[int | None, typer.Option(help="Keep so many of the model's layers. Default: all.")]
Text = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A text that the model reads. Default: the farm's own.")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="With --text: the folder of the tokenizer.json that makes it into ids."),
]
Step = Annotated[
    str | None,
    typer.Option(help="training: one iteration, with loss, backward and optimizer. Default: the forward alone."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(help="Of a step: sgd, adam or adamw; -foreach or -fused may stand behind it. Default: sgd."),
]
Amp = Annotated[
    str | None, typer.Option(help="Of a step: bfloat16 or float16, what autocast computes in. Default: none.")
]
Accumulate = Annotated[int | None, typer.Option(help="Of a step: passes before the optimizer. Default: 1.")]
Recompute = Annotated[
    str | None,
    typer.Option(
        metavar="blocks|PATH,...",
        help="Of a step: modules that are run anew in the backward instead of keeping what they computed.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Follow = Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")]
Job = Annotated[str, typer.Argument(help="The job's id, or its beginning.")]
Cards = Annotated[
    list[str] | None, typer.Option("--card", help="Part of a card's model, or of its id. May be repeated.")
]
