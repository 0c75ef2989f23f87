"""The data set of predictors: chosen from what the database holds of a card, and written as one file for others."""

from __future__ import annotations

from pathlib import Path

from sqlmodel import Session

from farm.errors import UsageError
from farm.estimate.estimate import card_model_named
from farm.exchange.columns import DATASET
from farm.exchange.export import schema_of
from farm.prediction.dataset import Dataset, datasets
from farm.prediction.measured_models import ReadModel, read_models
from farm.store.database import Database


def dataset_of(session: Session, card: str = "", torch: str = "") -> Dataset:
    """The largest set of readings of one card model, software and protocol.

    Args:
        card: part of the card's model.
        torch: a version, or its beginning.

    Raises:
        UsageError: no such card, several, or no reading of it under that software.
    """
    model = card_model_named(session, card)
    found = datasets(session, model)
    chosen = [one for one in found if one.circumstances.software.torch.startswith(torch) and len(one)]
    if not chosen:
        known = ", ".join(sorted({one.circumstances.software.torch for one in found}))
        raise UsageError(
            f"No reading of an operator is of {model}" + (f" under torch {torch}." if torch else "."),
            f"There are readings under torch {known}." if known else "Measure a model: farm run resnet18.",
        )
    return chosen[0]


def learnt_from(session: Session, card: str = "", torch: str = "") -> tuple[Dataset, list[ReadModel]]:
    """The same, and the models that were read under it.

    Raises:
        UsageError: as of `dataset_of`.
    """
    found = dataset_of(session, card, torch)
    return found, read_models(session, found.card, found.circumstances)


def opened(place: str) -> Database:
    """A database by its URL or file, or a folder that was exported.

    Raises:
        UsageError: there is none; Refused: the folder is no export.
    """
    from farm.exchange.packaged import database_of
    from farm.settings import settings

    path = Path(place)
    if "://" in place:
        return Database(place)
    if path.is_dir():
        return database_of([path], settings().state_dir / "packaged")
    if path.is_file():
        return Database(f"sqlite:///{path}")
    raise UsageError(f"There is no database '{place}'.", "Give a URL, a SQLite file, or a folder that was exported.")


def write_dataset(dataset: Dataset, path: Path) -> None:
    """Write it as Parquet or CSV, by the file's ending; `farm.exchange.columns` says what the columns mean.

    Raises:
        UsageError: another ending, or it cannot be written.
    """
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    schema = schema_of("dataset", {"rows": len(dataset)}, DATASET)
    records = list(dataset.records())
    try:
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(records, schema=schema), path)
        elif path.suffix == ".csv":
            flat = [{name: ";".join(v) if isinstance(v, list) else v for name, v in one.items()} for one in records]
            pyarrow.csv.write_csv(pa.Table.from_pylist(flat), path)
        else:
            raise UsageError(f"'{path}' is of no kind that can be written.", "Name a .parquet or .csv file.")
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror or error}.", "Name another file.") from error
