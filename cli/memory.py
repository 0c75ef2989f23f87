"""``farm memory``: the memory of a training step over time. Needs no broker; a database only for --job; a card only
for --run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cli import opening
from cli.options import AsJson, Model, variant_options
from cli.output import emit_json, say, show


@variant_options(without=["batch", "dtype", "cache", "text", "tokenizer", "mode", "step"])
def memory(
    model: Model,
    batch: Annotated[int, typer.Option("-b", "--batch", help="Batch size.")] = 32,
    given: dict[str, Any] = {},  # noqa: B006 - replaced by options
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16, of the weights too.")] = "float32",
    card: Annotated[
        str | None,
        typer.Option(
            help="Card model whose readings give the times, and whose data sheet gives estimates for the rest; or cpu."
            " Default: H200."
        ),
    ] = None,
    job: Annotated[
        str, typer.Option(metavar="JOB", help="Take times from the readings of that job. Default: all readings.")
    ] = "",
    fit: Annotated[
        str, typer.Option(metavar="SIZE", help="Find the largest batch that fits in this memory: 80GB.")
    ] = "",
    offload: Annotated[
        str,
        typer.Option(
            metavar="SIZE/s",
            help="Show what could be offloaded between two uses, over a link of this bandwidth each way: 55GB/s.",
        ),
    ] = "",
    fast: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Plan which tensors to put into slow memory, with this much fast memory: 8GB, or a share of the peak,"
            " 50%; several amounts give several plans, 75%,50%.",
        ),
    ] = "",
    slow_bandwidth: Annotated[
        str,
        typer.Option(
            metavar="SIZE/s|measured",
            help="With --fast: bandwidth of moves, and of tensors without a reading in slow memory."
            " Default: measured; for moves, beside the step of --run.",
        ),
    ] = "",
    moves: Annotated[
        bool, typer.Option("--moves", help="With --fast: also move tensors to slow memory between two uses.")
    ] = False,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="With --fast: run the step on a card of this host under each plan, and all fast. --card names "
            "the card.",
        ),
    ] = False,
    what_if_recompute: Annotated[
        bool,
        typer.Option(
            "--what-if-recompute", help="Show what recomputing each block in the backward would free and cost."
        ),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write kernels, tensors and their lifetimes as text files in the format of G10's tool.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write tables (Parquet), a trace for Perfetto or Chrome, charts and a page."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory of a training step over time. Runs nothing without --run."""
    from farm.api.memory import Access, MemoryOptions, requested_memory
    from farm.models import catalog

    options = MemoryOptions(
        card, job, fit, offload, fast, slow_bandwidth, moves, run, what_if_recompute, config=config, out=out
    )
    variant = catalog.variant(model, batch, dtype=dtype, step="training", **given)
    access = Access(
        ask=opening.first_that_knows,
        open_database=opening.open_database,
        own_card=lambda word: opening.chosen_own_cards([word] if word else [])[0],
        say=say,
    )
    found = requested_memory(variant, options, access)
    if as_json:
        emit_json(found.to_json())
    else:
        from cli import memory_table

        show(memory_table.table(found))
