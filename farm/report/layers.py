"""A job's cost by layer: each call of the model with its place, sizes and parameters, and sums of these.

One row model for calls, tuples, types and modules, so that a table, CSV and JSON have the same columns whatever a person
groups by. A call costs what the sum against the whole takes of its tuple's reading; shares are of the sum over all calls.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sqlmodel import Session

from farm.errors import TupleRejected, UsageError
from farm.jobs.spool import write_whole
from farm.report.report import Report
from farm.settings import settings
from farm.store import tables
from farm.store.content import PlacedCall, placed_calls
from farm.store.rows import fetch_values
from farm.types.format import printable
from farm.types.label import call_of
from farm.types.tuple import OperatorTuple, parse
from farm.verdict.verdict import TupleRow

By = Literal["type", "tuple", "call", "module"]
BY: tuple[By, ...] = ("type", "tuple", "call", "module")

SCHEMA = 1

Size = tuple[int, ...]


@dataclass(frozen=True)
class LayerRow:
    """One call, tuple, operator type or module: what it is, and what all its calls cost together.

    Of several unlike calls together sizes and parameters are empty. A time or an energy is None where none of the calls
    has one; where some have, it is the sum of these, and `measured_calls` says of how many.
    """

    name: str  # what a person reads: the call without its inputs, or the type, or the module's own name
    module_path: str  # "" is the model itself; of a sweep always empty
    depth: int  # of a module in the tree; 0 elsewhere
    operator: str  # its type, "" for modules
    operator_id: str
    call_index: int | None
    input_sizes: tuple[Size, ...]
    output_sizes: tuple[Size, ...] | None  # None: not known
    kernel_size: Any
    parameters: Mapping[str, Any]  # what it is made and called with, tensors left out
    held_parameters: int | None  # elements; weights that several calls have in common count once in a module
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

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; keys carry their units, shares are fractions."""
        return vars(self)


