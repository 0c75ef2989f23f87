"""Studies of two conditions of a reading: the values in the tensors, and other busy cards of the host."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from farm.benchmark_process.client import START_TIMEOUT_S, BenchmarkProcess
from farm.devices.device import Card
from farm.errors import FarmError, Unmeasurable
from farm.jobs.item_driver import check_health
from farm.settings import settings
from farm.store import tables
from farm.study.laboratory import Laboratory, Sample, StudyOptions, holding
from farm.study.results import (
    QUANTITIES,
    Findings,
    ResultColumn,
    ResultRow,
    bar_chart,
    change,
    change_of,
    known,
    tabulated,
)
from farm.types.protocol import Protocol, Stopping


def data(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How much do the values in the tensors matter? Compare normal values, zeros, and the most frequent class."""
    stopping = laboratory.stopping(quick=options.quick)
    samples = laboratory.samples(options.variant, options.tuples or (10 if options.quick else 24), values=True)
    wanted = [(sample, list(dict.fromkeys(("normal", sample.data_class, "zeros")))) for sample in samples]
    laboratory.expected = sum(len(classes) for _, classes in wanted)
    rows: list[ResultRow] = []
    for sample, classes in wanted:
        read = {
            data: laboratory.read(sample, laboratory.protocol(data=data), stopping, data=data)
            for data in laboratory.shuffled(sample, classes)
        }
        normal, zeros, common = read["normal"], read["zeros"], sample.data_class
        # If most calls of a tuple have normal values, there is no change to report.
        seen = read[common] if common != "normal" else None
        if normal is not None:
            rows.append(
                {
                    ResultColumn("tuple", "operator tuple"): sample.label,
                    ResultColumn("calls", "calls", "count"): sample.count,
                    ResultColumn("seen", "seen"): common,
                    ResultColumn("power_w", "power", "power_w"): normal.power_w,
                    ResultColumn("seen_energy", "energy change, seen", "change"): change_of(seen, normal, "energy_mj"),
                    ResultColumn("seen_time", "time change, seen", "change"): change_of(seen, normal, "time_us"),
                    ResultColumn("zeros_energy", "energy change, zeros", "change"): change_of(
                        zeros, normal, "energy_mj"
                    ),
                    ResultColumn("zeros_time", "time change, zeros", "change"): change_of(zeros, normal, "time_us"),
                }
            )
    laboratory.require(laboratory.readings)
    columns, table = tabulated(rows)
    notes = [
        "Changes are relative to standard normal values. `seen` is the class of data that most calls of the tuple have."
    ]
    if usual := sum(row["seen"] == "normal" for row in table):
        notes.append(
            f"For {usual} of {len(table)} tuples, most calls have the class `normal`; there the columns `seen` are "
            "empty."
        )
    for key, what in (("seen_energy", "Values as in the model"), ("zeros_energy", "Zeros")):
        if values := known(row[key] for row in table):
            notes.append(
                f"{what}: median change of the energy {statistics.median(values):+.1%} over {len(values)} tuples, "
                f"{min(values):+.1%} to {max(values):+.1%}."
            )
    quantity = "energy" if known(row["zeros_energy"] for row in table) else "time"
    series = {name: f"{name}_{quantity}" for name in ("seen", "zeros")}
    chart = bar_chart(f"change of {quantity} from standard normal values", table, "tuple", series)
    return Findings(columns, table, tuple(notes), (chart,), options.variant)


