"""Studies of the conditions of a reading: values in the tensors, other busy cards of the host, and
slow memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.studies.laboratory import Laboratory, Sample, StudyOptions, holding
from benchmarks.studies.results import (
    QUANTITIES,
    Findings,
    ResultColumn,
    ResultRow,
    bar_chart,
    change,
    change_of,
    known,
    scatter_chart,
    tabulated,
)
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.device import Card
from farm.errors import FarmError, Unmeasurable
from farm.jobs.own_card import check_health
from farm.settings import START_TIMEOUT_S, settings
from farm.store import tables
from farm.subjects.parsing import parse
from farm.types.format import percent
from farm.types.protocol import Protocol, Stopping


def data(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How much do the values in the tensors matter? Compare normal values, zeros, and the most
    frequent class.
    """
    stopping = laboratory.stopping(quick=options.quick)
    samples = laboratory.samples(
        options.variant, options.tuples or (10 if options.quick else 24), values=True
    )
    wanted = [
        (sample, list(dict.fromkeys(("normal", sample.data_class, "zeros")))) for sample in samples
    ]
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
                    ResultColumn("seen_energy", "energy change, seen", "change"): change_of(
                        seen, normal, "energy_mj"
                    ),
                    ResultColumn("seen_time", "time change, seen", "change"): change_of(
                        seen, normal, "time_us"
                    ),
                    ResultColumn("zeros_energy", "energy change, zeros", "change"): change_of(
                        zeros, normal, "energy_mj"
                    ),
                    ResultColumn("zeros_time", "time change, zeros", "change"): change_of(
                        zeros, normal, "time_us"
                    ),
                }
            )
    laboratory.require(laboratory.readings)
    columns, table = tabulated(rows)
    notes = [
        "Changes are relative to standard normal values. `seen` is the class of data that most "
        "calls of the tuple have."
    ]
    if usual := sum(row["seen"] == "normal" for row in table):
        notes.append(
            f"For {usual} of {len(table)} tuples, most calls have the class `normal`; there the "
            "columns `seen` are "
            "empty."
        )
    for key, what in (("seen_energy", "Values as in the model"), ("zeros_energy", "Zeros")):
        if values := known(row[key] for row in table):
            notes.append(
                f"{what}: median change of the energy {statistics.median(values):+.1%} over "
                f"{len(values)} tuples, "
                f"{min(values):+.1%} to {max(values):+.1%}."
            )
    quantity = "energy" if known(row["zeros_energy"] for row in table) else "time"
    series = {name: f"{name}_{quantity}" for name in ("seen", "zeros")}
    chart = bar_chart(f"change of {quantity} from standard normal values", table, "tuple", series)
    return Findings(columns, table, tuple(notes), (chart,), options.variant)


