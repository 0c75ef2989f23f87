"""The tables of the shared database. The database stores the state of the farm; the queues only
transport messages.

Columns ending in ``_at_s`` are Unix seconds on the *database's* clock, since the clocks of hosts
may differ or step (`farm.store.database.database_now`). Content-addressed rows (operators,
variants, protocols, software) are written once and never changed. ``docs/data-model.md`` has a
diagram of all tables."""

from __future__ import annotations

from dataclasses import MISSING
from enum import StrEnum
from typing import Any

from pydantic import create_model
from sqlalchemy import (
    DDL,
    JSON,
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    UniqueConstraint,
    event,
    text,
)
from sqlmodel import Field, SQLModel

from farm.types import reading, software, variant
from farm.types.card_kind import OfCardKind
from farm.types.fields import fields_of
from farm.types.request import OfJobKind

# Every constraint gets a name: a migration needs the name to change the constraint, on SQLite too.
SQLModel.metadata.naming_convention = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

# A 64-bit key. SQLite increments a key automatically only if its type is INTEGER.
BigKey = BigInteger().with_variant(Integer(), "sqlite")


class ItemState(StrEnum):
    WAITING = "waiting"  # not measured yet; its card's queue has a message for it, or will have one
    CLAIMED = "claimed"  # a worker measures it until its lease ends
    DEFERRED = "deferred"  # waits for the reading of another item with the same subject
    DONE = "done"  # has an accepted reading, or has compiled its model
    FAILED = "failed"  # ended without a reading; see `reason`
    CANCELLED = "cancelled"


class ItemRole(StrEnum):
    """What an item is for."""

    TUPLE = "tuple"  # an operator tuple of the sum
    WHOLE = "whole"  # the whole model, with which the sum is compared
    CANARY = "canary"  # a tuple on each card, to compare the cards
    # compiles a model and lists its kernels, which the next round measures
    COMPILE = "compile"

    @property
    def has_reading(self) -> bool:
        """True if an item of this role ends with a reading."""
        return self is not ItemRole.COMPILE


#: The origin of an imported capture begins with this text. Jobs of this farm do not use imported
#: captures.
IMPORTED_PREFIX = "imported "
_OF_FARM = " of "


def imported_origin(captured: str, farm: str) -> str:
    """The origin of a capture of another farm. Farms verify a capture on different cards, so each
    keeps its own.
    """
    return f"{IMPORTED_PREFIX}{captured}{_OF_FARM}{farm}"


def captured_as(origin: str) -> str:
    """Return "predicted" or "observed", from the origin of a capture."""
    return origin.removeprefix(IMPORTED_PREFIX).partition(_OF_FARM)[0]


def farm_of_origin(origin: str) -> str:
    """Return the farm of an imported capture; "" if it is of this farm, or was imported by an older
    version.
    """
    return origin.removeprefix(IMPORTED_PREFIX).partition(_OF_FARM)[2]


OPEN = (ItemState.WAITING, ItemState.CLAIMED, ItemState.DEFERRED)
CLOSED = (ItemState.DONE, ItemState.FAILED, ItemState.CANCELLED)


class JobState(StrEnum):
    OPEN = "open"
    DONE = "done"
    CANCELLED = "cancelled"


class CardState(StrEnum):
    STARTING = "starting"  # its worker runs; its benchmark process is not ready yet
    IDLE = "idle"
    BUSY = "busy"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    LOST = "lost"
    STOPPED = "stopped"


class Row(SQLModel):
    """Base of all tables. Rows are not validated, so Pydantic builds their validators only on first
    use.
    """

    model_config = {"defer_build": True}


def _json(default: type | None) -> Any:
    """Define a JSON column: NOT NULL with an empty list or dict as default, or nullable if
    ``default`` is None.
    """
    if default is None:
        return Field(default=None, sa_column=Column(JSON(none_as_null=True), nullable=True))
    return Field(default_factory=default, sa_column=Column(JSON, nullable=False))


