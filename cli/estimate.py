"""``farm estimate``: the cost of a model from readings, and from predictions where there are none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import opening
from cli.options import AsJson, Model, variant_options
from cli.output import emit_json, say, show

if TYPE_CHECKING:
    from farm.estimate.estimate import Estimate
    from farm.estimate.query import EstimateQuery
    from farm.types.protocol import Variant


@variant_options(without=["batch", "length"])
def estimate(
    model: Model,
    batch: Annotated[
        str,
        typer.Option(
            "-b", "--batch", metavar="N|N..M|N,M", help="Batch size; several make a curve: 1..256, or 1,8,32."
        ),
    ] = "32",
    length: Annotated[
        str | None,
        typer.Option(
            metavar="N|N..M|N,M", help="Tokens in each sequence; several make a curve. Default: the model's own."
        ),
    ] = None,
    given: dict[str, Any] = {},  # noqa: B006 - replaced by options
    card: Annotated[str, typer.Option(help="Part of the card's model. Default: the only one with readings.")] = "",
    launch: Annotated[str | None, typer.Option(help="graph or eager. Default: graph on a GPU, eager on a CPU.")] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="Use readings that allowed TF32.")] = False,
    torch: Annotated[
        str, typer.Option(help="Use readings of this version, e.g. 2.11. Default: the one that covers most.")
    ] = "",
    fill: Annotated[
        str,
        typer.Option(
            help="Predict tuples without a reading: auto (the stored predictor), roofline (a lower bound), or none."
        ),
    ] = "auto",
    measure: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="K", help="First measure the K tuples that narrow the estimate most, on a card of this host."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, metavar="S", help="Like --measure, with as many tuples as fit in S seconds of card time."),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(help="Generate so many tokens after a prompt of --length: the prompt, and a decode for each."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the curve (.png, .svg or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the cost of a model on a card from readings, and from predictions where there are none. Runs nothing."""
    from cli import prediction_tables
    from farm.errors import UsageError
    from farm.estimate.query import EstimateQuery, check_fill, parse_sizes
    from farm.models import catalog
    from farm.pages.plots import check_path
    from farm.requests.partial_request import default_dtype

    check_fill(fill)
    batches = parse_sizes(batch, "--batch")
    lengths = parse_sizes(length, "--length") if length is not None else [None]
    is_curve, measures = len(batches) * len(lengths) > 1, bool(measure or seconds)
    if png is not None:
        if not is_curve:
            raise UsageError("There is no curve to draw.", "Give several sizes: --batch 1..256")
        check_path(png)
    if generate is not None and (fill not in ("auto", "none") or is_curve or measures):
        raise UsageError("--generate adds up readings alone, of one size.", "Omit --fill or --generate.")
    if given.get("step") and generate is not None:
        raise UsageError("A training step generates no text.", "Omit --step or --generate.")
    if measures and is_curve:
        raise UsageError("--measure needs one size.", "Give one --batch and one --length, or omit --measure.")
    options = {"dtype": default_dtype(model, "cuda"), **given}
    variants = [catalog.variant(model, size, **{**options, "length": tokens}) for size in batches for tokens in lengths]
    query = EstimateQuery(card, launch, tf32, torch, fill)
    if generate is not None:
        generation = opening.first_that_knows(
            lambda session: query.generation(session, variants[0], generate), lambda _: True
        )
        emit_json(generation.to_json()) if as_json else show(prediction_tables.generation(generation))
        return
    found = [estimated(variant, query) for variant in variants]
    if is_curve:
        emit_json({"curve": [one.to_json() for one in found]}) if as_json else show(prediction_tables.curve(found))
        if png is not None:
            from farm.pages.plots import draw_estimates

            draw_estimates(found, png, over="batch" if len(batches) > 1 else "length")
            say(f"Drawn to {png}")
        return
    (one,) = found
    before = None
    if measures:
        before = one
        _measure(before, query, measure, seconds)
        with opening.open_database().read() as session:
            one = query.estimate(session, variants[0])
    if as_json:
        emit_json({**one.to_json(), "before": before.to_json()} if before else one.to_json())
        return
    if before:
        show(prediction_tables.narrowed(before, one))
    show(prediction_tables.estimate(one))


def estimated(variant: Variant, query: EstimateQuery) -> Estimate:
    """An estimate from one's own database, or from the readings of the package if one's own has none."""
    return opening.first_that_knows(
        lambda session: query.estimate(session, variant), lambda found: found.covered_tuples > 0
    )


def _measure(found: Estimate, query: EstimateQuery, measure: int | None, seconds: float | None) -> None:
    """Measure the tuples that narrow an estimate most on a card of this host.

    The next estimate reads one database, so the readings of the package are imported if this estimate used them.
    """
    from farm.api.measure import measure_tuples
    from farm.errors import NoSuchCard
    from farm.estimate.query import import_packaged
    from farm.settings import settings
    from farm.store.database import Database

    own = [card for card in opening.own_cards() if card.model == found.card_model]
    if not own:
        raise NoSuchCard(
            f"No card of this host is a {found.card_model}.",
            "Measure on a host with one: `farm predict plan` writes a measurement file of what helps most.",
        )
    chosen = found.to_measure(measure, seconds)
    labels = {one.operator_id: one.label for one in found.missing}
    database = Database(settings().database)
    try:
        database.upgrade()
        say(f"Measuring {len(chosen)} tuples on {own[0]}: {', '.join(labels[id_] for id_ in chosen[:3])} ...")
        measure_tuples(
            [found.specs[id_] for id_ in chosen],
            database=database,
            card=own[0].id,
            protocol=query.protocol(own[0].kind),
        )
        if import_packaged(database, found, query):
            say("Imported the readings of the package into your database, as `farm import` does.")
    finally:
        database.close()
