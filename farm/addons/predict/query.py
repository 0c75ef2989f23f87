"""Queries for the commands: an estimate with its options and predictor, and training data for
predictors.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import ChainMap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session, select

from farm.addons.predict import stored_predictor
from farm.addons.predict.collectives import on_several_cards
from farm.addons.predict.compiled_models import (
    compiled_predictor,
    kernels_without_card,
    notes_on_kernels,
    why_lower_bound,
)
from farm.addons.predict.dataset import (
    Dataset,
    MeasuredModel,
    TrainingRow,
    datasets,
    measured_models,
    stored_card_rates,
)
from farm.addons.predict.estimate import CompileGain, Estimate
from farm.addons.predict.estimating import estimate
from farm.addons.predict.generation import Generation, generation
from farm.addons.predict.stored_predictor import Predictor, RooflinePredictor, StoredPredictor
from farm.addons.predict.tile_roofline import card_rates
from farm.addons.predict.transfer import (
    SourceCosts,
    TransferredPredictor,
    data_sheet_model,
    distance,
)
from farm.addons.predict.why import why_of
from farm.errors import Ambiguous, NoDatabase, UsageError, did_you_mean, writing_to
from farm.exchange.first_answer import first_answer
from farm.exchange.packaged import database_of, export_at, packaged_database, packaged_files
from farm.requests.partial_request import title_of
from farm.settings import settings
from farm.settings.shared_files import replacing_file
from farm.store import tables
from farm.store.captures import capture_to_sum, kernels_unknown, placed_calls, stored_tuples
from farm.store.card_models import card_model_named, peaks_of
from farm.store.columns import OF_TUPLES, OPERATOR, PROTOCOL, READING
from farm.store.database import Database, open_database
from farm.store.reuse import sound_readings
from farm.types.card_kind import device_type_of, is_gpu_kind, usual_launch
from farm.types.data_sheets import NamedCard, data_sheet, data_sheets, sheet_name_of
from farm.types.protocol import Protocol
from farm.types.tuple import NeededTuple
from farm.types.variant import Variant
from farm.verdict.causes import Why

if TYPE_CHECKING:
    from farm.training.extract import Extraction

FILLS = ("auto", "none", "roofline")
#: A predictor, notes, and why a tuple has no value.
FoundPredictor = tuple[StoredPredictor | TransferredPredictor | None, list[str], str]
# readings of one card from which its power is predicted apart from that of its model
LEAST_OF_CARD = 20


@dataclass(frozen=True)
class EstimateQuery:
    """The options of an estimate, apart from the variant. Raises `UsageError` if `fill` is
    unknown.
    """

    card: str = ""  # part of the card model's name, or a `NamedCard`
    launch: str | None = None  # graph or eager; None: the default of the card
    tf32: bool = False
    torch: str = ""  # a version, or its beginning
    # a predictor of `FILLS`; auto: the card's stored one, if any; roofline: from the card's peaks
    fill: str = "auto"
    #: Predictors by database and conditions: fitted once for all models that a query estimates.
    #: After new readings, use a new query.
    fitted: dict[tuple[object, ...], FoundPredictor] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise UsageError(
                f"There is no predictor '{self.fill}'.", f"Give --fill one of {', '.join(FILLS)}."
            )

    def protocol(self, kind: str) -> Protocol:
        launch = self.launch or usual_launch(kind)
        return Protocol(launch=launch, tf32=self.tf32)  # type: ignore[arg-type]

    def kind(self, database: Database | None = None) -> str:
        """The kind of the card, by a database (see `first_answer`); "cuda" if unknown: the estimate
        will say why.
        """
        with contextlib.suppress(NoDatabase, UsageError):
            return first_answer(
                lambda session: peaks_of(session, self.card_model(session), "float32")[0],
                database=database,
            )
        return "cuda"

    def answer(
        self, variant: Variant, needed: Sequence[NeededTuple] | None = None, **where: Any
    ) -> Estimate:
        """Estimate the cost of a model from a database (`where`: see `first_answer`). A compiled
        model that no card has compiled is compared with the model without the compiler."""
        answer = first_answer(
            lambda session: self.estimate(session, variant, needed),
            lambda found: found.covered_tuples > 0,
            **where,
        )
        if answer.gain is None:
            return answer
        eager = self.answer(replace(variant, compile=""), **{**where, "say": lambda _: None})
        return replace(answer, gain=answer.gain.over(eager))

    def estimate(
        self, session: Session, variant: Variant, needed: Sequence[NeededTuple] | None = None
    ) -> Estimate:
        """Estimate the cost of a model (`farm.addons.predict.estimating.estimate`). A note names a
        predictor that cannot be read."""
        model = self.card_model(session)
        kind, roofline = peaks_of(session, model, variant.computes_in, self.tf32)
        is_unlisted = needed is None and self._is_unlisted(session, variant, model, kind)
        protocol, notes = self.protocol(kind), list[str]()
        predictor: Predictor | None = None
        unfilled = "`--fill none` excludes predictions"
        if self.fill == "roofline":
            predictor = RooflinePredictor(roofline)
        elif self.fill == "auto":
            predictor, notes, unfilled = self.predictor(session, model, protocol, kind)
        if variant.generates_kernels and isinstance(predictor, StoredPredictor):
            predictor = compiled_predictor(session, predictor)
            unfilled = "no generated kernel has a reading to predict others from"
        unlisted = self._listed(variant, model, kind) if is_unlisted else None
        if unlisted is not None:
            needed = unlisted.needed()
        arguments = {"predictor": predictor, "unfilled": unfilled, "notes": notes, "needed": needed}
        answer = estimate(session, variant, model, protocol, torch=self.torch, **arguments)  # type: ignore[arg-type]
        if unlisted is None:
            return answer
        roofline_us = sum(roofline.call_us(entry) * entry.all_calls for entry in needed or ())
        notes = [*notes_on_kernels(variant), *answer.notes]
        reason = answer.incomplete_reason
        reason = reason or why_lower_bound(entry.needed for entry in answer.missing)
        return replace(
            answer,
            gain=CompileGain(roofline_us),
            notes=tuple(notes),
            incomplete_reason=reason,
        )

    def _is_unlisted(self, session: Session, variant: Variant, model: str, kind: str) -> bool:
        """True for a compiled forward pass whose kernels no card of the model has listed. Raises
        `NoReadings` for another compiled variant that no card has listed."""
        if not variant.generates_kernels:
            return False
        device_type, launch = device_type_of(kind), self.protocol(kind).launch
        with packaged_database().read() as packaged:
            for readings in (session, packaged):
                if capture_to_sum(readings, variant, device_type, launch, model) is not None:
                    return False
        if variant.step or not is_gpu_kind(kind) or self.fill == "none":
            raise kernels_unknown(variant, title_of(variant), model)
        return True

    def _listed(self, variant: Variant, model: str, kind: str) -> Extraction:
        """The kernels of a compiled forward pass, by the compiler without a card."""
        multiprocessors = data_sheet(kind, model).multiprocessors
        return kernels_without_card(replace(variant, compile="default"), multiprocessors)

    def why(self, session: Session, variant: Variant) -> Why:
        """Explain the estimated time of a model; raises as `estimate`."""
        model = self.card_model(session)
        kind, roofline = peaks_of(session, model, variant.computes_in, self.tf32)
        device_type = device_type_of(kind)
        launch = self.protocol(kind).launch
        stored = capture_to_sum(session, variant, device_type, launch, model)
        if self._is_unlisted(session, variant, model, kind):
            unlisted = self._listed(variant, model, kind)
            needed = unlisted.needed()
            order = [call.tuple_id for call in unlisted.capture.calls]
        elif stored is not None:
            needed = stored_tuples(session, variant, device_type, launch, model)
            order = [call.operator_id for call in placed_calls(session, stored, "normal")]
        elif variant.generates_kernels:
            raise kernels_unknown(variant, title_of(variant), model)
        else:
            from farm.training.extract import extract

            extraction = extract(variant, device_type=device_type)
            needed = extraction.needed()
            order = [call.tuple_id for call in extraction.capture.calls]
        estimated = self.estimate(session, variant, needed)
        half_rate = None
        if variant.computes_in == "float32" and not self.tf32:
            half = peaks_of(session, model, "bfloat16")[1]
            half_rate = half.flops_per_s / roofline.flops_per_s
        return why_of(estimated, needed, order, roofline, half_rate)

    def predictor(
        self, session: Session, model: str, protocol: Protocol, kind: str
    ) -> FoundPredictor:
        """Return the predictor of a card model, or one from another card model; notes; and why a
        tuple has no value.
        """
        key = (session.get_bind().engine.url, model, protocol, self.torch)
        if key not in self.fitted:
            self.fitted[key] = self._predictor(session, model, protocol, kind)
        predictor, notes, unfilled = self.fitted[key]
        return predictor, list(notes), unfilled

    def _predictor(
        self, session: Session, model: str, protocol: Protocol, kind: str
    ) -> FoundPredictor:
        predictor: StoredPredictor | TransferredPredictor | None
        predictor, notes = self._stored_predictor(session, model, protocol)
        under = f"{protocol.launch} launch{' with TF32' if self.tf32 else ''}"
        source = "one from readings with TF32" if self.tf32 else "one"
        unfilled = (
            f"there is no predictor for {model} under {under} (`farm predict fit` makes {source})"
        )
        if predictor is None and is_gpu_kind(kind):
            predictor, why = transferred(session, model, self.torch, protocol)
            unfilled, notes = unfilled + why, [*notes, why] if predictor and why else notes
        elif predictor and predictor.path and predictor.path.parent == stored_predictor.PACKAGED:
            predictor = _of_own_card(session, predictor)
        if predictor:
            unfilled = (
                f"the predictor is for torch {predictor.software.torch} (omit --torch to use it)"
            )
        return predictor, notes, unfilled

    def card_model(self, session: Session) -> str:
        """Return the card model: one with readings, else the name of a data sheet, for predictions
        alone.
        """
        if isinstance(self.card, NamedCard):
            return self.card
        try:
            return card_model_named(session, self.card)
        except UsageError as error:
            if isinstance(error, Ambiguous) or self.fill != "auto" or not self.card:
                raise
            with packaged_database().read() as packaged:
                packaged_models = set(
                    map(sheet_name_of, packaged.exec(select(tables.CardRow.model)))
                )
                is_here = packaged.get_bind().engine.url == session.get_bind().engine.url
            if (
                sheet := sheet_name_of(self.card)
            ) and sheet not in packaged_models:  # else the package has readings of it
                return sheet
            if sheet or not is_here:
                raise
            step = did_you_mean(self.card, data_sheets()) or (
                f"{error.next_step} Without readings, a card needs a data sheet: "
                f"{', '.join(data_sheets())}."
            )
            raise UsageError(error.message, step) from error

    def _stored_predictor(
        self, session: Session, card_model: str, protocol: Protocol
    ) -> tuple[StoredPredictor | None, list[str]]:
        """Return the stored predictor of a card, with notes about it and about files that cannot be
        read.
        """
        folders, notes = stored_predictor.folders(), list[str]()
        # a bad file must not hide another folder's
        for some in (
            folders,
            *([folder] for folder in folders),
        ):
            try:
                stored = stored_predictor.find(some, card_model, self.torch, protocol)
            except UsageError as error:
                notes.append(f"{error.message} {error.next_step}")
                continue
            if stored is not None:
                return stored, [*dict.fromkeys(notes), *_not_learned(session, stored)]
        return None, list(dict.fromkeys(notes))

    def generation(self, session: Session, prompt: Variant, tokens: int) -> Generation:
        """Estimate the cost of a text; see `farm.addons.predict.generation.generation`."""
        return generation(session, prompt, tokens, lambda variant: self.estimate(session, variant))


def transferred(
    session: Session, model: str, torch: str, protocol: Protocol
) -> tuple[TransferredPredictor | None, str]:
    """Return a predictor for a card model that has none, from the most similar card model, with a
    note; or why not.
    """
    target = stored_card_rates(session, model)
    measured = target != card_rates(target.kind, model)  # its card has a fingerprint
    if not measured and not sheet_name_of(model):
        return (
            None,
            ", and no data sheet, so no other card predicts it (there are sheets of "
            f"{', '.join(data_sheets())})",
        )
    folders, sources = stored_predictor.folders(), list[StoredPredictor]()
    for name in stored_predictor.card_models(folders):
        with contextlib.suppress(UsageError):
            candidate = stored_predictor.find(folders, name, torch, protocol)
            sources += [candidate] if candidate and candidate.card.is_gpu else []
    if not sources:
        return None, ""
    usual = [
        candidate for candidate in sources if candidate.software.torch.startswith(torch)
    ] or sources
    source = min(usual, key=lambda one: (distance(one.card, target), one.card.model))
    target = target if measured else data_sheet_model(source.card, model)
    its_torch, (own_rows, packaged) = source.software.torch, _rows(session, model, source)
    rows, cards, note = (
        {**packaged, **own_rows},
        {row.card_id for id_, row in own_rows.items() if id_ not in packaged},
        "",
    )
    if not rows and (
        others := {data.conditions.software.torch for data in datasets(session, model)}
        - {its_torch}
    ):
        note = (
            f"The readings of {model} are for torch {', '.join(sorted(others))}, and the "
            "predictor of "
            f"{source.card.model} for torch {its_torch}, so they do not calibrate it. Measure "
            "with that "
            "version, or fit a predictor to the readings: `farm predict fit`."
        )
    costs = SourceCosts(
        source, lambda ids: ChainMap(*_rows(session, source.card.model, source, ids)).values()
    )
    predictor = TransferredPredictor.fit(
        costs, target, list(rows.values()), cards.pop() if len(cards) == 1 else ""
    )
    if not measured and not rows:
        sheet = data_sheet(target.kind, model)
        predictor = replace(predictor, data_sheet=sheet.source)
    return predictor, note


def _of_own_card(session: Session, found: StoredPredictor) -> StoredPredictor:
    """Return the predictor for the user's card of this model if enough readings are of exactly one
    such card.
    """
    own_rows, packaged = _rows(session, found.card.model, found, least=LEAST_OF_CARD)
    rows = [row for id_, row in own_rows.items() if id_ not in packaged]
    cards = {row.card_id for row in rows}
    if len(cards) != 1 or len(rows) < LEAST_OF_CARD:
        return found
    costs = SourceCosts(found, lambda ids: _rows(session, found.card.model, found, ids)[1].values())
    return TransferredPredictor.fit(costs, found.card, rows, cards.pop())


def _rows(
    session: Session,
    card_model: str,
    source: StoredPredictor,
    only: Collection[str] | None = None,
    least: int = 0,
) -> tuple[dict[str, TrainingRow], dict[str, TrainingRow]]:
    """Return the readings of a card model that fit a predictor, by id: of the own database, and, if
    these are ``least`` or more, of the package. ``session``: of either; the settings name the
    other. ``only``: ids of tuples."""
    alike = operator.attrgetter("method", "software.torch", "protocol")

    def fitting(at: Session) -> dict[str, TrainingRow]:
        data_sets = datasets(at, card_model, source.card, only)
        same = (data for data in data_sets if alike(data.conditions) == alike(source.conditions))
        rows = itertools.chain.from_iterable(data.rows for data in same)
        return {row.reading_id: row for row in rows}

    with packaged_database().read() as packaged, contextlib.ExitStack() as stack:
        own_rows: dict[str, TrainingRow] = {}
        with contextlib.suppress(NoDatabase):
            is_packaged = packaged.get_bind().engine.url == session.get_bind().engine.url
            own_rows = fitting(
                stack.enter_context(open_database().read()) if is_packaged else session
            )
        return own_rows, fitting(packaged) if len(own_rows) >= least else {}


def import_packaged(database: Database, before: Estimate, query: EstimateQuery) -> bool:
    """Import the packaged readings if the database has readings of fewer tuples than `before`.
    Return if it did so.
    """
    from farm.exchange.importer import import_export

    with database.read() as session:
        own_estimate = replace(query, fill="none").estimate(session, before.variant)
    if own_estimate.covered_tuples >= before.covered_tuples:
        return False
    for path in packaged_files():
        import_export(database, export_at(path))
    return True


def _not_learned(session: Session, found: StoredPredictor) -> list[str]:
    """Return a note if the database has readings of many tuples that the predictor was not trained
    with: over 1 %.
    """
    # of_calls: fields that differ between calls
    conditions, of_calls = (
        found.conditions,
        {"data": None, "grad": None},
    )
    like = {**conditions.protocol.to_json(), **of_calls}
    specs = session.execute(sqlalchemy.select(PROTOCOL.id, PROTOCOL.spec))
    # kernels are not predicted
    eager = (row for row in specs if (row.spec or {}).get("data") != "copied")
    chosen = (
        READING.software_id == conditions.software.id,
        READING.protocol_id.in_(
            [row.id for row in eager if {**(row.spec or {}), **of_calls} == like]
        ),
        OF_TUPLES,
        READING.subject_id.not_in(sqlalchemy.select(OPERATOR.id).where(on_several_cards())),
        READING.method == conditions.method,
    )
    rows = sound_readings(session, found.card.model, ("subject_id", "flags"), *chosen)
    stored = sorted({row.subject_id for row in rows})
    new = len(stored) - int(found.has_learned(stored).sum())
    if new <= len(found.learned) / 100:
        return []
    learned = (
        f"The predictor was fitted to {len(found.learned)} tuples, and the database has readings "
        f"of {new} more"
    )
    return [f"{learned}. To learn from all of them takes some minutes: `farm predict fit`."]


def training_set(
    session: Session, card: str = "", torch: str = ""
) -> tuple[Dataset, list[MeasuredModel]]:
    """Return the largest set of readings with one card model, software and protocol, and the models
    measured so. Raises `UsageError` if not exactly one card matches, or if it has no reading with
    that torch version (or its beginning)."""
    model = card_model_named(session, card)
    data_sets = datasets(session, model)
    chosen = next(
        (
            data
            for data in data_sets
            if data.conditions.software.torch.startswith(torch) and len(data)
        ),
        None,
    )
    if chosen is None:
        problem = f"The database has no operator readings on {model}"
        if torch:
            problem += f" with torch {torch}"
        versions = ", ".join(sorted({data.conditions.software.torch for data in data_sets}))
        step = "Measure a model: farm run resnet18."
        if versions:
            step = f"Choose a torch version that has readings: {versions}."
        raise UsageError(f"{problem}.", step)
    return chosen, measured_models(session, chosen.card, chosen.conditions)


def database_at(place: str) -> Database:
    """Open a database by its URL or file, or the folder of an export. Raises `UsageError` if there
    is none, `ImportRefused` if the folder is not an export."""
    path = Path(place)
    if "://" in place:
        return Database(place)
    if path.is_dir():
        return database_of([path], settings().state_dir / "packaged")
    if path.is_file():
        return Database(f"sqlite:///{path}")
    raise UsageError(
        f"There is no database '{place}'.", "Give a URL, a SQLite file, or the folder of an export."
    )


def write_dataset(dataset: Dataset, path: Path) -> None:
    """Write a data set as Parquet or CSV; the file's suffix decides. `farm.store.data_columns`
    documents the columns. Raises `UsageError` if the suffix is neither, or if the file cannot be
    written."""
    import pyarrow as pa

    from farm.exchange.export import schema_of, writer
    from farm.store.data_columns import DATASET

    if path.suffix not in (".parquet", ".csv"):
        raise UsageError(
            f"'{path}' has an unknown suffix.", "Name a file that ends in .parquet or .csv."
        )
    schema = schema_of("dataset", {"rows": len(dataset)}, DATASET)
    with (
        writing_to(path),
        replacing_file(path) as file,
        writer(file, path.suffix[1:], schema, DATASET) as write,
    ):
        write(pa.RecordBatch.from_pylist(list(dataset.records()), schema=schema))