def _columns_of(record: type) -> Any:
    """Return a base class with a column for each text, number and boolean field of a record
    (`farm.types.fields`).
    """
    columns: dict[str, Any] = {}
    for field in fields_of(record):
        if field.type in (str, int, float, bool):
            kind = field.type | None if field.default is None else field.type
            columns[field.name] = (kind, ... if field.default is MISSING else field.default)
    return create_model(f"{record.__name__}Columns", __base__=Row, **columns)


class SoftwareRow(_columns_of(software.Software), table=True):  # type: ignore[call-arg, misc]
    """The software of readings. ``id`` is `farm.types.software.Software.id`."""

    __tablename__ = "software"
    id: str = Field(primary_key=True, max_length=32)

    @property
    def value(self) -> software.Software:
        return software.Software(**self.model_dump(exclude={"id"}))


class CardRow(OfCardKind, Row, table=True):
    """One physical GPU (its UUID), the CPU of a host, or a simulated card."""

    __tablename__ = "card"
    id: str = Field(primary_key=True, max_length=80)
    kind: str
    model: str = Field(index=True)
    memory_bytes: int = Field(default=0, sa_type=BigInteger)
    driver: str = ""
    host: str = Field(default="", index=True)
    index: int = 0
    queue: str = ""
    software_id: str | None = Field(default=None, foreign_key="software.id")
    state: str = CardState.STOPPED
    state_reason: str = ""
    # the embedded farm that set the quarantine; "": only a person can end it
    quarantined_by: str = ""
    worker: str = Field(default="", index=True)  # the holder name of the worker that serves it
    capabilities: list[str] = _json(list)
    fingerprint: dict[str, Any] = _json(dict)
    # to other cards of its host (`farm.devices.host.links_of`)
    links: dict[str, Any] | None = _json(None)
    # The newest reservation for an item on several cards, see `farm.jobs.groups`; NULL: the newest
    # item was on one card
    group_item_id: int | None = Field(default=None, sa_type=BigInteger)
    group_token: str = ""  # the token of that item's claim
    # the farm from which readings of this card were imported; "": a card of this farm
    origin: str = ""
    registered_at_s: float = 0.0
    last_seen_at_s: float = 0.0


class Operator(Row, table=True):
    """One operator tuple; ``id`` is the hash of ``spec``."""

    __tablename__ = "operator"
    id: str = Field(primary_key=True, max_length=32)
    schema_version: int
    name: str = Field(index=True)  # torch.nn.Conv2d
    short_name: str = Field(index=True)  # Conv2d
    kind: str  # module | function | aten | kernel | collective
    label: str
    training: bool = False
    flops: int = Field(default=0, sa_type=BigInteger)
    bytes_moved: int = Field(default=0, sa_type=BigInteger)
    parameters: dict[str, Any] = _json(dict)
    spec: dict[str, Any] = _json(dict)
    output_shapes: list[list[int]] | None = _json(None)


class ModelVariant(_columns_of(variant.Variant), table=True):  # type: ignore[call-arg, misc]
    """A model variant and its costs. ``id`` is `farm.types.variant.Variant.id`."""

    __tablename__ = "model_variant"
    id: str = Field(primary_key=True, max_length=32)
    model: str = Field(index=True)
    flops: int = Field(default=0, sa_type=BigInteger)
    # PyTorch's own counter over the whole model; 0: not counted
    model_flops: int = Field(default=0, sa_type=BigInteger)
    bytes_moved: int = Field(default=0, sa_type=BigInteger)


class TokenInput(Row, table=True):
    """The token ids of a text, the input of a language model; ``id`` is
    `farm.types.tokens.Tokens.id`.
    """

    __tablename__ = "token_input"
    id: str = Field(primary_key=True, max_length=32)
    batch: int
    length: int
    row_lengths: list[int] = _json(list)  # tokens of each row without padding
    padding: str  # the side of the padding: right | left
    packed: bytes = Field(sa_column=Column(LargeBinary, nullable=False))  # `Tokens.compressed`


