"""Write a training step's memory to files: tables, a trace for a timeline viewer, charts, and G10's
text files.

The text files have the format of G10 (https://github.com/platformxlab/G10), so programs for G10's
files can read them. G10's kernels are calls here. An inactive period begins with the first call
after a use of the tensor and ends with the next use. The death of a tensor is the call after its
last use; its release may be later."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farm.addons.memory.plans import plan_rows, sentences
from farm.addons.memory.step_memory import LENGTHS_US, SIZES_BYTES, StepMemory
from farm.addons.pages import COLOURS
from farm.addons.pages.charts import Chart as PageChart
from farm.addons.pages.charts import page_chart
from farm.addons.pages.page import plotly_js, render
from farm.addons.pages.plots import Chart, Line, check_available, draw_charts
from farm.errors import writing_to
from farm.operators.captured import CapturedCall
from farm.training.tensor_lifetime import PeriodInterval
from farm.types.format import TIME, count_of, quantity

_DTYPES = {"bool": "b8", "bfloat16": "bf16", "uint8": "u8"}
_DTYPES |= {f"float{bits}": f"f{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {f"int{bits}": f"i{bits}" for bits in (8, 16, 32, 64)}


def write_config(found: StepMemory, folder: Path) -> list[Path]:
    """Write ``kernels.config``, ``tensors.config`` and ``liveness_analysis.config``; return their
    paths. Raises `UsageError` if a file cannot be written."""
    import jinja2

    tensors, names = found.life.tensors, _names(found)
    lines = {
        tensor.number: f"tensor{tensor.number}, Name: {names[tensor.number]}, "
        f"Is global?: {int(tensor.outlives)}: Size in byte: {tensor.size_bytes}, "
        for tensor in tensors
    }
    shapes = {}
    for tensor in tensors:
        shape = ", ".join(map(str, tensor.shape))
        shapes[tensor.number] = f"{_DTYPES.get(tensor.dtype, tensor.dtype)}[{shape}]"
    calls = [(call, _expression(found, call, names)) for call in found.capture.calls]
    facts = {
        "tensors": tensors,
        "lines": lines,
        "shapes": shapes,
        "calls": calls,
        "periods": found.life.periods,
    }
    folder_of_templates = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder_of_templates,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    files = ("kernels.config", "tensors.config", "liveness_analysis.config")
    return _written(
        folder, {name: environment.get_template(f"{name}.txt").render(facts) for name in files}
    )


def check_drawing() -> None:
    """Raise `UsageError` if a drawing library is not installed."""
    check_available()
    plotly_js()


def write_all(found: StepMemory, folder: Path) -> list[Path]:
    """Write ``kernels.parquet``, ``tensors.parquet``, ``trace.json`` for Perfetto or Chrome,
    ``memory.png``, ``memory.svg`` and the page ``memory.html``; return their paths. Raises
    `UsageError` if a file cannot be written, or a drawing library is not installed."""
    facts, drawn, plans = found.to_json(), charts(found), found.offload_plans
    draw = functools.partial(draw_charts, drawn, title=f"{found.title} (times: {found.clock_name})")
    page = render(
        "memory.html",
        title=found.title,
        found=found,
        charts=list(map(as_plotly, drawn)),
        sentences=sentences(found.life, plans) if plans else [],
        plans=plan_rows(found.life, plans) if plans else [],
        script=plotly_js(),
    )
    return _written(
        folder,
        {
            "kernels.parquet": functools.partial(_parquet, facts["kernels"]),
            "tensors.parquet": functools.partial(_parquet, facts["tensors"]),
            "trace.json": json.dumps({"traceEvents": list(events(found)), "displayTimeUnit": "ms"}),
            "memory.png": draw,
            "memory.svg": draw,
            "memory.html": page,
        },
    )


def _written(folder: Path, files: Mapping[str, str | Callable[[Path], Any]]) -> list[Path]:
    """Write files to a folder and return their paths. A file's content is text or a function that
    writes the file.
    """
    with writing_to(folder, "Name another folder, or make room."):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if isinstance(content, str):
                (folder / name).write_text(content, encoding="utf-8")
            else:
                content(folder / name)
    return [folder / name for name in files]


def _names(found: StepMemory) -> dict[int, str]:
    """Return a unique name for each tensor number. Equal names get numbers as in `torch.fx`."""
    names: dict[int, str] = {}
    counts: dict[str, int] = {}
    for tensor in found.life.tensors:
        name = tensor.name.replace(" ", "_")
        count = counts[name] = counts.get(name, -1) + 1
        names[tensor.number] = f"{name}_{count}" if count else name
    return names


def _expression(found: StepMemory, call: CapturedCall, names: Mapping[int, str]) -> str:
    """Return a call as text: ``torch.ops.aten.mul.Tensor(sub, rsqrt)``."""
    spec = found.capture.tuples[call.tuple_id]

    def text(tree: Any) -> str:
        if isinstance(tree, list):
            return f"[{', '.join(map(text, tree))}]"
        if isinstance(tree, dict):
            if set(tree) == {"tensor"}:
                return names[call.reads[spec.tensors[tree["tensor"]].storage]]
            return text(next(iter(tree.values())))
        return str(tree)

    arguments = [
        *map(text, spec.arguments),
        *(f"{name} = {text(value)}" for name, value in spec.keywords.items()),
    ]
    return f"torch.ops.{spec.operator}({', '.join(arguments)})"


def _parquet(rows: list[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")


def events(found: StepMemory) -> Iterator[dict[str, Any]]:
    """Yield trace events: slices for stages, for consecutive calls of one owner, and for calls;
    counters for the held bytes by role and for active and inactive bytes."""
    life, calls = found.life, found.capture.calls
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": found.title}}
    for thread, title, of in (
        (1, "stages", lambda call: call.stage),
        (2, "calls by owner", found.where),
    ):
        yield {"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": title}}
        for name, group in itertools.groupby(calls, of):
            indices = [call.index for call in group]
            yield _slice(thread, name, life.begins_us[indices[0]], life.begins_us[indices[-1] + 1])
    for call in calls:
        spec = found.capture.tuples[call.tuple_id]
        arguments = {"call": call.index, "part": call.part, "tuple": call.tuple_id}
        begin_us, end_us = life.begins_us[call.index], life.begins_us[call.index + 1]
        yield {**_slice(2, spec.operator, begin_us, end_us), "args": arguments}
        bytes_by_role = {role: row[call.index] for role, row in life.held_by_role.items()}
        yield {
            "ph": "C",
            "pid": 1,
            "name": "held, bytes",
            "ts": _exactly(begin_us),
            "args": bytes_by_role,
        }
        active = life.active_bytes[call.index]
        use = {"active": active, "inactive": life.held_bytes[call.index] - active}
        yield {"ph": "C", "pid": 1, "name": "use, bytes", "ts": _exactly(begin_us), "args": use}


def _slice(thread: int, name: str, begin_us: float, end_us: float) -> dict[str, Any]:
    begin_us, end_us = _exactly(begin_us), _exactly(end_us)
    return {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": name,
        "ts": begin_us,
        "dur": end_us - begin_us,
    }


def _exactly(time_us: float) -> float:
    """Round a time to 1/8 µs, which is exact in floats: Perfetto drops slices that overlap by a
    rounding error.
    """
    return round(time_us * 8) / 8


def charts(found: StepMemory) -> list[Chart]:
    """Return charts: memory over the step by role and by use, inactive periods by length and size,
    and the peak.
    """
    life = found.life
    times_ms = [begin / 1e3 for begin in life.begins_us[:-1]]
    inactive_bytes = [
        total - used for total, used in zip(life.held_bytes, life.active_bytes, strict=True)
    ]

    def lines(held: Mapping[str, Sequence[int]]) -> tuple[Line, ...]:
        return tuple(
            Line(name, times_ms, [size / 1e9 for size in sizes]) for name, sizes in held.items()
        )

    use = lines({"active": life.active_bytes, "inactive": inactive_bytes})
    left = lines({"with offloading": found.offload.held_bytes} if found.offload else {})
    unseen = {"other memory": found.unseen_bytes or 0} if (found.unseen_bytes or 0) > 0 else {}
    at_peak = {role: {"GB": size / 1e9} for role, size in (found.at_peak() | unseen).items()}
    by_length = _bars(life.by_length(LENGTHS_US), lambda least: quantity(least, TIME, 1))
    by_size = _bars(life.by_size(SIZES_BYTES), lambda least: count_of(least, "B"))
    time_name = "time since the step began, ms"
    return [
        Chart(
            "memory held, by role of the tensor", time_name, "GB", areas=lines(life.held_by_role)
        ),
        Chart(
            "memory held, active (in use by a call) or inactive",
            time_name,
            "GB",
            lines=left,
            areas=use,
        ),
        *_curve(found),
        Chart("inactive periods of tensors, by length", y_name="MB·s", bars=by_length),
        Chart("inactive periods of tensors, by size", y_name="MB·s", bars=by_size),
        Chart(
            f"memory held at the peak: {count_of(found.peak_bytes, 'B')}", "", "GB", bars=at_peak
        ),
    ]


def _curve(found: StepMemory) -> Iterator[Chart]:
    """Yield the chart of the step's predicted time over the amount of fast memory, if the step has
    plans.
    """
    if (offload_plans := found.offload_plans) is not None:
        sizes = [plan.fast_bytes / 1e9 for plan in offload_plans.curve]
        lines: tuple[Line, ...] = (
            Line("planned", sizes, [plan.time_us / 1e3 for plan in offload_plans.curve]),
            Line("all slow", sizes, [offload_plans.all_slow_us / 1e3] * len(sizes)),
            Line("all fast", sizes, [offload_plans.all_fast.time_us / 1e3] * len(sizes)),
        )
        rows = [row for row in plan_rows(found.life, offload_plans) if row.run is not None]
        if rows:
            at = [row.plan.fast_bytes / 1e9 for row in rows]
            runs = [row.run for row in rows if row.run is not None]
            run_ms = [run.time_us.value / 1e3 for run in runs]
            half_ms = [run.time_us.half_width / 1e3 for run in runs]
            lines += (Line("run on the card", at, run_ms, half_ms, alone=True),)
        yield Chart(
            "time of the step, by amount of fast memory", "fast memory, GB", "ms", lines=lines
        )


def _bars(
    rows: Sequence[PeriodInterval], text: Callable[[float], str]
) -> dict[str, dict[str, float]]:
    names = [
        f"from {text(row.least)}" if row.least else f"below {text(rows[1].least)}" for row in rows
    ]
    return {name: {"MB·s": row.byte_s / 1e6} for name, row in zip(names, rows, strict=True)}


def as_plotly(chart: Chart) -> PageChart:
    """Convert a chart to plotly's data and layout."""
    data: list[dict[str, Any]] = []
    legend: list[tuple[str, str]] = []
    for number, line in enumerate((*chart.areas, *chart.lines)):
        colour = COLOURS[number % len(COLOURS)]
        legend.append((line.name, colour))
        form: dict[str, Any] = (
            {"stackgroup": "held", "fillcolor": colour} if number < len(chart.areas) else {}
        )
        stroke = {"shape": "hv", "width": 0 if form else 1.5, "color": colour}
        if line.alone:
            bars = {"type": "data", "array": list(line.half_widths or ()), "color": colour}
            form = {"mode": "markers", "marker": {"size": 9, "color": colour}, "error_y": bars}
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": line.name,
                "x": [round(value, 6) for value in line.x],
                "y": [round(value, 6) for value in line.y],
                "line": stroke,
                "hovertemplate": f"{line.name}: %{{y:.3g}} {chart.y_name}<extra></extra>",
                **form,
            }
        )
    for name in dict.fromkeys(itertools.chain.from_iterable(chart.bars.values())):
        heights = [row.get(name) for row in chart.bars.values()]
        hover = f"%{{x}}: %{{y:.3g}} {chart.y_name}<extra></extra>"
        marker = {"color": COLOURS[0]}
        data.append(
            {
                "type": "bar",
                "x": list(chart.bars),
                "y": heights,
                "marker": marker,
                "hovertemplate": hover,
            }
        )
    axes, margin = (
        ({"automargin": True}, {"rangemode": "tozero"}),
        {"l": 60, "r": 15, "t": 10, "b": 50},
    )
    drawn = page_chart(
        data, 300, chart.x_name, chart.y_name, axes=axes, legend=legend or None, margin=margin
    )
    return {**drawn, "caption": chart.title}
