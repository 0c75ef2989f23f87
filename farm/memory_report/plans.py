"""The plans for a step's tensors in slow memory: as rows (predicted and run), as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from farm.slow_memory.offload_plan import OffloadPlan, OffloadPlans
from farm.slow_memory.transfers import Copied, Run, Wire
from farm.training.tensor_lifetime import Inactive, Life
from farm.types.format import count_of, percent, plural
from farm.verdict.figures import Figure

WAITS_SHARE = 0.9  # of a step: if launching takes longer, the card may have waited for Python


@dataclass(frozen=True)
class PlanRow:
    """A plan, compared with the step as it was run under it.

    Attributes:
        plan: None: all tensors are in fast memory.
        predicted_us: of the step.
        run: None if it was not run; ``why_not`` says why, if a run was requested.
        off: prediction over run - 1.
        stayed_fast_bytes: tensors that the plan has in slow memory but that could not be placed there.
        moved_bytes: moved out and back in one step.
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
        """Number of moves in a step and their size: ``12, 1.20 GB``."""
        return f"{len(self.plan.moved)}, {count_of(self.moved_bytes, 'B')}" if self.plan and self.plan.moved else "0"

    @property
    def run_us(self) -> Figure | None:
        return Figure(self.run.time_us, self.run.half_width_us) if self.run is not None else None

    def run_json(self) -> dict[str, Any] | None:
        if self.run is None or self.off is None:
            return None
        return {**asdict(self.run), "stayed_fast_bytes": self.stayed_fast_bytes, "prediction_off": self.off.value}


def offload_json(life: Life, offload_plans: OffloadPlans) -> dict[str, Any]:
    """All plans and the curve; beside them, the keys of the first plan."""
    costs, run, rows = offload_plans.costs, offload_plans.run, plan_rows(life, offload_plans)
    first = _plan_json(life, offload_plans.plan)
    return {
        **first,
        "slow": [
            {
                "tensor": tensor.number,
                "name": tensor.name,
                "role": tensor.role,
                "size_bytes": tensor.size_bytes,
                "slow_us": costs.slow_us.get(tensor.number, 0.0),
            }
            for tensor in offload_plans.slow(life, offload_plans.plan)
        ],
        "all_fast_us": offload_plans.all_fast_us,
        "all_slow_us": offload_plans.all_slow_us,
        "least_bytes": offload_plans.least_bytes,
        "slow_bytes_per_s": costs.bytes_per_s,
        "read_share": costs.read_share,
        "costs_from": costs.told,
        "sum_over_together": costs.together,
        "moves": offload_plans.moves_bytes_per_s is not None,
        "moves_bytes_per_s": offload_plans.moves_bytes_per_s,
        "wire": offload_plans.wire and {**asdict(offload_plans.wire), "bytes_per_s": offload_plans.wire.bytes_per_s},
        "curve": [
            {"fast_bytes": one.fast_bytes, "time_us": one.time_us, "gap": one.gap, "slow": len(one.slow)}
            for one in offload_plans.curve
        ],
        "unsolved_bytes": list(offload_plans.unsolved),
        "plans": [
            {
                **_plan_json(life, row.plan),
                "moved_bytes": row.moved_bytes,
                "run": row.run_json(),
                "not_run": row.why_not or None,
            }
            for row in rows
            if row.plan is not None
        ],
        "run": run and {"slow_memory": run.slow_memory, "took_s": run.took_s, "all_fast": rows[0].run_json()},
    }


def _plan_json(life: Life, plan: OffloadPlan) -> dict[str, Any]:
    return {
        "fast_bytes": plan.fast_bytes,
        "time_us": plan.time_us,
        "peak_bytes": plan.peak_bytes,
        "gap": plan.gap,
        "ended_in_time": plan.in_time,
        "slow": sorted(plan.slow),
        "moved": periods_json(life.periods[number][index] for number, index in plan.moved),
    }


def periods_json(periods: Iterable[Inactive]) -> list[dict[str, Any]]:
    return [asdict(period) for period in periods]


def plan_rows(life: Life, offload_plans: OffloadPlans) -> list[PlanRow]:
    """A row for all tensors in fast memory, and one for each plan."""
    sizes = life.sizes_bytes
    planned = [PlanRow(None, offload_plans.all_fast_us)]
    planned += [
        PlanRow(plan, plan.time_us, moved_bytes=sum(sizes[number] for number, _ in plan.moved))
        for plan in offload_plans.plans
    ]
    if offload_plans.run is None:
        return planned
    rows = []
    for row, run in zip(planned, (offload_plans.run.fast, *offload_plans.run.plans), strict=True):
        if isinstance(run, str):
            rows.append(replace(row, why_not=run))
            continue
        times = row.predicted_us / run.time_us
        off = Figure(times - 1, times * run.half_width_us / run.time_us)
        stayed_bytes = sum(sizes.get(number, 0) for number in run.stayed_fast)
        rows.append(replace(row, run=run, off=off, stayed_fast_bytes=stayed_bytes))
    return rows