class Capture(Row, table=True):
    """One capture of a variant: predicted at submit time, or observed on a card.

    ``torch`` is the torch version of the capture. The operators can depend on it and on ``launch``:
    a model can query whether a CUDA graph is being captured. The kernels of a compiled variant are
    known only after a card has compiled
    it: its predicted capture has no calls.
    """

    __tablename__ = "capture"
    __table_args__ = (
        UniqueConstraint(
            "variant_id", "device_type", "grad", "torch", "launch", "origin", "card_model"
        ),
    )
    id: int | None = Field(default=None, primary_key=True)
    variant_id: str = Field(foreign_key="model_variant.id", index=True)
    device_type: str
    grad: bool = False
    torch: str = ""
    launch: str = "eager"
    origin: str = "predicted"  # predicted | observed; of another farm: `imported_origin`
    card_id: str | None = Field(default=None, foreign_key="card.id")
    verification: dict[str, Any] = _json(dict)
    # only of a compiled variant: the card model for which its kernels were generated
    card_model: str = ""
    # only of a compiled variant: `choices` and `graph_breaks`
    compiled: dict[str, Any] | None = _json(None)
    created_at_s: float = 0.0


class Call(Row, table=True):
    """One operator call of a capture. ``call_index`` is the position of the call in the pass, from
    0.

    The view ``occurrence`` has the number of calls of each operator in each capture.
    """

    __tablename__ = "call"
    capture_id: int = Field(primary_key=True, foreign_key="capture.id", ondelete="CASCADE")
    call_index: int = Field(primary_key=True)
    module_path: str = ""
    operator_id: str = Field(foreign_key="operator.id", index=True)
    reads: list[int] = _json(list)
    writes: list[int] = _json(list)
    # in a training step: forward, backward, recomputation, accumulation, loss or optimizer
    part: str = ""
    owner: str = ""  # in a training step: the leaf module or function to which the call belongs
    # The observed values of each activation (`farm.training.observed_values`); []: unknown; NULL:
    # not observed yet
    data: list[dict[str, Any] | None] | None = _json(None)


class ProtocolRow(Row, table=True):
    """The conditions under which readings are measured; ``id`` is
    `farm.types.protocol.Protocol.id`.
    """

    __tablename__ = "protocol"
    id: str = Field(primary_key=True, max_length=32)
    launch: str
    residency: str
    data: str
    spec: dict[str, Any] = _json(dict)


