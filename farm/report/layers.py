"""A job's cost by layer: each call of the model with its module, sizes and parameters, and sums of
calls.

Calls, tuples, types and modules use the same row class, so tables, CSV and JSON have the same
columns. The cost of a call is the cost of its tuple in the verdict's sum. Shares are shares of the
sum over all calls."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlmodel import Session

from farm.errors import TupleRejected, UsageError
from farm.errors.safe_text import cell, printable
from farm.report.report import Report
from farm.store import tables
from farm.store.captures import PlacedCall, placed_calls, storages_read
from farm.store.columns import OPERATOR
from farm.store.database import by_key, fetch_values
from farm.subjects.label import call_of
from farm.subjects.parsing import parse
from farm.subjects.registry import kind_of
from farm.types.figure import share_of
from farm.types.tuple import OperatorTuple
from farm.verdict.cost_line import CostGroup, CostLine

By = Literal["type", "tuple", "call", "module"]
BY: tuple[By, ...] = ("type", "tuple", "call", "module")

SCHEMA = 1

Size = tuple[int, ...]


@dataclass(frozen=True)
class LayerRow:
    """A row for one call, tuple, operator type or module: its description, and the cost of all its
    calls.

    Sizes and parameters are empty if the calls differ. `cost` counts each call as a tuple, and
    `total` is the cost of all calls of the model."""

    name: (
        str  # the call without its inputs, the label of a tuple, the type, or the module's own name
    )
    module_path: str  # "" is the model itself; always empty for a sweep
    depth: int  # level of a module in the tree; else 0
    operator: str  # operator type; "" for modules
    operator_id: str
    call_index: int | None
    input_sizes: tuple[Size, ...]
    output_sizes: tuple[Size, ...] | None  # None: unknown
    kernel_size: Any
    parameters: Mapping[str, Any]  # arguments of the constructor and the call, without tensors
    held_parameters: int | None  # elements of the parameters; shared weights count once in a module
    held_bytes: int | None
    cost: CostGroup
    total: CostGroup
    reason: str = ""  # why it is not measured
    call: str = ""  # the call without its inputs, for tables with size columns; not in JSON and CSV

    @property
    def measured_calls(self) -> int:
        return self.cost.measured_tuples

    @property
    def time_us(self) -> float | None:
        """The time of the measured calls; None if there are none."""
        return self.cost.measured_us

    @property
    def time_share(self) -> float | None:
        return share_of(self.time_us, self.total.measured_us)

    @property
    def energy_mj(self) -> float | None:
        """The energy of the calls that have one; None if there are none."""
        has_energy = self.cost.measured_tuples > self.cost.without_energy
        return self.cost.energy_mj if has_energy else None

    @property
    def energy_share(self) -> float | None:
        """The share of the energy; None if a measured call of the model has no energy."""
        return share_of(self.energy_mj, self.total.measured_mj)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the keys; shares are fractions."""
        return {
            "name": self.name,
            "module_path": self.module_path,
            "depth": self.depth,
            "operator": self.operator,
            "operator_id": self.operator_id,
            "call_index": self.call_index,
            "input_sizes": self.input_sizes,
            "output_sizes": self.output_sizes,
            "kernel_size": self.kernel_size,
            "parameters": self.parameters,
            "held_parameters": self.held_parameters,
            "held_bytes": self.held_bytes,
            "calls": self.cost.calls,
            "measured_calls": self.measured_calls,
            "flops": self.cost.flops,
            "bytes_moved": self.cost.bytes_moved,
            "estimated_us": self.cost.estimated_us,
            "time_us": self.time_us,
            "time_share": self.time_share,
            "energy_mj": self.energy_mj,
            "energy_share": self.energy_share,
            "reason": self.reason,
        }


#: The keys of `LayerRow.to_json`, in order.
COLUMNS = (
    *("name", "module_path", "depth", "operator", "operator_id", "call_index", "input_sizes"),
    *("output_sizes", "kernel_size", "parameters", "held_parameters", "held_bytes", "calls"),
    *("measured_calls", "flops", "bytes_moved", "estimated_us", "time_us", "time_share"),
    *("energy_mj", "energy_share", "reason"),
)


