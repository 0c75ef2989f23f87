"""``farm models`` lists the catalog, ``farm operators`` the operator tuples of one model. Both
measure nothing.
"""

from __future__ import annotations

from cli import lists
from cli.options import AsJson, Model, VariantFields
from cli.output import answer, emit_json, first_that_knows, say, say_differences, show

_KINDS = {"cuda": "a GPU", "cpu": "a CPU", "simulated": "a simulated card"}


def models(pattern: str | None = None, source: str | None = None, as_json: AsJson = False) -> None:
    """List the models of the catalog, with parameters and FLOPs of one pass at batch 1."""
    from farm.report.models import models as list_models

    listed = list_models(pattern or "", source or "")
    answer(as_json, {"models": listed.rows}, lambda: lists.models(listed.rows))
    if as_json:
        return
    for name, step in listed.to_install.items():
        say(f"→ The package of {name} is not installed; its models need it: {step}")
    if listed.further:
        say(f"→ `farm models --source timm` lists {listed.further} more models.")
    say(
        "→ The setting `models` adds your own models (docs/own-models.md): "
        'FARM_MODELS=\'{"my_net": "my_package.models:my_net"}\''
    )


def operators(
    model: Model,
    *,
    batch: int | None = None,
    compare_inputs: str | None = None,
    given: VariantFields,
    as_json: AsJson = False,
) -> None:
    """Show a model's operator tuples with counts, FLOPs and bytes."""
    from farm.jobs.cards import kind_of_cards
    from farm.report.kernels import listed_kernels
    from farm.report.operators import operators as list_operators
    from farm.requests.partial_request import usual_variant

    kind = kind_of_cards() if batch is None else ""
    resolved = usual_variant(model, kind or "cuda", batch=batch, **given)
    if compare_inputs is not None:
        from farm.report.operators import compare_inputs as compared_inputs

        other = usual_variant(compare_inputs, kind or "cuda", batch=batch, **given)
        sides = resolved.extraction(), other.extraction()
        compared = compared_inputs(resolved.variant.model, *sides).to_json()
        answer(as_json, compared, lambda: lists.compared_inputs(compared))
        return
    say_differences([resolved])
    if resolved.variant.generates_kernels:
        variant = resolved.versioned()
        listed = first_that_knows(lambda session: listed_kernels(session, variant, kind or "cuda"))
    else:
        listed = list_operators(resolved.variant, resolved.extraction())
    if listed.refusal is not None and not listed.gaps:
        raise listed.refusal
    if as_json:
        emit_json(listed.to_json())
    elif listed.rows:
        origin = ""
        if kind and resolved.model.usual_batch(0):
            origin = " (the batch of its example inputs)"
        elif kind:
            origin = f" (the default batch on {_KINDS[kind]})"
        card = f", kernels of {listed.card_model}" if listed.card_model else ""
        show(lists.operators(listed.to_json()["operators"], f"{resolved.title}{card}{origin}"))
    for label, reason in listed.mismatches.items():
        say(f"→ {label} is not measured: {reason}.")
    if listed.note_on_values:
        say(f"→ {listed.note_on_values}")
    if listed.refusal is not None:
        raise listed.refusal
