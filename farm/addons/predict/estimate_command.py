"""``farm estimate``: the cost of a model from readings, and from predictions where there are
none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
    from farm.types.variant import Variant


@dataclass(frozen=True)
class EstimateOptions:
    """The options of `farm estimate` beside the variant; `options.toml` has their texts."""

    batch: str | None = None
    length: str | None = None
    given: VariantFields = field(default_factory=dict)
    card: str = ""
    card_file: list[Path] | None = None
    price: str = ""
    why: bool = False
    launch: str | None = None
    tf32: bool = False
    torch: str = ""
    fill: str = "auto"
    measure: int | None = None
    budget: float | None = None
    generate: int | None = None
    png: Path | None = None
    as_json: AsJson = False

    def cards(self) -> list[str]:
        """The cards to estimate for; "" for the only one with readings."""
        from farm.types.card_file import card_of_file

        names = [name.strip() for name in self.card.split(",")]
        described = [card_of_file(path) for path in self.card_file or ()]
        return list(dict.fromkeys([*filter(None, names), *described])) or [""]

    def queries(self) -> dict[str, EstimateQuery]:
        """The estimate of each card."""
        from farm.addons.predict.query import EstimateQuery

        return {
            card: EstimateQuery(card, self.launch, self.tf32, self.torch, self.fill)
            for card in self.cards()
        }

    def check(self, *, is_curve: bool, training: bool, cards: int) -> None:
        """Raise `UsageError` if two options do not go together."""
        if cards > 1 and (self.png or self.generate or self.measure or self.budget):
            raise UsageError(
                "--generate, --measure, --budget and --png need one card.",
                "Give one --card, or omit these options.",
            )
        shown_otherwise = self.generate is not None or self.measure or self.budget or self.png
        if self.why and (cards > 1 or is_curve or shown_otherwise):
            raise UsageError(
                "--why explains one size on one card.",
                "Give one --batch, one --length and one --card, and omit --generate, --measure, "
                "--budget and --png.",
            )
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
    from farm.addons.predict.side_by_side import Offer, prices_of
    from farm.requests.partial_request import usual_variant

    queries = options.queries()
    prices = prices_of(options.price, list(queries))
    batches, lengths = sizes("--batch", options.batch), sizes("--length", options.length)
    options.check(
        is_curve=len(batches) * len(lengths) > 1,
        training=bool(options.given.get("step")),
        cards=len(queries),
    )

    def variants_for(query: EstimateQuery) -> list[ResolvedVariant]:
        kind = query.kind()
        return [
            usual_variant(model, kind, batch=size, length=tokens, **options.given)
            for size, tokens in itertools.product(batches, lengths)
        ]

    card, query = next(iter(queries.items()))
    variants = variants_for(query)
    output.say_differences(variants)
    if len(queries) > 1:
        asked = []
        for its_card, its_query in queries.items():
            for variant in variants_for(its_query):
                asked.append((variant, its_query, prices.get(its_card)))
        _on_cards(asked, options)
        return
    if options.why:
        _show_why(variants[0], query, options)
        return
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
                current = replace(query, fitted={}).estimate(session, current.variant)
        offer = Offer(current, prices.get(card))
        if options.as_json:
            emit_json({**offer.to_json(), **({"before": before.to_json()} if before else {})})
        else:
            level = min(current.level, before.level) if before else current.level
            if before:
                show(tables.narrowed(before, current, level))
            shown = replace(offer, estimate=current.with_memory())
            show(tables.estimate(variants[0].title, shown, level))


def estimated(resolved: ResolvedVariant, query: EstimateQuery) -> Estimate:
    """An estimate from one's own database, or from the readings of the package if one's own has
    none.
    """
    variant = resolved.versioned()
    output.doing(f"farm is estimating {resolved.title}")
    return query.answer(variant, say=say)


def _show_why(resolved: ResolvedVariant, query: EstimateQuery, options: EstimateOptions) -> None:
    from cli import report_tables

    variant = resolved.versioned()
    output.doing(f"farm is estimating {resolved.title}")
    explained = output.first_that_knows(
        lambda session: query.why(session, variant),
        lambda known: any(row.line.origin == "reused" for row in known.rows),
    )
    answer(options.as_json, explained, lambda: report_tables.why(explained))


def _on_cards(
    asked: Iterable[tuple[ResolvedVariant, EstimateQuery, float | None]], options: EstimateOptions
) -> None:
    """Estimates for several cards beside each other, with the price of an hour of each."""
    from farm.addons.predict import tables
    from farm.addons.predict.side_by_side import Offer

    offers: list[Offer] = []
    without: list[tuple[str, NoReadings]] = []
    for resolved, query, per_hour in asked:
        try:
            offers.append(Offer(estimated(resolved, query), per_hour))
        except NoReadings as error:
            without.append((query.card, error))
    if not offers:
        raise without[0][1]
    shown = {
        "cards": [offer.to_json() for offer in offers],
        "without_estimate": [
            {"card": card, "reason": why.message, "next_step": why.next_step}
            for card, why in without
        ],
    }
    answer(
        options.as_json,
        shown,
        lambda: tables.side_by_side(
            [replace(offer, estimate=offer.estimate.with_memory()) for offer in offers]
        ),
    )
    for _, why in without:
        say(f"{why.message} {why.next_step}")


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
    missing = [found.missing_by_id[id_].needed for id_ in chosen]
    with output.writable_database() as database:
        say(
            f"Measuring {len(chosen)} tuples on {cards[0]}: "
            f"{', '.join(needed.label for needed in missing[:3])} ..."
        )
        specs = [needed.spec for needed in missing]
        protocol = query.protocol(cards[0].kind)
        measure_tuples(specs, database=database, card=cards[0].id, protocol=protocol)
        if import_packaged(database, found, query):
            say("Also imported the packaged readings into your database, as `farm import` does.")