class Job(OfJobKind, Row, table=True):
    """One submitted request: a model variant or a sweep, with one protocol, on chosen cards, in one
    or more rounds.
    """

    __tablename__ = "job"
    id: str = Field(primary_key=True, max_length=16)
    kind: str  # model | sweep
    title: str
    variant_id: str | None = Field(default=None, foreign_key="model_variant.id", index=True)
    protocol_id: str = Field(foreign_key="protocol.id")
    request: dict[str, Any] = _json(dict)
    # `Request.id`: equal for equal requests
    request_id: str = Field(default="", index=True, max_length=32)
    farm: str = ""  # the embedded farm that owns it; empty: any control worker may continue it
    state: str = Field(default=JobState.OPEN, index=True)
    round: int = 0  # the newest round
    created_at_s: float = 0.0
    ended_at_s: float | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The request as JSON; {} if the row was damaged."""
        return self.request if isinstance(self.request, dict) else {}


class Round(Row, table=True):
    """One round of a job: its operator types and the reason for it. It is published as chords."""

    __tablename__ = "job_round"
    job_id: str = Field(primary_key=True, foreign_key="job.id", ondelete="CASCADE")
    number: int = Field(primary_key=True)
    reason: str = ""
    operators: list[str] = _json(list)  # the operator types of this round and all earlier rounds
    capture_id: int | None = Field(default=None, foreign_key="capture.id")
    created_at_s: float = 0.0
    planned_at_s: float | None = None  # None: its items are still being added
    publisher: str | None = None  # the process that publishes the round now; None: no process
    planning_at_s: float | None = None  # when its planner last made progress
    progress_at_s: float | None = None  # when its publisher last made progress
    published_at_s: float | None = None  # None: one of its items needs a message


#: SQL condition of the items that need a message. Without parameters: databases use the index only
#: for this text.
UNSENT = text("published_at_s IS NULL AND state IN ('waiting', 'claimed')")
_PUT_OFF = text("put_off_at_s IS NOT NULL")


class Item(Row, table=True):
    """One subject of a job to measure on one card.

    Only a result with the ``token`` of the newest claim is accepted. A claimed item has a unique
    ``claim_key``, so two jobs never measure the same subject at the same time."""

    __tablename__ = "item"
    __table_args__ = (
        UniqueConstraint("job_id", "subject_kind", "subject_id", "protocol_id", "card_id", "role"),
        Index("ix_item_job_round_state", "job_id", "round", "state"),
        Index("ix_item_card_state", "card_id", "state"),
        # queried for all cards, at every pass of every host
        Index("ix_item_state_ended", "state", "ended_at_s"),
        Index("ix_item_subject", "subject_id", "protocol_id"),
        Index("ix_item_card_started", "card_id", "started_at_s"),  # when a card last began an item
        Index(
            "ix_item_unsent",
            "job_id",
            "card_id",
            "id",
            sqlite_where=UNSENT,
            postgresql_where=UNSENT,
        ),
        Index("ix_item_put_off", "put_off_at_s", sqlite_where=_PUT_OFF, postgresql_where=_PUT_OFF),
    )
    id: int | None = Field(
        default=None, sa_column=Column(BigKey, primary_key=True, autoincrement=True)
    )
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE")
    round: int
    role: str  # see `ItemRole`
    subject_kind: str  # operator | variant
    subject_id: str
    protocol_id: str = Field(foreign_key="protocol.id")
    card_id: str = Field(foreign_key="card.id")  # of an item on several cards: the leading card
    card_model: str
    cards: int = 1  # the number of cards of one host that measure it together
    state: str = ItemState.WAITING
    expected_s: float = 0.0
    # of the time, as a share, that is enough for the job's sum; 0: that of the request
    half_width: float = 0.0
    holder: str = ""
    token: str = ""
    # subject, card or card model, software, protocol
    subject_key: str = Field(default="", index=True)
    claim_key: str | None = Field(default=None, unique=True)  # the subject key, while claimed
    lease_until_s: float = 0.0
    attempts: int = 0
    repeated: int = 0  # results that came too late to be accepted
    reading_id: str | None = Field(default=None, foreign_key="reading.id", index=True)
    reused: bool = False  # the reading existed before, or belongs to another item
    # One of `farm.errors.Unmeasurable.REASONS`, or a reason of its job (`card_left`, `not_run`).
    reason: str = ""
    message: str = ""
    created_at_s: float = 0.0
    published_at_s: float | None = None  # time of its newest message; None: it needs a message
    # when its cards were last found in use; None: never since its last claim
    put_off_at_s: float | None = None
    message_used: bool = False  # its newest message was used up when it was put off
    started_at_s: float | None = None
    ended_at_s: float | None = None


#: Columns of an index for comparisons of readings: first the circumstances, then the compared
#: figures and the id.
CIRCUMSTANCES = (
    *("card_model", "software_id", "protocol_id", "subject_id", "method", "subject_kind"),
    *("time_us", "time_half_width_us", "energy_mj", "energy_half_width_mj", "card_id", "id"),
)


class ReadingRow(_columns_of(reading.Reading), table=True):  # type: ignore[call-arg, misc]
    """One accepted result; fields as in `farm.types.reading.Reading`."""

    __tablename__ = "reading"
    # These indexes contain all columns that comparisons of readings use: the database counts, sorts
    # and averages a million readings from the index alone, without their long rows.
    __table_args__ = (
        Index(
            "ix_reading_subject",
            "subject_id",
            "card_model",
            "software_id",
            "protocol_id",
            "time_us",
            "energy_mj",
            "id",
        ),
        Index("ix_reading_circumstances", *CIRCUMSTANCES),
    )
    id: str = Field(primary_key=True, max_length=32)
    subject_kind: str
    subject_id: str
    card_id: str = Field(foreign_key="card.id")
    card_model: str
    software_id: str = Field(foreign_key="software.id")
    protocol_id: str = Field(foreign_key="protocol.id")
    simulated: bool = False
    passes: int = Field(sa_type=BigInteger)
    throttle_reasons: list[str] = _json(list)
    flags: list[str] = _json(list)
    details: dict[str, Any] = _json(dict)
    cost_s: dict[str, float] = _json(dict)
    method: int | None = None  # `Details.method`; readings of different methods are not compared
    # the farm from which it was imported (`Origin.name`); "": measured by this farm
    origin: str = ""
    # For an imported reading: the kernels that one call launches. Captures contain the kernels of
    # own readings.
    kernels: dict[str, int] | None = _json(None)
    created_at_s: float = 0.0


class Origin(Row, table=True):
    """Another farm whose export was imported."""

    __tablename__ = "origin"
    name: str = Field(primary_key=True, max_length=200)
    file: str = ""
    farm_version: str = ""
    exported_at_s: float = 0.0  # on that farm's clock
    imported_at_s: float = 0.0


class ImportedVerdict(Row, table=True):
    """A verdict of another farm, unchanged from its export, so that it can be exported again.

    If its readings were imported too, there is an ended job with the same id and an empty
    `Job.request_id`."""

    __tablename__ = "imported_verdict"
    job_id: str = Field(primary_key=True, max_length=16)
    round: int = Field(primary_key=True)
    origin: str
    row: dict[str, Any] = _json(dict)


class TraceRow(Row, table=True):
    """The compressed time series of a reading (`farm.types.reading.Trace.pack`)."""

    __tablename__ = "trace"
    reading_id: str = Field(primary_key=True, foreign_key="reading.id", ondelete="CASCADE")
    packed: bytes = Field(sa_column=Column(LargeBinary, nullable=False))


class VerdictRow(Row, table=True):
    """The verdict of one (job, round): sum compared with whole. The unique key makes aggregation
    idempotent.
    """

    __tablename__ = "verdict"
    __table_args__ = (UniqueConstraint("job_id", "round"),)
    id: int | None = Field(default=None, primary_key=True)
    job_id: str = Field(foreign_key="job.id", ondelete="CASCADE")
    round: int
    outcome: str  # pass | fail | none (a sweep, or no whole)
    target: float
    accuracy_time: float | None = None
    accuracy_energy: float | None = None
    coverage: float | None = None
    sum_time_us: float | None = None
    whole_time_us: float | None = None
    sum_energy_mj: float | None = None
    whole_energy_mj: float | None = None
    details: dict[str, Any] = _json(dict)
    created_at_s: float = 0.0


class SignificantOperator(Row, table=True):
    """An operator type that the accuracy loop measures first. The loop adds types; people edit the
    set.
    """

    __tablename__ = "significant_operator"
    name: str = Field(primary_key=True)  # the short name: Conv2d
    # person | loop | the id of a job whose accuracy loop added the type
    added_by: str = "person"
    created_at_s: float = 0.0


event.listen(
    SQLModel.metadata,
    "after_create",
    DDL(
        "CREATE VIEW occurrence AS"
        ' SELECT capture_id, operator_id, count(*) AS calls FROM "call"'
        " GROUP BY capture_id, operator_id"
    ),
)
