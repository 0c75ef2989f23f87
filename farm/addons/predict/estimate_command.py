"""``farm estimate``: the cost of a model from readings, and from predictions where there are
none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cli import output
from cli.options import AsJson, Model, VariantFields, sizes
from cli.output import answer, emit_json, say, show
from farm.errors import NoReadings, NoSuchCard, UsageError

if TYPE_CHECKING:
    from farm.addons.predict.estimate import Estimate
    from farm.addons.predict.query import EstimateQuery
    from farm.requests.partial_request import ResolvedVariant
    from farm.types.protocol import Variant


@dataclass(frozen=True)
class EstimateOptions:
    """The options of `farm estimate` beside the variant; `options.toml` has their texts."""

    batch: str | None = None
    length: str | None = None
    given: VariantFields = field(default_factory=dict)
    card: str = ""
    launch: str | None = None
    tf32: bool = False
    torch: str = ""
    fill: str = "auto"
    measure: int | None = None
    budget: float | None = None
    generate: int | None = None
    png: Path | None = None
    as_json: AsJson = False

    def check(self, *, is_curve: bool, training: bool) -> None:
        """Raise `UsageError` if two options do not go together."""
        generates, measures = self.generate is not None, bool(self.measure or self.budget)
        if self.png is not None:
            if not is_curve:
                raise UsageError(
                    "--png draws a curve, but only one size is given.",
                    "Give several sizes: -b 1..256",
                )
            from farm.addons.pages.plots import check_path

            check_path(self.png)
        if (generates or measures) and (is_curve or (generates and measures)):
            problem = (
                "--generate, --measure and --budget need one size, and --generate excludes the "
                "others."
            )
            raise UsageError(
                problem, "Give one --batch and one --length, and one of these options."
            )
        if training and generates:
            raise UsageError("A training step generates no text.", "Omit --step or --generate.")


def estimate(model: Model, options: EstimateOptions) -> None:
    """Estimate the cost of a model on a card from readings, and from predictions where there are
    none. Runs nothing.
    """
    from farm.addons.predict import tables
    from farm.addons.predict.query import EstimateQuery
    from farm.requests.partial_request import usual_variant

    query = EstimateQuery(options.card, options.launch, options.tf32, options.torch, options.fill)
    batches, lengths = sizes("--batch", options.batch), sizes("--length", options.length)
    options.check(
        is_curve=len(batches) * len(lengths) > 1, training=bool(options.given.get("step"))
    )
    kind = query.kind()
    variants = [
        usual_variant(model, kind, batch=size, length=tokens, **options.given)
        for size, tokens in itertools.product(batches, lengths)
    ]
    output.say_differences(variants)
    if (tokens := options.generate) is not None:
        generated = output.first_that_knows(
            lambda session: query.generation(session, variants[0].variant, tokens),
            lambda known: any(phase.covered_tuples for phase in known.phases),
        )
        answer(options.as_json, generated, lambda: tables.generation(generated))
    elif len(variants) > 1:
        _curve(variants, query, options, over="batch" if len(batches) > 1 else "length")
    else:
        current, before = estimated(variants[0], query), None
        if options.measure or options.budget:
            before = current
            _measure(before, query, options)
            with output.open_database().read() as session:
                current = query.estimate(session, current.variant)
        if options.as_json:
            emit_json({**current.to_json(), **({"before": before.to_json()} if before else {})})
        else:
            level = min(current.level, before.level) if before else current.level
            if before:
                show(tables.narrowed(before, current, level))
            show(tables.estimate(variants[0].title, current, level))


def estimated(resolved: ResolvedVariant, query: EstimateQuery) -> Estimate:
    """An estimate from one's own database, or from the readings of the package if one's own has
    none.
    """
    variant = resolved.versioned()
    output.doing(f"farm is estimating {resolved.title}")
    return query.answer(variant, say=say)


def _curve(
    variants: list[ResolvedVariant], query: EstimateQuery, options: EstimateOptions, *, over: str
) -> None:
    from farm.addons.predict import tables
    from farm.addons.predict.estimate import too_large_from

    estimates: list[Estimate] = []
    without: dict[Variant, NoReadings] = {}
    for resolved in variants:
        try:
            estimates.append(estimated(resolved, query))
        except NoReadings as error:
            without[resolved.variant] = error
    if not estimates:
        raise next(iter(without.values()))
    too_large = too_large_from(estimates)
    shown = {
        "curve": [estimate.to_json() for estimate in estimates],
        "without_estimate": [
            {"variant": variant.to_json(), "reason": why.message}
            for variant, why in without.items()
        ],
        "too_large_from": too_large and too_large.variant.to_json(),
    }
    answer(options.as_json, shown, lambda: tables.curve(estimates))
    for why in without.values():
        say(f"{why.message} {why.next_step}")
    if options.png is not None:
        from farm.addons.predict.plots import draw_estimates

        draw_estimates(estimates, options.png, over=over)
        say(f"Drawn to {options.png}")


def _measure(found: Estimate, query: EstimateQuery, options: EstimateOptions) -> None:
    """Measure the tuples that narrow an estimate most on a card of this host."""
    from farm.addons.predict.query import import_packaged
    from farm.jobs.cards import own_cards
    from farm.jobs.in_process import measure_tuples

    cards = [card for card in own_cards(say) if card.model == found.card_model]
    if not cards:
        raise NoSuchCard(
            f"This host has no {found.card_model} to measure on.",
            "Measure on a host that has one: `farm predict plan` writes a measurement file of the "
            "most useful tuples.",
        )
    chosen = found.to_measure(options.measure, options.budget)
    labels = {entry.operator_id: entry.label for entry in found.missing}
    with output.writable_database() as database:
        say(
            f"Measuring {len(chosen)} tuples on {cards[0]}: "
            f"{', '.join(labels[id_] for id_ in chosen[:3])} ..."
        )
        specs, protocol = [found.specs[id_] for id_ in chosen], query.protocol(cards[0].kind)
        measure_tuples(specs, database=database, card=cards[0].id, protocol=protocol)
        if import_packaged(database, found, query):
            say("Also imported the packaged readings into your database, as `farm import` does.")
