"""``farm memory``: the memory of a training step over time. Only --job needs a database, only --run
a card.
"""

from __future__ import annotations

from typing import Annotated, Any

from cli.options import NOT_PLAIN, AsJson, Declared, Model
from cli.output import answer, say
from farm.addons.memory.memory_options import MemoryOptions
from farm.errors import UsageError

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
    step: str = "training",
    options: Options,
    as_json: AsJson = False,
) -> None:
    """Show the memory of a training step over time. Runs nothing without --run. `farm estimate`
    shows the memory of a forward pass.
    """
    from farm.addons.memory import tables
    from farm.addons.memory.requested import requested_memory
    from farm.models import catalog

    if step != "training":
        raise UsageError(
            f"`farm memory` shows training steps only, not --step {step}.",
            f"For a forward pass: `farm estimate {model} --card H200` shows the memory that it "
            'needs; in Python, `farm.fits(module, inputs, card="H200")`.',
        )
    checked = MemoryOptions(**options)
    resolved = catalog.resolve_given(model)
    usual_batch = batch or resolved.usual_batch(32)
    variant = resolved.variant(usual_batch, dtype=dtype, step="training", **given)
    for line in resolved.differences(variant):
        say(line)
    step_memory = requested_memory(resolved, variant, checked, say)
    answer(as_json, step_memory, lambda: tables.table(step_memory))
