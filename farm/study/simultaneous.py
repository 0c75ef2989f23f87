"""Do the readings of one card change while its neighbours on the host measure too? The same list, alone and beside."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from farm.benchmark_process.client import START_TIMEOUT_S, BenchmarkProcess
from farm.devices.device import Card
from farm.devices.lock import CardLock
from farm.errors import FarmError, Unmeasurable
from farm.jobs.item_driver import check_health
from farm.pages.plots import Chart
from farm.settings import settings
from farm.store import tables
from farm.study.findings import Column, Findings, change, known
from farm.study.laboratory import Laboratory, Plan, Sample, require, require_neighbours
from farm.types.protocol import Protocol, Stopping


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """Alone, then beside the busy neighbours; a full go does both twice, in the order A B B A, against drift.

    Raises:
        UsageError: the host has one card.
        CardBusy: a worker serves a neighbour, or somebody else measures on it.
        FarmError: a neighbour measures nothing, or stopped.
    """
    require_neighbours(laboratory, plan)
    with contextlib.ExitStack() as held:
        # First of all and to the end: a worker that serves one is met before anything is read, and none comes to one
        # that should rest.
        for card in plan.neighbours:
            held.enter_context(CardLock(card.id, settings().lock_dir))
        return _alone_and_beside(laboratory, plan)


def _alone_and_beside(laboratory: Laboratory, plan: Plan) -> Findings:
    stopping = laboratory.stopping(quick=plan.quick)
    protocol = laboratory.protocol()
    samples = laboratory.samples(plan.variant, plan.tuples or (12 if plan.quick else None))
    samples = [laboratory.whole(plan.variant), *samples]
    read: dict[tuple[str, bool], list[tables.Reading]] = defaultdict(list)
    taken: Counter[str] = Counter()
    goes = (False, True) if plan.quick else (False, True, True, False)
    laboratory.expect(len(goes) * len(samples))
    for beside in goes:
        busy = _busy(plan.neighbours, samples, protocol, stopping, taken) if beside else None
        with busy or contextlib.nullcontext(_nothing) as check:
            for sample in samples:
                check()
                neighbours = len(plan.neighbours) if beside else 0
                row = laboratory.read(sample, protocol, stopping, busy_neighbours=neighbours)
                if row is not None:
                    read[sample.subject.id, beside].append(row)
            check()
    require([row for rows in read.values() for row in rows], laboratory)
    table = [compared for sample in samples if (compared := _compare(sample, read))]
    columns = (
        Column("subject", "subject"),
        Column("alone_time_us", "time, alone", "time_us"),
        Column("change_time", "beside", "change"),
        Column("half_width_time", "±", "share"),
        Column("alone_energy_mj", "energy, alone", "energy_mj"),
        Column("change_energy", "beside", "change"),
        Column("half_width_energy", "±", "share"),
        Column("alone_temperature_c", "°C, alone", "count"),
        Column("beside_temperature_c", "°C, beside", "count"),
    )
    others = "1 other card" if len(plan.neighbours) == 1 else f"{len(plan.neighbours)} other cards"
    counts = ", ".join(f"{taken[card.id]} on card {card.index}" for card in plan.neighbours)
    notes = [
        f"Beside means: {others} of the host measured the same list at the same time.",
        f"Readings that they took: {counts}.",
    ]
    for key, what in (("time", "Time"), ("energy", "Energy")):
        values = known([row[f"change_{key}"] for row in table])
        if values:
            notes.append(
                f"{what}: {statistics.median(values):+.2%} in the median, {min(values):+.2%} to {max(values):+.2%}."
            )
    bars = {
        row["subject"]: {
            name: row[f"change_{name}"] * 100 for name in ("time", "energy") if row[f"change_{name}"] is not None
        }
        for row in table
    }
    chart = Chart("beside busy neighbours, against alone", y_name="%", bars=bars, zero=True)
    return Findings(columns, tuple(table), tuple(notes), (chart,))


def _compare(sample: Sample, read: dict[tuple[str, bool], list[tables.Reading]]) -> dict[str, Any] | None:
    alone, beside = read[sample.subject.id, False], read[sample.subject.id, True]
    if not alone or not beside:
        return None
    row: dict[str, Any] = {"subject": sample.label}
    for name, unit in (("time", "us"), ("energy", "mj")):
        apart = [_mean(rows, f"{name}_{unit}") for rows in (alone, beside)]
        widths = [
            (_mean(rows, f"{name}_half_width_{unit}") or 0.0) / value
            for rows, value in zip((alone, beside), apart, strict=True)
            if value
        ]
        row |= {
            f"alone_{name}_{unit}": apart[0],
            f"beside_{name}_{unit}": apart[1],
            f"change_{name}": change(apart[1], apart[0]),
            f"half_width_{name}": sum(width**2 for width in widths) ** 0.5 if len(widths) == 2 else None,
        }
    for name in ("temperature_c", "sm_clock_mhz"):
        row |= {f"alone_{name}": _mean(alone, name), f"beside_{name}": _mean(beside, name)}
    return row


def _mean(rows: Sequence[tables.Reading], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if any(value is None for value in values) else statistics.mean(values)


def _nothing() -> None:
    """There is no neighbour to look after."""


@contextlib.contextmanager
def _busy(
    cards: Sequence[Card], samples: Sequence[Sample], protocol: Protocol, stopping: Stopping, taken: Counter[str]
) -> Iterator[Callable[[], None]]:
    """Have the cards, whose locks are held, measure the list over and over.

    Begins when each has taken a reading, counts them in `taken` by the card's id, and gives a function that raises if
    one of them has stopped. A card that can measure nothing of the list has.
    """
    stop = threading.Event()
    working = [threading.Event() for _ in cards]
    problems: list[str] = []

    def work(card: Card, begun: threading.Event, first: int) -> None:
        # The process is tied to the thread that starts it, so it lives and ends here.
        failed = 0  # one after the other
        try:
            with BenchmarkProcess(card.id) as process:
                check_health(process)
                number = first
                while not stop.is_set():
                    subject = samples[number % len(samples)].subject
                    number += 1
                    try:
                        process.measure(subject, protocol, stopping, verify=False, timeout_s=settings().item_timeout_s)
                    except Unmeasurable:
                        failed += 1
                        if failed == len(samples):
                            raise
                    else:
                        failed = 0
                        taken[card.id] += 1
                        begun.set()
        except (FarmError, OSError) as error:
            problems.append(f"{card}: {error}")
        finally:
            begun.set()

    def check() -> None:
        if problems:
            raise FarmError(f"A neighbour does not measure: {problems[0]}", "Stop what uses it, or name other cards.")

    # Each begins elsewhere in the list, so that they do not march in step.
    threads = [
        threading.Thread(target=work, args=(card, begun, 1 + 3 * number), daemon=True)
        for number, (card, begun) in enumerate(zip(cards, working, strict=True))
    ]
    try:
        for thread in threads:
            thread.start()
        patience_s = START_TIMEOUT_S + settings().item_timeout_s
        for card, begun in zip(cards, working, strict=True):
            if not begun.wait(patience_s):
                problems.append(f"{card}: no reading within {patience_s:g} s")
        check()
        yield check
    finally:
        stop.set()
        for thread in threads:
            thread.join(settings().item_timeout_s)
