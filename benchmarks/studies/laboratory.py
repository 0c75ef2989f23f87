"""The card of a study: a study locks it, measures through the farm's benchmark process, and stores
every reading.

The readings of a study have the flag ``study``; ``details["study"]`` has the study's id, its name
and the conditions. Jobs never reuse these readings, because a study uses other windows and
conditions than jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.device import Card
from farm.devices.lock import CardLock
from farm.devices.software import torch_version
from farm.errors import FarmError, Unmeasurable, UsageError
from farm.jobs.captures import capture_for
from farm.jobs.cards import ensure_card
from farm.jobs.own_card import check_health, hold_card, keep_reading, quarantining
from farm.requests.partial_request import DEFAULTS
from farm.settings import settings
from farm.store import tables
from farm.store.captures import classes
from farm.store.database import Database
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Request
from farm.types.roofline import roofline_of
from farm.types.software import Software
from farm.types.subject import Subject
from farm.types.variant import Variant

T = TypeVar("T")


@dataclass(frozen=True)
class Sample:
    """One subject of a study. `weight_us` is the estimated time of all its calls in the model."""

    subject: Subject
    label: str
    short_name: str
    count: int = 1
    weight_us: float = 0.0
    data: tuple[
        tuple[str, int], ...
    ] = ()  # (data class, calls); class `normal` for all calls if values are unknown

    @property
    def data_class(self) -> str:
        """The data class of most calls."""
        return max(self.data, key=itemgetter(1))[0] if self.data else "normal"


@dataclass(frozen=True)
class StudyOptions:
    """The options of a study."""

    variant: Variant
    quick: bool = False
    tuples: int | None = None  # number of tuples of the model; None: the default of the study
    neighbours: tuple[Card, ...] = ()  # the host's other cards


@dataclass
class Laboratory:
    """A context manager that locks one card while a study runs.

    `__enter__` raises the errors of `hold_card`, and Unmeasurable if the benchmark process does not
    start."""

    database: Database
    card: Card
    name: str
    say: Callable[[str], None] = lambda line: None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    readings: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)  # label and protocol -> reason
    card_time_s: float = 0.0
    expected: int = 0  # readings of the study, for its progress
    _begun: int = 0

    def __enter__(self) -> Laboratory:
        self._held = hold_card(self.card, self.database)
        self._process = self._held.__enter__()
        self.software = self._process.wait_ready()
        with self.database.write() as session:
            ensure_card(session, self.card, self.software)
        return self

    def __exit__(self, *about: Any) -> None:
        self._held.__exit__(*about)

    @contextlib.contextmanager
    def slow_on(self, peer: Card) -> Iterator[None]:
        """Use the memory of another GPU of the host, whose lock is held, as slow memory.

        Raises:
            Unmeasurable: the card cannot access that memory, or the benchmark process does not
                start.
        """
        program = "benchmarks.studies.peer_process"
        usual, self._process = (
            self._process,
            BenchmarkProcess(self.card.id, also_visible=(peer.id,), program=program),
        )
        # only one process at a time uses the card; the next request after the block restarts
        # `usual`
        usual.close()
        try:
            self.check_health()
            yield
        finally:
            self._process.close()
            self._process = usual

    def check_health(self) -> Software:
        """Return the software of the benchmark process if the card is healthy.

        Raises:
            UnhealthyCard: the card failed the health check of its newest process; it is now in
                quarantine.
        """
        with quarantining(self.database, self.card):
            return check_health(self._process)

    @property
    def launches(self) -> tuple[str, ...]:
        """The launch modes of this card: a CPU has no graphs."""
        return ("eager",) if self.card.is_cpu else ("graph", "eager")

    def protocol(self, **changes: Any) -> Protocol:
        """The default protocol of the card with these changes. The default data class is
        `normal`.
        """
        return Protocol(**{"launch": DEFAULTS[self.card.kind].launch, **changes})

    def stopping(self, *, quick: bool) -> Stopping:
        """The default stopping rule of jobs on this card. If `quick` is set, windows have about
        half the length.
        """
        usual = DEFAULTS[self.card.kind].stopping
        if not quick:
            return usual
        return Stopping(
            min(0.2, usual.warm_up_s),
            min(0.5, usual.minimum_s),
            min(1.0, usual.maximum_s),
            0.02,
            0.03,
        )

    def exactly(self, window_s: float) -> Stopping:
        """A stopping rule for windows of this length, whatever their intervals, plus time for the
        last counter tick.
        """
        warm_up_s = DEFAULTS[self.card.kind].stopping.warm_up_s
        return Stopping(
            warm_up_s, window_s, window_s * 1.1 + 0.25, time_half_width=1.0, energy_half_width=1.0
        )

    def scaled(self, seconds: float) -> float:
        """The given duration on a GPU; a tenth of it on other cards, which measure only time. Unit:
        s.
        """
        return seconds if self.card.is_gpu else seconds / 10

    def shuffled(self, sample: Sample, wanted: Sequence[T]) -> list[T]:
        """The given list in random order: a fixed order would mix up its effects with warm-up and
        drift of the card.

        The ids of study and sample are the seed: the order is reproducible, and each study has
        another order."""
        return random.Random(f"{self.id}/{sample.subject.id}").sample(wanted, len(wanted))

    def read(
        self, sample: Sample, protocol: Protocol, stopping: Stopping, **circumstances: Any
    ) -> tables.ReadingRow | None:
        """Measure and store one reading. If this fails, return None and add an entry to `failures`.

        Raises:
            UnhealthyCard: see `check_health`.
        """
        self._begun += 1
        words = filter(None, (_in_words(name, value) for name, value in circumstances.items()))
        self.say(f"{self._begun} of {self.expected}: {', '.join((sample.label, *words))}")
        try:
            self.check_health()  # the process may have been restarted
            timeout_s = settings().item_timeout_s
            answer = self._process.measure(
                MeasureRequest(sample.subject, protocol, stopping),
                timeout_s=timeout_s,
                verify=False,
            )
        except Unmeasurable as error:
            self.failures[f"{sample.label} ({protocol})"] = f"{error.reason}: {error.message}"
            return None
        self.card_time_s += answer.reading.cost_s.get("total", 0.0)
        study = {"id": self.id, "name": self.name, **circumstances}
        answer = dataclasses.replace(
            answer, reading=answer.reading.flagged("study").noting(study=study)
        )
        row = keep_reading(self.database, answer, sample.subject, protocol)
        self.readings.append(row.id)
        return row

    def in_situ(self, variant: Variant, most: int | None) -> dict[str, Any]:
        """Time the model's calls with tensors in slow memory; the result of
        `benchmarks.studies.in_situ.compare`.

        Raises:
            FarmError: this card or this model does not support it.
        """
        from benchmarks.studies.in_situ import InSituRequest  # imports torch

        self.say(
            f"{variant}: measuring calls with tensors in slow memory, many calls per run and one "
            "call per run"
        )
        began_s = time.monotonic()
        try:
            request = InSituRequest(self.whole(variant).subject, self.protocol(), most)
            # only one process at a time uses the card; the next request restarts this one
            self._process.close()
            with BenchmarkProcess(self.card.id, program="benchmarks.studies.in_situ") as process:
                found = process.call(request, timeout_s=settings().item_timeout_s)
        except Unmeasurable as error:
            raise FarmError(error.message, error.next_step or "Choose another card.") from error
        self.card_time_s += time.monotonic() - began_s
        return found

    def whole(self, variant: Variant) -> Sample:
        """The whole model as a sample."""
        return Sample(
            Subject("variant", variant.id, variant.to_json()), f"{variant}, whole", "whole model"
        )

    def samples(
        self, variant: Variant, most: int | None = None, *, values: bool = False
    ) -> list[Sample]:
        """The tuples of a model, sorted by estimated cost.

        Args:
            most: the highest number of tuples. At most half of them have the same operator type, if
                there are others.
            values: run the model once to observe the values in its tensors (`Sample.data`).
        """
        data = "seen" if values else "normal"
        request = Request(variant=variant, protocol=self.protocol(data=data))
        device_type = self.card.device_type
        torch = torch_version() if self.card.is_simulated else self.software.torch
        capture_id = capture_for(self.database, request, device_type=device_type, torch=torch)
        found = []
        with self.database.read() as session:
            by_tuple: dict[str, dict[str, int]] = defaultdict(dict)
            for (operator_id, name), calls in classes(session, capture_id, data).items():
                by_tuple[operator_id][name] = calls
            card = session.get_one(
                tables.CardRow, self.card.id
            )  # has a fingerprint if a worker has served the card
            roofline = roofline_of(
                card.kind, card.model, card.fingerprint, dtype=variant.dtype, tf32=False
            )
            for operator_id, named in by_tuple.items():
                one = session.get_one(tables.Operator, operator_id)
                count = sum(named.values())
                weight_us = count * roofline.call_us(one)
                subject = Subject("operator", operator_id, one.spec)
                found.append(
                    Sample(
                        subject, one.label, one.short_name, count, weight_us, tuple(named.items())
                    )
                )
        found.sort(key=lambda sample: -sample.weight_us)
        if most is None:
            return found
        ranks: dict[str, Iterator[int]] = defaultdict(
            itertools.count
        )  # operator type -> rank of its next tuple
        return sorted(
            found, key=lambda sample: next(ranks[sample.short_name]) >= max(1, most // 2)
        )[:most]

    def parts(self, variant: Variant, most: int | None = None) -> list[Sample]:
        """The summands of a model as in a job: a tuple whose calls have two data classes gives two
        samples.
        """
        values = DEFAULTS[self.card.kind].data == "seen"
        return [
            dataclasses.replace(
                sample,
                count=calls,
                weight_us=sample.weight_us * calls / sample.count,
                data=((name, calls),),
            )
            for sample in self.samples(variant, most, values=values)
            for name, calls in sample.data
        ]

    def require(self, readings: Sequence[object]) -> None:
        """Raise FarmError if all `readings` are empty or None. Its message has the first
        failure.
        """
        if not any(readings):
            reason = next(iter(self.failures.values()), "nothing was measured")
            raise FarmError(
                f"The study has no readings to compare: {reason}",
                "Choose another model, batch or card.",
            )


def _in_words(circumstance: str, value: Any) -> str:
    match circumstance:
        case "window_s":
            return f"window {value:g} s"
        case "data":
            return {"normal": "standard normal values", "zeros": "zeros"}.get(
                value, "values as seen in the model"
            )
        case "busy_neighbours":
            return (
                f"beside {value} busy cards"
                if value > 1
                else "beside a busy card"
                if value
                else "alone"
            )
        case "of":  # the label has it
            return ""
        case _:
            return f"{circumstance} {value}"


@contextlib.contextmanager
def holding(cards: Sequence[Card], laboratory: Laboratory) -> Iterator[None]:
    """Lock other cards of the host during the block: no worker may measure on them, even while they
    are idle.

    Raises:
        UsageError: `cards` is empty.
        CardBusy: a worker or another command uses one of the cards.
    """
    if not cards:
        raise UsageError(
            f"{laboratory.card} is the only usable card of its kind on this host.",
            "Run this study on a host with two or more cards.",
        )
    with contextlib.ExitStack() as held:
        for card in cards:
            held.enter_context(CardLock(card.id, settings().lock_dir))
        yield
