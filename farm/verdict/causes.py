"""Why a model takes its time: the largest causes, each with the time that it would save at most.

Nothing is measured or predicted here. Each saving is an upper bound from the times of the calls
and the card's peak rates; the docstring of each cause says how it is computed. Two causes may save
the same time, so their savings are not added."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from farm.types.figure import share_of
from farm.types.format import TIME, few, percent, plural, quantity
from farm.types.roofline import Roofline
from farm.verdict.cost_line import CostLine
from farm.verdict.rates import MOST_OF_ROOFLINE, Rates, rule_of

#: Operators that move or convert data and compute nothing.
COPIES = frozenset(
    {
        *("to", "_to_copy", "type_as", "float", "half", "bfloat16", "double"),
        *("clone", "contiguous", "copy_", "reshape"),
        *("cat", "concat", "stack", "pad", "repeat", "repeat_interleave", "roll", "flip"),
    }
)
# A cause that saves less is not worth a sentence.
_LEAST_SAVING = 0.01


@dataclass(frozen=True)
class Cause:
    """A reason for time that another way to run the model would save.

    Attributes:
        topic: fusion, copies, launch, small calls, dtype or rate.
        saves_us: the largest possible saving of one pass.
        of_us: the time that it is a part of: the sum, or an eager pass if the topic is launch.
        text: sentences with the numbers and what to do.
    """

    topic: str
    saves_us: float
    of_us: float
    text: str

    @property
    def share(self) -> float | None:
        """The saving as a share of the sum, or of an eager pass if the topic is launch."""
        return share_of(self.saves_us, self.of_us)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "share": self.share}


@dataclass(frozen=True)
class Why:
    """The rates of a job's tuples, the most expensive first, and its causes, the largest first."""

    job_id: str  # "" for an estimate
    title: str
    card_model: str
    rows: tuple[Rates, ...]
    causes: tuple[Cause, ...]
    peaks: Roofline

    @property
    def rule(self) -> str:
        """What the mark of a row and the column `roofline` mean."""
        return rule_of(self.peaks)

    @property
    def sum_us(self) -> float:
        return _sum_us(self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "title": self.title,
            "card_model": self.card_model,
            "sum_us": self.sum_us,
            "peaks": vars(self.peaks),
            "causes": [cause.to_json() for cause in self.causes],
            "rows": [_row_json(row) for row in self.rows],
        }


def rates_of(lines: Sequence[CostLine], peaks: Roofline) -> tuple[Rates, ...]:
    """The rates of the lines of a model, the most expensive first."""
    total_us = math.fsum(line.total_us for line in lines)
    rows = [Rates.of(line, total_us, peaks) for line in lines]
    return tuple(sorted(rows, key=lambda row: -row.line.total_us))


def largest_causes(
    rows: Sequence[Rates],
    calls: Sequence[tuple[str, str]],
    *,
    fused: bool,
    half_rate: float | None,
    launch_gap: Iterable[Cause] = (),
) -> tuple[Cause, ...]:
    """The causes of a model's time, the largest first.

    Args:
        rows: the rates of its tuples.
        calls: the tuple (`TupleView.key`) of each call, in order; empty if the order is unknown.
        fused: True if the calls are generated kernels, which a compiler has fused.
        half_rate: the card's rate of bfloat16 / that of float32, if the model computes in float32
            without TF32; else None.
        launch_gap: the cause of launches without a graph, if it is known.
    """
    candidates = [
        *([] if fused else _fusion(rows, calls)),
        *_copies(rows),
        *launch_gap,
        *_small_calls(rows),
        *_dtype(rows, half_rate),
        *_slow_operators(rows),
    ]
    least_us = _LEAST_SAVING * _sum_us(rows)
    large = [cause for cause in candidates if cause.saves_us >= least_us]
    return tuple(sorted(large, key=lambda cause: -cause.saves_us))


def _sum_us(rows: Iterable[Rates]) -> float:
    return math.fsum(row.line.total_us for row in rows)


def _row_json(row: Rates) -> dict[str, Any]:
    return {
        "operator_id": row.line.subject.operator_id,
        "label": row.line.subject.label,
        "calls": row.line.count,
        "origin": row.line.origin,
        "time_us": row.line.total_us,
        **row.to_json(),
        "bound": row.bound,
    }


def _cause(rows: Iterable[Rates], topic: str, saves_us: float, text: str) -> Cause:
    """Return a cause that would save a part of the sum."""
    return Cause(topic, saves_us, _sum_us(rows), text)


