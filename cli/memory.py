"""``farm memory``: the memory of a training step over time. Needs no broker; a database only for --job; a card only
for --run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import output
from cli.options import SPLIT, AsJson, Declared, Model, option
from cli.output import answer, say

Fields = Annotated[dict[str, Any], Declared(without=("cache", "text", "tokenizer", "mode", "step", "compile", *SPLIT))]


@dataclass(frozen=True)
class MemoryCliOptions:
    """See `farm.api.memory.MemoryOptions`."""

    card: str | None = option(
        None,
        help="Card model of the times: its readings, and estimates from its data sheet for calls without a reading; or "
        "cpu. Default: H200.",
    )
    job: str = option("", metavar="JOB", help="Use only the readings of this job. Default: all readings.")
    fit: str = option("", metavar="SIZE", help="Find the largest batch that fits in memory of this size, e.g. 80GB.")
    offload: str = option(
        "",
        metavar="SIZE/s",
        help="Show which tensors could be moved out between two uses, over a link of this bandwidth in each direction, "
        "e.g. 55GB/s.",
    )
    fast: str = option(
        "",
        metavar="SIZE",
        help="Plan which tensors to put into slow memory if fast memory has this size: bytes (8GB) or a share of the "
        "peak (50%). Several sizes, such as 75%,50%, give several plans.",
    )
    slow_bandwidth: str = option(
        "",
        metavar="SIZE/s|measured",
        help="With --fast: bandwidth between fast and slow memory, for moves and for operators without a reading in "
        "slow memory. Default: measured; --run measures the bandwidth of moves during the step.",
    )
    moves: bool = option(False, "--moves", help="With --fast: also move tensors to slow memory between two uses.")
    run: bool = option(
        False,
        "--run",
        help="With --fast: run the step on a card of this host (see --card), first in fast memory only, then under "
        "each plan.",
    )
    what_if_recompute: bool = option(
        False,
        "--what-if-recompute",
        help="Show the memory that recomputing each block would free, and the time for it.",
    )
    config: Path | None = option(
        None,
        metavar="FOLDER",
        help="Write kernels, tensors and their lifetimes as text files in the format of the G10 simulator.",
    )
    out: Path | None = option(
        None, metavar="FOLDER", help="Write tables (Parquet), a trace for Perfetto or Chrome, charts and a page."
    )


def memory(
    model: Model,
    *,
    batch: int | None = typer.Option(
        None, "-b", "--batch", help="Batch size. Default: 32, or that of your example inputs."
    ),
    given: Fields,
    dtype: str = typer.Option("float32", help="Data type of activations and weights: float32, float16 or bfloat16."),
    options: MemoryCliOptions,
    as_json: AsJson = False,
) -> None:
    """Show the memory of a training step over time. Runs nothing without --run."""
    from cli import memory_table
    from farm.api import memory as memories
    from farm.models import catalog

    checked = memories.MemoryOptions(**vars(options))
    variant = catalog.variant(model, batch or catalog.usual_batch(model, 32), dtype=dtype, step="training", **given)
    access = memories.Access(
        ask=output.first_that_knows,
        open_database=output.open_database,
        own_card=lambda word: output.chosen_own_cards([word] if word else [])[0],
        say=say,
    )
    found = memories.requested_memory(variant, checked, access)
    answer(as_json, found, lambda: memory_table.table(found))
