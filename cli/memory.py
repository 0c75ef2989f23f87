"""``farm memory``: the memory of a training step over time. Only --job needs a database, only --run a card."""

from __future__ import annotations

from typing import Annotated, Any

from cli import output
from cli.options import SPLIT, AsJson, Declared, Model
from cli.output import answer, say

Fields = Annotated[dict[str, Any], Declared(without=("cache", "text", "tokenizer", "mode", "step", "compile", *SPLIT))]
Options = Annotated[dict[str, Any], Declared("memory")]


def memory(
    model: Model,
    *,
    batch: int | None = None,
    given: Fields,
    dtype: str = "float32",
    options: Options,
    as_json: AsJson = False,
) -> None:
    """Show the memory of a training step over time. Runs nothing without --run."""
    from cli import memory_table
    from farm.api import memory as memories
    from farm.models import catalog
    from farm.requests.memory import MemoryOptions

    checked = MemoryOptions(**options)
    variant = catalog.variant(model, batch or catalog.usual_batch(model, 32), dtype=dtype, step="training", **given)
    access = memories.Access(
        ask=output.first_that_knows,
        open_database=output.open_database,
        own_card=lambda word: output.chosen_own_cards([word] if word else [])[0],
        say=say,
    )
    found = memories.requested_memory(variant, checked, access)
    answer(as_json, found, lambda: memory_table.table(found))
