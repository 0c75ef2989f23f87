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
from farm.store.columns import OPERATOR
from farm.store.content import PlacedCall, placed_calls
from farm.store.database import by_key, fetch_values
from farm.subjects.label import call_of
from farm.subjects.parsing import parse
from farm.types.fields import names_of
from farm.types.figure import share_of
from farm.types.tuple import OperatorTuple
from farm.verdict.cost_line import CostLine

By = Literal["type", "tuple", "call", "module"]
BY: tuple[By, ...] = ("type", "tuple", "call", "module")

SCHEMA = 1

Size = tuple[int, ...]


@dataclass(frozen=True)
class LayerRow:
    """A row for one call, tuple, operator type or module: its description, and the cost of all its
    calls.

    Sizes and parameters are empty if the calls differ. Time and energy are sums over the measured
    calls; `measured_calls` is their number. They are None if no call is measured."""

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
    calls: int
    measured_calls: int
    flops: int
    bytes_moved: int
    estimated_us: float
    time_us: float | None
    time_share: float | None
    energy_mj: float | None
    energy_share: float | None
    reason: str = ""  # why it is not measured
    call: str = ""  # the call without its inputs, for tables with size columns; not in JSON and CSV

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with units in the keys; shares are fractions."""
        return {name: value for name, value in vars(self).items() if name != "call"}


COLUMNS = [name for name in names_of(LayerRow) if name != "call"]


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

    @property
    def name(self) -> str:
        return call_of(self.spec) if self.spec is not None else self.short_name

    @property
    def is_module(self) -> bool:
        return self.spec is not None and self.spec.kind == "module"

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
    times, energies = _costs(calls)
    # Without the energy of one measured call, there are no energy shares.
    totals = math.fsum(times), math.fsum(energies) if len(energies) == len(times) else None
    row_of, rows = functools.partial(_row, totals=totals), list[LayerRow]()
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
        rows.sort(key=lambda row: (-(row.time_us or 0.0), -row.estimated_us))
    of = (
        f", the {len(report.tuples)} heaviest of {report.verdict.parts} tuples"
        if report.verdict.types
        else ""
    )
    return Layers(report.job_id, report.title + of, by, tuple(rows))


def _calls(session: Session, report: Report, *, outputs: bool) -> list[_LayerCall]:
    line_of = {line.subject.key: line for line in report.tuples}
    place = session.get(tables.Round, (report.job_id, report.round))
    if place is not None and place.capture_id is not None:
        placed = placed_calls(session, place.capture_id, report.protocol.data)
    else:
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
            )
        )
    return calls


def _row(
    calls: Sequence[_LayerCall],
    *,
    totals: tuple[float, float | None],
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
    lines = [call.line for call in calls if call.line]
    times, energies = _costs(calls)
    time_us = math.fsum(times) if times else None
    energy_mj = math.fsum(energies) if energies else None
    # If a module is called twice, its weights count once.
    weights = {}
    for call in calls:
        place = call.place.module_path if call.is_module else call.place.index
        weights[place] = call.spec.held_parameters if call.spec is not None else None
    held_parameters, held_bytes = _total_weights([*weights.values()])
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
        calls=len(calls),
        measured_calls=len(times),
        flops=sum(line.subject.flops for line in lines),
        bytes_moved=sum(line.subject.bytes_moved for line in lines),
        estimated_us=math.fsum(line.subject.estimated_us for line in lines),
        time_us=time_us,
        time_share=share_of(time_us, totals[0]),
        energy_mj=energy_mj,
        energy_share=share_of(energy_mj, totals[1]),
        reason=", ".join(dict.fromkeys(line.reason for line in lines if line.reason)),
        call=first.name,
    )


def _total_weights(
    weights: Sequence[tuple[int, int] | None],
) -> tuple[int, int] | tuple[None, None]:
    """Add elements and bytes of parameters; None if one is unknown."""
    total_elements = total_bytes = 0
    for entry in weights:
        if entry is None:
            return None, None
        total_elements += entry[0]
        total_bytes += entry[1]
    return total_elements, total_bytes


def _costs(calls: Iterable[_LayerCall]) -> tuple[list[float], list[float]]:
    """Return the times (µs) and the energies (mJ) of the measured calls."""
    lines = [call.line for call in calls if call.line]
    times = [line.time_us.value for line in lines if line.time_us]
    return times, [line.energy_mj.value for line in lines if line.energy_mj]


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
