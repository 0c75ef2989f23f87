"""Plans for slow memory as table rows (predicted and measured), as sentences and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from farm.slow_memory.offload_plan import OffloadPlan, OffloadPlans
from farm.slow_memory.transfers import Copied, Run, Wire
from farm.training.tensor_lifetime import Life
from farm.types.format import count_of, percent, plural
from farm.verdict.figures import Figure

WAITS_SHARE = 0.9  # share of a step's time: if launching takes longer, the card may have waited for Python


@dataclass(frozen=True)
class PlanRow:
    """A plan with its predicted time, and the result of running the step under the plan.

    Attributes:
        plan: None: all tensors are in fast memory.
        predicted_us: predicted time of the step.
        run: None if the step was not run under the plan; ``why_not`` has the reason if a run was requested.
        off: predicted time / measured time - 1.
        stayed_fast_bytes: size of the planned slow tensors that had to stay in fast memory.
        moved_bytes: bytes that one step copies out; it copies as many back.
    """

    plan: OffloadPlan | None
    predicted_us: float
    run: Run | None = None
    why_not: str = ""
    off: Figure | None = None
    stayed_fast_bytes: int = 0
    moved_bytes: int = 0

    @property
    def moves_told(self) -> str:
        """Number and size of the moves in a step, as text: ``12, 1.20 GB``."""
        return f"{len(self.plan.moved)}, {count_of(self.moved_bytes, 'B')}" if self.plan and self.plan.moved else "0"

    @property
    def run_us(self) -> Figure | None:
        return Figure(self.run.time_us, self.run.half_width_us) if self.run is not None else None

    def run_json(self) -> dict[str, Any] | None:
        if self.run is None or self.off is None:
            return None
        return {**asdict(self.run), "stayed_fast_bytes": self.stayed_fast_bytes, "prediction_off": self.off.value}


def offload_json(life: Life, offload_plans: OffloadPlans) -> dict[str, Any]:
    """Return all plans and the curve as JSON. The keys of the first plan are also at the top level."""
    costs, run, wire = offload_plans.costs, offload_plans.run, offload_plans.wire
    all_fast, *rows = plan_rows(life, offload_plans)

    def plan_json(plan: OffloadPlan) -> dict[str, Any]:
        moved = [asdict(life.periods[number][index]) for number, index in plan.moved]
        return {**vars(plan), "slow": sorted(plan.slow), "moved": moved}

    return {
        **plan_json(offload_plans.plan),
        "slow": [
            {"tensor": one.number, "slow_us": costs.slow_us.get(one.number, 0.0)}
            | {name: getattr(one, name) for name in ("name", "role", "size_bytes")}
            for one in offload_plans.slow(life, offload_plans.plan)
        ],
        **{
            name: getattr(offload_plans, name)
            for name in ("all_fast_us", "all_slow_us", "least_bytes", "moves_bytes_per_s")
        },
        "slow_bytes_per_s": costs.bytes_per_s,
        "read_share": costs.read_share,
        "costs_from": costs.source,
        "sum_over_together": costs.together,
        "moves": offload_plans.moves_bytes_per_s is not None,
        "wire": wire and {**asdict(wire), "bytes_per_s": wire.bytes_per_s},
        "curve": [
            {name: getattr(one, name) for name in ("fast_bytes", "time_us", "gap")} | {"slow": len(one.slow)}
            for one in offload_plans.curve
        ],
        "unsolved_bytes": list(offload_plans.unsolved),
        "plans": [
            plan_json(row.plan)
            | {"moved_bytes": row.moved_bytes, "run": row.run_json(), "not_run": row.why_not or None}
            for row in rows
            if row.plan
        ],
        "run": run and {"slow_memory": run.slow_memory, "took_s": run.took_s, "all_fast": all_fast.run_json()},
    }


def plan_rows(life: Life, offload_plans: OffloadPlans) -> list[PlanRow]:
    """Return a row for the step with all tensors in fast memory, and a row for each plan."""
    sizes = life.sizes_bytes
    ran = offload_plans.run
    runs = (ran.fast, *ran.plans) if ran else [None] * (1 + len(offload_plans.plans))
    rows = []
    for plan, run in zip((None, *offload_plans.plans), runs, strict=True):
        row = PlanRow(plan, plan.time_us if plan else offload_plans.all_fast_us)
        row = replace(row, moved_bytes=sum(sizes[number] for number, _ in (plan.moved if plan else ())))
        if isinstance(run, str):
            row = replace(row, why_not=run)
        elif run is not None:
            times = row.predicted_us / run.time_us
            off = Figure(times - 1, times * run.half_width_us / run.time_us)
            stayed_bytes = sum(sizes.get(number, 0) for number in run.stayed_fast)
            row = replace(row, run=run, off=off, stayed_fast_bytes=stayed_bytes)
        rows.append(row)
    return rows


def sentences(life: Life, offload_plans: OffloadPlans) -> list[str]:
    """Describe the plans, copies and runs in sentences."""
    first = _of_plan(life, offload_plans) if len(offload_plans.plans) == 1 else []
    return [*first, *_of_all(offload_plans), *_of_wire(offload_plans.wire), *_of_runs(life, offload_plans)]


def _of_plan(life: Life, offload_plans: OffloadPlans) -> list[str]:
    plan = offload_plans.plan
    slow_bytes = sum(tensor.size_bytes for tensor in life.tensors if tensor.number in plan.slow)
    return [
        f"With {count_of(plan.fast_bytes, 'B')} of fast memory the step is predicted to take {plan.time_us / 1e3:.4g} "
        f"ms: {plan.time_us / offload_plans.all_fast_us:.3g} times the {offload_plans.all_fast_us / 1e3:.4g} ms with "
        "all tensors in fast memory. With all tensors in slow memory it is predicted to take "
        f"{offload_plans.all_slow_us / 1e3:.4g} ms.",
        f"{len(plan.slow)} {plural('tensor', len(plan.slow))} of {count_of(slow_bytes, 'B')} are in slow memory for "
        f"their whole lifetime; the peak of fast memory is {count_of(plan.peak_bytes, 'B')}. The solver ended"
        f"{'' if plan.ended_in_time else ' at its time limit'}; the best plan may cost up to {percent(plan.gap)} less.",
    ]


def _of_all(offload_plans: OffloadPlans) -> list[str]:
    costs = offload_plans.costs
    found = [f"Cost of a slow tensor: {costs.source}. The costs of the slow tensors are added up."]
    if costs.together:
        found[0] += (
            f" Measured check: the sum over the single tensors of a tuple is {costs.together:.2f} times its cost with "
            "all tensors slow (median)."
        )
    if offload_plans.moves_bytes_per_s is not None:
        moves = " and ".join(
            f"{len(plan.moved)} {plural('move', len(plan.moved))} with {count_of(plan.fast_bytes, 'B')}"
            for plan in offload_plans.plans
        )
        found.append(
            f"{moves}: between two uses, the plan moves a fast tensor to slow memory and back, at "
            f"{count_of(offload_plans.moves_bytes_per_s, 'B')}/s each way. The prediction assumes that these copies do "
            "not slow the calls down."
        )
    if offload_plans.unsolved:
        left_out = ", ".join(count_of(amount, "B") for amount in offload_plans.unsolved)
        found.append(f"The curve has no point at {left_out}: the solver found no plan within its time limit.")
    rounding = "Sizes of tensors are rounded up to multiples of 512 bytes, as the allocator does."
    return [*found, f"{rounding} Workspaces are not counted and stay in fast memory."]


def _of_wire(wire: Wire | None) -> list[str]:
    """Describe the measured bandwidth of copies, and how much copies slow the step down."""
    if wire is None:
        return []

    def rates(copied: Copied) -> str:
        ways = (("to slow memory", copied.out_bytes_per_s), ("back", copied.back_bytes_per_s))
        return " and ".join(f"{count_of(rate, 'B')}/s {way}" for way, rate in ways if rate is not None)

    found = [f"Measured copies without a step: {'; '.join(map(rates, wire.alone))}."]
    if not wire.beside:
        return [*found, "This card cannot copy while a call runs; it copies between calls."]
    beside = (
        f"{rates(one)} change the step by {((one.step_us or 0.0) / wire.step_us - 1) * 100:+z.1f} %"
        for one in wire.beside
    )
    step = f"all tensors in fast memory ({wire.step_us / 1e3:.4g} ms without copies)"
    return [*found, f"Measured copies during the step, {step}: {'; '.join(beside)}."]


def _of_runs(life: Life, offload_plans: OffloadPlans) -> list[str]:
    """Describe details of the runs that the table does not show."""
    found = []
    for row in plan_rows(life, offload_plans):
        plan, run = row.plan, row.run
        with_fast = f"with {count_of(plan.fast_bytes, 'B')}" if plan else ""
        if row.why_not:
            found.append(f"The step was not measured {with_fast}: {row.why_not}")
        if plan is None or run is None:
            continue
        if number := len(run.stayed_fast):
            tensors = f"{number} {plural('tensor', number)}, {count_of(row.stayed_fast_bytes, 'B')}"
            found.append(f"Run {with_fast}: {tensors}, could not be placed in slow memory and stayed in fast memory.")
        if run.launch_us > WAITS_SHARE * run.time_us:
            found.append(
                f"Run {with_fast}: Python takes {run.launch_us / 1e3:.3g} ms to launch the {run.graphs} graphs of a "
                "step and the copies between them. The card may have waited for Python."
            )
        if left := len(plan.moved) - run.moves:
            moves = f"{left} of {len(plan.moved)} moves were left out"
            found.append(f"Run {with_fast}: {moves}, because other tensors use the same storage as the moved tensors.")
    if offload_plans.run is not None:
        found.append(f"Run: slow tensors are in {offload_plans.run.slow_memory} for their whole lifetime.")
        if offload_plans.moves_bytes_per_s is not None:
            found.append(
                "Run: a moved tensor keeps its fast memory reserved while it is in slow memory. The run measures the "
                "time of the copies and of waiting for them, not the memory that they would free."
            )
    return found
