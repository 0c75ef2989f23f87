"""``farm memory``: the memory of a training step over time. Needs no broker; a database only for --job; a card only
for --run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import output
from cli.options import AsJson, Declared, Model, option
from cli.output import answer, say

Fields = Annotated[dict[str, Any], Declared(without=("cache", "text", "tokenizer", "mode", "step"))]


@dataclass(frozen=True)
class MemoryCliOptions:
    """See `farm.api.memory.MemoryOptions`."""

    card: str | None = option(
        None,
        help="Card model whose readings give the times, and whose data sheet gives estimates for the rest; or cpu."
        " Default: H200.",
    )
    job: str = option("", metavar="JOB", help="Take times from the readings of that job. Default: all readings.")
    fit: str = option("", metavar="SIZE", help="Find the largest batch that fits in this memory: 80GB.")
    offload: str = option(
        "",
        metavar="SIZE/s",
        help="Show what could be offloaded between two uses, over a link of this bandwidth each way: 55GB/s.",
    )
    fast: str = option(
        "",
        metavar="SIZE",
        help="Plan which tensors to put into slow memory if fast memory has this size: 8GB, or 50% of the peak."
        " Several sizes, such as 75%,50%, give several plans.",
    )
    slow_bandwidth: str = option(
        "",
        metavar="SIZE/s|measured",
        help="With --fast: bandwidth of moves, and of tensors without a reading in slow memory."
        " Default: measured; for moves, during the step of --run.",
    )
    moves: bool = option(False, "--moves", help="With --fast: also move tensors to slow memory between two uses.")
    run: bool = option(
        False,
        "--run",
        help="With --fast: run the step on a card of this host (see --card), in fast memory only and under each plan.",
    )
    what_if_recompute: bool = option(
        False, "--what-if-recompute", help="Show what recomputing each block in the backward would free and cost."
    )
    config: Path | None = option(
        None,
        metavar="FOLDER",
        help="Write kernels, tensors and their lifetimes as text files in the format of G10's tool.",
    )
    out: Path | None = option(
        None, metavar="FOLDER", help="Write tables (Parquet), a trace for Perfetto or Chrome, charts and a page."
    )


def memory(
    model: Model,
    *,
    batch: int = typer.Option(32, "-b", "--batch", help="Batch size."),
    given: Fields,
    dtype: str = typer.Option("float32", help="float32, float16 or bfloat16, of the weights too."),
    options: MemoryCliOptions,
    as_json: AsJson = False,
) -> None:
    """Show the memory of a training step over time. Runs nothing without --run."""
    from cli import memory_table
    from farm.api import memory as memories
    from farm.models import catalog

    checked = memories.MemoryOptions(**vars(options))
    variant = catalog.variant(model, batch, dtype=dtype, step="training", **given)
    access = memories.Access(
        ask=output.first_that_knows,
        open_database=output.open_database,
        own_card=lambda word: output.chosen_own_cards([word] if word else [])[0],
        say=say,
    )
    found = memories.requested_memory(variant, checked, access)
    answer(as_json, found, lambda: memory_table.table(found))
