"""The kernels of a compiled model: their sources in the model and their rates, and kernels matched between two jobs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, col, select

from farm.operators.roofline import Roofline
from farm.store import tables
from farm.store.content import PlacedCall
from farm.store.database import fetch_values
from farm.types.format import count_of, percent
from farm.types.label import fused_names
from farm.verdict.figures import share_of
from farm.verdict.verdict import TupleRow

# A kernel has room for improvement if it has at least this share of the sum, and less than this share of the roofline.
LEAST_SHARE, MOST_OF_ROOFLINE = 0.01, 0.5

_OPERATOR = tables.Operator.__table__.c  # type: ignore[attr-defined]
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class KernelRow:
    """A generated kernel or a library call of a compiled model. Time and rates are for one call.

    Attributes:
        fused: names of the aten operators that a generated kernel computes.
        modules: paths of the modules that the kernel was fused from; ``*`` stands for several numbers.
        roofline_share: the time at the card's peak rates, as a share of the time. Above 1: the data was in the cache.
    """

    operator_id: str
    operator: str
    fused: tuple[str, ...]
    modules: tuple[str, ...]
    calls: int
    time_us: float | None
    time_share: float | None
    bytes_per_s: float | None
    flops_per_s: float | None
    roofline_share: float | None

    @property
    def improvable(self) -> bool:
        """True if the kernel has room for improvement."""
        return (self.time_share or 0.0) >= LEAST_SHARE and (self.roofline_share or 1.0) < MOST_OF_ROOFLINE


@dataclass(frozen=True)
class CompiledJob:
    """The kernels of a compiled job, the most expensive first, and the number of graph breaks by reason."""

    kernels: tuple[KernelRow, ...]
    graph_breaks: Mapping[str, int]
    peaks: Roofline

    @property
    def breaks(self) -> str:
        """The number of graph breaks, and the first line of each reason."""
        reasons = (f"{reason.strip().partition(chr(10))[0]} (×{n})" for reason, n in self.graph_breaks.items())
        return "; ".join([str(sum(self.graph_breaks.values())), *reasons])

    @property
    def rule(self) -> str:
        """What the mark of a kernel and the column `roofline` mean."""
        rates = f"{count_of(self.peaks.bytes_per_s, 'B/s')}, {count_of(self.peaks.flops_per_s, 'FLOP/s')}"
        limits = (
            f"at least {percent(LEAST_SHARE, 0)} of the sum and below {percent(MOST_OF_ROOFLINE, 0)} of the roofline"
        )
        return f"* room for improvement: {limits} ({rates}; above 100 %: the data was in the cache)"

    def to_json(self) -> dict[str, Any]:
        return {
            "kernels": [{**vars(row), "improvable": row.improvable} for row in self.kernels],
            "graph_breaks": dict(self.graph_breaks),
            "peaks": vars(self.peaks),
        }


def compiled_job(
    session: Session, capture: tables.Capture, tuples: Sequence[TupleRow], peaks: Roofline
) -> CompiledJob | None:
    """Return the kernels of a job; None if its capture is not of a compiled model."""
    if capture.compiled is None:
        return None
    paths: dict[str, list[str]] = defaultdict(list)
    calls = select(tables.Call.operator_id, tables.Call.module_path).where(tables.Call.capture_id == capture.id)
    for operator_id, path in session.exec(calls.order_by(col(tables.Call.call_index))):
        paths[operator_id] += paths_of(path)
    stored = fetch_values(session, (_OPERATOR.id, _OPERATOR.parameters), paths)
    total_us = sum(row.total_us for row in tuples)
    rows = []
    for row in sorted(tuples, key=lambda row: (-row.total_us, -row.calls * row.estimated_us)):
        second = (row.time_us or 0.0) * 1e-6
        ideal_us = max(row.flops / peaks.flops_per_s, row.bytes_moved / peaks.bytes_per_s) * 1e6
        rows.append(
            KernelRow(
                operator_id=row.operator_id,
                operator=row.short_name,
                fused=tuple(fused_names(stored[row.operator_id].parameters.get("fused") or "")),
                modules=shortened(paths[row.operator_id]),
                calls=row.calls,
                time_us=row.time_us,
                time_share=share_of(row.total_us, total_us) if second else None,
                bytes_per_s=row.bytes_moved / second if second else None,
                flops_per_s=row.flops / second if second else None,
                roofline_share=ideal_us / row.time_us if row.time_us else None,
            )
        )
    return CompiledJob(tuple(rows), capture.compiled.get("graph_breaks") or {}, peaks)


def paths_of(text: str) -> list[str]:
    """The module paths of a launch."""
    return text.split(", ") if text else []


def shortened(paths: Iterable[str]) -> tuple[str, ...]:
    """Return distinct paths; paths that differ only in numbers become one path with ``*``: ``h.*.mlp.act``."""
    groups: dict[str, set[str]] = {}
    for path in paths:
        groups.setdefault(_NUMBER.sub("*", path), set()).add(path)
    return tuple(found.pop() if len(found) == 1 else pattern for pattern, found in groups.items())


# ------------------------------------------------------------------------------------------------ two jobs


@dataclass
class Group:
    """Calls of A and B that compute the same part of a model. No call is in two groups.

    Attributes:
        modules: module paths as in `KernelRow`. a, b: (tuple id, data class) -> number of calls.
    """

    modules: tuple[str, ...]
    a: Counter[tuple[str, str]]
    b: Counter[tuple[str, str]]


Calls = Sequence[PlacedCall]


def fused_groups(eager: Calls, compiled: Calls) -> tuple[list[Any], list[Any]]:
    """Return the group of each eager call and of each launch of the compiled model; None if it has no match.

    A module's calls belong to the first launch that names the module. A launch that computes more of a module joins
    the group of that first launch. The same groups of several layers become one.
    """
    known, full = {call.module_path for call in eager}, _full_paths(call.module_path for call in eager)
    group_of: dict[str, int] = {}
    launches: list[int | None] = []
    for number, call in enumerate(compiled):
        paths = [full.get(path) or path for path in paths_of(call.module_path)]
        paths = [path for path in paths if path in known]
        launches.append(group_of.get(paths[0], number) if paths else None)
        for path in paths:
            group_of.setdefault(path, launches[-1])  # type: ignore[arg-type]
    layers: dict[int | None, dict[str, None]] = defaultdict(dict)
    for call in eager:
        layers[group_of.get(call.module_path)][_NUMBER.sub("*", call.module_path)] = None
    keys: dict[int | None, Any] = {number: tuple(found) for number, found in layers.items()} | {None: None}
    return [keys[group_of.get(call.module_path)] for call in eager], [keys[number] for number in launches]


def _full_paths(paths: Iterable[str]) -> dict[str, str]:
    """End of a path -> the one path with that end. After a graph break, the compiler's paths may lack the beginning."""
    found: dict[str, str] = {}
    every = {".".join(steps[:end]) for path in paths for steps in (path.split("."),) for end in range(len(steps) + 1)}
    for path in every:
        steps = path.split(".")
        for begin in range(1, len(steps)):
            end = ".".join(steps[begin:])
            found[end] = "" if end in found else path
    return {end: path for end, path in found.items() if path and end not in every}


