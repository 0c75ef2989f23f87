"""Studies of the conditions of a reading: the values in the tensors, and busy neighbours of the card."""

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
from farm.study.laboratory import Laboratory, Sample, StudyOptions, require, require_neighbours
from farm.study.results import Findings, ResultColumn, change, known
from farm.types.protocol import Protocol, Stopping


def data(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How much do the values in the tensors matter? Each tuple with normal values, with zeros, and with the values that
    most of its calls have in the model.
    """
    stopping = laboratory.stopping(quick=options.quick)
    samples = laboratory.samples(options.variant, options.tuples or (10 if options.quick else 24), values=True)
    everything: list[tables.ReadingRow | None] = []
    table: list[dict[str, Any]] = []
    wanted = [list(dict.fromkeys(("normal", _commonest(sample), "zeros"))) for sample in samples]
    laboratory.expect(sum(len(classes) for classes in wanted))
    for sample, classes in zip(samples, wanted, strict=True):
        commonest = _commonest(sample)
        rows = {
            data: laboratory.read(sample, laboratory.protocol(data=data), stopping, data=data)
            for data in laboratory.shuffled(sample, classes)
        }
        everything += rows.values()
        # If most calls of a tuple have normal values, there is no change to report.
        normal, seen, zeros = rows["normal"], rows[commonest] if commonest != "normal" else None, rows["zeros"]
        if normal is None:
            continue
        table.append(
            {
                "tuple": sample.label,
                "calls": sample.count,
                "seen": commonest,
                "power_w": normal.power_w,
                "seen_time": change(seen.time_us, normal.time_us) if seen else None,
                "seen_energy": change(seen.energy_mj, normal.energy_mj) if seen else None,
                "zeros_time": change(zeros.time_us, normal.time_us) if zeros else None,
                "zeros_energy": change(zeros.energy_mj, normal.energy_mj) if zeros else None,
            }
        )
    require(everything, laboratory)
    columns = (
        ResultColumn("tuple", "operator tuple"),
        ResultColumn("calls", "calls", "count"),
        ResultColumn("seen", "seen"),
        ResultColumn("power_w", "power", "power_w"),
        ResultColumn("seen_energy", "seen, energy", "change"),
        ResultColumn("seen_time", "seen, time", "change"),
        ResultColumn("zeros_energy", "zeros, energy", "change"),
        ResultColumn("zeros_time", "zeros, time", "change"),
    )
    notes = ["Changes are against standard normal values; `seen` is the class that most calls of the tuple see."]
    if usual := sum(row["seen"] == "normal" for row in table):
        notes.append(f"Most calls of {usual} of {len(table)} tuples see `normal`: these have no change to `seen`.")
    for key, what in (("seen_energy", "As seen in the model"), ("zeros_energy", "With zeros")):
        values = known([row[key] for row in table])
        if values:
            notes.append(
                f"{what}: energy {statistics.median(values):+.1%} in the median of {len(values)}, "
                f"{min(values):+.1%} to {max(values):+.1%}."
            )
    quantity = "energy" if known([row["zeros_energy"] for row in table]) else "time"
    bars = {
        row["tuple"]: {
            name: row[f"{name}_{quantity}"] * 100 for name in ("seen", "zeros") if row[f"{name}_{quantity}"] is not None
        }
        for row in table
    }
    chart = Chart(f"{quantity} against standard normal values", y_name="%", bars=bars, zero=True)
    return Findings(columns, tuple(table), tuple(notes), (chart,))


def _commonest(sample: Sample) -> str:
    return max(sample.data, key=lambda pair: pair[1])[0] if sample.data else "normal"


def simultaneous(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Do the readings of a card change while its neighbours measure? The same list alone and beside busy neighbours.

    Without `quick` both twice, in the order A B B A, against drift.

    Raises:
        UsageError: the host has one card.
        CardBusy: a worker serves a neighbour, or somebody else measures on it.
        FarmError: a neighbour measures nothing, or stopped.
    """
    require_neighbours(laboratory, options)
    with contextlib.ExitStack() as held:
        # From the beginning to the end: no worker may measure on a neighbour, even while it should be idle.
        for card in options.neighbours:
            held.enter_context(CardLock(card.id, settings().lock_dir))
        return _alone_and_beside(laboratory, options)


def _alone_and_beside(laboratory: Laboratory, options: StudyOptions) -> Findings:
    stopping = laboratory.stopping(quick=options.quick)
    protocol = laboratory.protocol()
    samples = laboratory.samples(options.variant, options.tuples or (12 if options.quick else None))
    samples = [laboratory.whole(options.variant), *samples]
    read: dict[tuple[str, bool], list[tables.ReadingRow]] = defaultdict(list)
    taken: Counter[str] = Counter()
    goes = (False, True) if options.quick else (False, True, True, False)
    laboratory.expect(len(goes) * len(samples))
    for beside in goes:
        busy = _busy(options.neighbours, samples, protocol, stopping, taken) if beside else None
        with busy or contextlib.nullcontext(_nothing) as check:
            for sample in samples:
                check()
                neighbours = len(options.neighbours) if beside else 0
                row = laboratory.read(sample, protocol, stopping, busy_neighbours=neighbours)
                if row is not None:
                    read[sample.subject.id, beside].append(row)
            check()
    require([row for rows in read.values() for row in rows], laboratory)
    table = [compared for sample in samples if (compared := _compare(sample, read))]
    columns = (
        ResultColumn("subject", "subject"),
        ResultColumn("alone_time_us", "time, alone", "time_us"),
        ResultColumn("change_time", "beside", "change"),
        ResultColumn("half_width_time", "±", "share"),
        ResultColumn("alone_energy_mj", "energy, alone", "energy_mj"),
        ResultColumn("change_energy", "beside", "change"),
        ResultColumn("half_width_energy", "±", "share"),
        ResultColumn("alone_temperature_c", "°C, alone", "count"),
        ResultColumn("beside_temperature_c", "°C, beside", "count"),
    )
    others = "1 other card" if len(options.neighbours) == 1 else f"{len(options.neighbours)} other cards"
    counts = ", ".join(f"{taken[card.id]} on card {card.index}" for card in options.neighbours)
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


def _compare(sample: Sample, read: dict[tuple[str, bool], list[tables.ReadingRow]]) -> dict[str, Any] | None:
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


def _mean(rows: Sequence[tables.ReadingRow], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if any(value is None for value in values) else statistics.mean(values)


def _nothing() -> None:
    """Without neighbours nothing can have stopped."""


@contextlib.contextmanager
def _busy(
    cards: Sequence[Card], samples: Sequence[Sample], protocol: Protocol, stopping: Stopping, taken: Counter[str]
) -> Iterator[Callable[[], None]]:
    """Let the cards, whose locks are held, measure the list again and again.

    The block begins when each has taken a reading; `taken` counts them by card id. Yields a function that raises if a
    card has stopped, or cannot measure anything of the list.
    """
    stop = threading.Event()
    working = [threading.Event() for _ in cards]
    problems: list[str] = []

    def work(card: Card, begun: threading.Event, first: int) -> None:
        # The process ends with the thread that starts it.
        failed = 0  # in a row
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

    # Each begins at another place of the list, so that they do not run in step.
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
