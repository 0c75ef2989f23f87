"""Compute what `farm memory` shows: the memory of a training step, and the results that its options request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from farm.errors import FarmUnavailable, UsageError
from farm.memory_report import files
from farm.memory_report import step_memory as memories
from farm.memory_report.step_memory import StepMemory
from farm.requests.memory import amounts_of, bytes_of
from farm.slow_memory import offload_plan
from farm.slow_memory.transfers import offload
from farm.training.version import versioned
from farm.types.protocol import Variant

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.devices.device import Card
    from farm.slow_memory.transfers import Wire
    from farm.store.database import Database


@dataclass(frozen=True)
class Access:
    """How a command or program reaches its databases and cards, and shows messages."""

    # ask(query, knows) queries its own database; if not knows(answer), it queries the packaged readings.
    ask: Callable[[Callable[[Session], Any], Callable[[Any], bool]], Any]
    open_database: Callable[[], Database]  # its own
    own_card: Callable[[str | None], Card]  # the card of this host with the given name; for None, the first card
    say: Callable[[str], Any]  # shows a message about a slow action or a written file


@dataclass(frozen=True)
class MemoryOptions:
    """The options of `farm memory` other than the variant, as the user gave them. The constructor checks them."""

    card: str | None = None
    job: str = ""
    fit: str = ""
    offload: str = ""
    fast: str = ""
    slow_bandwidth: str = ""
    moves: bool = False
    run: bool = False
    what_if_recompute: bool = False
    config: Path | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        """Raise `UsageError` if an amount is malformed, or if two options exclude each other."""
        for problem, step in self._contradictions():
            raise UsageError(problem, step)
        _ = self.limit_bytes, self.offload_bytes_per_s, self.amounts, self.slow_bytes_per_s
        if self.out is not None:
            files.check_drawing()

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield each contradiction of two options, and what to do."""
        if not self.fast and (self.slow_bandwidth or self.moves or self.run):
            yield "--slow-bandwidth, --moves and --run need a plan.", "Give the size of fast memory: --fast 8GB."
        for name in ("job", "fit", "what_if_recompute"):
            if self.run and getattr(self, name):
                option = "--" + name.replace("_", "-")
                problem = f"{option} cannot be combined with --run, which runs one step with one batch."
                yield problem, f"Omit {option} or --run."
        if self.moves and not self.run and self.slow_bandwidth in ("", "measured"):
            problem = "--moves needs the bandwidth between fast and slow memory, which readings do not contain."
            yield problem, "Give the bandwidth (--slow-bandwidth 55GB/s), or measure it on a card of this host (--run)."
        if self.job and self.card is not None:
            yield "--card cannot be combined with --job: the job has a card.", "Omit --card or --job."

    @property
    def limit_bytes(self) -> int | None:
        return bytes_of("--fit", self.fit) if self.fit else None

    @property
    def offload_bytes_per_s(self) -> float | None:
        return bytes_of("--offload", self.offload, per_second=True) if self.offload else None

    @property
    def amounts(self) -> list[Any]:
        return amounts_of("--fast", self.fast) if self.fast else []

    @property
    def slow_bytes_per_s(self) -> float | None:
        given = self.slow_bandwidth not in ("", "measured")
        return bytes_of("--slow-bandwidth", self.slow_bandwidth, per_second=True) if given else None


def requested_memory(variant: Variant, options: MemoryOptions, access: Access) -> StepMemory:
    """Return the memory of a training step, with the results that the options request. Runs the step only for ``run``.
    Raises the errors of `farm.api.queries.step_memory`; with ``run``, also those of `farm.api.planned_step.step_on`."""
    if variant.recompute and options.what_if_recompute:
        raise UsageError("--what-if-recompute cannot be combined with --recompute.", "Omit one of them.")
    variant = versioned(variant)
    if options.run:
        found = _run(variant, options, access)
    elif options.job:
        with access.open_database().read() as session:
            found = memories.of_job(session, variant, options.job)
    else:
        found = _with_readings(memories.memory(variant, options.card or "H200"), access)
    if options.offload_bytes_per_s is not None:
        found = replace(found, offload=offload(found.life, options.offload_bytes_per_s))
    if options.limit_bytes is not None:
        found = memories.with_fit(found, options.limit_bytes)
    if options.amounts and not options.run:
        found = _with_plans(found, options, access)
    if options.what_if_recompute:
        access.say("Capturing the step again with each block recomputed: some seconds per block.")
        found = memories.with_recomputed(found)
    written = files.write_config(found, options.config) if options.config else []
    for path in [*written, *(files.write_all(found, options.out) if options.out else [])]:
        access.say(f"Written to {path}")
    return found


def _run(variant: Variant, options: MemoryOptions, access: Access) -> StepMemory:
    """Capture the step on a card of this host, plan it, and run it under each plan."""
    from farm.api.planned_step import step_on

    card = access.own_card(options.card)
    with step_on(card, variant) as step:
        if options.moves:
            access.say("Measuring the bandwidth of copies, alone and during the step.")
        found = _with_readings(step.memory, access)
        found = _with_plans(found, options, access, step.wire() if options.moves else None)
        access.say(f"Running the step on {card}, in fast memory only and under each plan.")
        return step.run(found)


def _with_readings(found: StepMemory, access: Access) -> StepMemory:
    try:
        return cast(
            StepMemory,
            access.ask(lambda session: memories.with_readings(session, found), lambda answer: answer.read_calls > 0),
        )
    except FarmUnavailable as error:
        access.say(f"Times are estimates: {error.message}")
    return found


def _with_plans(found: StepMemory, options: MemoryOptions, access: Access, wire: Wire | None = None) -> StepMemory:
    if options.moves:
        programs = offload_plan.POINTS + len(options.amounts)
        access.say(f"Solving {programs} integer programs, each in at most {offload_plan.TIME_LIMIT_S:g} s.")
    read = None
    try:
        read = access.ask(lambda session: memories.read_in_slow_memory(session, found), lambda read: read is not None)
    except FarmUnavailable as error:
        access.say(f"The cost of tensors in slow memory is estimated from their bytes: {error.message}")
    return memories.with_offload_plans(
        found, read, options.amounts, options.slow_bytes_per_s, moves=options.moves, wire=wire
    )
