"""Query a database from Python: readings, estimates, comparisons, exports, and the memory of a
training step.

Nothing here runs on a card, and nothing needs a broker.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from sqlmodel import Session

from farm.addons.memory import step_memory as memories
from farm.addons.memory.step_memory import StepMemory
from farm.addons.predict.estimate import Estimate
from farm.addons.predict.floor import above_floor
from farm.addons.predict.query import EstimateQuery
from farm.addons.predict.readings import needed_of, needed_tuple, peaks_of
from farm.addons.predict.stored_predictor import CallPrediction
from farm.api.capture import CapturedModel, as_captured_for, no_model
from farm.errors import UsageError
from farm.exchange import export as exports
from farm.exchange import filters
from farm.exchange.export import Exported
from farm.exchange.importer import Imported, import_export
from farm.exchange.packaged import export_at, first_answer, packaged_database
from farm.models import catalog
from farm.operators.cost import cost
from farm.report.compare import SideComparison
from farm.report.compare import compare as compare_sides
from farm.report.lookup import LookupRow, Sort
from farm.report.lookup import lookup as look_up
from farm.requests.memory import amounts_of, bytes_of
from farm.requests.partial_request import usual_variant
from farm.settings import settings
from farm.store.database import Database
from farm.training.version import versioned
from farm.types.protocol import Variant
from farm.types.tuple import OperatorTuple


def open_database(where: str | Path | None = None) -> Database:
    """Open a database of the farm. A missing or empty database gets its tables; others are not
    changed.

    Args:
        where: a URL (``postgresql://...``, ``sqlite:////...``) or the path of a SQLite file.
            Default: the database of the settings, as for every command of `farm`.

    Raises:
        SettingsError: the farm does not support this kind of database.
        SchemaMismatch: another version of the farm made the database, or it has other tables.
        DatabaseUnreachable: the database does not answer.
    """
    url = settings().database if where is None else str(where)
    if isinstance(where, Path) or "://" not in url:
        url = f"sqlite:///{Path(url).expanduser().absolute()}"
    database = Database(url)
    database.create_or_check()
    return database


def readings(database: Database, *wanted: str, card: str = "") -> Any:
    """Return readings as a data frame, one row for each reading. docs/data-dictionary.md describes
    the columns.

    Args:
        wanted: operators ("Conv2d") and conditions ("in_channels=64", "flops>=1e9", "torch=2.11"),
            as in `farm lookup`. Default: all readings.
        card: as in ``--card``.

    Returns:
        A pandas.DataFrame if pandas is installed, else a pyarrow.Table, which polars and DuckDB
        accept.

    Raises:
        UsageError, UnknownOperator: there is no such column or operator; the message suggests a
        similar name.
    """
    return _frame(database, "readings", wanted, card)


def calls(database: Database, *wanted: str, card: str = "") -> Any:
    """Return the calls of all captured models that have such readings, one row for each call; see
    `readings`.
    """
    return _frame(database, "calls", wanted, card)


def _frame(
    database: Database, table: Literal["readings", "calls"], wanted: tuple[str, ...], card: str
) -> Any:
    meant = filters.parse(wanted, [card] if card else ())
    with database.read() as session:
        found = exports.as_table(session, table, meant or None)
    try:
        import pandas  # noqa: F401
    except ImportError:
        return found
    return found.to_pandas()


def lookup(
    *wanted: str,
    card: str = "",
    sort: Sort = "time",
    limit: int = 20,
    database: Database | None = None,
) -> tuple[LookupRow, ...]:
    """Return readings of an operator, as `farm lookup` shows them.

    Args:
        wanted: an operator and filters: ``farm.lookup("Conv2d", "in_channels=64", card="H200")``.
        sort: time, energy or power (most expensive first), or age (newest first).
        database: default: the database of the settings, then the packaged readings.

    Raises:
        UsageError, UnknownOperator: there is no such column or operator; the message suggests a
        similar name.
    """
    meant = filters.parse(wanted, [card] if card else ())
    return first_answer(
        lambda session: look_up(session, meant, sort=sort, limit=limit),
        lambda found: found[1] > 0,
        database=database,
    )[0]


def estimate(
    model: CapturedModel | Variant | str,
    *,
    card: str = "",
    batch: int | None = None,
    torch: str = "",
    fill: str = "auto",
    database: Database | None = None,
    **fields: Any,
) -> Estimate:
    """Estimate the cost of one pass of a model from readings, and from predictions where there are
    none.

    Args:
        model: a name, a variant or a `CapturedModel`: ``farm.estimate("resnet50", card="H200",
            batch=32)``.
        card: part of a card model's name.
        batch: default: that of `farm run` on such a card.
        torch: a version or its beginning. Default: the version whose readings cover most of the
            model.
        fill: "auto", "roofline" or "none", as in `farm estimate --fill`.
        database: default: the database of the settings, then the packaged readings.
        fields: other fields of a variant, for a name, such as ``dtype="bfloat16"``.

    Returns:
        The estimate: ``time`` in us and ``energy`` in mJ with intervals; ``to_json()`` equals `farm
        estimate --json`.

    Raises:
        UsageError, NoReadings, CaptureError: the model or card is unknown, or nothing is known
        about the model.
    """
    query = EstimateQuery(card, torch=torch, fill=fill)
    if isinstance(model, CapturedModel):
        extraction = as_captured_for(model, query.kind(database))
        return query.answer(model.variant, needed_of(extraction), database=database)
    if isinstance(model, str):
        model = usual_variant(catalog.known(model), query.kind(database), batch=batch, **fields)
    if not isinstance(model, Variant):
        raise no_model(model)
    return query.answer(versioned(model), database=database)


def predict(
    tuples: Iterable[OperatorTuple], *, card: str, torch: str = "", database: Database | None = None
) -> list[CallPrediction]:
    """Predict the time and energy of operator tuples on a card, with 90 % intervals. Readings are
    not used.

    Args:
        tuples: such as ``farm.capture_model(model, inputs).tuples``.
        card: part of a card model's name.

    Raises:
        UsageError: no card or several cards match, or there is no predictor for the card.
    """
    wanted = [needed_tuple(spec, cost(spec)) for spec in tuples]
    query = EstimateQuery(card, torch=torch)

    def answer(session: Session) -> list[CallPrediction]:
        model = query.card_model(session)
        kind, _ = peaks_of(session, model, "float32")
        predictor, _, why = query.predictor(session, model, query.protocol(kind), kind)
        if predictor is None:
            raise UsageError(
                f"Nothing is predicted: {why}.", "Measure on the card first: `farm calibrate`."
            )
        return list(above_floor(predictor.predict(wanted, wanted), wanted, model).calls)

    return first_answer(answer, bool, database=database)


def compare(first: str, second: str, *, database: Database) -> SideComparison:
    """Compare two jobs or two sets of readings, as `farm compare`. ``to_json()`` equals its
    ``--json``.

    Args:
        first, second: the id of a job, or filters in one text: ``"card=H200 torch=2.11"``.

    Raises:
        UsageError: a side is no job and no filter, or nothing matches.
    """
    with database.read() as session:
        return compare_sides(session, first, second)


def export(
    target: str | Path,
    *wanted: str,
    database: Database,
    card: str = "",
    form: str | None = None,
    traces: bool = False,
) -> Exported:
    """Write readings to a file, or all tables to a folder, as `farm export`.

    Args:
        target: a file (.parquet, .csv or .jsonl), or a folder.
        wanted: filters as in `lookup`. Default: all readings.
        form: the format of the files in a folder: parquet (default), csv or jsonl.
        traces: also write the sampled time series.

    Raises:
        UsageError: the target cannot be written, or a filter is wrong.
    """
    meant = filters.parse(wanted, [card] if card else ())
    with database.read() as session:
        return exports.export(
            session, Path(target), form=form, filters=meant or None, traces=traces
        )


def import_readings(source: str | Path, *, database: Database, origin: str = "") -> list[Imported]:
    """Import the export of another farm, as `farm import`. Returns the number of rows and of new
    rows by table.

    Args:
        source: a file or folder of `export`; "h100" and "h200" are the packaged readings.
        origin: the name of the exporting farm. Default: the name of the file.

    Raises:
        UsageError: a file is not an export, or damaged; then nothing is written.
        SchemaMismatch, DatabaseUnreachable: the database has another schema, or is read-only.
    """
    database.check_stores()
    return import_export(database, export_at(Path(source)), origin=origin)


def step_memory(
    variant: Variant,
    *,
    database: Database | None = None,
    card: str = "H200",
    fast: str = "",
    slow_bandwidth: str = "",
) -> StepMemory:
    """Compute the memory that a training step needs. With ``fast``, plan its slow tensors. Runs
    nothing on a card.

    Args:
        variant: a training step: ``farm.variant("resnet50", batch=32, step="training")``.
        database: source of times and of the cost of slow memory. Default: the readings that come
            with the package.
        card: part of the model name of a card, or ``cpu``.
        fast: amounts of fast memory to plan for: ``8GB``, or shares of the peak, ``75%,50%``.
        slow_bandwidth: bandwidth of slow memory, ``55GB/s``, for operators without readings in slow
            memory.
            Default: derived from the readings.

    Returns:
        The memory over the step. With ``fast``, ``offload_plans.plans`` name the tensors in slow
        memory, and ``offload_plans.curve`` has the step's time by fast memory. ``to_json()`` equals
        ``farm memory --json``.

    Raises:
        UsageError: the variant is a forward pass, the card is unknown, an amount is malformed or
            too small for the largest operator, or a plan has no readings to use.
        CaptureError: the step cannot be captured.
    """
    if not isinstance(variant, Variant):
        raise no_model(variant)
    if variant.step != "training":
        raise UsageError(
            f"{variant} is a forward pass, not a training step.",
            'Give step="training": farm.variant("resnet50", 32, step="training").',
        )
    amounts = amounts_of("fast", fast) if fast else []
    bytes_per_s = (
        bytes_of("slow_bandwidth", slow_bandwidth, per_second=True) if slow_bandwidth else None
    )
    found = memories.memory(versioned(variant), card)
    known = database or packaged_database()
    with known.read() as session:
        found = memories.with_readings(session, found)
        read = memories.read_in_slow_memory(session, found) if amounts else None
    return memories.with_offload_plans(found, read, amounts, bytes_per_s) if amounts else found
