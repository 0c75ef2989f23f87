"""Measuring on a card of this host now: no broker, no worker, one card held as long as it takes.

Tuples and models of the catalog go to the farm's own benchmark process, as they do everywhere. A model in hand cannot travel
there, for nothing is unpickled: its whole is read in this very process (`farm.api.in_process`), after all its tuples.
"""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlmodel import col, select

from farm.api.capture import CapturedModel
from farm.api.notebook import JobReport, figure, job_report, table
from farm.benchmark_process.client import BenchmarkProcess, held
from farm.devices.device import Card
from farm.devices.host import discover
from farm.errors import CardUnavailable, Unmeasurable, UsageError
from farm.jobs import cards, items, jobs, owner
from farm.jobs.closing import Closing, close_round
from farm.jobs.create import Tuples, open_job, take_all_layers_apart
from farm.requests.card_selection import choose_cards
from farm.requests.partial_request import QUICK, Wish, complete, default_data, defaults_for
from farm.settings import settings
from farm.store import tables
from farm.store.content import (
    add_reading,
    predicted_counts,
    store_capture,
    store_observed,
    store_operators,
    store_values,
    store_variant,
)
from farm.store.database import Database
from farm.types.label import label_of
from farm.types.memory_tiers import Placements
from farm.types.protocol import Protocol, Software, Stopping, Subject, Variant
from farm.types.reading import Reading
from farm.types.request import Request, Reuse
from farm.types.tuple import OperatorTuple, parse

AGAIN_S = 0.5  # between two looks at what another farm reads


@dataclass(frozen=True)
class TupleReading:
    """One tuple read on one card; it shows itself in a notebook.

    `reading` has the figures of one call, with their 95 % intervals and flags. `reading_id` is its row's, "" where it is
    not kept.
    """

    spec: OperatorTuple
    reading: Reading
    protocol: Protocol
    card: Card
    software: Software
    reading_id: str = ""

    @property
    def time_us(self) -> float:
        """Of one call. Unit: us."""
        return self.reading.time_us

    @property
    def energy_mj(self) -> float | None:
        """Of one call, None where the card does not tell. Unit: mJ."""
        return self.reading.energy_mj

    def __repr__(self) -> str:
        time = figure(self.reading.time_us, self.reading.time_half_width_us, "µs")
        return f"<TupleReading {label_of(self.spec)}: {time} on {self.card.model}>"

    def _repr_html_(self) -> str:
        reading = self.reading
        rows = [
            ("time", figure(reading.time_us, reading.time_half_width_us, "µs")),
            ("power", figure(reading.power_w, reading.power_half_width_w, "W")),
            ("energy", figure(reading.energy_mj, reading.energy_half_width_mj, "mJ")),
            ("flags", ", ".join(reading.flags) or "none"),
        ]
        return table(f"{label_of(self.spec)} on {self.card.model}", ("", "one call"), rows)


def measure_tuples(
    tuples: Iterable[OperatorTuple | Mapping[str, Any]],
    *,
    database: Database | None = None,
    card: str = "",
    protocol: Protocol | None = None,
    stopping: Stopping | None = None,
    quick: bool = False,
) -> list[TupleReading]:
    """Measure operator tuples alone, one after the other, on one card of this host. Reuses nothing.

    Args:
        tuples: as `capture_model` gives them, or as their plain JSON.
        database: where to keep the readings; without it they are only returned.
        card: as for ``--card``: an id, an index, "cpu", "gpu", part of a model. Without it the host's first GPU, else its CPU.
        protocol: how; what suits the card without it.
        stopping: for how long; what suits the card without it.
        quick: short windows: figures to look at, not to publish.

    Raises:
        TupleRejected: one is no tuple.
        NoSuchCard, UsageError: there is no such card, or it cannot measure so.
        CardBusy: a worker or somebody else measures on the card.
        UnhealthyCard: the card fails a known sum.
        Unmeasurable: one cannot be measured; what was read before is kept.
    """
    specs = [spec if isinstance(spec, OperatorTuple) else parse(spec) for spec in tuples]
    chosen = _card(card)
    how, until = _how(chosen, protocol, stopping, quick=quick, data="normal")
    limit_s = settings().item_timeout_s
    found = []
    with held(chosen) as process:
        for spec in specs:
            subject = Subject("operator", spec.id, spec.to_json())
            answer = process.measure(subject, how, until, timeout_s=limit_s)
            read = TupleReading(spec, answer.reading, how, answer.card, answer.software)
            found.append(read if database is None else _kept(database, read, subject))
    return found


