"""Queries of the commands: an estimate with its options and predictor, and the training data of predictors."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy
from sqlmodel import Session

from farm.errors import UsageError
from farm.estimate.estimate import Estimate, estimate
from farm.estimate.generation import Generation, generation
from farm.estimate.readings import card_model_named, peaks_of
from farm.exchange.packaged import database_of, packaged_files
from farm.operators.roofline import Roofline
from farm.prediction import stored_predictor
from farm.prediction.dataset import Dataset, MeasuredModel, datasets, measured_models
from farm.prediction.stored_predictor import Predictor, RooflinePredictor, StoredPredictor
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.store.reuse import tells_others
from farm.types.protocol import Protocol, Variant

FILLS = ("auto", "none", "roofline")


def check_fill(fill: str) -> None:
    """
    Raises:
        UsageError: it is not one of `FILLS`.
    """
    if fill not in FILLS:
        raise UsageError(f"There is no predictor '{fill}'.", f"Give --fill one of {', '.join(FILLS)}.")


# -- estimates


def parse_sizes(text: str, option: str) -> list[int]:
    """`32`, `1,8,32`, or `1..256`, which doubles.

    Raises:
        UsageError: the text of the option is none of these.
    """
    sizes: list[int] = []
    with contextlib.suppress(ValueError):
        if ".." in text:
            first, last = (int(part) for part in text.split("..", 1))
            if 0 < first <= last:
                doubled = (first << number for number in range(64))
                sizes = [*itertools.takewhile(lambda size: size < last, doubled), last]
        else:
            sizes = [int(part) for part in text.split(",")]
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{option} '{text}' is no size.", f"Give {option} 32, {option} 1,8,32, or {option} 1..256.")
    return list(dict.fromkeys(sizes))


@dataclass(frozen=True)
class EstimateQuery:
    """The options of an estimate beside its variant.

    Attributes:
        card: part of the card's model.
        launch: graph or eager; the usual one of the card if None.
        torch: a version, or its beginning.
        fill: one of `FILLS`: `auto` is the stored predictor of the card, if there is one.
    """

    card: str = ""
    launch: str | None = None
    tf32: bool = False
    torch: str = ""
    fill: str = "auto"

    def protocol(self, kind: str) -> Protocol:
        launch = self.launch or ("eager" if kind == "cpu" else "graph")
        return Protocol(launch=launch, tf32=self.tf32)  # type: ignore[arg-type]

    def estimate(self, session: Session, variant: Variant) -> Estimate:
        """
        Raises:
            UsageError, CaptureError: see `farm.estimate.estimate.estimate`.
        """
        model = card_model_named(session, self.card)
        kind, roofline = peaks_of(session, model, variant.computes_in, self.tf32)
        protocol = self.protocol(kind)
        choice = choose_predictor(session, self.fill, model, roofline, protocol, stored_predictor.folders(), self.torch)
        return estimate(
            session,
            variant,
            model,
            protocol=protocol,
            torch=self.torch,
            predictor=choice.predictor,
            notes=choice.notes,
        )

    def generation(self, session: Session, prompt: Variant, tokens: int) -> Generation:
        """
        Raises:
            UsageError: see `farm.estimate.generation.generation`.
        """
        model = card_model_named(session, self.card)
        kind, _ = peaks_of(session, model, prompt.computes_in, self.tf32)
        return generation(session, prompt, tokens, model, protocol=self.protocol(kind), torch=self.torch)


def import_packaged(database: Database, before: Estimate, query: EstimateQuery) -> bool:
    """Import the readings of the package if the database alone covers less than an estimate; return whether it did."""
    from farm.exchange.importer import import_export

    with database.read() as session:
        own = replace(query, fill="none").estimate(session, before.variant)
    if own.covered_tuples >= before.covered_tuples:
        return False
    for path in packaged_files():
        import_export(database, path)
    return True


@dataclass(frozen=True)
class PredictorChoice:
    """The predictor for tuples without a reading, if there is one, and notes about it."""

    predictor: Predictor | None
    notes: tuple[str, ...] = ()


def choose_predictor(
    session: Session,
    fill: str,
    card_model: str,
    roofline: Roofline,
    protocol: Protocol,
    folders: Sequence[Path],
    torch: str = "",
) -> PredictorChoice:
    """
    Args:
        fill: `auto` is the stored predictor of the card, `none` no predictor, `roofline` the peaks of the card.

    Raises:
        UsageError: `fill` is unknown. A predictor that cannot be read is skipped, with a note.
    """
    check_fill(fill)
    if fill == "roofline":
        return PredictorChoice(RooflinePredictor(roofline))
    if fill == "none" or protocol.residency != "resident":
        return PredictorChoice(None)
    notes: dict[str, None] = {}
    for some in (folders, *([folder] for folder in folders)):  # an unreadable file must not hide another folder's
        try:
            found = stored_predictor.find(some, card_model, torch, protocol.launch, protocol.tf32)
        except UsageError as error:
            notes[f"{error.message} {error.next_step}"] = None
            continue
        if found is not None:
            return PredictorChoice(found, (*notes, *_not_learned(session, found)))
    return PredictorChoice(None, tuple(notes))


def _not_learned(session: Session, found: StoredPredictor) -> list[str]:
    """A note if the database has tuples that a predictor has not learned."""
    reading, protocols = tables.ReadingRow.__table__.c, tables.ProtocolRow.__table__.c  # type: ignore[attr-defined]
    conditions, properties_of_calls = found.conditions, {"data": None, "grad": None}
    like = {**conditions.protocol.to_json(), **properties_of_calls}
    specs = session.execute(sqlalchemy.select(protocols.id, protocols.spec))
    query = sqlalchemy.select(reading.subject_id, reading.flags).where(
        reading.card_model == found.card.model,
        reading.software_id == conditions.software.id,
        reading.protocol_id.in_([row.id for row in specs if {**(row.spec or {}), **properties_of_calls} == like]),
        reading.subject_kind == "operator",
        reading.method == conditions.method,
        reading.simulated.is_(False),
    )
    stored = sorted({row.subject_id for row in session.execute(query) if tells_others(row.flags)})
    new = len(stored) - int(found.has_learned(stored).sum())
    learned = f"The predictor has learned {len(found.learned)} tuples, and the database has {new} more"
    return [f"{learned}: `farm predict fit` learns all."] if new else []


# -- training data


def training_set(session: Session, card: str = "", torch: str = "") -> tuple[Dataset, list[MeasuredModel]]:
    """The largest set of readings of one card model, software and protocol, and the models measured under them.

    Args:
        card: part of the card's model.
        torch: a version, or its beginning.

    Raises:
        UsageError: there is no such card, several, or no reading of it under that software.
    """
    model = card_model_named(session, card)
    found = datasets(session, model)
    chosen = [one for one in found if one.conditions.software.torch.startswith(torch) and len(one)]
    if not chosen:
        known = ", ".join(sorted({one.conditions.software.torch for one in found}))
        raise UsageError(
            f"No reading of an operator is of {model}" + (f" under torch {torch}." if torch else "."),
            f"There are readings under torch {known}." if known else "Measure a model: farm run resnet18.",
        )
    return chosen[0], measured_models(session, chosen[0].card, chosen[0].conditions)


def database_at(place: str) -> Database:
    """Open a database by its URL or file, or the folder of an export.

    Raises:
        UsageError: there is no such database.
        ImportRefused: the folder is not an export.
    """
    path = Path(place)
    if "://" in place:
        return Database(place)
    if path.is_dir():
        return database_of([path], settings().state_dir / "packaged")
    if path.is_file():
        return Database(f"sqlite:///{path}")
    raise UsageError(f"There is no database '{place}'.", "Give a URL, a SQLite file, or the folder of an export.")


def write_dataset(dataset: Dataset, path: Path) -> None:
    """Write a data set as Parquet or CSV, by the suffix of the file; `farm.exchange.columns` documents the columns.

    Raises:
        UsageError: the suffix is another, or the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    from farm.exchange.columns import DATASET
    from farm.exchange.export import schema_of

    records = list(dataset.records())
    try:
        if path.suffix == ".parquet":
            schema = schema_of("dataset", {"rows": len(dataset)}, DATASET)
            pyarrow.parquet.write_table(pa.Table.from_pylist(records, schema=schema), path)
        elif path.suffix == ".csv":
            flat = [{name: ";".join(v) if isinstance(v, list) else v for name, v in one.items()} for one in records]
            pyarrow.csv.write_csv(pa.Table.from_pylist(flat), path)
        else:
            raise UsageError(f"'{path}' has an unknown suffix.", "Name a .parquet or .csv file.")
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror or error}.", "Name another file.") from error