def kernel_groups(a: Calls, b: Calls, sources: Mapping[str, str]) -> tuple[list[Any], list[Any]]:
    """Return the group of each launch of two compiled models: by the kernel's source, else by the module paths.

    Args:
        sources: tuple id -> the hash of the kernel's source; absent for library calls.
    """
    of_a, of_b = ({sources.get(call.operator_id, call.operator_id) for call in calls} for calls in (a, b))

    def group(call: PlacedCall) -> str | None:
        source = sources.get(call.operator_id, call.operator_id)
        return source if source in of_a & of_b else _NUMBER.sub("*", call.module_path) or None

    return [group(call) for call in a], [group(call) for call in b]


def merged(a: Calls, of_a: Sequence[Any], b: Calls, of_b: Sequence[Any]) -> list[Group]:
    """Join the calls of each group. The calls of a side without a match become one group."""
    common = set(of_a) & set(of_b) - {None}
    paths: dict[Any, list[str]] = defaultdict(list)
    found: dict[Any, tuple[Counter[Any], Counter[Any]]] = defaultdict(lambda: (Counter(), Counter()))
    for side, (calls, groups) in enumerate(((a, of_a), (b, of_b))):
        for call, group in zip(calls, groups, strict=True):
            key = group if group in common else ("only in", side)
            found[key][side][call.operator_id, call.data] += 1
            if group in common and not side:
                paths[key] += paths_of(call.module_path)
    return [Group(shortened(paths[key]), *sides) for key, sides in found.items()]
