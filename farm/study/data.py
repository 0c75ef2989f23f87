"""How much do values matter? The heaviest tuples with normal values, with zeros, and with what the model shows them."""

from __future__ import annotations

import statistics
from typing import Any

from farm.pages.plots import Chart
from farm.store import tables
from farm.study.findings import Column, Findings, change, known
from farm.study.laboratory import Laboratory, Plan, Sample, require


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """Each tuple under `normal`, under the class of data that most of its calls see, and under `zeros`."""
    stopping = laboratory.stopping(quick=plan.quick)
    samples = laboratory.samples(plan.variant, plan.tuples or (10 if plan.quick else 24), values=True)
    everything: list[tables.Reading | None] = []
    table: list[dict[str, Any]] = []
    wanted = [list(dict.fromkeys(("normal", _commonest(sample), "zeros"))) for sample in samples]
    laboratory.expect(sum(len(classes) for classes in wanted))
    for sample, classes in zip(samples, wanted, strict=True):
        commonest = _commonest(sample)
        rows = {
            data: laboratory.read(sample, laboratory.protocol(data=data), stopping, data=data)
            for data in laboratory.shuffled(sample, classes)
        }
        everything += rows.values()
        # Most calls of some tuples see nothing but normal values: no change of theirs is to be told.
        normal, seen, zeros = rows["normal"], rows[commonest] if commonest != "normal" else None, rows["zeros"]
        if normal is None:
            continue
        table.append(
            {
                "tuple": sample.label,
                "calls": sample.count,
                "seen": commonest,
                "power_w": normal.power_w,
                "seen_time": change(seen.time_us, normal.time_us) if seen else None,
                "seen_energy": change(seen.energy_mj, normal.energy_mj) if seen else None,
                "zeros_time": change(zeros.time_us, normal.time_us) if zeros else None,
                "zeros_energy": change(zeros.energy_mj, normal.energy_mj) if zeros else None,
            }
        )
    require(everything, laboratory)
    columns = (
        Column("tuple", "operator tuple"),
        Column("calls", "calls", "count"),
        Column("seen", "seen"),
        Column("power_w", "power", "power_w"),
        Column("seen_energy", "seen, energy", "change"),
        Column("seen_time", "seen, time", "change"),
        Column("zeros_energy", "zeros, energy", "change"),
        Column("zeros_time", "zeros, time", "change"),
    )
    notes = ["Changes are against standard normal values; `seen` is the class that most calls of the tuple see."]
    if usual := sum(row["seen"] == "normal" for row in table):
        notes.append(f"Most calls of {usual} of {len(table)} tuples see `normal`: these have no change to `seen`.")
    for key, what in (("seen_energy", "As seen in the model"), ("zeros_energy", "With zeros")):
        values = known([row[key] for row in table])
        if values:
            notes.append(
                f"{what}: energy {statistics.median(values):+.1%} in the median of {len(values)}, "
                f"{min(values):+.1%} to {max(values):+.1%}."
            )
    quantity = "energy" if known([row["zeros_energy"] for row in table]) else "time"
    bars = {
        row["tuple"]: {
            name: row[f"{name}_{quantity}"] * 100 for name in ("seen", "zeros") if row[f"{name}_{quantity}"] is not None
        }
        for row in table
    }
    chart = Chart(f"{quantity} against standard normal values", y_name="%", bars=bars, zero=True)
    return Findings(columns, tuple(table), tuple(notes), (chart,))


def _commonest(sample: Sample) -> str:
    return max(sample.data, key=lambda pair: pair[1])[0] if sample.data else "normal"
