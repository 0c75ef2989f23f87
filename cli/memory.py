"""``farm memory``: what memory a training step needs, and when. Needs no broker, no database unless a job is named, and no card
unless a plan is to be run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import opening
from cli.options import AsJson, Model, variant_options
from cli.output import emit_json, say, show
from farm.errors import FarmUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from farm.memory_report.step_memory import Memory
    from farm.requests.memory import Amount
    from farm.slow_memory.transfers import Wire
    from farm.types.protocol import Variant


@variant_options(without=["batch", "dtype", "cache", "text", "tokenizer", "mode", "step"])
def memory(
    model: Model,
    batch: Annotated[int, typer.Option("-b", "--batch", help="Batch size.")] = 32,
    given: dict[str, Any] = {},  # noqa: B006 - replaced by options
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16, of the weights too.")] = "float32",
    card: Annotated[
        str | None,
        typer.Option(
            help="Whose readings times are taken from, and by whose data sheet the others are estimated; or cpu."
            " Default: H200."
        ),
    ] = None,
    job: Annotated[
        str, typer.Option(metavar="JOB", help="Take times from what that job read, on its card. Default: all readings.")
    ] = "",
    fit: Annotated[
        str, typer.Option(metavar="SIZE", help="Find the largest batch that fits in so much memory: 80GB.")
    ] = "",
    offload: Annotated[
        str,
        typer.Option(
            metavar="SIZE/s",
            help="What could lie elsewhere while it waits, over a link of that bandwidth each way: 55GB/s.",
        ),
    ] = "",
    fast: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Plan which tensors lie in slow memory, with so much fast memory: 8GB, or a share of the peak, 50%;"
            " a plan each for several, 75%,50%.",
        ),
    ] = "",
    slow_bandwidth: Annotated[
        str,
        typer.Option(
            metavar="SIZE/s|measured",
            help="With --fast: what the wire gives tensors of operators that nobody has read in slow memory, and moves."
            " Default: measured; for moves beside the step that is run.",
        ),
    ] = "",
    moves: Annotated[
        bool, typer.Option("--moves", help="With --fast: let tensors lie in slow memory while they wait, too.")
    ] = False,
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="With --fast: run the step so on a card of this host, and all fast. --card says which; default: the first.",
        ),
    ] = False,
    what_if_recompute: Annotated[
        bool,
        typer.Option("--what-if-recompute", help="What each block would free, run anew in the backward, and cost."),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write kernels, tensors and their life as text files in the form of G10's tool."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Write tables (Parquet), a trace for Perfetto or Chrome, drawings and a page."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what memory a training step needs, when, and what only lies there. Runs nothing without --run."""
    from farm.memory_report import files
    from farm.memory_report import step_memory as memories
    from farm.models import catalog
    from farm.requests.memory import amounts_of, bytes_of

    _refuse(fast, slow_bandwidth, moves, run, {"--job": job, "--fit": fit, "--what-if-recompute": what_if_recompute})
    if what_if_recompute and given.get("recompute"):
        raise UsageError(
            "--what-if-recompute begins with a step that computes nothing anew.", "Leave --recompute away."
        )
    limit_bytes = bytes_of("--fit", fit) if fit else None
    bytes_per_s = bytes_of("--offload", offload, per_second=True) if offload else None
    amounts = amounts_of("--fast", fast) if fast else []
    slow_bytes_per_s = (
        bytes_of("--slow-bandwidth", slow_bandwidth, per_second=True)
        if slow_bandwidth not in ("", "measured")
        else None
    )
    variant = catalog.variant(model, batch, dtype=dtype, step="training", **given)
    if out is not None:
        files.check_drawing()

    def placed(found: Memory, wire: Wire | None = None) -> Memory:
        return _placed(found, amounts, slow_bytes_per_s, moves, wire)

    found = _run(variant, card, moves, placed) if run else _found(variant, card, job)
    if bytes_per_s is not None:
        found = memories.with_offload(found, bytes_per_s)
    if limit_bytes is not None:
        found = memories.with_fit(found, limit_bytes)
    if amounts and not run:
        found = placed(found)
    if what_if_recompute:
        say("The step is extracted again for each block, which takes a second or a few each.")
        found = memories.with_recomputed(found)
    for path in files.write_config(found, config) if config else ():
        say(f"Written to {path}")
    for path in files.write_all(found, out) if out else ():
        say(f"Written to {path}")
    if as_json:
        emit_json(found.to_json())
    else:
        from cli import memory_table

        show(memory_table.table(found))


def _refuse(fast: str, slow_bandwidth: str, moves: bool, run: bool, not_run: Mapping[str, object]) -> None:
    """Options that do not go together.

    Args:
        not_run: options that do not go with ``--run``, with what was said.
    """
    if not fast and (slow_bandwidth or moves or run):
        raise UsageError(
            "--slow-bandwidth, --moves and --run are of a plan.", "Say how much fast memory there is: --fast 8GB."
        )
    for option in (name for name, said in not_run.items() if run and said):
        raise UsageError(
            f"{option} does not go with --run, which runs the step of one batch as the card runs it.",
            f"Leave {option} away.",
        )
    if moves and not run and slow_bandwidth in ("", "measured"):
        raise UsageError(
            "Moves go at what the wire gives, and readings of slow tensors do not tell that.",
            "Say it: --slow-bandwidth 55GB/s; or have it measured on a card of this host: --run.",
        )


def _run(variant: Variant, card: str | None, moves: bool, placed: Callable[[Memory, Wire | None], Memory]) -> Memory:
    """Taken apart on a card of this host, planned, and run so."""
    from farm.study.planned_step import step_on

    chosen = opening.chosen_own_cards([card] if card else [])[0]
    with step_on(chosen, variant) as step:
        if moves:
            say("Copies are timed, alone and beside the step.")
        found = placed(_with_readings(step.memory), step.wire() if moves else None)
        say(f"The step is run on {chosen}, all fast and under each plan.")
        return step.run(found)


def _placed(
    found: Memory, amounts: list[Amount], slow_bytes_per_s: float | None, moves: bool, wire: Wire | None
) -> Memory:
    from farm.memory_report import step_memory as memories
    from farm.slow_memory.offload_plan import POINTS, TIME_LIMIT_S

    if moves:
        say(f"{POINTS + len(amounts)} programs are solved, each in {TIME_LIMIT_S:g} s at most.")
    read = None
    try:
        read = opening.first_that_knows(
            lambda session: memories.read_in_slow_memory(session, found), lambda read: read is not None
        )
    except FarmUnavailable as error:
        say(f"What tensors add in slow memory is taken from bytes: {error.message}")
    return memories.with_offload_plans(found, read, amounts, slow_bytes_per_s, moves=moves, wire=wire)


def _found(variant: Variant, card: str | None, job: str) -> Memory:
    from farm.memory_report import step_memory as memories

    if job:
        if card is not None:
            raise UsageError("A job has a card of its own.", "Leave --card away, or --job.")
        with opening.open_database().read() as session:
            return memories.of_job(session, variant, job)
    return _with_readings(memories.memory(variant, card or "H200"))


def _with_readings(found: Memory) -> Memory:
    """What the farm's database has read, or the readings that come with the package."""
    from farm.memory_report import step_memory as memories

    try:
        return opening.first_that_knows(
            lambda session: memories.with_readings(session, found), lambda answer: answer.read_calls > 0
        )
    except FarmUnavailable as error:
        say(f"Times are estimates: {error.message}")
    return found
