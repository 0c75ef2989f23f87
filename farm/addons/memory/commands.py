"""``farm memory``: the memory of a training step over time. Only --job needs a database, only --run
a card.
"""

from __future__ import annotations

from typing import Annotated, Any

from cli.options import NOT_PLAIN, AsJson, Declared, Model
from cli.output import answer, say
from farm.addons.memory.memory_options import MemoryOptions

Fields = Annotated[
    dict[str, Any],
    Declared(without=("cache", "text", "tokenizer", "mode", "step", *NOT_PLAIN)),
]
Options = Annotated[dict[str, Any], Declared(MemoryOptions)]


def memory(
    model: Model,
    *,
    batch: int | None = None,
    given: Fields,
    dtype: str | None = None,
    options: Options,
    as_json: AsJson = False,
) -> None:
    """Show the memory of a training step over time. Runs nothing without --run."""
    from farm.addons.memory import tables
    from farm.addons.memory.requested import requested_memory
    from farm.models import catalog

    checked = MemoryOptions(**options)
    resolved = catalog.resolve_given(model)
    usual_batch = batch or resolved.usual_batch(32)
    variant = resolved.variant(usual_batch, dtype=dtype, step="training", **given)
    for line in resolved.differences(variant):
        say(line)
    step_memory = requested_memory(resolved, variant, checked, say)
    answer(as_json, step_memory, lambda: tables.table(step_memory))
