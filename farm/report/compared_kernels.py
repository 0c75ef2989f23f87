"""Match the calls of two jobs of one model, if at least one of them is compiled, and compare the
costs of the matched parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from sqlmodel import Session

from farm.report.compared_rows import side_of_row
from farm.report.compared_side import LoadedSide
from farm.report.comparison import ComparedKernels, ComparedRow
from farm.report.kernels import paths_of, pattern_of, patterns_of
from farm.report.matching import Counted
from farm.store import tables
from farm.store.captures import PlacedCall, placed_calls
from farm.store.columns import OPERATOR
from farm.store.database import fetch_values
from farm.types.figure import value_of
from farm.verdict.cost_line import CostLine

if TYPE_CHECKING:
    from farm.report.report import Report


#: What calls of the same part have in common. None: the call has no match on the other side.
GroupKey = Hashable


class GroupedCall(NamedTuple):
    """A call, and the group of calls to which it belongs."""

    call: PlacedCall
    group: GroupKey | None


@dataclass
class MatchedPart:
    """Calls of A and B that compute the same part of a model. No call is in two parts."""

    modules: tuple[str, ...]  # module paths of A; * stands for several numbers
    a: Counter[tuple[str, str]]  # (tuple id, data class) -> number of calls
    b: Counter[tuple[str, str]]


def compared_kernels(session: Session, a: LoadedSide, b: LoadedSide) -> tuple[ComparedKernels, ...]:
    """Match the calls of two jobs of one model if at least one is compiled: an eager job by
    modules, the heaviest part first; two compiled jobs by kernels, the kernel that became slower
    first."""
    if not (a.report and b.report):
        return ()
    variant_a, variant_b = dict(a.models[0].variant), dict(b.models[0].variant)
    compiled_a, compiled_b = variant_a.pop("compile", ""), variant_b.pop("compile", "")
    variant_a["version"] = variant_b["version"] = ""
    if not (compiled_a or compiled_b) or variant_a != variant_b:
        return ()

    calls_a, calls_b = _calls_of(session, a.report), _calls_of(session, b.report)
    if compiled_a and compiled_b:
        sources = _sources(session, [*calls_a, *calls_b])
        grouped_a, grouped_b = grouped_by_kernel(calls_a, calls_b, sources)
    elif compiled_a:
        grouped_b, grouped_a = grouped_by_launch(calls_b, calls_a)
    else:
        grouped_a, grouped_b = grouped_by_launch(calls_a, calls_b)

    line_of_a = {line.subject.key: line for line in a.lines}
    line_of_b = {line.subject.key: line for line in b.lines}
    compared = []
    for part in matched_parts(grouped_a, grouped_b):
        of_a, of_b = _lines_of(line_of_a, part.a), _lines_of(line_of_b, part.b)
        name = ", ".join(part.modules)
        side_a = side_of_row(a, _if_complete(of_a))
        side_b = side_of_row(b, _if_complete(of_b))
        row = ComparedRow(name, "", side_a, side_b)
        compared.append(
            ComparedKernels(part.modules, _calls_by_type(of_a), _calls_by_type(of_b), row)
        )

    def heaviest_us(entry: ComparedKernels) -> float:
        time = entry.row.time
        return max(value_of(time.a) or 0.0, value_of(time.b) or 0.0)

    if compiled_a and compiled_b:
        compared.sort(key=lambda entry: entry.saved(entry.row.time) or 0.0)
    else:
        compared.sort(key=lambda entry: -heaviest_us(entry))
    return tuple(compared)


def _calls_of(session: Session, report: Report) -> list[PlacedCall]:
    """Return the calls of a job's round."""
    capture_id = session.get_one(tables.Round, (report.job_id, report.round)).capture_id
    return placed_calls(session, capture_id, report.protocol.data) if capture_id else []


def _sources(session: Session, calls: Sequence[PlacedCall]) -> dict[str, str]:
    """Return tuple id -> the hash of its kernel's source; library calls have none."""
    ids = {call.operator_id for call in calls}
    stored = fetch_values(session, (OPERATOR.id, OPERATOR.parameters), ids)
    sources = {}
    for operator_id, row in stored.items():
        source = row.parameters.get("source")
        if source:
            sources[operator_id] = source
    return sources


def _lines_of(
    line_of: Mapping[tuple[str, str], CostLine], calls: Mapping[tuple[str, str], int]
) -> list[Counted]:
    return [Counted(line_of[key], number) for key, number in calls.items() if key in line_of]


