"""``farm models`` lists the catalog, ``farm operators`` the operator tuples of one model. Both
measure nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cli import lists
from cli.options import AsJson, Model, VariantFields, known
from cli.output import answer, emit_json, first_that_knows, say, say_differences, show

if TYPE_CHECKING:
    from farm.models.entry import ModelEntry
    from farm.types.protocol import Variant

#: The fields of a `ModelEntry` in a row.
_FIELDS = (
    "name task input_size smallest_size fixed_size origin parameters flops length longest phases"
)
_KINDS = {"cuda": "a GPU", "cpu": "a CPU", "simulated": "a simulated card"}


def models(pattern: str | None = None, source: str | None = None, as_json: AsJson = False) -> None:
    """List the models of the catalog, with parameters and FLOPs of one pass at batch 1."""
    from farm.errors import UnknownModel
    from farm.models import catalog
    from farm.models.source import install_line, is_installed

    every = catalog.names(source=source)
    # timm's many models are listed only on request, or if nothing else matches.
    few = every if source else [name for name in every if catalog.find(name).origin != "timm"]
    names = few
    if pattern:
        if catalog.is_pattern(pattern):
            names = catalog.matching(f"{source}/{pattern}" if source else pattern)
        else:
            names = [name for name in few if pattern.lower() in name.lower()]
            names = names or [name for name in every if pattern.lower() in name.lower()]
        if not names:
            raise UnknownModel.named(pattern, every)
    entries = [catalog.find(name) for name in names]
    rows = [_row(entry) for entry in entries]
    answer(as_json, {"models": rows}, lambda: lists.models(rows))
    if as_json:
        return
    origins = {entry.origin for entry in entries}
    for origin in catalog.SOURCES:
        if origin.name in origins and not is_installed(origin):
            say(
                f"→ The package of {origin.name} is not installed; its models need it: "
                f"{install_line(origin)}"
            )
    if not pattern and not source:
        say(f"→ `farm models --source timm` lists {len(catalog.names(source='timm'))} more models.")
    say(
        "→ The setting `models` adds your own models (docs/own-models.md): "
        'FARM_MODELS=\'{"my_net": "my_package.models:my_net"}\''
    )


def _row(entry: ModelEntry) -> dict[str, Any]:
    notes = ["fixed input size"] if entry.fixed_size and entry.input_size else []
    row = {name: getattr(entry, name) for name in _FIELDS.split()}
    if entry.fixed_size:
        row["smallest_size"] = entry.input_size
    return row | {"note": ", ".join([*notes, *entry.phases])}


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
    from farm.models import catalog
    from farm.report.operators import compiled_operators
    from farm.report.operators import operators as list_operators
    from farm.requests.partial_request import usual_variant

    kind = kind_of_cards() if batch is None else ""
    variant = usual_variant(model, kind or "cuda", batch=batch, **given)
    if compare_inputs is not None:
        _compare_inputs(variant, known(compare_inputs), kind, batch, given, as_json=as_json)
        return
    say_differences([variant])
    if variant.compile:
        listed = first_that_knows(
            lambda session: compiled_operators(session, variant, kind or "cuda")
        )
    else:
        listed = list_operators(variant)
    if listed.refusal is not None and not listed.gaps:
        raise listed.refusal
    if as_json:
        emit_json(listed.to_json())
    elif listed.rows:
        default = f" (the default batch on {_KINDS[kind]})" if kind else ""
        card = f", kernels of {listed.card_model}" if listed.card_model else ""
        show(
            lists.operators(
                listed.to_json()["operators"], f"{catalog.title_of(listed.variant)}{card}{default}"
            )
        )
    for label, reason in listed.mismatches.items():
        say(f"→ {label} is not measured: {reason}.")
    if listed.note_on_values:
        say(f"→ {listed.note_on_values}")
    if listed.refusal is not None:
        raise listed.refusal


def _compare_inputs(
    variant: Variant,
    other: str,
    kind: str,
    batch: int | None,
    given: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from farm.report.operators import compare_inputs
    from farm.requests.partial_request import usual_variant

    compared = compare_inputs(variant, usual_variant(other, kind or "cuda", batch=batch, **given))
    answer(as_json, compared.to_json(), lambda: lists.compared_inputs(compared.to_json()))
