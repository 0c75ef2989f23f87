"""The farm's metrics for Prometheus: one exporter per host, in its control worker.

Every scrape counts items in the database (`farm.jobs.listing`) and reads the power of this host's
cards. The exporter keeps nothing but the results of the checks of `farm doctor`, for a minute. Each
host reports its own cards, so that sums over hosts count each card once. Every host reports all
lost cards, since the host of a lost card may be down."""

from __future__ import annotations

import contextlib
import csv
import functools
import logging
import math
import operator
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kombu.exceptions import OperationalError
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from redis import RedisError
from sqlalchemy.exc import SQLAlchemyError

from farm.devices.device import Device
from farm.devices.host import find_card, open_device
from farm.errors import FarmError
from farm.jobs import cards, listing
from farm.jobs.card_checks import OUTCOMES
from farm.jobs.listing import CardCounts
from farm.jobs.outage import Outage
from farm.jobs.spool import Spool
from farm.settings import Settings
from farm.store.database import Database
from farm.store.tables import OPEN, CardRow, CardState
from tasks.broker_probe import check_broker_works
from tasks.card_checks import RegularChecks
from tasks.doctor.database import database_checks
from tasks.queues import queue_depths, reconciler_works
from tasks.supervisor import state_of_supervisor

log = logging.getLogger("farm.control")

#: Every check asks the broker or the database, and Prometheus scrapes more often than their answers
#: matter. Unit: s.
CHECK_EVERY_S = 60.0

#: In this time after the start, the first pass of a reconciler has been completed. Unit: s.
FIRST_PASS_S = 15.0
#: A client that opens a connection has so long for its request: it may be gone without a notice.
#: Unit: s.
REQUEST_TIMEOUT_S = 30.0

CARD = ("host", "card", "index", "model")

#: The values of a metric's labels, and its value.
Labelled = tuple[Sequence[str], float]

#: Kinds of metrics in ``metrics.csv``. Only metrics that never decrease are counters: Prometheus's
#: rate() treats a decrease as a restart. Others decrease if items are tried again, moved or handed
#: back.
KINDS: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


