"""Measure tuples and models on a card of this host now, without a broker and without a worker.

The card's benchmark process measures tuples and models of the catalog, as it does for a worker. It
cannot measure a captured model, because it would have to unpickle it. This process measures the
whole of a captured model, after its tuples, with the same `Bench`. Afterwards this process keeps a
CUDA context on the card. Other work of the program during the measurement affects the reading."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlmodel import col, select

from farm.benchmark.block import Window, measured_block
from farm.benchmark_process.client import CardReading
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.device import Card
from farm.devices.host import discover, open_device
from farm.errors import Unmeasurable, UsageError
from farm.jobs import cards, items, jobs, leases
from farm.jobs.captures import capture_all_layers
from farm.jobs.closing import Closing, close_round
from farm.jobs.create import open_job
from farm.jobs.item_driver import ItemDriver
from farm.jobs.own_card import check_health, heartbeat, hold_card, keep_reading, refuse_card_in
from farm.models import catalog
from farm.models.resolved import ResolvedModel
from farm.models.user_code import captured_code, user_code
from farm.requests.card_selection import choose_cards
from farm.requests.partial_request import DEFAULTS, default_data, usual_variant_of
from farm.requests.resolved import ResolvedRequest
from farm.settings import settings
from farm.store import tables
from farm.store.captures import store_extraction, store_values
from farm.store.content import store_operators
from farm.store.database import Database
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.training.captured_model import CapturedModel, no_model
from farm.training.version import versioned
from farm.types.card_kind import device_type_of
from farm.types.figure import value_of
from farm.types.format import ENERGY, POWER, TIME, interval
from farm.types.notebook import table
from farm.types.protocol import QUICK, Protocol, Stopping
from farm.types.reading import Reading
from farm.types.request import Request
from farm.types.software import Software
from farm.types.subject import Subject
from farm.types.tuple import OperatorTuple
from farm.types.variant import Variant

if TYPE_CHECKING:
    from torch import nn

AGAIN_S = 0.5  # pause between two checks of items that another farm measures for this job


@dataclass(frozen=True)
class TupleReading:
    """One tuple measured on one card; a notebook shows it as a table.

    `reading` has the values of one call with 95 % intervals and flags. `reading_id` is "" if it is
    not stored."""

    spec: OperatorTuple
    reading: Reading
    protocol: Protocol
    card: Card
    software: Software
    reading_id: str = ""

    @property
    def time_us(self) -> float:
        """Time of one call. Unit: us."""
        return self.reading.time_us.value

    @property
    def energy_mj(self) -> float | None:
        """Energy of one call, None if the card does not report it. Unit: mJ."""
        return value_of(self.reading.energy_mj)

    def __repr__(self) -> str:
        time = interval(self.reading.time_us, TIME)
        return f"<TupleReading {label_of(self.spec)}: {time} on {self.card.model}>"

    def _repr_html_(self) -> str:
        reading = self.reading
        rows = [
            ("time", interval(reading.time_us, TIME)),
            ("power", interval(reading.power_w, POWER)),
            ("energy", interval(reading.energy_mj, ENERGY)),
            ("flags", ", ".join(reading.flags) or "none"),
        ]
        return table(f"{label_of(self.spec)} on {self.card.model}", ("", "one call"), rows)


@contextlib.contextmanager
def window(card: str = "") -> Iterator[Window]:
    """Measure the time and energy of a block of code, once. The GPU is synchronized at the begin
    and the end.

    This is not a reading: nothing is repeated or stored, and no other process is kept off the card.

    Args:
        card: as in ``--card``. Default: the first GPU of this host, or the CPU if there is no GPU.

    Raises:
        NoSuchCard, UsageError: there is no such card.

    Example:
        >>> with farm.window() as w:
        ...     train_one_epoch()
        >>> w.time_s, w.energy_mj
    """
    with measured_block(own_card(card)) as measured:
        yield measured


def measure_tuples(
    tuples: Iterable[OperatorTuple | Mapping[str, Any]],
    *,
    database: Database | None = None,
    card: str = "",
    protocol: Protocol | None = None,
    stopping: Stopping | None = None,
    quick: bool = False,
) -> list[TupleReading]:
    """Measure operator tuples one at a time, outside of a model, on one card of this host. Reuse no
    stored readings.

    Args:
        tuples: the tuples of a `CapturedModel`, or their plain JSON.
        database: stores the readings. None: the readings are returned and not stored.
        card: as in ``--card``: an id, an index, "cpu", "gpu" or part of a model name. Default: the
            first GPU, or the CPU if there is no GPU.
        protocol, stopping: how and how long to measure. Default: the default for this kind of card.
        quick: use short windows, for rough values.

    Raises:
        TupleRejected: a value is not a valid operator tuple.
        NoSuchCard, UsageError: there is no such card, or it does not support the protocol.
        SchemaMismatch, DatabaseUnreachable: the database has another schema, or is read-only.
        CardBusy: a worker or another command holds the card.
        CardUnavailable, UnhealthyCard: the card is in quarantine in this database, or fails its
        health check.
        Unmeasurable: a tuple cannot be measured. Readings of earlier tuples remain in the database.
    """
    from farm.operators.cost import cost

    specs = [spec if isinstance(spec, OperatorTuple) else parse(spec) for spec in tuples]
    if database is not None:
        database.check_stores()
    chosen = own_card(card)
    how, until = how_to_measure(chosen, protocol, stopping, quick=quick, data="normal")
    readings = []
    with hold_card(chosen, database) as process:
        for spec in specs:
            subject = Subject("operator", spec.id, spec.to_json())
            check_health(process)  # a restarted process has a new result
            measured = process.measure(MeasureRequest(subject, how, until))
            row_id = ""
            if database is not None:
                with database.write() as session:
                    store_operators(session, {spec: cost(spec)})
                row_id = keep_reading(database, measured, subject, how).id
            readings.append(
                TupleReading(spec, measured.reading, how, measured.card, measured.software, row_id)
            )
    return readings


def run_model(
    model: CapturedModel | Variant | str,
    *,
    database: Database,
    card: str,
    protocol: Protocol | None,
    stopping: Stopping | None,
    quick: bool,
    compile: str,
    **fields: Any,
) -> str:
    """Measure a model and its tuples on one card of this host, and return the id of the job.
    ``fields``: other fields of the request. Arguments and errors are those of
    `farm.api.measure.measure_model`."""
    if not isinstance(model, CapturedModel | Variant | str):
        raise no_model(model)
    captured = model if isinstance(model, CapturedModel) else None
    if captured is not None and compile:
        raise UsageError(
            "A captured model cannot be compiled: the farm compiles only models that it can build "
            "on the card's host.",
            "Give the model's name in the catalog, or name your function in FARM_MODELS.",
        )
    database.check_stores()
    chosen = own_card(card)
    resolved, variant = _found(model, chosen, compile)
    how, until = how_to_measure(
        chosen, protocol, stopping, quick=quick, data=default_data(chosen.kind, variant)
    )
    if captured is not None and how.grad != captured.grad:
        raise UsageError(
            f"The model was captured with grad={captured.grad}, but the protocol has "
            f"grad={how.grad}.",
            "Give `capture_model` and the protocol the same value of `grad`.",
        )
    request = Request(
        variant=variant,
        protocol=how,
        stopping=until,
        **fields,
    )
    job = ResolvedRequest(
        request,
        [chosen.id],
        resolved,
        smallest_card=chosen,
        outside_title=captured.title if captured else "",
        pinned=True,
    )
    return _run_job(job, captured, chosen, database)


def _found(
    model: CapturedModel | Variant | str, card: Card, compile_mode: str
) -> tuple[ResolvedModel | None, Variant]:
    """Return a model of the catalog, and the variant to measure. A captured model, and a variant
    that the catalog does not have, has no model."""
    if isinstance(model, CapturedModel):
        return None, model.variant
    resolved: ResolvedModel | None
    if isinstance(model, str):
        resolved = catalog.resolve_given(model)
        usual = usual_variant_of(resolved, card.kind, compile=compile_mode or None)
        return resolved, versioned(usual, resolved)
    resolved = None
    with contextlib.suppress(UsageError):  # capturing the model raises this error again
        resolved = catalog.resolve(model.model)
    variant = versioned(model, resolved)
    return resolved, dataclasses.replace(variant, compile=compile_mode or variant.compile)


def _run_job(
    resolved: ResolvedRequest, captured: CapturedModel | None, card: Card, database: Database
) -> str:
    """Lock the card, measure the job on it, and return the id of the job."""
    host, tag = settings().host, uuid.uuid4().hex[:8]
    farm = cards.farm_name(host, os.getpid(), tag)
    holder = cards.holder_name(card.id, host, os.getpid(), tag, farm)

    def beat() -> None:
        leases.renew(database, holder, settings().lease_s)

    with hold_card(card, database) as process:
        refuse_card_in(database, card.id, tables.CardState.DRAINING)
        driver = _JobDriver(card.id, holder, database, process, captured=captured)
        torch = driver.prepare_card().torch
        try:
            capture_all_layers(database, resolved)
            if captured is not None:
                protocol = resolved.request.protocol
                capture_id = _store(database, captured, protocol, card.kind, torch)
                resolved = dataclasses.replace(resolved, capture_id=capture_id)
            plan = open_job(database, resolved, farm=farm)
            try:
                with heartbeat(beat):
                    driver.run_rounds(plan.job_id, plan.round)
            except BaseException:
                jobs.cancel(database, plan.job_id)
                raise
        finally:
            cards.stopped(database, holder)
    return plan.job_id


@dataclass
class _JobDriver(ItemDriver):
    """Measures all items of a job. Measures the whole of a captured model in this process."""

    captured: CapturedModel | None = None

    def run_rounds(self, job_id: str, number: int | None) -> None:
        """Measure and close each round of the job, beginning with round `number`."""
        while number is not None:
            for item_id in self._open(job_id, number):
                self.run(item_id)
            closed = close_round(self.database, job_id, number)
            if closed.closing is Closing.OPEN:
                time.sleep(AGAIN_S)  # another farm still measures an item of this job
            else:
                number = closed.next_round

    def _open(self, job_id: str, number: int) -> list[int]:
        """Ids of the open items of a round. The whole is first: it shows which predicted tuples the
        card does not run.

        The whole of a captured model is last, because it leaves a CUDA context of this process on
        the card."""
        item = tables.Item
        is_whole = col(item.role) == "whole"
        query: Any = select(item.id).where(item.job_id == job_id, item.round == number)
        query = query.order_by(is_whole if self.captured else is_whole.desc(), col(item.id))
        with self.database.read() as session:
            return list(session.exec(query.where(col(item.state).in_(tables.OPEN))))

    def measure(self, claimed: items.Claim) -> CardReading:
        if claimed.role != "whole" or self.captured is None or self.benchmark.card.is_simulated:
            return super().measure(claimed)
        card, software = self.benchmark.card, self.benchmark.wait_ready()
        self.benchmark.close()  # only one process may use the card
        captured = self.captured
        whole = GivenWhole(captured.variant, captured.model, captured.args, captured.kwargs)
        reading = measure_whole(whole, card, claimed.work)
        return CardReading(reading, software, card)


@dataclass(frozen=True)
class GivenWhole:
    """A module of the caller with its example inputs, to be measured as a whole."""

    variant: Variant
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def subject(self) -> Subject:
        return Subject("variant", self.variant.id, self.variant.to_json())


def measure_whole(whole: GivenWhole, card: Card, request: MeasureRequest) -> Reading:
    """Measure a copy of a module in this process. The caller must hold the card's lock.
    Raises `Unmeasurable`: out_of_memory, raised, not_capturable or not_available (PyTorch does not
    see the card)."""
    import torch
    from torch.utils._pytree import tree_map_only

    from farm.benchmark.bench import Bench
    from farm.benchmark.subjects.model_variant import GivenModel
    from farm.benchmark.workload import why_it_raised
    from farm.models.building import ByPosition

    to = _torch_device(card)
    values = (*whole.args, *whole.kwargs.values())
    with contextlib.closing(open_device(card)) as device, _torch_state_restored(), user_code():
        bench = Bench(device, to)
        try:
            model = copy.deepcopy(whole.model).to(to)
            values = tree_map_only(torch.Tensor, lambda tensor: tensor.to(to), values)
        except Exception as error:
            raise why_it_raised(error) from error
        if whole.kwargs:
            model = ByPosition(model, len(whole.args), tuple(whole.kwargs))
        subject = GivenModel.of(request.subject, model, values)
        return bench.measure(subject, request.protocol, request.stopping)


def _torch_device(card: Card) -> Any:
    """Return the torch device of a card. Raises `Unmeasurable` if PyTorch in this process does not
    see the card.
    """
    import torch

    if not card.is_gpu:
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        # PyTorch for ROCm formats the 16 characters of HIP's UUID as if they were bytes.
        text = bytes.fromhex(uuid.replace("-", "")).decode("ascii", "replace")
        if card.id in (f"GPU-{uuid}", f"GPU-{text}"):
            return torch.device("cuda", index)
    raise Unmeasurable(
        "not_available",
        f"PyTorch {torch.__version__} does not see the card {card} in this process.",
        "Install a PyTorch that is built for a CUDA version of the driver, and unset "
        "CUDA_VISIBLE_DEVICES.",
    )


@contextlib.contextmanager
def _torch_state_restored() -> Iterator[None]:
    """Restore PyTorch's thread count, device and stream, and the C library, because a `Bench`
    changes them.
    """
    import torch

    from farm.benchmark.host_clock import keep_memory

    threads = torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        keep_memory(False)
        if torch.cuda.is_initialized():
            # also sets the stream's device
            torch.cuda.set_stream(stream or torch.cuda.default_stream())


def _store(
    database: Database, model: CapturedModel, how: Protocol, card_kind: str, torch: str
) -> int:
    """Store the model's tuples and calls, and return the id of the capture. With the data policy
    `seen`, also store observed values of its tensors.
    """
    extraction, device_type = model.extraction, device_type_of(card_kind)
    capture = tables.Capture(
        variant_id=model.variant.id,
        device_type=device_type,
        grad=how.grad,
        torch=torch,
        launch=how.launch,
    )
    with database.write() as session:
        capture_id = store_extraction(session, model.variant, extraction, capture)
    if how.data == "seen":
        from farm.training.observed_values import watch_values

        with captured_code():
            seen = watch_values(copy.deepcopy(model.model), model.args, dict(model.kwargs))
        with database.write() as session:
            store_values(session, capture_id, seen)
    return capture_id


def own_card(text: str) -> Card:
    """The card of this host that ``--card`` means; "" is the first GPU, else the CPU."""
    usable = [card for card in discover(settings()) if not card.refusal]
    return choose_cards(usable, [text] if text else [])[0]


def how_to_measure(
    card: Card, protocol: Protocol | None, stopping: Stopping | None, *, quick: bool, data: str
) -> tuple[Protocol, Stopping]:
    usual = DEFAULTS[card.kind]
    protocol = protocol or Protocol(launch=usual.launch, data=data)  # type: ignore[arg-type]
    if card.is_cpu and protocol.launch == "graph":
        raise UsageError("A CPU has no CUDA graphs to launch.", 'Give Protocol(launch="eager").')
    if stopping is None:
        stopping = dataclasses.replace(usual.stopping, **QUICK) if quick else usual.stopping
    return protocol, stopping