def _if_complete(counted: Sequence[Counted]) -> Sequence[Counted]:
    """Return the tuples if all have a reading; else none, so that the sum is unknown."""
    return counted if all(line.time_us for line, _ in counted) else []


def _calls_by_type(counted: Sequence[Counted]) -> dict[str, int]:
    calls = Counter[str]()
    for entry in counted:
        calls[entry.line.subject.short_name] += entry.calls
    return dict(calls)


# ---- matched calls


def grouped_by_launch(
    eager: Sequence[PlacedCall], compiled: Sequence[PlacedCall]
) -> tuple[list[GroupedCall], list[GroupedCall]]:
    """Group the eager calls and the launches of a compiled model by the launch that computes them.

    A module's calls belong to the first launch that names the module. A launch that computes more
    of a module joins the group of that first launch. The same groups of several layers become one.
    """
    eager_paths = {call.module_path for call in eager}
    full = _full_paths(eager_paths)
    first_launch: dict[str, int] = {}  # module path -> number of the first launch that names it
    launch_of: list[int | None] = []  # the first launch of the group of each launch
    for number, launch in enumerate(compiled):
        paths = [full.get(path) or path for path in paths_of(launch.module_path)]
        paths = [path for path in paths if path in eager_paths]
        first = first_launch.get(paths[0], number) if paths else None
        launch_of.append(first)
        if first is not None:
            for path in paths:
                first_launch.setdefault(path, first)

    patterns: dict[int | None, dict[str, None]] = defaultdict(dict)
    for call in eager:
        patterns[first_launch.get(call.module_path)][pattern_of(call.module_path)] = None
    groups: dict[int | None, GroupKey | None] = {
        number: tuple(paths) for number, paths in patterns.items()
    }
    groups[None] = None

    grouped_eager = []
    for call in eager:
        grouped_eager.append(GroupedCall(call, groups[first_launch.get(call.module_path)]))
    grouped_launches = []
    for launch, first in zip(compiled, launch_of, strict=True):
        grouped_launches.append(GroupedCall(launch, groups[first]))
    return grouped_eager, grouped_launches


def _full_paths(paths: Iterable[str]) -> dict[str, str]:
    """End of a path -> the one path with that end. After a graph break, the compiler's paths may
    lack the beginning.
    """
    every: set[str] = set()
    for path in paths:
        steps = path.split(".")
        every.update(".".join(steps[:end]) for end in range(len(steps) + 1))

    path_of: dict[str, str] = {}  # "": several paths have the end
    for path in every:
        steps = path.split(".")
        for begin in range(1, len(steps)):
            end = ".".join(steps[begin:])
            path_of[end] = "" if end in path_of else path
    return {end: path for end, path in path_of.items() if path and end not in every}


def grouped_by_kernel(
    a: Sequence[PlacedCall], b: Sequence[PlacedCall], sources: Mapping[str, str]
) -> tuple[list[GroupedCall], list[GroupedCall]]:
    """Group the launches of two compiled models: by the kernel's source, else by the module paths.

    Args:
        sources: tuple id -> the hash of the kernel's source; absent for library calls.
    """

    def source_of(call: PlacedCall) -> str:
        return sources.get(call.operator_id, call.operator_id)

    common = {source_of(call) for call in a} & {source_of(call) for call in b}

    def grouped(call: PlacedCall) -> GroupedCall:
        source = source_of(call)
        return GroupedCall(
            call, source if source in common else pattern_of(call.module_path) or None
        )

    return [grouped(call) for call in a], [grouped(call) for call in b]


def matched_parts(a: Sequence[GroupedCall], b: Sequence[GroupedCall]) -> list[MatchedPart]:
    """Join the calls of each group. The calls of a side without a match become one part."""
    groups_b = {grouped.group for grouped in b}
    common = {grouped.group for grouped in a if grouped.group in groups_b} - {None}
    paths: dict[GroupKey, list[str]] = defaultdict(list)
    calls_a: dict[GroupKey, Counter[tuple[str, str]]] = defaultdict(Counter)
    calls_b: dict[GroupKey, Counter[tuple[str, str]]] = defaultdict(Counter)
    keys: dict[GroupKey, None] = {}
    for call, group in a:
        key = group if group in common else ("only in", "A")
        keys[key] = None
        calls_a[key][call.operator_id, call.data] += 1
        if group in common:
            paths[key] += paths_of(call.module_path)
    for call, group in b:
        key = group if group in common else ("only in", "B")
        keys[key] = None
        calls_b[key][call.operator_id, call.data] += 1
    return [MatchedPart(patterns_of(paths[key]), calls_a[key], calls_b[key]) for key in keys]
