"""Measure items on one card: the same steps for a worker and for `farm.measure_model`.

The steps: start the card's benchmark process, check the card's health, claim an item, measure it,
store the operator calls observed on the card, drop the tuples that the card does not run, store the
reading. The caller holds the lock of the card (`farm.jobs.own_card` for callers without items)."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self, TypeVar

from farm.benchmark_process.client import BenchmarkProcess, CardReading
from farm.benchmark_process.requests import FingerprintRequest, MeasureRequest, VerifyRequest
from farm.devices.device import Card
from farm.devices.host import error_counters, open_device
from farm.devices.quiet import quiet
from farm.errors import (
    CardUnavailable,
    DatabaseUnreachable,
    FarmError,
    HostBusy,
    NoSuchCard,
    SchemaMismatch,
    UnhealthyCard,
    Unmeasurable,
)
from farm.jobs import cards, group_driver, groups, items
from farm.jobs.compile_ahead import CompileAhead
from farm.jobs.cpu_turns import MOST_IN_TURN, CpuTurns, MustStop
from farm.jobs.items import Claim, Declined, DeclineReason, FollowUp
from farm.jobs.outage import Outage
from farm.jobs.own_card import check_health, refuse_card_in
from farm.jobs.spool import Spool
from farm.settings import settings
from farm.store.captures import predicted_counts, store_observed
from farm.store.database import Database
from farm.store.tables import CardState, Item
from farm.types.card_kind import is_cpu_id
from farm.types.error_counters import ERROR_COUNTERS
from farm.types.reading import Reading
from farm.types.software import Software
from farm.types.verification import Verification

log = logging.getLogger("farm.worker")

T = TypeVar("T")

#: The reason of an outcome: the item was put off, because this host lacks something now
#: (`HostBusy`).
HOST_BUSY = "host_busy"


@dataclass(frozen=True)
class ItemOutcome:
    """The result of `ItemDriver.run`.

    `listed`: the generated kernels of a model were stored, and the next round measures it.
    `declined`: another worker has the item, or it is closed. `fenced`: measured, but the claim was
    lost meanwhile. `spooled`: measured, and the reading waits on disk because the database is
    unreachable."""

    status: Literal["done", "reused", "failed", "spooled", "declined", "fenced", "listed"]
    reason: str = ""
    message: str = ""


@dataclass
class ItemDriver:
    """Measures items on one card, one after the other. A subclass overrides the methods in the
    section "hooks".

    The caller renews the leases of `holder` during a measurement (`heartbeat`,
    `farm.jobs.leases.renew`)."""

    card_id: str
    holder: str
    database: Database
    benchmark: BenchmarkProcess
    #: Stores readings while the database is unreachable. None: `retried` waits for the database.
    spool: Spool | None = None
    #: The software with which the card is registered. None: not registered.
    software: Software | None = None
    queue: str = ""
    #: Compiles the models of coming items. None: each item compiles its model in its turn.
    ahead: CompileAhead | None = None
    #: Time of the newest claim on the registered card, by the monotonic clock.
    claimed_at_s: float = field(default=-math.inf, init=False)
    #: Of items on several cards; None before the first one.
    _group: group_driver.KeptGroup | None = field(default=None, init=False, repr=False)
    _outage: Outage = field(
        default_factory=partial(Outage, log, "Waiting for the database"), init=False, repr=False
    )
    _turns: CpuTurns = field(init=False, repr=False)
    #: Time of the newest check of the database's schema, by the monotonic clock.
    _schema_checked_s: float = field(default=-math.inf, init=False, repr=False)

    def __post_init__(self) -> None:
        self._turns = CpuTurns(self.benchmark)

    @classmethod
    def with_process(cls, card_id: str, holder: str, database: Database, **fields: Any) -> Self:
        """A driver with a benchmark process of its own, which has not started."""
        return cls(card_id, holder, database, BenchmarkProcess(card_id), **fields)

    def close(self) -> None:
        """End all processes that measure or compile."""
        if self.ahead is not None:
            self.ahead.close()
        if self._group is not None:
            self._group.close()
        self.benchmark.close()

    def register(self) -> Software:
        """Wait for the benchmark process, register the card with its software, and return the
        software. Raises as `check_health`."""
        software = check_health(self.benchmark)
        if software != self.software:
            card = self.benchmark.card
            capabilities: tuple[str, ...] = ()
            with contextlib.suppress(FarmError):
                capabilities = tuple(open_device(card).capabilities)
            cards.register(
                self.database,
                card,
                software,
                holder=self.holder,
                queue=self.queue,
                capabilities=capabilities,
            )
            self.software = software
            self.registered(card)
        return software

    def take_fingerprint(self, card: Card) -> None:
        """Store a fingerprint of the card if it has none for its driver."""
        if cards.needs_fingerprint(self.database, card.id, card.driver):
            fingerprint = self.benchmark.call(FingerprintRequest(), timeout_s=60.0)
            cards.keep_fingerprint(self.database, card.id, fingerprint)

    def prepare_card(self) -> Software:
        """Register the card unless it is registered, and return its software. Put the card in
        quarantine if it cannot measure: it failed its health check, or its benchmark process failed
        to start twice.

        Raises:
            UnhealthyCard: the card cannot measure.
            CardUnavailable: this process is ending.
        """
        try:
            return self._registered_in_two_attempts()
        except UnhealthyCard as error:
            self.software = None
            self._quarantine(error.message)
            raise
        except Unmeasurable as error:
            self.software = None
            if self.ending():
                # The benchmark process ended because this process ends: no fault of the card.
                raise CardUnavailable("The worker is stopping.") from error
            self._quarantine(error.message)
            raise UnhealthyCard(error.message, error.next_step) from error

    def _registered_in_two_attempts(self) -> Software:
        """Register the card. If its benchmark process fails to start, try once more."""
        try:
            return self.retried(self.register, has_claim=False)
        except Unmeasurable as error:
            if self.ending():
                raise
            reason = error.message
        log.warning("The benchmark process of card %s did not start: %s", self.card_id, reason)
        return self.retried(self.register, has_claim=False)

    def _quarantine(self, reason: str) -> None:
        farm = cards.farm_of(self.holder)
        try:
            self.retried(
                cards.quarantine, self.database, self.card_id, reason, farm=farm, has_claim=False
            )
        except NoSuchCard:
            log.error("The card %s cannot measure and is not registered: %s", self.card_id, reason)
        else:
            log.error("The card %s is put in quarantine: %s", self.card_id, reason)

    def run(self, item_id: int) -> ItemOutcome:
        """Claim an item and measure it. If the benchmark process crashes, try again until the last
        attempt. Raises as `prepare_card` and `retried`, and `CardUnavailable` if the card is in
        quarantine."""
        if self.spool is not None and item_id in self.spool.items():
            # Write the spooled reading of this item first: a new claim would invalidate its token.
            for closed in self.retried(
                self.spool.flush, self.database, self.card_id, has_claim=False
            ):
                self.follow_up(closed)
        while True:
            claimed = self._claim(item_id)
            if isinstance(claimed, Claim):
                outcome = self._measured(claimed)
                if outcome is not None:
                    return outcome
                # The benchmark process crashed; the next claim counts the attempt.
            elif claimed.why is DeclineReason.RESERVED:
                self._await_group()
            elif claimed.why is DeclineReason.DEFERRED and item_id in claimed.closed.woken:
                pass  # nobody measures its subject any more: claim it again
            else:
                self.follow_up(claimed.closed)
                return self._outcome_of_declined(item_id, claimed.why)

    def _claim(self, item_id: int) -> Claim | Declined:
        """Claim an item. A card in quarantine starts no benchmark process. While the database has
        the schema of another version of the farm, nothing is claimed."""
        current = settings()
        if time.monotonic() - self._schema_checked_s > current.beat_s:
            self.retried(self.database.check_schema, has_claim=False)
            self._schema_checked_s = time.monotonic()
        if self.software is None:
            self.retried(
                refuse_card_in,
                self.database,
                self.card_id,
                CardState.QUARANTINED,
                has_claim=False,
            )
        return self.retried(
            items.claim,
            self.database,
            item_id,
            card_id=self.card_id,
            holder=self.holder,
            software_id=self.prepare_card().id,
            lease_s=current.lease_s,
            max_attempts=current.max_attempts,
            has_claim=False,
        )

    def _measured(self, claimed: Claim) -> ItemOutcome | None:
        """Measure a claimed item once, and let groups that wait for this card go on. None if the
        benchmark process crashed.
        """
        if claimed.card_state != CardState.STARTING:
            self.claimed_at_s = time.monotonic()
        if claimed.after_group:
            self._call_groups()
        outcome = self._attempt(claimed)
        # An item that this host is too busy for would be published again at once.
        if outcome is not None and claimed.cards and outcome.reason != HOST_BUSY:
            self._call_groups()
        return outcome

    def _outcome_of_declined(self, item_id: int, why: DeclineReason) -> ItemOutcome:
        """The outcome of an item that this driver may not measure. For other reasons than those
        named here, the claim has closed it as failed.
        """
        if why in (DeclineReason.GONE, DeclineReason.DEFERRED, DeclineReason.PUT_OFF):
            return ItemOutcome("declined")
        if why is DeclineReason.REUSED:
            return ItemOutcome("reused")
        item = self.retried(self._stored, item_id, has_claim=False)
        if item is None:
            return ItemOutcome("declined")
        return ItemOutcome("failed", item.reason, item.message)

    def _stored(self, item_id: int) -> Item | None:
        with self.database.read() as session:
            return session.get(Item, item_id)

    def measure(self, claimed: Claim) -> CardReading:
        """Measure a claimed item in the benchmark process. For a whole, first verify its capture
        once per job. Raises as `BenchmarkProcess.measure`."""
        work, verify = self._with_prediction(claimed)
        if claimed.cards:
            self._group = self._group or group_driver.KeptGroup()
            return self.retried(
                group_driver.measure,
                self.database,
                claimed,
                work if verify else claimed.work,
                self._group,
                farm=cards.farm_of(self.holder),
                on_phase=partial(self.phase, claimed),
                must_stop=self.stop_requested,
            )
        takes_turns = self.benchmark.card.is_cpu and work.protocol.takes_turns
        if takes_turns and not self._turns.had_turn(claimed):
            waiting, calls = self.retried(
                items.waiting_beside, self.database, claimed, self.card_id, MOST_IN_TURN
            )
            self._turns.time(claimed, waiting, calls, partial(self._phase_of_turns, claimed))
        measured = self.benchmark.measure(
            work, verify=verify, on_phase=partial(self.phase, claimed)
        )
        reading = measured.reading
        if claimed.records_errors:
            reading = self._with_error_counters(reading)
        return dataclasses.replace(measured, reading=self._turns.flagged(claimed, reading))

    def _with_prediction(self, claimed: Claim) -> tuple[MeasureRequest, bool]:
        """Return the request of a claim, with the predicted calls of a whole model; and True if the
        card must verify them. Without verification, only a simulated card needs them. Generated
        kernels are not predicted, but listed by a verification.
        """
        if claimed.role != "whole" or claimed.capture_id is None:
            return claimed.work, False
        predicted, verify = self.retried(
            predicted_counts, self.database, claimed.capture_id, claimed.job_id, self.card_id
        )
        if not verify and not self.benchmark.card.is_simulated:
            return claimed.work, False
        return dataclasses.replace(claimed.work, predicted=predicted or None), verify

    def _phase_of_turns(self, claimed: Claim, phase: str, details: dict[str, Any]) -> None:
        self.phase(claimed, phase, details)
        if self.stop_requested():
            raise MustStop

    def _with_error_counters(self, reading: Reading) -> Reading:
        counters = error_counters(self.benchmark.card)
        if counters is None:
            return reading
        details = reading.details.recording(ERROR_COUNTERS, counters)
        return dataclasses.replace(reading, details=details)

    def retried(
        self, query: Callable[..., T], *arguments: Any, has_claim: bool = True, **options: Any
    ) -> T:
        """Return ``query(*arguments, **options)``. While the database is unreachable, or has the
        schema of another version of the farm, wait and try again.

        Args:
            has_claim: this driver has a claim and must write its outcome, so it waits even if the
                process must stop.

        Raises:
            DatabaseUnreachable, SchemaMismatch: this lasted for the time limit of an item, or this
                process must stop. Another worker may claim the item after its lease.
        """
        deadline_s = time.monotonic() + max(settings().item_timeout_s, 60.0)
        pauses_s = _pauses_s(2.0)
        while True:
            try:
                answer = query(*arguments, **options)
                self._outage.over()
                return answer
            except (DatabaseUnreachable, SchemaMismatch) as error:
                pause_s = next(pauses_s)
                if time.monotonic() + pause_s > deadline_s or (
                    self.stop_requested() and not has_claim
                ):
                    raise
                self._outage.note(error)
                time.sleep(pause_s)

    # -------------------------------------------------------------------------------- hooks

    def registered(self, card: Card) -> None:
        """Called after the card was registered with new software."""

    def follow_up(self, closed: FollowUp) -> None:
        """Publish the messages that follow from a closed item. Without a broker, other farms'
        reconcilers do.
        """

    def phase(self, claimed: Claim, phase: str, details: dict[str, Any]) -> None:
        """Called when a phase of the measurement begins."""

    def retrying(self, reason: str, message: str) -> None:
        """Called when an attempt crashed and the item is claimed again."""

    def ending(self) -> bool:
        """Whether this process is about to end."""
        return self.stop_requested()

    def stop_requested(self) -> bool:
        """Whether this process must stop."""
        return False

    def _await_group(self) -> None:
        """Wait until the group that holds the card has ended. Raises `CardUnavailable` if this
        process must stop.
        """
        pauses_s = _pauses_s(1.0)
        while self.retried(groups.is_reserved, self.database, self.card_id, has_claim=False):
            if self.stop_requested():
                raise CardUnavailable("The worker is stopping.")
            time.sleep(next(pauses_s))

    def _call_groups(self) -> None:
        """Publish items on several cards of this host that wait for cards which are free now."""
        with contextlib.suppress(DatabaseUnreachable):  # the reconciler publishes them later
            due = groups.due(self.database, cards.farm_of(self.holder), self.card_id)
            self.follow_up(FollowUp(due=tuple(due)))

    # -------------------------------------------------------------------------------- one attempt

    def _attempt(self, claimed: Claim) -> ItemOutcome | None:
        """Measure a claimed item once and return its outcome; None if the benchmark process
        crashed.
        """
        try:
            may_run = self.ahead is None or self.retried(self.ahead.turn_of, claimed)
        except Unmeasurable as error:  # its compiler crashed, so another attempt would, too
            return self._failed(claimed, error.reason, f"{error.message} {error.next_step}")
        if not may_run:
            log.info("%s is put off: its model is being compiled", claimed.label)
            self._put_off(claimed, groups.COMPILING, counted=False, reason=groups.HOST_BUSY_NOTED)
            return ItemOutcome("declined", HOST_BUSY, f"{claimed.label} is being compiled")
        try:
            with self._turn(claimed):
                if claimed.lists_kernels:
                    return self._list_kernels(claimed)
                measured = self.measure(claimed)
        except group_driver.GroupInterrupted as error:
            why, counted = error.args
            log.warning("%s was interrupted: %s", claimed.label, why)
            self._put_off(claimed, why, counted=counted)
            return ItemOutcome("declined")
        except HostBusy as error:
            log.warning("%s is put off: %s %s", claimed.label, error.message, error.next_step)
            self._put_off(claimed, error.message.rstrip("."), counted=False, reason=error.reason)
            return ItemOutcome("declined", HOST_BUSY, error.message)
        except Unmeasurable as error:
            said = error.message.partition("\n")[0]
            log.warning("%s was not measured (%s): %s", claimed.label, error.reason, said)
            failure = (error.reason, error.message)
            if error.reason != "crashed":
                return self._failed(claimed, *failure)
            self.follow_up(self.retried(items.fail, self.database, claimed, *failure, again=True))
            self.retrying(*failure)
            return None
        if measured.verification is not None and claimed.capture_id is not None:
            observed_id = self._store_verified(claimed.capture_id, measured.verification)
            if observed_id is not None:
                self.retried(items.drop_not_run, self.database, claimed.job_id, observed_id)
        closed = self._store(claimed, measured)
        if closed is None:
            return ItemOutcome("spooled")
        self.follow_up(closed)
        return ItemOutcome("done" if closed.accepted else "fenced")

    def _failed(self, claimed: Claim, reason: str, message: str) -> ItemOutcome:
        """Close a claimed item without a reading."""
        self.follow_up(self.retried(items.fail, self.database, claimed, reason, message))
        return ItemOutcome("failed", reason, message)

    @contextlib.contextmanager
    def _turn(self, claimed: Claim) -> Iterator[None]:
        """The turn of an item. The compilations of this host pause if its time depends on the
        host.
        """
        depends_on_host = is_cpu_id(self.card_id) or claimed.work.protocol.launch == "eager"
        try:
            with quiet(settings().lock_dir) if depends_on_host else contextlib.nullcontext():
                yield
        finally:
            if self.ahead is not None:
                self.ahead.end_turn()

    def _put_off(self, claimed: Claim, why: str, **how: Any) -> None:
        """Let a claimed item wait again, see `items.put_off`."""
        self.retried(items.put_off, self.database, claimed, why, **how)
        woken = self.retried(items.wake_orphans, self.database, farm=cards.farm_of(self.holder))
        self.follow_up(FollowUp(woken=woken))

    def _list_kernels(self, claimed: Claim) -> ItemOutcome:
        """Compile a model on the card and store its list of kernels; the next round measures them
        and the model.
        """
        request = VerifyRequest(claimed.work.subject, claimed.work.protocol)
        try:
            verification = self.benchmark.verify(
                request, settings().item_timeout_s, partial(self.phase, claimed)
            )
        except (
            Unmeasurable
        ) as error:  # the first line of an item's message has the reason and the next step
            line, _, more = error.message.partition("\n")
            raise Unmeasurable(
                error.reason, f"{line} {error.next_step}".strip() + f"\n{more}".rstrip()
            ) from error
        if verification.observed is None:
            raise Unmeasurable(
                "not_available", "A simulated card cannot compile a model. Choose another card."
            )
        assert claimed.capture_id is not None
        self._store_verified(claimed.capture_id, verification)
        self.follow_up(self.retried(items.listed, self.database, claimed))
        return ItemOutcome("listed")

    def _store_verified(self, capture_id: int, verification: Verification) -> int | None:
        """Store what the card has shown about a capture; return the id of the observed capture,
        see `store_observed`.
        """
        return self.retried(
            store_observed,
            self.database,
            capture_id,
            verification,
            card_id=self.card_id,
        )

    def _store(self, claimed: Claim, measured: CardReading) -> FollowUp | None:
        """Write the reading into the database; if the database is unreachable, write it into the
        spool, return None.

        If the spool's disk is full too, keep the reading in memory and try both again; the token
        decides whether the database accepts it. If the database raises another error, spool the
        reading and raise that error."""
        origin: dict[str, Any] = {"card_id": self.card_id, "software_id": measured.software.id}
        complete = partial(items.complete, self.database, claimed, measured.reading, **origin)
        if self.spool is None:
            return self.retried(complete)
        pauses_s = _pauses_s(0.5)
        while True:
            try:
                return complete()
            except DatabaseUnreachable as away:
                try:
                    self.spool.keep(claimed, measured.reading, **origin)
                except OSError as full:
                    log.warning(
                        "The reading of %s waits in memory: %s The spool cannot be written "
                        "either: %s",
                        claimed.label,
                        away.message,
                        full,
                    )
                    time.sleep(next(pauses_s))
                    continue
                log.warning(
                    "The database does not answer; the reading of %s waits in %s",
                    claimed.label,
                    self.spool.folder,
                )
                return None
            except Exception:
                with contextlib.suppress(OSError):
                    self.spool.keep(claimed, measured.reading, **origin)
                    log.error(
                        "The reading of %s was not written and waits in %s",
                        claimed.label,
                        self.spool.folder,
                    )
                raise


def _pauses_s(most_s: float) -> Iterator[float]:
    """Yield the pauses between tries: each twice as long as the previous one, up to ``most_s``.
    Unit: s.
    """
    pause_s = 0.1
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)
