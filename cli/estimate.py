"""``farm estimate``: what a model costs from readings, and from predictions where there are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import opening
from cli.options import AsJson, Model, variant_options
from cli.output import emit_json, say, show

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.estimate.estimate import Estimate
    from farm.estimate.generation import Generation
    from farm.store.database import Database
    from farm.types.protocol import Protocol, Variant


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
    tf32: Annotated[bool, typer.Option("--tf32", help="With readings that allowed TF32.")] = False,
    torch: Annotated[
        str, typer.Option(help="With readings of this version, e.g. 2.11. Default: what covers most.")
    ] = "",
    fill: Annotated[
        str,
        typer.Option(
            help="Predict what no reading covers: auto (what is kept for the card), roofline (a lower bound), or none."
        ),
    ] = "auto",
    measure: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="K", help="Read the K tuples that narrow it most on this host's card, and say it again."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, metavar="S", help="As --measure, as many as that many seconds of a card take."),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(help="Of a text of so many tokens after a prompt of --length: the prompt, and a decode for each."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw the curve (.png, .svg or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate what a model costs on a card, from readings, and from predictions where there are none: runs nothing."""
    from farm.errors import UsageError
    from farm.estimate.predictor_choice import FILLS
    from farm.models import catalog
    from farm.pages.plots import check_path
    from farm.requests.partial_request import default_dtype

    if fill not in FILLS:
        raise UsageError(f"There is no predictor '{fill}'.", f"Give --fill one of {', '.join(FILLS)}.")
    batches, lengths = _sizes(batch, "--batch"), _sizes(length, "--length") if length is not None else [None]
    curve = len(batches) * len(lengths) > 1
    if png is not None:
        if not curve:
            raise UsageError("There is no curve to draw.", "Give several sizes: --batch 1..256")
        check_path(png)
    if generate is not None and (fill not in ("auto", "none") or curve or measure or seconds):
        raise UsageError(
            "What a text costs is summed from readings alone, of one size.", "Leave --fill or --generate away."
        )
    if given.get("step") and generate is not None:
        raise UsageError("A training step writes no text.", "Leave --step or --generate away.")
    if (measure or seconds) and curve:
        raise UsageError("Tuples are read for one size.", "Give one --batch and one --length, or leave --measure away.")

    def variant_of(batch: int, length: int | None) -> Variant:
        return catalog.variant(model, batch, **{"dtype": default_dtype(model, "cuda"), **given, "length": length})

    variants = [variant_of(one, size) for one in batches for size in lengths]
    how = _How(card, launch, tf32, torch, fill, generate)
    if curve:
        _curve([_estimated(variant, how) for variant in variants], len(batches) > 1, png, as_json)
        return
    found = opening.first_that_knows(lambda session: how.ask(session, variants[0]), _knows)
    before = None
    if measure or seconds:
        before = _as_estimate(found)
        _read(before, how, measure, seconds)
        with opening.open_database().read() as session:
            found = how.ask(session, variants[0])
    if as_json:
        told = found.to_json()
        emit_json({**told, "before": before.to_json()} if before is not None else told)
        return
    from cli import estimate_table
    from farm.estimate.estimate import Estimate

    if before is not None:
        show(estimate_table.narrowed(before, _as_estimate(found)))
    show(estimate_table.estimate(found) if isinstance(found, Estimate) else estimate_table.generation(found))


@dataclasses.dataclass(frozen=True)
class _How:
    """How an estimate is asked for, beside its variant."""

    card: str
    launch: str | None
    tf32: bool
    torch: str
    fill: str
    generate: int | None

    def ask(self, session: Session, variant: Variant) -> Estimate | Generation:
        from farm.estimate import estimate as estimates
        from farm.estimate.predictor_choice import filling

        model = estimates.card_model_named(session, self.card)
        kind, roofline = estimates.peaks_of(session, model, variant.computes_in, self.tf32)
        protocol = self.protocol(kind)
        if self.generate is not None:
            from farm.estimate.generation import generation

            return generation(session, variant, self.generate, model, protocol=protocol, torch=self.torch)
        from cli.predict import folders

        filled = filling(session, self.fill, model, roofline, protocol, folders(), self.torch)
        return estimates.estimate(
            session,
            variant,
            model,
            protocol=protocol,
            torch=self.torch,
            predictor=filled.predictor,
            notes=filled.notes,
        )

    def protocol(self, kind: str) -> Protocol:
        from farm.types.protocol import Protocol

        return Protocol(launch=self.launch or ("eager" if kind == "cpu" else "graph"), tf32=self.tf32)  # type: ignore[arg-type]


