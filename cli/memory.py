"""``farm memory``: what memory a training step needs, and when. Measures nothing; needs no broker, database or card."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.options import AsJson, InputSize, Layers, Length, MemoryFormat, Model, Padded, Phase
from cli.output import emit_json, show


def memory(
    model: Model,
    batch: Annotated[int, typer.Option("-b", "--batch", help="Batch size.")] = 32,
    optimizer: Annotated[
        str, typer.Option(help="sgd (with momentum), adam or adamw; also adamw-foreach, adamw-fused and so on.")
    ] = "sgd",
    amp: Annotated[str, typer.Option(help="What autocast computes in: bfloat16. Default: no autocast.")] = "",
    accumulate: Annotated[int, typer.Option(help="Passes before the optimizer.")] = 1,
    recompute: Annotated[
        str,
        typer.Option(
            metavar="PATH,...",
            help="Run these modules anew in the backward, or blocks, instead of keeping activations.",
        ),
    ] = "",
    input_size: InputSize = None,
    length: Length = None,
    padded: Padded = False,
    phase: Phase = None,
    layers: Layers = None,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16, of the weights too.")] = "float32",
    memory_format: MemoryFormat = "contiguous",
    card: Annotated[str, typer.Option(help="By whose data sheet times are estimated.")] = "H200",
    as_json: AsJson = False,
) -> None:
    """Show what memory a training step needs, when, and what only lies there: runs nothing."""
    from farm.models import catalog
    from farm.report import memory as memories
    from farm.words.iteration import Iteration

    iteration = Iteration(optimizer, amp, accumulate, recompute)
    variant = catalog.variant(
        model,
        batch,
        input_size=input_size,
        length=length,
        padded=padded,
        phase=phase,
        layers=layers,
        dtype=dtype,
        memory_format=memory_format,
        mode="train",
    )
    found = memories.memory(variant, iteration, card)
    if as_json:
        emit_json(found.to_json())
    else:
        from cli import memory_table

        show(memory_table.table(found))