def sentences(life: Life, offload_plans: OffloadPlans) -> list[str]:
    """The plans in words."""
    first = _of_plan(life, offload_plans, offload_plans.plan) if len(offload_plans.plans) == 1 else []
    return [*first, *_of_all(offload_plans), *_of_wire(offload_plans.wire), *_of_runs(life, offload_plans)]


def _of_plan(life: Life, offload_plans: OffloadPlans, plan: OffloadPlan) -> list[str]:
    slow_bytes = sum(tensor.size_bytes for tensor in life.tensors if tensor.number in plan.slow)
    share = plan.time_us / offload_plans.all_fast_us
    ended = "" if plan.in_time else " at its time limit"
    return [
        f"With {count_of(plan.fast_bytes, 'B')} of fast memory the step is predicted to take "
        f"{plan.time_us / 1e3:.4g} ms: "
        f"{share:.3g} times the {offload_plans.all_fast_us / 1e3:.4g} ms with all tensors in fast memory. With all "
        "in slow memory it "
        f"takes {offload_plans.all_slow_us / 1e3:.4g} ms.",
        f"{len(plan.slow)} {plural('tensor', len(plan.slow))} of {count_of(slow_bytes, 'B')} are in slow memory "
        "for their "
        f"whole lifetime; the peak of fast memory is {count_of(plan.peak_bytes, 'B')}. The solver ended with a gap of "
        f"{percent(plan.gap)}{ended}.",
    ]


def _of_all(offload_plans: OffloadPlans) -> list[str]:
    costs = offload_plans.costs
    found = [f"Cost of a slow tensor: {costs.told}. The costs of single tensors are added up."]
    if costs.together:
        found[0] += f" That sum is {costs.together:.2f} times the measured cost of all tensors of a tuple (median)."
    if offload_plans.moves_bytes_per_s is not None:
        moves = " and ".join(
            f"{len(plan.moved)} {plural('move', len(plan.moved))} with {count_of(plan.fast_bytes, 'B')}"
            for plan in offload_plans.plans
        )
        found.append(
            f"{moves}: a fast tensor is in slow memory between two uses, copied at "
            f"{count_of(offload_plans.moves_bytes_per_s, 'B')}/s each way. The prediction assumes that copies do "
            "not slow calls down."
        )
    if offload_plans.unsolved:
        left_out = ", ".join(count_of(amount, "B") for amount in offload_plans.unsolved)
        found.append(f"The curve leaves out {left_out}: the solver found no plan in time.")
    found.append(
        "Sizes are rounded up to the allocator's 512 bytes. Workspaces are not counted and stay in fast memory."
    )
    return found


def _of_wire(wire: Wire | None) -> list[str]:
    """The measured rates of copies, and how much they slow the step down."""
    if wire is None:
        return []
    found = [f"Copies alone: {'; '.join(map(_rates, wire.alone))}."]
    if wire.beside:
        beside = "; ".join(
            f"{_rates(one)}, the step {((one.step_us or 0.0) / wire.step_us - 1) * 100:+z.1f} %" for one in wire.beside
        )
        found.append(
            f"Copies beside the step, all tensors in fast memory ({wire.step_us / 1e3:.4g} ms without copies): "
            f"{beside}."
        )
    else:
        found.append("This card copies between its calls, not beside them.")
    return found


def _rates(copied: Copied) -> str:
    ways = (("out", copied.out_bytes_per_s), ("back", copied.back_bytes_per_s))
    return " and ".join(f"{way} {count_of(rate, 'B')}/s" for way, rate in ways if rate is not None)


def _of_runs(life: Life, offload_plans: OffloadPlans) -> list[str]:
    """Details of the runs that the table does not show."""
    found = []
    for row in plan_rows(life, offload_plans):
        if row.plan is None:
            continue
        with_fast = f"with {count_of(row.plan.fast_bytes, 'B')}"
        if row.why_not:
            found.append(f"The step was not run {with_fast}: {row.why_not}")
        if row.run is None:
            continue
        if number := len(row.run.stayed_fast):
            found.append(
                f"Run {with_fast}: {number} {plural('tensor', number)}, {count_of(row.stayed_fast_bytes, 'B')}, "
                "could not be "
                "placed and stayed fast."
            )
        if row.run.launch_us > WAITS_SHARE * row.run.time_us:
            found.append(
                f"Run {with_fast}: Python takes {row.run.launch_us / 1e3:.3g} ms to launch the {row.run.graphs} "
                "graphs of a "
                "step and the copies between them. The card may have waited for it."
            )
        if left := len(row.plan.moved) - row.run.moves:
            found.append(
                f"Run {with_fast}: {left} of {len(row.plan.moved)} moves were left out, because the step holds "
                "these tensors "
                "elsewhere."
            )
    if offload_plans.run is not None:
        found.append(f"Run: slow tensors are in {offload_plans.run.slow_memory} for their whole lifetime.")
        if offload_plans.moves_bytes_per_s is not None:
            found.append(
                "Run: a moved tensor keeps its room in fast memory meanwhile. The run measures the time of copies "
                "and of "
                "waiting for them, not the memory that they free."
            )
    return found