def measure_model(
    model: CapturedModel | Variant | str,
    *,
    database: Database,
    card: str = "",
    protocol: Protocol | None = None,
    stopping: Stopping | None = None,
    quick: bool = False,
    operators: tuple[str, ...] = ("all",),
    target: float = 0.95,
    reuse: Reuse = "model",
    placements: Placements = "none",
) -> JobReport:
    """Measure a model and all its tuples on one card of this host: a job as `farm run` makes one, to its verdict.

    The whole of a model in hand is read in this very process, as a copy on the card; the model is left as it was. On a GPU
    the process holds a context from then on, which later readings on that card are flagged for (`shared`) until it ends.

    Args:
        model: what `capture_model` gave, a variant of the catalog, or a name in it.
        database: where job, calls and readings are kept. What it has of the tuples already is not read again.
        card: as for `measure_tuples`.
        protocol: as for `measure_tuples`.
        stopping: as for `measure_tuples`.
        quick: as for `measure_tuples`.
        operators: the types to measure: ("all",), ("auto",) or names such as ("Conv2d", "Linear").
        target: the accuracy that makes a pass.
        reuse: "model" takes readings of any card of the model, "card" of this one, "none" none at all. A model in hand is known by its
            calls: one with other weights is the same.
        placements: "all" or "each": tuples are read also with tensors in slow memory.

    Raises:
        UnknownModel, UnsupportedModel, CaptureError, UsageError, NoSuchCard: nothing was measured.
        CardBusy, CardUnavailable, UnhealthyCard: the card is not to be had.
    """
    chosen = _card(card)
    in_hand = model if isinstance(model, CapturedModel) else None
    variant = _variant(model, chosen.kind)
    how, until = _how(chosen, protocol, stopping, quick=quick, data=default_data(chosen.kind, variant.step))
    if in_hand is not None and how.grad != in_hand.grad:
        raise UsageError(
            f"The model was captured with grad={in_hand.grad} and is to be measured with grad={how.grad}.",
            "Give `capture_model` and the protocol the same.",
        )
    request = Request(
        variant=variant,
        protocol=how,
        stopping=until,
        operators=operators,
        target=target,
        reuse=reuse,
        placements=placements,
    )
    current = settings()
    farm = owner.name_of(current.host, os.getpid(), uuid.uuid4().hex[:8])
    holder = cards.holder_name(chosen.id, current.host, os.getpid(), uuid.uuid4().hex[:8], farm)
    with held(chosen) as process:
        software = process.wait_ready()
        if cards.written_state(database, chosen.id) in cards.KEPT:
            raise CardUnavailable(
                f"The card {chosen} takes nothing: it is drained or in quarantine.",
                "Release it with `farm cards resume` or `farm cards release`.",
            )
        cards.register(database, process.card, software, holder=holder, queue="")
        try:
            take_all_layers_apart(database, request, [chosen.id])
            known = None if in_hand is None else _stored(database, in_hand, how, chosen.kind, software.torch)
            job = open_job(
                database,
                request,
                [chosen.id],
                tuples=known,
                title=in_hand.title if in_hand else "",
                farm=farm,
                pinned=True,
            )
            try:
                _Job(database, process, software.id, holder, in_hand).run(job.job_id, job.round)
            except BaseException:
                jobs.cancel(database, job.job_id)
                raise
        finally:
            cards.stopped(database, holder)
    return job_report(database, job.job_id)


