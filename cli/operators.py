"""``farm operators``: list the operator tuples of a model. Measures nothing; needs no broker, database or card."""

from __future__ import annotations

import typer

from cli.options import AsJson, Model, VariantFields
from cli.output import emit_json, show

_KINDS = {"cuda": "a GPU", "cpu": "a CPU", "simulated": "a simulated card"}


def operators(
    model: Model,
    *,
    batch: int | None = typer.Option(
        None, "-b", "--batch", help="Batch size. Default: what suits the card, as in `farm run`."
    ),
    given: VariantFields,
    as_json: AsJson = False,
) -> None:
    """Show a model's operator tuples with counts, FLOPs and bytes."""
    from farm.jobs.card_choice import kind_of_cards
    from farm.models import catalog
    from farm.report.operators import operators as list_operators
    from farm.requests.partial_request import DEFAULTS, default_dtype

    catalog.find(model)  # before looking for cards
    kind = kind_of_cards() if batch is None else ""
    options = {"dtype": default_dtype(model, kind or "cuda"), **given}
    listed = list_operators(catalog.variant(model, DEFAULTS[kind].batch if batch is None else batch, **options))
    if listed.refusal is not None and not listed.gaps:
        raise listed.refusal
    if as_json:
        emit_json(listed.to_json())
    elif listed.rows:
        from cli import lists

        default = f" (the default batch on {_KINDS[kind]})" if kind else ""
        show(lists.operators(listed.to_json()["operators"], f"{catalog.title_of(listed.variant)}{default}"))
    if listed.refusal is not None:
        raise listed.refusal