def simultaneous(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Do the readings of a card change while its neighbours (other cards of the host) measure?

    Measure the same list with idle (A) and busy neighbours (B). Without `quick` the order is A B B
    A: drift cancels.

    Raises:
        UsageError, CardBusy: see `holding`.
        FarmError: a neighbour measures nothing, or stopped.
    """
    read: dict[tuple[str, bool], list[tables.ReadingRow]] = defaultdict(list)
    taken: Counter[str] = Counter()
    with holding(options.neighbours, laboratory):
        stopping, protocol = laboratory.stopping(quick=options.quick), laboratory.protocol()
        samples = laboratory.samples(
            options.variant, options.tuples or (12 if options.quick else None)
        )
        samples = [laboratory.whole(options.variant), *samples]
        goes = (False, True) if options.quick else (False, True, True, False)
        laboratory.expected = len(goes) * len(samples)
        for beside in goes:
            neighbours = options.neighbours if beside else ()
            with _busy(neighbours, samples, protocol, stopping, taken) as check:
                for sample in samples:
                    check()
                    row = laboratory.read(
                        sample, protocol, stopping, busy_neighbours=len(neighbours)
                    )
                    if row is not None:
                        read[sample.subject.id, beside].append(row)
                check()
    laboratory.require(laboratory.readings)
    both = [
        (sample.label, read[sample.subject.id, False], read[sample.subject.id, True])
        for sample in samples
    ]
    columns, table = tabulated(_compare(*one) for one in both if all(one))
    others = (
        "1 other card" if len(options.neighbours) == 1 else f"{len(options.neighbours)} other cards"
    )
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


def _compare(
    label: str, alone: Sequence[tables.ReadingRow], beside: Sequence[tables.ReadingRow]
) -> ResultRow:
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
            ResultColumn(f"half_width_{name}", "±", "share"): math.hypot(*widths)
            if len(widths) == 2
            else None,
        }
    for way, rows in (("alone", alone), ("beside", beside)):
        row[ResultColumn(f"{way}_temperature_c", f"°C, {way}", "count")] = _mean(
            rows, "temperature_c"
        )
        row[ResultColumn(f"{way}_sm_clock_mhz")] = _mean(rows, "sm_clock_mhz")
    return row


def _mean(rows: Sequence[tables.ReadingRow], name: str) -> float | None:
    values = [getattr(row, name) for row in rows]
    return None if None in values else statistics.mean(values)


@contextlib.contextmanager
def _busy(
    cards: Sequence[Card],
    samples: Sequence[Sample],
    protocol: Protocol,
    stopping: Stopping,
    taken: Counter[str],
) -> Iterator[Callable[[], None]]:
    """Let the cards measure the list again and again during the block. The caller must hold their
    locks.

    The block begins when each card has made a reading; `taken` counts the readings by card id.
    Yields a function that raises FarmError if a card has stopped, or cannot measure any sample of
    the list."""
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
                            MeasureRequest(sample.subject, protocol, stopping),
                            verify=False,
                            timeout_s=settings().item_timeout_s,
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
    # Each card begins with another sample, so that the cards do not measure the same sample at the
    # same time.
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


MOST_CONFIGURATIONS, QUICK_CONFIGURATIONS = 160, 12


def placement(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Does a call with tensors in slow memory take as long if one run changes many calls as if it
    changes one?

    The study changes the first call of each tuple: once with each single tensor in slow memory,
    once with all. A run changes many independent calls (`together`) or one call (`alone`). Without
    `quick`, `isolated` is the time of the tuple outside of the model.

    Raises:
        FarmError: the card has no slow memory, or no tensor could be put in it.
    """
    found = laboratory.in_situ(
        options.variant,
        options.tuples or (QUICK_CONFIGURATIONS if options.quick else MOST_CONFIGURATIONS),
    )
    changes = found["changes"]
    if not changes:
        why = next((one["why"] for one in found["left_out"]), "the model has no calls")
        raise FarmError(
            f"No tensor of {options.variant} could be placed: {why}", "Choose another model."
        )
    isolated_us: dict[tuple[str, str], float] = {}
    if not options.quick:
        samples = {sample.subject.id: sample for sample in laboratory.samples(options.variant)}
        wanted = [
            (one["tuple_id"], one["placement"]) for one in changes if one["tuple_id"] in samples
        ]
        laboratory.expected = len(wanted)
        stopping = laboratory.stopping(quick=True)
        for tuple_id, word in wanted:
            protocol = laboratory.protocol(placement=word)
            if (
                row := laboratory.read(samples[tuple_id], protocol, stopping, placement=word)
            ) is not None:
                isolated_us[tuple_id, word] = row.time_us
    rows: list[ResultRow] = []
    for one in changes:
        alone_us, together_us = one["alone"]["time_us"], one["together"]["time_us"]
        half_width_us = math.hypot(one["alone"]["half_width_us"], one["together"]["half_width_us"])
        by_itself_us = isolated_us.get((one["tuple_id"], one["placement"]))
        rows.append(
            {
                ResultColumn("operator", "operator tuple"): one["label"],
                ResultColumn("placement", "in slow memory"): one["placement"],
                ResultColumn("alone_time_us", "time, one changed", "time_us"): alone_us,
                ResultColumn("together_time_us", "time, many changed", "time_us"): together_us,
                ResultColumn("change", "change", "change"): change(together_us, alone_us),
                ResultColumn("half_width", "±", "share"): half_width_us / alone_us
                if alone_us > 0
                else None,
                ResultColumn(
                    "isolated_time_us", "time, outside the model", "time_us"
                ): by_itself_us,
                ResultColumn("change_isolated", "change, inside/outside", "change"): change(
                    alone_us, by_itself_us
                ),
            }
        )
    columns, table = tabulated(rows)
    chart = scatter_chart(
        "calls in the model with tensors in slow memory",
        "time if a run changes one call, µs",
        table,
        "alone_time_us",
        {
            "many changed calls, relative to one": "change",
            "relative to outside the model": "change_isolated",
        },
    )
    return Findings(
        columns, table, tuple(_placement_notes(found, table)), (chart,), options.variant
    )


def _placement_notes(found: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    runs, took_s = found["runs"], found["took_s"]
    notes = [
        f"{runs['alone']} runs that change one call took {took_s['alone']:.1f} s; "
        f"{runs['together']} runs that change "
        f"many calls took {took_s['together']:.1f} s: {runs['alone'] / runs['together']:.1f} "
        "times fewer runs."
    ]
    changes = known(row["change"] for row in rows)
    if len(changes) > 1:
        low, *_, high = statistics.quantiles(changes, n=20)
        within = statistics.fmean(
            abs(row["change"]) <= row["half_width"]
            for row in rows
            if row["change"] is not None and row["half_width"] is not None
        )
        notes.append(
            "Change of a call's time if a run changes many calls, relative to one: median "
            f"{statistics.median(changes):+.2%} over {len(changes)} configurations (a call and "
            "its slow tensors), 90 % "
            f"of them from {low:+.2%} to {high:+.2%}; {percent(within, 0)} are within their "
            "intervals."
        )
    if apart := known(row["change_isolated"] for row in rows):
        size = statistics.median(map(abs, apart))
        notes.append(
            "Time in the model, relative to outside the model: median "
            f"{statistics.median(apart):+.2%} over "
            f"{len(apart)} configurations; median of the absolute values {size:.2%}."
        )
    if left_out := found["left_out"]:
        notes.append(
            f"{len(left_out)} configurations could not be run. The first is "
            f"{left_out[0]['label']}, "
            f"{left_out[0]['placement']}: {left_out[0]['why']}"
        )
    return notes


QUICK_TUPLES = 4  # they have about a dozen configurations
FAST = ""  # the placement with all tensors in fast memory

Times = Mapping[tuple[str, str], float]  # (tuple id, placement) -> us


def peer(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How much time do tensors in another GPU's memory cost, compared with the memory of the host?

    Measure each tuple with each single tensor in slow memory, with all, and with none. Slow memory
    is first the memory of the first neighbour, which is idle meanwhile, then the memory of the
    host.

    Raises:
        UsageError, CardBusy: see `holding`.
        Unmeasurable: the card cannot access the neighbour's memory.
        FarmError: nothing could be measured.
    """
    from farm.operators.rebuild import placements_of

    with holding(options.neighbours[:1], laboratory):
        peer = options.neighbours[0]
        samples = laboratory.samples(
            options.variant, options.tuples or (QUICK_TUPLES if options.quick else None)
        )
        wanted = [(sample, placements_of(parse(sample.subject.spec), "each")) for sample in samples]
        laboratory.expected = 2 * sum(1 + len(words) for _, words in wanted)
        with laboratory.slow_on(
            peer
        ):  # do this first: it fails at once if the card cannot access the memory
            there = _measure_placements(laboratory, wanted, "of another GPU")
        here = _measure_placements(laboratory, wanted, "of the host")
    rows: list[ResultRow] = []
    for sample, words in wanted:
        fast = (sample.subject.id, FAST)
        for word in words:
            host_us, peer_us = (times.get((sample.subject.id, word)) for times in (here, there))
            rows.append(
                {
                    ResultColumn("operator", "operator tuple"): sample.label,
                    ResultColumn("placement", "in slow memory"): word,
                    ResultColumn("fast_time_us", "time, all fast", "time_us"): here.get(fast),
                    ResultColumn("host_time_us", "time, host", "time_us"): host_us,
                    ResultColumn("peer_time_us", "time, other GPU", "time_us"): peer_us,
                    ResultColumn("change_fast", "change, other GPU to all fast", "change"): change(
                        peer_us, there.get(fast)
                    ),
                    ResultColumn("change_host", "change, other GPU to host", "change"): change(
                        peer_us, host_us
                    ),
                }
            )
    columns, table = tabulated(rows)
    chart = scatter_chart(
        "time in another GPU's memory, relative to the host's memory",
        "time in the host's memory, µs",
        table,
        "host_time_us",
        {"another GPU's memory": "change_host"},
    )
    notes = (f"The other GPU is {peer}.", *_peer_notes(table, here, there))
    return Findings(columns, table, notes, (chart,), options.variant)


def _measure_placements(
    laboratory: Laboratory, wanted: Sequence[tuple[Sample, Sequence[str]]], memory: str
) -> Times:
    stopping = laboratory.stopping(quick=True)
    times, rows = {}, []
    for sample, words in wanted:
        for word in laboratory.shuffled(sample, [FAST, *words]):
            protocol = laboratory.protocol(placement=word)
            row = laboratory.read(
                sample, protocol, stopping, placement=word or "none", memory=memory
            )
            if row is not None:
                # Use the median of the pass times, as in readings without energy.
                times[sample.subject.id, word] = row.time_median_us
                rows.append(row if word else None)
    laboratory.require(rows)
    return times


def _peer_notes(rows: Sequence[Mapping[str, Any]], here: Times, there: Times) -> list[str]:
    notes = []
    for name, times in (("the host's memory", here), ("the other GPU's memory", there)):
        slower = [
            time_us / times[tuple_id, FAST]
            for (tuple_id, word), time_us in times.items()
            if word != FAST and times.get((tuple_id, FAST))
        ]
        if slower:
            notes.append(
                f"Tensors in {name}: median {statistics.median(slower):.3g} times the time with "
                "all tensors in fast "
                f"memory, over {len(slower)} configurations; from {min(slower):.3g} to "
                f"{max(slower):.3g}."
            )
    if shares := [1 + off for off in known(row["change_host"] for row in rows)]:
        notes.append(
            f"Time in the other GPU's memory, as a share of the time in the host's memory: median "
            f"{percent(statistics.median(shares))}, from {percent(min(shares))} to "
            f"{percent(max(shares))}."
        )
    fast = known(change(there.get(key), time_us) for key, time_us in here.items() if key[1] == FAST)
    if fast:
        notes.append(
            "Control, all tensors in fast memory: first half of the study relative to the "
            "second, median "
            f"{statistics.median(fast):+.2%} over {len(fast)} tuples, at most "
            f"{max(fast, key=abs):+.2%}."
        )
    return notes