@dataclass(frozen=True)
class _Job:
    """The items of a job, read one after the other by this process instead of a worker."""

    database: Database
    process: BenchmarkProcess
    software_id: str
    holder: str
    in_hand: CapturedModel | None

    def run(self, job_id: str, number: int | None) -> None:
        while number is not None:
            for item_id in self._open(job_id, number):
                self._read(item_id)
            closed = close_round(self.database, job_id, number)
            if closed.closing is Closing.OPEN:
                time.sleep(AGAIN_S)  # another farm is reading what this job needs, too
            else:
                number = closed.next_round

    def _open(self, job_id: str, number: int) -> list[int]:
        """A round's items that are not closed, the whole last: a model in hand leaves this process on the card."""
        item = tables.Item
        query = select(item).where(item.job_id == job_id, item.round == number, col(item.state).in_(tables.OPEN))
        with self.database.read() as session:
            found = sorted(session.exec(query), key=lambda one: (one.subject_kind == "variant", one.id))
        return [one.id for one in found if one.id is not None]

    def _read(self, item_id: int) -> None:
        current = settings()
        claimed = items.claim(
            self.database,
            item_id,
            card_id=self.process.card_id,
            holder=self.holder,
            software_id=self.software_id,
            lease_s=2 * current.item_timeout_s,
            max_attempts=current.max_attempts,
        )
        if not isinstance(claimed, items.Claim):
            return
        try:
            reading = self._whole(claimed) if claimed.subject.kind == "variant" else self._measured(claimed)
        except Unmeasurable as error:
            if error.reason == "crashed":  # the next claim counts the attempt
                items.note_attempt(self.database, claimed, error.reason, error.message)
            else:
                items.fail(self.database, claimed, error.reason, error.message)
            return
        card_id, software_id = self.process.card_id, self.software_id
        items.complete(self.database, claimed, reading, card_id=card_id, software_id=software_id)

    def _measured(
        self, claimed: items.Claim, predicted: Mapping[str, int] | None = None, verify: bool = False
    ) -> Reading:
        answer = self.process.measure(
            claimed.subject,
            claimed.protocol,
            claimed.stopping,
            predicted=predicted,
            verify=verify,
            timeout_s=settings().item_timeout_s,
        )
        if answer.verification is not None and claimed.capture_id is not None:
            seen = answer.observed, answer.verification
            store_observed(self.database, claimed.capture_id, *seen, card_id=self.process.card_id)
        return answer.reading

    def _whole(self, claimed: items.Claim) -> Reading:
        simulated = self.process.card.kind == "simulated"
        if claimed.role == "whole" and self.in_hand is not None and not simulated:
            card = self.process.card
            self.process.close()  # nothing but this process may be on the card
            from farm.api.in_process import measure_whole

            return measure_whole(self.in_hand, card, claimed.subject, claimed.protocol, claimed.stopping)
        if claimed.role != "whole" or claimed.capture_id is None:
            return self._measured(claimed)
        predicted, verify = predicted_counts(self.database, claimed.capture_id, claimed.job_id)
        # They serve verifying; only a simulated card makes its figures of them.
        return self._measured(claimed, predicted if verify or simulated else None, verify)


# ------------------------------------------------------------------------------------------ what is measured


def _variant(model: CapturedModel | Variant | str, card_kind: str) -> Variant:
    if isinstance(model, CapturedModel):
        return model.variant
    if isinstance(model, Variant):
        return model
    variant = complete(Wish(model=model), card_kind, target=0.95).variant
    assert variant is not None, "a model was named"
    return variant


def _stored(database: Database, model: CapturedModel, how: Protocol, card_kind: str, torch: str) -> Tuples:
    """The model's tuples and calls as rows, with what stood in its tensors where the protocol goes by that."""
    apart, device_type = model.apart, "cuda" if card_kind == "cuda" else "cpu"
    taken = apart.capture
    with database.write() as session:
        store_operators(session, {spec: apart.costs[tuple_id] for tuple_id, spec in taken.tuples.items()})
        store_variant(session, model.variant, flops=apart.flops, bytes_moved=apart.bytes_moved)
        capture_id = store_capture(
            session,
            taken.calls,
            variant_id=model.variant.id,
            device_type=device_type,
            grad=how.grad,
            torch=torch,
            launch=how.launch,
            origin="predicted",
        )
    if how.data == "seen":
        from farm.api.in_process import seen_values

        seen = seen_values(model)
        with database.write() as session:
            store_values(session, capture_id, seen)
    return Tuples(taken.counts, capture_id)


def _kept(database: Database, read: TupleReading, subject: Subject) -> TupleReading:
    from farm.operators.cost import cost

    with database.write() as session:
        store_operators(session, {read.spec: cost(read.spec)})
        cards.write_down(session, read.card, read.software)
        row = add_reading(
            session,
            read.reading,
            subject=subject,
            protocol=read.protocol,
            software=read.software,
            card_id=read.card.id,
            card_model=read.card.model,
        )
        return dataclasses.replace(read, reading_id=row.id)


# ------------------------------------------------------------------------------------------ where and how


def _card(wanted: str) -> Card:
    found = choose_cards([card for card in discover(settings()) if not card.refusal], [wanted] if wanted else [])
    return found[0]


def _how(
    card: Card, protocol: Protocol | None, stopping: Stopping | None, *, quick: bool, data: str
) -> tuple[Protocol, Stopping]:
    usual = defaults_for(card.kind)
    protocol = protocol or Protocol(launch=usual.launch, data=data)  # type: ignore[arg-type]
    if card.kind == "cpu" and protocol.launch == "graph":
        raise UsageError("A CPU has no CUDA graphs to launch.", 'Give Protocol(launch="eager").')
    if stopping is None:
        stopping = dataclasses.replace(usual.stopping, **QUICK) if quick else usual.stopping
    return protocol, stopping