def _fusion(rows: Sequence[Rates], calls: Sequence[tuple[str, str]]) -> Iterator[Cause]:
    """Calls without matrix products that follow each other. A compiler makes one kernel of them.

    Such a kernel takes at least as long as the longest of its calls: it reads and writes at least
    that call's data. The rest of each run is the saving."""
    row_of: Mapping[tuple[str, str], Rates] = {row.line.subject.key: row for row in rows}
    saves_us, fused, names = 0.0, 0, Counter[str]()
    placed = [row_of.get(call) for call in calls]
    for without_products, run in groupby(placed, _is_without_products):
        times_us = []
        run_names = []
        for row in run:
            if row is not None:
                times_us.append(row.time_us)
                run_names.append(row.line.subject.short_name)
        if not without_products or len(times_us) < 2:
            continue
        saves_us += math.fsum(times_us) - max(times_us)
        fused += len(times_us)
        names.update(run_names)
    common = few([name for name, _ in names.most_common()], 4)
    yield _cause(
        rows,
        "fusion",
        saves_us,
        f"{fused} calls without matrix products follow each other ({common}). `--compile` makes "
        "fewer kernels of them, which keep intermediate results on the chip.",
    )


def _is_without_products(row: Rates | None) -> bool:
    return row is not None and not row.line.subject.flops


def _copies(rows: Sequence[Rates]) -> Iterator[Cause]:
    """Calls that only copy or convert data: all of their time."""
    copies = [row for row in rows if row.line.subject.short_name in COPIES]
    number = sum(row.line.count for row in copies)
    names = few(list(dict.fromkeys(row.line.subject.short_name for row in copies)), 4)
    yield _cause(
        rows,
        "copies",
        math.fsum(row.line.total_us for row in copies),
        f"{number} {plural('call', number)} only copy or convert data ({names}). Another layout, "
        "one dtype, or fusion with the next operator avoids them.",
    )


def _small_calls(rows: Sequence[Rates]) -> Iterator[Cause]:
    """Calls whose data and arithmetic need less than the least time of a kernel: the time above
    that of their data and arithmetic at the card's peak rates."""
    small = [row for row in rows if row.bound == "launch" and row.time_us]
    number = sum(row.line.count for row in small)
    total = sum(row.line.count for row in rows)
    saved_us = [row.line.count * max(row.time_us - row.ideal_us, 0.0) for row in small]
    yield _cause(
        rows,
        "small calls",
        math.fsum(saved_us),
        f"{number} of {total} calls are too small for the card: the least time of a kernel is "
        "longer than their work. With a larger batch they cost less per sample; fusion removes "
        "some.",
    )


def _dtype(rows: Sequence[Rates], half_rate: float | None) -> Iterator[Cause]:
    """Matrix products in float32 that arithmetic limits: their time above the same products at the
    card's ratio of the rates of bfloat16 and float32, or above half of their data's time."""
    products = [row for row in rows if row.bound == "compute"]
    if half_rate is None or half_rate <= 1 or not products:
        return
    saved_us, total_us = 0.0, 0.0
    for row in products:
        memory_us = row.line.subject.bytes_moved / 2 / row.peaks.bytes_per_s * 1e6
        least_us = max(row.time_us / half_rate, memory_us)
        saved_us += row.line.count * max(row.time_us - least_us, 0.0)
        total_us += row.line.total_us
    yield _cause(
        rows,
        "dtype",
        saved_us,
        f"Matrix products in float32 take {quantity(total_us, TIME)}. The card's rate for bfloat16 "
        f"is {half_rate:.1f} times as high: `--dtype bfloat16`.",
    )


def _slow_operators(rows: Sequence[Rates]) -> Iterator[Cause]:
    """The tuples of each operator with room for improvement: their time above that at the card's
    peak rates."""
    slow: dict[str, list[Rates]] = defaultdict(list)
    for row in rows:
        if row.improvable and row.bound != "launch":
            slow[row.line.subject.short_name].append(row)
    for name, of_name in slow.items():
        number = sum(row.line.count for row in of_name)
        worst = max(of_name, key=lambda row: row.excess_us)
        limit = "arithmetic" if worst.bound == "compute" else "bandwidth"
        yield _cause(
            rows,
            "rate",
            math.fsum(row.excess_us for row in of_name),
            f"{name} reaches less than {percent(MOST_OF_ROOFLINE, 0)} of the roofline in {number} "
            f"{plural('call', number)}. The largest part is "
            f"{worst.line.subject.label}: {percent(worst.roofline_share)}, where {limit} is "
            "the limit. Other sizes, another layout or another kernel may come closer.",
        )