@functools.cache
def described() -> dict[str, dict[str, str]]:
    """Name of each metric -> its row in ``metrics.csv``."""
    with Path(__file__).with_name("metrics.csv").open(encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def serve(
    current: Settings, *, supervisor: int = 0, checks: RegularChecks | None = None
) -> int | None:
    """Start a thread that serves metrics; return its port, or None if metrics are off or the port
    is in use.

    Args:
        supervisor: the id of the process that supervises this one; 0: none.
        checks: the regular checks of this host's cards.
    """
    if not current.metrics_port:
        return None
    registry = CollectorRegistry()
    registry.register(FarmCollector(current, supervisor, checks))
    try:
        server, _ = start_http_server(current.metrics_port, current.metrics_address, registry)
    except OSError as error:
        # Another control worker of this host may export metrics already; measuring does not need
        # them.
        log.warning(
            "Metrics cannot be served on %s:%s: %s",
            current.metrics_address,
            current.metrics_port,
            error,
        )
        return None
    server.RequestHandlerClass.timeout = REQUEST_TIMEOUT_S  # type: ignore[attr-defined]
    server.handle_error = _log_error  # type: ignore[method-assign, assignment]
    log.info("Metrics on http://%s:%s/metrics", current.metrics_address, current.metrics_port)
    return current.metrics_port


def _log_error(_request: Any, client: Any) -> None:
    log.warning("A request for metrics from %s failed: %s", client[0], sys.exception())


class FarmCollector(Collector):
    """Collects the metrics. The registry calls `collect` at every scrape, possibly in several
    threads at once.
    """

    def __init__(
        self, current: Settings, supervisor: int = 0, checks: RegularChecks | None = None
    ) -> None:
        self._settings = current
        self._supervisor = supervisor
        self._checks = checks
        self._problems: dict[str, int] = {}
        self._checked_s = -math.inf
        self._began_s = time.monotonic()
        self._checking = threading.Lock()
        self._ended = listing.EndedCounts()
        self._database = Database(current.database)
        self._spool = Spool(current.state_dir / "spool")
        self._devices: dict[str, Device | None] = {}
        self._outage = Outage(log, "No metrics of cards and items")

    def describe(self) -> list[Metric]:
        """Return no metrics: registration must not query the database, which may start later."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield _metric(
            "farm_spooled_readings", ["host"], [([self._settings.host], len(self._spool))]
        )
        problems = (([check], number) for check, number in self._problems_now().items())
        yield _metric("farm_doctor_problems", ["check"], problems)
        try:
            with self._checking, self._database.read() as session:
                entries = listing.count_items(
                    session, self._settings.host, self._settings.heartbeat_s, self._ended
                )
                jobs = listing.open_jobs(session)
                lost = cards.lost(session, self._settings.heartbeat_s)
        except (FarmError, SQLAlchemyError) as error:
            self._outage.note(error)
            yield _metric("farm_database_up", (), [((), 0)])
            return
        self._outage.over()
        yield _metric("farm_database_up", (), [((), 1)])
        yield _metric("farm_open_jobs", (), [((), jobs)])
        yield _metric(
            "farm_card_unseen_seconds", CARD, ((_labels(card), unseen_s) for card, unseen_s in lost)
        )
        yield from _items(entries)
        yield from self._now(entries)
        yield from self._checked(entries)

    def _problems_now(self) -> dict[str, int]:
        """Return check -> number of problems that stop the farm. The checks run once in
        `CHECK_EVERY_S` at most.
        """
        with self._checking:
            if time.monotonic() - self._checked_s > CHECK_EVERY_S:
                problems = dict.fromkeys(
                    ("broker", "cards", "database", "reconciler", "supervisor"), 0
                )
                try:
                    for check in database_checks(self._settings):
                        problems["cards" if check.name.startswith("card") else "database"] += (
                            check.level == "problem"
                        )
                except SQLAlchemyError:
                    problems["database"] = 1
                try:
                    check_broker_works(self._settings)
                    starts = time.monotonic() - self._began_s < FIRST_PASS_S
                    problems["reconciler"] = int(not starts and not reconciler_works())
                except FarmError:
                    problems["broker"] = 1
                if self._supervisor:
                    problems["supervisor"] = int(state_of_supervisor(self._supervisor) != "running")
                self._problems, self._checked_s = problems, time.monotonic()
            return self._problems

    def _now(self, entries: list[CardCounts]) -> Iterator[Metric]:
        """Yield the present power and temperature of the cards and the present lengths of their
        queues.
        """
        names = ("farm_card_power_watts", "farm_card_temperature_celsius", "farm_queue_messages")
        power, temperature, messages = (_metric(name, CARD) for name in names)
        with contextlib.suppress(FarmError, OperationalError, RedisError):
            depths = queue_depths([entry.view.card.id for entry in entries])
            for entry in entries:
                messages.add_metric(_labels(entry.view.card), depths[entry.view.card.id])
        for entry in entries:
            device = self._device(entry.view.card.id)
            if device is not None:
                instant_w = device.power_instant_w()
                values = (
                    device.power_average_w() if instant_w is None else instant_w,
                    device.temperature_c(),
                )
                for metric, value in zip((power, temperature), values, strict=True):
                    if value is not None:
                        metric.add_metric(_labels(entry.view.card), value)
        yield from (power, temperature, messages)

    def _checked(self, entries: list[CardCounts]) -> Iterator[Metric]:
        """Yield the outcomes of the newest regular checks. That of a link is at its first card."""
        labels = {entry.view.card.id: _labels(entry.view.card) for entry in entries}
        states: list[Labelled] = []
        ages: list[Labelled] = []
        for check in self._checks.outcomes() if self._checks is not None else ():
            if check.card_ids[0] not in labels:
                continue
            of_check = [*labels[check.card_ids[0]], check.checked]
            ages.append((of_check, time.time() - check.ended_at_s))
            for outcome in OUTCOMES:
                states.append(([*of_check, outcome], check.outcome == outcome))
        yield _metric("farm_card_check", [*CARD, "checked", "state"], states)
        yield _metric("farm_card_check_age_seconds", [*CARD, "checked"], ages)

    def _device(self, card_id: str) -> Device | None:
        if card_id not in self._devices:
            try:
                self._devices[card_id] = open_device(find_card(card_id, self._settings))
            except FarmError:
                self._devices[card_id] = None
        return self._devices[card_id]


def _labels(card: CardRow) -> list[str]:
    return [card.host, card.id, str(card.index), card.model]


def _metric(name: str, labels: Sequence[str], values: Iterable[Labelled] = ()) -> Any:
    """Return a metric with one value for each list of values of its labels."""
    row = described()[name]
    metric = KINDS[row["kind"]](name, row["help"], labels=labels)
    for of_labels, value in values:
        metric.add_metric(of_labels, value)
    return metric


def _items(entries: list[CardCounts]) -> Iterator[Metric]:
    of_cards = [(_labels(entry.view.card), entry) for entry in entries]
    for name, row in described().items():
        if row["value"]:
            value = operator.attrgetter(row["value"])
            yield _metric(name, CARD, [(card, max(0.0, value(entry))) for card, entry in of_cards])
    failed: list[Labelled] = []
    waiting: list[Labelled] = []
    states: list[Labelled] = []
    for card, entry in of_cards:
        failed += (([*card, reason], number) for reason, number in entry.failed.items())
        waiting += (([*card, str(state)], entry.open[state]) for state in OPEN)
        states += (([*card, str(state)], entry.view.state == state) for state in CardState)
    yield _metric("farm_items_failed", [*CARD, "reason"], failed)
    yield _metric("farm_items_open", [*CARD, "state"], waiting)
    yield _metric("farm_card_state", [*CARD, "state"], states)
    took = _metric("farm_item_seconds", CARD)
    for card, entry in of_cards:
        bounds: list[Any] = [f"{bound:g}" for bound in listing.DURATION_BOUNDS_S]
        took.add_metric(
            card,
            [*zip(bounds, entry.within, strict=True), ("+Inf", entry.measured)],
            entry.duration_s,
        )
    yield took