def simultaneous(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Do the readings of a card change while its neighbours (other cards of the host) measure?

    Measure the same list with idle (A) and busy neighbours (B). Without `quick` the order is A B B A: drift cancels.

    Raises:
        UsageError, CardBusy: see `holding`.
        FarmError: a neighbour measures nothing, or stopped.
    """
    read: dict[tuple[str, bool], list[tables.ReadingRow]] = defaultdict(list)
    taken: Counter[str] = Counter()
    with holding(options.neighbours, laboratory):
        stopping, protocol = laboratory.stopping(quick=options.quick), laboratory.protocol()
        samples = laboratory.samples(options.variant, options.tuples or (12 if options.quick else None))
        samples = [laboratory.whole(options.variant), *samples]
        goes = (False, True) if options.quick else (False, True, True, False)
        laboratory.expected = len(goes) * len(samples)
        for beside in goes:
            neighbours = options.neighbours if beside else ()
            with _busy(neighbours, samples, protocol, stopping, taken) as check:
                for sample in samples:
                    check()
                    row = laboratory.read(sample, protocol, stopping, busy_neighbours=len(neighbours))
                    if row is not None:
                        read[sample.subject.id, beside].append(row)
                check()
    laboratory.require(laboratory.readings)
    both = [(sample.label, read[sample.subject.id, False], read[sample.subject.id, True]) for sample in samples]
    columns, table = tabulated(_compare(*one) for one in both if all(one))
    others = "1 other card" if len(options.neighbours) == 1 else f"{len(options.neighbours)} other cards"
    counts = ", ".join(f"{taken[card.id]} on card {card.index}" for card in options.neighbours)
    notes = [
        f"Column `beside`: {others} of the host measured the same list at the same time.",
        f"Readings of the other cards: {counts}.",
    ]
    for name, _ in QUANTITIES:
        if values := known(row[f"change_{name}"] for row in table):
            low, median, high = min(values), statistics.median(values), max(values)
            notes.append(f"Median change of {name}: {median:+.2%}; from {low:+.2%} to {high:+.2%}.")
    series = {name: f"change_{name}" for name, _ in QUANTITIES}
    chart = bar_chart("change with busy neighbours, relative to alone", table, "subject", series)
    return Findings(columns, table, tuple(notes), (chart,), options.variant)


def _compare(label: str, alone: Sequence[tables.ReadingRow], beside: Sequence[tables.ReadingRow]) -> ResultRow:
    row: ResultRow = {ResultColumn("subject", "subject"): label}
    for name, quantity in QUANTITIES:
        means = [_mean(rows, quantity) for rows in (alone, beside)]
        widths = [
            (_mean(rows, quantity.replace("_", "_half_width_")) or 0.0) / mean
            for rows, mean in zip((alone, beside), means, strict=True)
            if mean
        ]
        row |= {
            ResultColumn(f"alone_{quantity}", f"{name}, alone", quantity): means[0],
            ResultColumn(f"beside_{quantity}"): means[1],
            ResultColumn(f"change_{name}", "change, beside", "change"): change(means[1], means[0]),
            ResultColumn(f"half_width_{name}", "±", "share"): math.hypot(*widths) if len(widths) == 2 else None,
        }
    for way, rows in (("alone", alone), ("beside", beside)):
        row[ResultColumn(f"{way}_temperature_c", f"°C, {way}", "count")] = _mean(rows, "temperature_c")
        row[ResultColumn(f"{way}_sm_clock_mhz")] = _mean(rows, "sm_clock_mhz")
    return row


def _mean(rows: Sequence[tables.ReadingRow], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if None in values else statistics.mean(values)


@contextlib.contextmanager
def _busy(
    cards: Sequence[Card], samples: Sequence[Sample], protocol: Protocol, stopping: Stopping, taken: Counter[str]
) -> Iterator[Callable[[], None]]:
    """Let the cards measure the list again and again during the block. The caller must hold their locks.

    The block begins when each card has made a reading; `taken` counts the readings by card id. Yields a function that
    raises FarmError if a card has stopped, or cannot measure any sample of the list.
    """
    stop = threading.Event()
    problems: list[str] = []

    def work(card: Card, begun: threading.Event, first: int) -> None:
        # This thread starts the process, because a process ends with the thread that started it.
        failed = 0  # failures in a row
        try:
            with BenchmarkProcess(card.id) as process:
                check_health(process)
                for sample in itertools.islice(itertools.cycle(samples), first, None):
                    if stop.is_set():
                        break
                    try:
                        process.measure(
                            sample.subject, protocol, stopping, verify=False, timeout_s=settings().item_timeout_s
                        )
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
            raise FarmError(
                f"A neighbouring card does not measure: {problems[0]}",
                "End the program that uses this card, then repeat the study.",
            )

    begun = {card: threading.Event() for card in cards}
    # Each card begins with another sample, so that the cards do not measure the same sample at the same time.
    threads = [
        threading.Thread(target=work, args=(card, begun[card], 1 + 3 * number), daemon=True)
        for number, card in enumerate(cards)
    ]
    try:
        for thread in threads:
            thread.start()
        patience_s = START_TIMEOUT_S + settings().item_timeout_s
        for card in cards:
            if not begun[card].wait(patience_s):
                problems.append(f"{card}: no reading within {patience_s:g} s")
        check()
        yield check
    finally:
        stop.set()
        for thread in threads:
            thread.join(settings().item_timeout_s)
