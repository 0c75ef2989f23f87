"""``farm estimate``: what a model costs from readings alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli import opening
from cli.options import (
    Accumulate,
    Amp,
    AsJson,
    Cache,
    Dtype,
    InputSize,
    Layers,
    Length,
    MemoryFormat,
    Mode,
    Model,
    Optimizer,
    Padded,
    Phase,
    Recompute,
    Step,
    Text,
    Tokenizer,
)
from cli.output import emit_json, show

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.report.estimate import Estimate
    from farm.report.generating import Generation


def estimate(
    model: Model,
    batch: Annotated[int, typer.Option("-b", "--batch", help="Batch size.")] = 32,
    input_size: InputSize = None,
    length: Length = None,
    padded: Padded = False,
    phase: Phase = None,
    cache: Cache = None,
    layers: Layers = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    dtype: Dtype = None,
    memory_format: MemoryFormat = "contiguous",
    mode: Mode = "eval",
    step: Step = None,
    optimizer: Optimizer = None,
    amp: Amp = None,
    accumulate: Accumulate = None,
    recompute: Recompute = None,
    card: Annotated[str, typer.Option(help="Part of the card's model. Default: the only one with readings.")] = "",
    launch: Annotated[str | None, typer.Option(help="graph or eager. Default: graph on a GPU, eager on a CPU.")] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="With readings that allowed TF32.")] = False,
    torch: Annotated[
        str, typer.Option(help="With readings of this version, e.g. 2.11. Default: what covers most.")
    ] = "",
    fill: Annotated[
        str, typer.Option(help="Predict what no reading covers: roofline (a lower bound). Default: leave it out.")
    ] = "",
    generate: Annotated[
        int | None,
        typer.Option(help="Of a text of so many tokens after a prompt of --length: the prompt, and a decode for each."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what a model costs on a card, from readings alone: runs nothing."""
    from farm.asking.defaults import default_dtype
    from farm.errors import UsageError
    from farm.models import catalog

    if fill not in ("", "roofline"):
        raise UsageError(f"There is no predictor '{fill}'.", "Give --fill roofline, or leave it out.")
    variant = catalog.variant(
        model,
        batch,
        input_size=input_size,
        length=length,
        padded=padded,
        phase=phase,
        cache=cache,
        layers=layers,
        text=text,
        tokenizer=tokenizer,
        dtype=dtype or default_dtype(model, "cuda"),
        memory_format=memory_format,
        mode=mode,
        step=step,
        optimizer=optimizer,
        amp=amp,
        accumulate=accumulate,
        recompute=recompute,
    )

    if step and generate is not None:
        raise UsageError("A training step writes no text.", "Leave --step or --generate away.")
    if fill and generate is not None:
        raise UsageError("What a text costs is summed from readings alone.", "Leave --fill or --generate away.")

    def ask(session: Session) -> Estimate | Generation:
        return _asked(session, variant, card, launch, tf32, torch, fill, generate)

    found = opening.first_that_knows(ask, lambda _: True)
    if as_json:
        emit_json(found.to_json())
    else:
        from cli import estimate_table
        from farm.report.estimate import Estimate

        show(estimate_table.estimate(found) if isinstance(found, Estimate) else estimate_table.generation(found))


def _asked(
    session: Session,
    variant: object,
    card: str,
    launch: str | None,
    tf32: bool,
    torch: str,
    fill: str,
    generate: int | None,
) -> Estimate | Generation:
    from farm.prediction.predictor import RooflinePredictor
    from farm.report import estimate as estimates
    from farm.words.protocol import Protocol, Variant

    assert isinstance(variant, Variant)
    model = estimates.card_model_named(session, card)
    kind, roofline = estimates.peaks_of(session, model, variant.computes_in, tf32)
    protocol = Protocol(launch=launch or ("eager" if kind == "cpu" else "graph"), tf32=tf32)  # type: ignore[arg-type]
    if generate is not None:
        from farm.report.generating import generation

        return generation(session, variant, generate, model, protocol=protocol, torch=torch)
    predictor = RooflinePredictor(roofline) if fill else None
    return estimates.estimate(session, variant, model, protocol=protocol, torch=torch, predictor=predictor)