@dataclass(frozen=True)
class Layers:
    """The rows of one job, grouped one way."""

    job_id: str
    title: str
    by: By
    rows: tuple[LayerRow, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [row.to_json() for row in self.rows]
        return {"schema": SCHEMA, "job_id": self.job_id, "title": self.title, "by": self.by, "rows": rows}


@dataclass(frozen=True)
class _Called:
    """A call with what is known of its tuple."""

    place: PlacedCall
    short_name: str
    row: TupleRow | None  # None: the report does not know the tuple
    spec: OperatorTuple | None  # None: the row of the database holds no tuple
    outputs: tuple[Size, ...] | None = None
    time_us: float | None = field(init=False, default=None)
    energy_mj: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.row is not None:
            object.__setattr__(self, "time_us", self.row.time_us)
            object.__setattr__(self, "energy_mj", self.row.energy_mj)

    @property
    def name(self) -> str:
        if self.spec is not None:
            return call_of(self.spec)
        return self.row.label.partition(" | ")[0] if self.row else self.short_name

    @property
    def is_module(self) -> bool:
        return self.spec is not None and self.spec.kind == "module"

    @property
    def holder(self) -> tuple[Any, ...]:
        """What its weights are counted by: those of a module that is called twice are there once."""
        return (self.place.module_path,) if self.is_module else (self.place.index,)


def layers(session: Session, report: Report, by: By, depth: int | None = None, *, outputs: bool = True) -> Layers:
    """A job's rows: calls in their order, tuples and types the costliest first, modules as a tree with the model on top.

    Args:
        by: `type`, `tuple`, `call` or `module`.
        depth: of modules, how many levels below the model to keep; the deeper ones are summed up in those above.
        outputs: whether to find the sizes of outputs, which runs each tuple that was not looked at before on tensors
            that hold nothing (imports torch).

    Raises:
        UsageError: modules are asked for of a sweep.
    """
    if by == "module" and report.kind == "sweep":
        raise UsageError(f"{report.title} has no modules: it is a sweep.", "Ask for `--by tuple`.")
    calls = _calls(session, report, outputs=outputs and by != "type")
    if by == "module":
        rows = list(_modules(calls, depth))
    elif by == "call":
        rows = [_row([call], name=call.name) for call in calls]
    else:
        groups: dict[Any, list[_Called]] = defaultdict(list)
        for call in calls:
            key = call.short_name if by == "type" else (call.place.operator_id, call.place.data)
            groups[key].append(call)
        named = [(group[0].short_name if by == "type" else _label(group[0]), group) for group in groups.values()]
        rows = [_row(group, name=name, alike=by == "tuple") for name, group in named]
        rows.sort(key=lambda row: (-(row.time_us or 0.0), -row.estimated_us))
    return Layers(report.job_id, report.title, by, tuple(_with_shares(rows, calls)))


def _label(call: _Called) -> str:
    return call.row.label if call.row else call.short_name


def _calls(session: Session, report: Report, *, outputs: bool) -> list[_Called]:
    by_key = {(row.operator_id, row.data): row for row in report.tuples}
    place = session.get(tables.Round, (report.job_id, report.round))
    if place is not None and place.capture_id is not None:
        placed = placed_calls(session, place.capture_id, report.protocol.data)
    else:
        placed = [PlacedCall(index, "", *key) for index, key in enumerate(by_key)]
    table = tables.Operator.__table__.columns  # type: ignore[attr-defined]
    wanted = (table.id, table.short_name, table.spec)
    stored = fetch_values(session, wanted, list({call.operator_id for call in placed}))
    specs = {row.id: _parsed(row.spec) for row in stored.values()}
    sizes = _outputs({id_: spec for id_, spec in specs.items() if spec is not None}) if outputs else {}
    return [
        _Called(
            call,
            stored[call.operator_id].short_name,
            by_key.get((call.operator_id, call.data)),
            specs[call.operator_id],
            sizes.get(call.operator_id),
        )
        for call in placed
    ]


def _parsed(spec: Any) -> OperatorTuple | None:
    try:
        return parse(spec)
    except TupleRejected:  # the row no longer holds what the farm wrote there
        return None


def _outputs(specs: Mapping[str, OperatorTuple]) -> dict[str, tuple[Size, ...] | None]:
    """Tuple id -> sizes of its outputs. What was found is kept in a file: a tuple's id stands for all that it is."""
    path = settings().state_dir / "output-sizes.json"
    known = _kept(path)
    if missing := {id_: spec for id_, spec in specs.items() if id_ not in known}:
        from farm.operators.replay import output_shapes

        known |= {id_: output_shapes(spec) for id_, spec in missing.items()}
        with contextlib.suppress(OSError):  # found again next time
            write_whole(path, known)
    return {id_: None if (found := known[id_]) is None else tuple(map(tuple, found)) for id_ in specs}


def _kept(path: Path) -> dict[str, list[list[int]] | None]:
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(path.read_text())
        return kept if isinstance(kept, dict) else {}
    return {}


# ---------------------------------------------------------------------------------------------------- rows


def _row(calls: Sequence[_Called], *, name: str, alike: bool = True, path: str = "", depth: int = 0) -> LayerRow:
    """Calls as one row. `alike`: all are of one tuple, so that its sizes and parameters are theirs."""
    first = calls[0]
    spec = first.spec if alike else None
    one = len(calls) == 1 and alike
    types = {call.short_name for call in calls}
    flat = spec.parameters_for_query() if spec else {}
    rows = [call.row for call in calls]
    times = [call.time_us for call in calls if call.time_us is not None]
    energies = [call.energy_mj for call in calls if call.energy_mj is not None]
    held = {call.holder: _held(call.spec) for call in calls}
    known = [counts for counts in held.values() if counts is not None]
    return LayerRow(
        name=name,
        module_path=path or (first.place.module_path if one else ""),
        depth=depth,
        operator=types.pop() if len(types) == 1 else "",
        operator_id=first.place.operator_id if alike else "",
        call_index=first.place.index if one else None,
        input_sizes=tuple(spec.input_shapes) if spec else (),
        output_sizes=first.outputs if alike else None,
        kernel_size=flat.get("kernel_size"),
        parameters=flat,
        held_parameters=sum(elements for elements, _ in known) if len(known) == len(held) else None,
        held_bytes=sum(size for _, size in known) if len(known) == len(held) else None,
        calls=len(calls),
        measured_calls=len(times),
        flops=sum(row.flops for row in rows if row),
        bytes_moved=sum(row.bytes_moved for row in rows if row),
        estimated_us=math.fsum(row.estimated_us for row in rows if row),
        time_us=math.fsum(times) if times else None,
        time_share=None,
        energy_mj=math.fsum(energies) if energies else None,
        energy_share=None,
        reason=", ".join(dict.fromkeys(row.reason for row in rows if row and row.reason)),
    )


def _held(spec: OperatorTuple | None) -> tuple[int, int] | None:
    """Elements and bytes of the parameters."""
    if spec is None:
        return None
    own = [tensor for tensor in spec.tensors if tensor.role == "parameter"]
    return sum(tensor.numel for tensor in own), sum(tensor.numel * tensor.itemsize_bytes for tensor in own)


def _with_shares(rows: Iterable[LayerRow], calls: Sequence[_Called]) -> list[LayerRow]:
    """Shares of the sums over all calls; none of energy where one of the measured calls has no energy."""
    times = [call.time_us for call in calls if call.time_us is not None]
    energies = [call.energy_mj for call in calls if call.time_us is not None and call.energy_mj is not None]
    time_us = math.fsum(times)
    energy_mj = math.fsum(energies) if len(energies) == len(times) else 0.0

    def share(value: float | None, of: float) -> float | None:
        return None if value is None or not of else value / of

    return [
        dataclasses.replace(row, time_share=share(row.time_us, time_us), energy_share=share(row.energy_mj, energy_mj))
        for row in rows
    ]


def _modules(calls: Sequence[_Called], depth: int | None) -> Iterable[LayerRow]:
    """The tree from the model on, each module before its own, in the order of first call.

    Functions that a module calls itself stand under it beside its modules (`layer1.0` holds `layer1.0:add_`), so that
    what stands under a module adds up to it.
    """
    groups: dict[tuple[str, ...], list[_Called]] = defaultdict(list)
    for call in calls:
        steps = _steps(call)
        for level in range(len(steps) + 1):
            groups[steps[:level]].append(call)
    for steps in _in_order(list(groups)):
        if depth is None or len(steps) <= depth:
            group = groups[steps]
            alike = len({call.place.operator_id for call in group}) == 1 and _steps(group[0]) == steps
            yield _row(
                group,
                name=steps[-1].lstrip(":") if steps else "",
                alike=alike,
                path=".".join(steps).replace(".:", ":"),
                depth=len(steps),
            )


def _steps(call: _Called) -> tuple[str, ...]:
    path = call.place.module_path
    steps = tuple(path.split(".")) if path else ()
    return steps if call.is_module else (*steps, f":{call.short_name}")


def _in_order(nodes: Sequence[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    """Each node before those under it, siblings in the order they are given."""
    below: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for node in nodes:
        if node:
            below[node[:-1]].append(node)
    waiting: list[tuple[str, ...]] = [()] if nodes else []
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(below[node])


# ----------------------------------------------------------------------------------------------------- CSV


def csv_lines(many: Iterable[Layers]) -> Iterator[str]:
    """The rows of one or several jobs under one head, which names the units; each is one line."""
    names = [entry.name for entry in dataclasses.fields(LayerRow)]
    line = io.StringIO()
    writer = csv.writer(line, lineterminator="")

    def written(cells: Iterable[Any]) -> str:
        line.seek(0)
        line.truncate()
        writer.writerow(printable(cell) if isinstance(cell, str) else cell for cell in cells)
        return line.getvalue()

    yield written(["job_id", "title", *names])
    for one in many:
        for row in one.rows:
            yield written([one.job_id, one.title, *(_cell(name, getattr(row, name)) for name in names)])


def _cell(name: str, value: Any) -> Any:
    """A value as CSV has it: sizes as people write them, what has parts as JSON, nothing for None."""
    if name in ("input_sizes", "output_sizes"):
        return sizes_text(value)
    return json.dumps(value, sort_keys=True) if isinstance(value, (Mapping, list, tuple)) else value


def sizes_text(sizes: Sequence[Size] | None) -> str:
    """``32x64x56x56 + 32x64x56x56``; a tensor without dimensions is a ``scalar``, what is not known is empty."""
    return " + ".join("x".join(map(str, size)) or "scalar" for size in sizes or ())
