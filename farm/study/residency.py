"""What must lie in the cache so that the tuples add up? All tuples of a model under each residency policy.

`resident` stands twice: as looped, like the others, and among other operators, as jobs take it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from farm.pages.plots import Chart
from farm.store import tables
from farm.study.findings import Column, Findings, change, known
from farm.study.laboratory import Laboratory, Plan, require
from farm.study.summing import against_whole
from farm.types.reading import Details

POLICIES = ("resident", "reuse", "stream", "chain")


def run(laboratory: Laboratory, plan: Plan) -> Findings:
    """The sum under each policy against the same whole; `chain` only where an operator can feed itself."""
    stopping = laboratory.stopping(quick=plan.quick)
    samples = laboratory.parts(plan.variant, plan.tuples)
    policies = POLICIES[:3] if plan.quick else POLICIES
    laboratory.expect(1 + len(policies) * len(samples))
    whole = laboratory.read(laboratory.whole(plan.variant), laboratory.protocol(), stopping, of="whole")
    read: dict[str, list[tables.Reading | None]] = {}
    for policy in policies:
        read[policy] = [
            laboratory.read(
                sample, laboratory.protocol(residency=policy, data=sample.data_class), stopping, residency=policy
            )
            for sample in samples
        ]
    require([row for rows in read.values() for row in rows], laboratory)
    table = []
    states = [(policy, policy, True) for policy in read]
    if any(Details.from_json(row.details).context for row in read["resident"] if row):
        states.insert(0, ("resident, among others", "resident", False))
    for name, policy, looped in states:
        rows = read[policy]
        changes = known(
            [
                change(row.time_us, usual.time_us)
                for row, usual in zip(rows, read["resident"], strict=True)
                if row and usual
            ]
        )
        pairs = zip(samples, rows, strict=True)
        sums = against_whole(pairs, whole, laboratory.launches[0], all_tuples=plan.tuples is None, looped=looped)
        table.append(
            {
                "residency": name,
                **sums,
                "change_median": statistics.median(changes) if changes else None,
                "change_most": max(changes, key=abs, default=None),
            }
        )
    columns = (
        Column("residency", "residency"),
        Column("tuples", "tuples", "count"),
        Column("sum_time_us", "sum, time", "time_us"),
        Column("gap_time", "gap", "change"),
        Column("sum_energy_mj", "sum, energy", "energy_mj"),
        Column("gap_energy", "gap", "change"),
        Column("change_median", "time to resident", "change"),
        Column("change_most", "most", "change"),
    )
    notes = ["Gaps are of the sum of all tuples against the whole model; policies without all tuples have none."]
    if plan.tuples is not None:
        notes.append(f"Only the {plan.tuples} heaviest tuples were read: their sum is not the model's.")
    charts = (
        _chart("gap of the sum to the whole", table, {"time": "gap_time", "energy": "gap_energy"}),
        _chart(
            "time of a tuple to `resident`",
            [row for row in table if not row["residency"].startswith("resident")],
            {"median": "change_median", "most": "change_most"},
        ),
    )
    return Findings(columns, tuple(table), tuple(notes), charts)


def _chart(title: str, rows: Sequence[Mapping[str, Any]], series: Mapping[str, str]) -> Chart:
    """Bars of the policies that have a figure; `series` is the row's key by the name of each."""
    bars = {
        row["residency"]: {name: row[key] * 100 for name, key in series.items() if row[key] is not None} for row in rows
    }
    return Chart(title, y_name="%", bars={name: values for name, values in bars.items() if values}, zero=True)
