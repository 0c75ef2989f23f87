"""Studies of tensors in slow memory: calls with such tensors in the running model, and the memory of another GPU."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from farm.errors import FarmError
from farm.study.laboratory import Laboratory, Sample, StudyOptions, holding
from farm.study.results import Findings, ResultColumn, ResultRow, change, known, scatter_chart, tabulated
from farm.types.format import percent
from farm.types.tuple import parse

MOST_CONFIGURATIONS, QUICK_CONFIGURATIONS = 160, 12


def placement(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """Does a call with tensors in slow memory take as long if one run changes many calls as if it changes one?

    The study changes the first call of each tuple: once with each single tensor in slow memory, once with all. A run
    changes many independent calls (`together`) or one call (`alone`). Without `quick`, `isolated` is the time of the
    tuple outside of the model.

    Raises:
        FarmError: the card has no slow memory, or no tensor could be put in it.
    """
    found = laboratory.in_situ(
        options.variant, options.tuples or (QUICK_CONFIGURATIONS if options.quick else MOST_CONFIGURATIONS)
    )
    changes = found["changes"]
    if not changes:
        why = next((one["why"] for one in found["left_out"]), "the model has no calls")
        raise FarmError(f"No tensor of {options.variant} could be placed: {why}", "Choose another model.")
    isolated_us: dict[tuple[str, str], float] = {}
    if not options.quick:
        samples = {sample.subject.id: sample for sample in laboratory.samples(options.variant)}
        wanted = [(one["tuple_id"], one["placement"]) for one in changes if one["tuple_id"] in samples]
        laboratory.expected = len(wanted)
        stopping = laboratory.stopping(quick=True)
        for tuple_id, word in wanted:
            protocol = laboratory.protocol(placement=word)
            if (row := laboratory.read(samples[tuple_id], protocol, stopping, placement=word)) is not None:
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
                ResultColumn("half_width", "±", "share"): half_width_us / alone_us if alone_us > 0 else None,
                ResultColumn("isolated_time_us", "time, outside the model", "time_us"): by_itself_us,
                ResultColumn("change_isolated", "change, inside/outside", "change"): change(alone_us, by_itself_us),
            }
        )
    columns, table = tabulated(rows)
    chart = scatter_chart(
        "calls in the model with tensors in slow memory",
        "time if a run changes one call, µs",
        table,
        "alone_time_us",
        {"many changed calls, relative to one": "change", "relative to outside the model": "change_isolated"},
    )
    return Findings(columns, table, tuple(_placement_notes(found, table)), (chart,), options.variant)


def _placement_notes(found: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    runs, took_s = found["runs"], found["took_s"]
    notes = [
        f"{runs['alone']} runs that change one call took {took_s['alone']:.1f} s; {runs['together']} runs that change "
        f"many calls took {took_s['together']:.1f} s: {runs['alone'] / runs['together']:.1f} times fewer runs."
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
            f"{statistics.median(changes):+.2%} over {len(changes)} configurations (a call and its slow tensors), 90 % "
            f"of them from {low:+.2%} to {high:+.2%}; {percent(within, 0)} are within their intervals."
        )
    if apart := known(row["change_isolated"] for row in rows):
        size = statistics.median(map(abs, apart))
        notes.append(
            f"Time in the model, relative to outside the model: median {statistics.median(apart):+.2%} over "
            f"{len(apart)} configurations; median of the absolute values {size:.2%}."
        )
    if left_out := found["left_out"]:
        notes.append(
            f"{len(left_out)} configurations could not be run. The first is {left_out[0]['label']}, "
            f"{left_out[0]['placement']}: {left_out[0]['why']}"
        )
    return notes


QUICK_TUPLES = 4  # they have about a dozen configurations
FAST = ""  # the placement with all tensors in fast memory

Times = Mapping[tuple[str, str], float]  # (tuple id, placement) -> us


def peer(laboratory: Laboratory, options: StudyOptions) -> Findings:
    """How much time do tensors in another GPU's memory cost, compared with the memory of the host?

    Measure each tuple with each single tensor in slow memory, with all, and with none. Slow memory is first the memory
    of the first neighbour, which is idle meanwhile, then the memory of the host.

    Raises:
        UsageError, CardBusy: see `holding`.
        Unmeasurable: the card cannot access the neighbour's memory.
        FarmError: nothing could be measured.
    """
    from farm.operators.replay import placements_of

    with holding(options.neighbours[:1], laboratory):
        peer = options.neighbours[0]
        samples = laboratory.samples(options.variant, options.tuples or (QUICK_TUPLES if options.quick else None))
        wanted = [(sample, placements_of(parse(sample.subject.spec), "each")) for sample in samples]
        laboratory.expected = 2 * sum(1 + len(words) for _, words in wanted)
        with laboratory.slow_on(peer):  # do this first: it fails at once if the card cannot access the memory
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
                    ResultColumn("change_host", "change, other GPU to host", "change"): change(peer_us, host_us),
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


def _measure_placements(laboratory: Laboratory, wanted: Sequence[tuple[Sample, Sequence[str]]], memory: str) -> Times:
    stopping = laboratory.stopping(quick=True)
    times, rows = {}, []
    for sample, words in wanted:
        for word in laboratory.shuffled(sample, [FAST, *words]):
            protocol = laboratory.protocol(placement=word)
            row = laboratory.read(sample, protocol, stopping, placement=word or "none", memory=memory)
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
                f"Tensors in {name}: median {statistics.median(slower):.3g} times the time with all tensors in fast "
                f"memory, over {len(slower)} configurations; from {min(slower):.3g} to {max(slower):.3g}."
            )
    if shares := [1 + off for off in known(row["change_host"] for row in rows)]:
        notes.append(
            f"Time in the other GPU's memory, as a share of the time in the host's memory: median "
            f"{percent(statistics.median(shares))}, from {percent(min(shares))} to {percent(max(shares))}."
        )
    fast = known(change(there.get(key), time_us) for key, time_us in here.items() if key[1] == FAST)
    if fast:
        notes.append(
            f"Control, all tensors in fast memory: first half of the study relative to the second, median "
            f"{statistics.median(fast):+.2%} over {len(fast)} tuples, at most {max(fast, key=abs):+.2%}."
        )
    return notes