def _knows(found: Estimate | Generation) -> bool:
    """Whether some reading answers: before predictions alone do, the package's readings are asked."""
    return getattr(found, "covered_tuples", 1) > 0


def _estimated(variant: Variant, how: _How) -> Estimate:
    ask: Callable[[Session], Estimate | Generation] = lambda session: how.ask(session, variant)  # noqa: E731
    return _as_estimate(opening.first_that_knows(ask, _knows))


def estimated(variant: Variant, card: str = "", torch: str = "") -> Estimate:
    """What a variant costs as `farm estimate` says it without further options."""
    return _estimated(variant, _How(card, None, False, torch, "auto", None))


def _as_estimate(found: Estimate | Generation) -> Estimate:
    from farm.estimate.estimate import Estimate

    assert isinstance(found, Estimate)
    return found


def _sizes(text: str, option: str) -> list[int]:
    """`32`, `1,8,32`, or `1..256`, which doubles."""
    from farm.errors import UsageError

    try:
        if ".." in text:
            first, last = (int(part) for part in text.split("..", 1))
            found: list[int] = []
            while first <= last and first > 0 and len(found) < 64:
                found.append(first)
                first *= 2
            found += [last] if found and found[-1] != last else []
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"{option} '{text}' is no size.", f"Give {option} 32, {option} 1,8,32, or {option} 1..256.")
    return list(dict.fromkeys(found))


def _curve(found: list[Estimate], over_batches: bool, png: Path | None, as_json: bool) -> None:
    if as_json:
        emit_json({"curve": [one.to_json() for one in found]})
    else:
        from cli import estimate_table

        show(estimate_table.curve(found))
    if png is None:
        return
    from farm.pages.plots import draw_curve

    totals = [one.total_time for one in found]
    values = [total.value if total else one.time.value for total, one in zip(totals, found, strict=True)]
    ranges = [
        (total.low, total.high)
        if total and total.low is not None and total.high is not None
        else (one.time.value - one.time.half_width, one.time.value + one.time.half_width)
        for total, one in zip(totals, found, strict=True)
    ]
    draw_curve(
        [one.variant.batch if over_batches else one.variant.length for one in found],
        [value / 1e3 for value in values],
        [low / 1e3 for low, _ in ranges],
        [high / 1e3 for _, high in ranges],
        png,
        f"{found[0].variant.model} on {found[0].card_model}",
        name="batch" if over_batches else "length",
    )
    say(f"Drawn to {png}")


def _read(found: Estimate, how: _How, measure: int | None, seconds: float | None) -> None:
    """Read the tuples that narrow the estimate most on this host's card of that model, and keep the readings.

    What comes with the package goes into the same database, where the estimate rests on it: the next one rests on both.
    """
    from farm.api.measure import measure_tuples
    from farm.errors import NoSuchCard, UsageError
    from farm.estimate.estimate import SECONDS_A_TUPLE
    from farm.settings import settings
    from farm.store.database import Database

    own = [card for card in opening.own_cards() if card.model == found.card_model]
    if not own:
        raise NoSuchCard(
            f"No card of this host is a {found.card_model}.",
            "Measure where there is one: `farm predict plan` writes a measurement file of what helps most.",
        )
    if not found.narrowing:
        raise UsageError("Readings cover every tuple: there is nothing left to measure.", "Leave --measure away.")
    each_s = found.measuring_rest_s / len(found.missing) if found.missing else SECONDS_A_TUPLE
    number = min(measure or len(found.narrowing), int((seconds or 1e9) / each_s) or 1)
    labels = {one.operator_id: one.label for one in found.missing}
    chosen = list(found.narrowing[:number])
    database = Database(settings().database)
    try:
        database.upgrade()
        say(f"Reading {len(chosen)} tuples on {own[0]}: {', '.join(labels[id_] for id_ in chosen[:3])} ...")
        measure_tuples(
            [found.specs[id_] for id_ in chosen],
            database=database,
            card=own[0].id,
            protocol=how.protocol(own[0].kind),
        )
        _take_packaged(database, found, how)
    finally:
        database.close()


def _take_packaged(database: Database, found: Estimate, how: _How) -> None:
    """Import the readings that come with the package, if the database answers with less than an estimate had."""
    from farm.exchange.importer import import_export
    from farm.exchange.packaged import packaged_files

    with database.read() as session:
        own = _as_estimate(dataclasses.replace(how, fill="none").ask(session, found.variant))
    if own.covered_tuples < found.covered_tuples:
        for path in packaged_files():
            import_export(database, path)
        say("The readings that come with the package are in your database now, as by `farm import`.")