@dataclass(frozen=True)
class Layers:
    """The rows of one job, grouped by call, tuple, operator type or module."""

    job_id: str
    title: str
    by: By
    rows: tuple[LayerRow, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        return {
            "schema": SCHEMA,
            "job_id": self.job_id,
            "title": self.title,
            "by": self.by,
            "rows": rows,
        }


@dataclass(frozen=True)
class _LayerCall:
    """A call with its tuple."""

    place: PlacedCall
    short_name: str
    line: CostLine | None  # None: the report does not have the tuple
    spec: OperatorTuple | None  # None: the database row does not hold a valid tuple
    outputs: tuple[Size, ...] | None
    reads: Sequence[int] = ()  # numbers of the storages that it reads, in the order of its tuple

    @property
    def name(self) -> str:
        return call_of(self.spec) if self.spec is not None else self.short_name

    @property
    def is_module(self) -> bool:
        return self.spec is not None and kind_of(self.spec).has_state

    @property
    def steps(self) -> tuple[str, ...]:
        """The path in the tree of modules, split into names. For a function, its type is the last
        name.
        """
        steps = tuple(self.place.module_path.split(".")) if self.place.module_path else ()
        return steps if self.is_module else (*steps, f":{self.short_name}")


def layers(
    session: Session, report: Report, by: By, depth: int | None = None, *, outputs: bool = True
) -> Layers:
    """Return the rows of a job: calls in execution order, tuples and types by falling cost, modules
    as a tree. Modules below the level `depth` count in the module above them. With `outputs`, find
    the sizes of outputs: this imports torch and runs each new tuple on empty tensors. Raises
    `UsageError` if modules are requested for a sweep."""
    if by == "module" and report.is_sweep:
        raise UsageError(f"{report.title} has no modules: it is a sweep.", "Use `--by tuple`.")
    calls = _calls(session, report, outputs=outputs and by != "type")
    row_of, rows = functools.partial(_row, total=_cost(calls)), list[LayerRow]()
    if by == "module":
        for steps, group in _modules(calls):
            if depth is None or len(steps) <= depth:
                alike = (
                    len({call.place.operator_id for call in group}) == 1 and group[0].steps == steps
                )
                rows.append(
                    row_of(
                        group, name=steps[-1].lstrip(":") if steps else "", alike=alike, steps=steps
                    )
                )
    elif by == "call":
        rows = [row_of([call], name=call.name) for call in calls]
    else:
        of_type = by == "type"
        groups = by_key(
            lambda call: call.short_name if of_type else (call.place.operator_id, call.place.data),
            calls,
        )
        for group in groups.values():
            line = group[0].line
            label = line.subject.label if line and by == "tuple" else group[0].short_name
            rows.append(row_of(group, name=label, alike=by == "tuple"))
        rows.sort(key=lambda row: (-(row.time_us or 0.0), -row.cost.estimated_us))
    part_of_sweep = (
        f", the {len(report.tuples)} heaviest of {report.verdict.parts} tuples"
        if report.verdict.types
        else ""
    )
    return Layers(report.job_id, report.title + part_of_sweep, by, tuple(rows))


def _calls(session: Session, report: Report, *, outputs: bool) -> list[_LayerCall]:
    line_of = {line.subject.key: line for line in report.tuples}
    newest_round = session.get(tables.Round, (report.job_id, report.round))
    if newest_round is not None and newest_round.capture_id is not None:
        placed = placed_calls(session, newest_round.capture_id, report.protocol.data)
        reads = storages_read(session, newest_round.capture_id)
    else:
        reads = {}
        placed = [PlacedCall(index, "", *key) for index, key in enumerate(line_of)]
    columns = (OPERATOR.id, OPERATOR.short_name, OPERATOR.spec, OPERATOR.output_shapes)
    stored = fetch_values(session, columns, [call.operator_id for call in placed])
    specs: dict[str, OperatorTuple] = {}
    sizes: dict[str, tuple[Size, ...]] = {}
    for row in stored.values():
        with contextlib.suppress(TupleRejected):  # another program changed the row
            specs[row.id] = parse(row.spec)
        if outputs and row.output_shapes is not None:
            sizes[row.id] = tuple(map(tuple, row.output_shapes))

    calls = []
    for call in placed:
        id_ = call.operator_id
        calls.append(
            _LayerCall(
                call,
                stored[id_].short_name,
                line_of.get((id_, call.data)),
                specs.get(id_),
                sizes.get(id_),
                reads.get(call.index, ()),
            )
        )
    return calls


def _row(
    calls: Sequence[_LayerCall],
    *,
    total: CostGroup,
    name: str,
    alike: bool = True,
    steps: tuple[str, ...] = (),
) -> LayerRow:
    """Build one row from calls; if they are `alike`, with sizes and parameters. `steps` is a
    module's path.
    """
    first = calls[0]
    spec = first.spec if alike else None
    single = len(calls) == 1 and alike
    types = {call.short_name for call in calls}
    flat = spec.parameters_for_query() if spec else {}
    held_parameters, held_bytes = _total_weights(calls)
    return LayerRow(
        name=name,
        module_path=".".join(steps).replace(".:", ":")
        or (first.place.module_path if single else ""),
        depth=len(steps),
        operator=types.pop() if len(types) == 1 else "",
        operator_id=first.place.operator_id if alike else "",
        call_index=first.place.index if single else None,
        input_sizes=tuple(spec.input_shapes) if spec else (),
        output_sizes=first.outputs if alike else None,
        kernel_size=flat.get("kernel_size"),
        parameters=flat,
        held_parameters=held_parameters,
        held_bytes=held_bytes,
        cost=_cost(calls),
        total=total,
        reason=", ".join(
            dict.fromkeys(call.line.reason for call in calls if call.line and call.line.reason)
        ),
        call=first.name,
    )


def _total_weights(calls: Iterable[_LayerCall]) -> tuple[int, int] | tuple[None, None]:
    """Add elements and bytes of the parameters of calls; None if a tuple is unknown. Parameters in
    the same memory count once: those of a module that is called twice, and tied weights."""
    of_memory: dict[Any, tuple[int, int]] = {}
    for call in calls:
        if call.spec is None:
            return None, None
        weights = call.spec.parameters_by_storage
        storages = list(dict.fromkeys(tensor.storage for tensor in call.spec.tensors))
        if len(storages) == len(call.reads):
            numbers = dict(zip(storages, call.reads, strict=True))
            of_memory |= {numbers[storage]: size for storage, size in weights.items()}
        else:  # the capture does not say which memory it is
            owner = call.place.module_path if call.is_module else call.place.index
            of_memory |= {(owner, storage): size for storage, size in weights.items()}
    elements = sum(number for number, _ in of_memory.values())
    return elements, sum(size_bytes for _, size_bytes in of_memory.values())


def _cost(calls: Sequence[_LayerCall]) -> CostGroup:
    """Return the sums over calls, each of which counts as a tuple."""
    lines = [call.line for call in calls if call.line]
    times_us = [line.time_us.value for line in lines if line.time_us]
    energies_mj = [line.energy_mj.value for line in lines if line.energy_mj]
    return CostGroup(
        time_us=math.fsum(times_us),
        energy_mj=math.fsum(energies_mj),
        flops=sum(line.subject.flops for line in lines),
        bytes_moved=sum(line.subject.bytes_moved for line in lines),
        estimated_us=math.fsum(line.subject.estimated_us for line in lines),
        tuples=len(calls),
        measured_tuples=len(times_us),
        without_energy=len(times_us) - len(energies_mj),
        calls=len(calls),
    )


def _modules(calls: Iterable[_LayerCall]) -> Iterator[tuple[tuple[str, ...], list[_LayerCall]]]:
    """Yield (path, calls) of each module in the tree: parents before children, siblings in
    execution order.

    The functions that a module calls directly are its children too (`layer1.0` has
    `layer1.0:add_`). So the costs of the children add up to the cost of the module."""
    groups: dict[tuple[str, ...], list[_LayerCall]] = defaultdict(list)
    for call in calls:
        for level in range(len(call.steps) + 1):
            groups[call.steps[:level]].append(call)
    order = {steps: number for number, steps in enumerate(groups)}
    for steps in sorted(
        groups, key=lambda steps: [order[steps[:level]] for level in range(len(steps) + 1)]
    ):
        yield steps, groups[steps]


def csv_lines(many: Iterable[Layers]) -> Iterator[str]:
    """Yield the rows of one or several jobs as CSV lines. The header line names the units."""

    def written(cells: Iterable[Any]) -> str:
        line = io.StringIO()
        row = (cell(printable(value)) if isinstance(value, str) else value for value in cells)
        csv.writer(line, lineterminator="").writerow(row)
        return line.getvalue()

    yield written(["job_id", "title", *COLUMNS])
    for of_job in many:
        for row in of_job.rows:
            cells = [_cell(name, value) for name, value in row.to_json().items()]
            yield written([of_job.job_id, of_job.title, *cells])


def _cell(name: str, value: Any) -> Any:
    """Format a value for CSV: sizes as ``1x3x224x224``, mappings and lists as JSON, None as an
    empty cell.
    """
    if name in ("input_sizes", "output_sizes"):
        return sizes_text(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, (Mapping, list, tuple)) else value


def sizes_text(sizes: Sequence[Size] | None) -> str:
    """Format sizes: ``32x64x56x56 + 32x64x56x56``. A tensor without dimensions is ``scalar``; None
    is "".
    """
    return " + ".join("x".join(map(str, size)) or "scalar" for size in sizes or ())
