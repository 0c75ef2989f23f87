"""Compute what `farm memory` shows: the memory of a training step, and the results that its options
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from farm.addons.memory import offload_plan
from farm.addons.memory import step_memory as memories
from farm.addons.memory.memory_options import MemoryOptions
from farm.addons.memory.step_memory import StepMemory
from farm.addons.memory.transfers import offload
from farm.errors import FarmUnavailable, UsageError
from farm.exchange.first_answer import first_answer
from farm.jobs.cards import chosen_own_cards
from farm.store.database import open_database
from farm.training.version import versioned
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.addons.memory.transfers import Wire
    from farm.models.resolved import ResolvedModel


def requested_memory(
    model: ResolvedModel, variant: Variant, options: MemoryOptions, say: Callable[[str], None]
) -> StepMemory:
    """Return the memory of a training step of a model, with the results that the options request.
    Runs the step only for ``run``. `say` shows a message about a slow action, a written file or the
    origin of readings. Raises the errors of `farm.addons.memory.queries.step_memory`; with ``run``,
    also those of `farm.addons.memory.step_on_card.step_on`."""
    if options.out is not None:
        from farm.addons.memory import files  # late: it needs the add-on `pages`

        files.check_drawing()
    if variant.recompute and options.what_if_recompute:
        raise UsageError(
            "--what-if-recompute cannot be combined with --recompute.", "Omit one of them."
        )
    variant = versioned(variant, model)
    say = _once(say)  # two queries may both take the packaged readings
    if options.run:
        step_memory = _run(model, variant, options, say)
    elif options.job:
        with open_database().read() as session:
            step_memory = memories.of_job(session, model, variant, options.job)
    else:
        step_memory = _with_readings(memories.memory(model, variant, options.card or "H200"), say)
    if options.offload_bytes_per_s is not None:
        step_memory = replace(
            step_memory, offload=offload(step_memory.life, options.offload_bytes_per_s)
        )
    if options.limit_bytes is not None:
        step_memory = memories.with_fit(step_memory, options.limit_bytes)
    if options.amounts and not options.run:
        step_memory = _with_plans(step_memory, options, say)
    if options.what_if_recompute:
        say("Capturing the step again with each block recomputed: some seconds per block.")
        step_memory = memories.with_recomputed(step_memory)
    for path in _written(step_memory, options):
        say(f"Written to {path}")
    return step_memory


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that says a text only the first time."""
    texts: set[str] = set()

    def say_new(text: str) -> None:
        if text not in texts:
            texts.add(text)
            say(text)

    return say_new


def _written(found: StepMemory, options: MemoryOptions) -> Iterator[Path]:
    """Write the files that the options request, and yield their paths."""
    if options.config is None and options.out is None:
        return
    from farm.addons.memory import files  # late: it needs the add-on `pages`

    if options.config is not None:
        yield from files.write_config(found, options.config)
    if options.out is not None:
        yield from files.write_all(found, options.out)


def _run(
    model: ResolvedModel, variant: Variant, options: MemoryOptions, say: Callable[[str], None]
) -> StepMemory:
    """Capture the step on a card of this host, plan it, and run it under each plan."""
    from farm.addons.memory.step_on_card import step_on  # late: it needs a card

    card = chosen_own_cards([options.card] if options.card else [], say)[0]
    with step_on(card, model, variant) as step:
        if options.moves:
            say("Measuring the bandwidth of copies, alone and during the step.")
        step_memory = _with_readings(step.memory, say)
        step_memory = _with_plans(step_memory, options, say, step.wire() if options.moves else None)
        say(f"Running the step on {card}, in fast memory only and under each plan.")
        return step.run(step_memory)


def _with_readings(found: StepMemory, say: Callable[[str], None]) -> StepMemory:
    try:
        return first_answer(
            lambda session: memories.with_readings(session, found),
            lambda one: one.read_calls > 0,
            say,
        )
    except FarmUnavailable as error:
        say(f"Times are estimates: {error.message}")
    return found


def _with_plans(
    found: StepMemory, options: MemoryOptions, say: Callable[[str], None], wire: Wire | None = None
) -> StepMemory:
    if options.moves:
        programs = offload_plan.POINTS + len(options.amounts)
        say(
            f"Solving {programs} integer programs, each in at most {offload_plan.TIME_LIMIT_S:g} s."
        )
    read = None
    try:
        read = first_answer(
            lambda session: memories.read_in_slow_memory(session, found),
            lambda one: one is not None,
            say,
        )
    except FarmUnavailable as error:
        say(f"The cost of tensors in slow memory is estimated from their bytes: {error.message}")
    return memories.with_offload_plans(
        found, read, options.amounts, options.slow_bytes_per_s, moves=options.moves, wire=wire
    )
