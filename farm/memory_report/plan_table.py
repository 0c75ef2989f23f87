"""The plans of a step's placement as rows, predicted and as run, and in sentences."""

from __future__ import annotations

from dataclasses import dataclass, replace

from farm.slow_memory.offload_plan import OffloadPlan, OffloadPlans
from farm.slow_memory.transfers import Copied, Run, Wire
from farm.training.tensor_lifetime import Life
from farm.types.format import count_of, percent, plural
from farm.verdict.figures import Figure

WAITS_SHARE = 0.9  # of a step: who launches for longer may be what is timed


@dataclass(frozen=True)
class PlanRow:
    """A plan against the step as it was run under it.

    Attributes:
        plan: None where all is fast.
        predicted_us: of the step.
        run: None where it was not run; ``why_not`` says why, where it was to be.
        off: by which share the prediction is more than the run.
        stayed_fast_bytes: of tensors that were to be slow, and could not be placed.
        moved_bytes: that are to go out in periods and come back.
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
        """How many periods in a step, and what goes out in all of them and comes back: ``12, 1.20 GB``."""
        return f"{len(self.plan.moved)}, {count_of(self.moved_bytes, 'B')}" if self.plan and self.plan.moved else "0"

    @property
    def run_us(self) -> Figure | None:
        return Figure(self.run.time_us, self.run.half_width_us) if self.run is not None else None


def plan_rows(life: Life, offload_plans: OffloadPlans) -> list[PlanRow]:
    """All fast, and each plan."""
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
    """The plans, for people."""
    told = _of_plan(life, offload_plans, offload_plans.plan) if len(offload_plans.plans) == 1 else []
    return [*told, *_of_all(offload_plans), *_of_wire(offload_plans.wire), *_of_runs(life, offload_plans)]


def _of_plan(life: Life, offload_plans: OffloadPlans, plan: OffloadPlan) -> list[str]:
    slow_bytes = sum(tensor.size_bytes for tensor in life.tensors if tensor.number in plan.slow)
    share = plan.time_us / offload_plans.all_fast_us
    ended = "" if plan.in_time else ", when its time was up"
    return [
        f"Within {count_of(plan.fast_bytes, 'B')} of fast memory the step is predicted to take {plan.time_us / 1e3:.4g} ms: {share:.3g} "
        f"times what it takes all fast ({offload_plans.all_fast_us / 1e3:.4g} ms); all slow {offload_plans.all_slow_us / 1e3:.4g} ms.",
        f"{len(plan.slow)} {plural('tensor', len(plan.slow))} of {count_of(slow_bytes, 'B')} lie in slow memory for their lives; "
        f"the most that is fast at once is {count_of(plan.peak_bytes, 'B')}. The program ended with a gap of {percent(plan.gap)}{ended}.",
    ]


def _of_all(offload_plans: OffloadPlans) -> list[str]:
    costs = offload_plans.costs
    told = [
        f"What a slow tensor adds: {costs.told}. Added up one tensor at a time"
        + (
            f", which is {costs.together:.2f} times what all of a tuple took together (median)."
            if costs.together
            else "."
        ),
    ]
    if offload_plans.moves_bytes_per_s is not None:
        told.append(
            " and ".join(
                f"{len(plan.moved)} {plural('period', len(plan.moved))} within {count_of(plan.fast_bytes, 'B')}"
                for plan in offload_plans.plans
            )
            + f" in which a fast tensor lies elsewhere meanwhile, at {count_of(offload_plans.moves_bytes_per_s, 'B')}/s each way; assumed is that "
            "copies cost the calls beside them nothing."
        )
    if offload_plans.unsolved:
        left_out = ", ".join(count_of(amount, "B") for amount in offload_plans.unsolved)
        told.append(f"The curve leaves out {left_out}: no plan was found in time.")
    told.append("Counted are tensors in the allocator's pieces of 512 bytes; workspaces are not, and stay fast.")
    return told


def _of_wire(wire: Wire | None) -> list[str]:
    """What copies got, and what the step lost by them."""
    if wire is None:
        return []
    told = [f"Copies alone: {'; '.join(map(_rates_told, wire.alone))}."]
    if wire.beside:
        beside = "; ".join(
            f"{_rates_told(one)}, the step {((one.step_us or 0.0) / wire.step_us - 1) * 100:+z.1f} %"
            for one in wire.beside
        )
        told.append(
            f"Beside the step without a pause, all fast ({wire.step_us / 1e3:.4g} ms without copies): {beside}."
        )
    else:
        told.append("This card copies between its calls, not beside them.")
    return told


def _rates_told(copied: Copied) -> str:
    ways = (("out", copied.out_bytes_per_s), ("back", copied.back_bytes_per_s))
    return " and ".join(f"{way} {count_of(rate, 'B')}/s" for way, rate in ways if rate is not None)


def _of_runs(life: Life, offload_plans: OffloadPlans) -> list[str]:
    """What of the runs is no figure of the table."""
    told = []
    for row in plan_rows(life, offload_plans):
        if row.plan is None:
            continue
        within = f"within {count_of(row.plan.fast_bytes, 'B')}"
        if row.why_not:
            told.append(f"The step was not run {within}: {row.why_not}")
        elif row.run is not None and (number := len(row.run.stayed_fast)):
            told.append(
                f"As run {within}, {number} {plural('tensor', number)}, {count_of(row.stayed_fast_bytes, 'B')}, could not be placed and "
                "stayed fast."
            )
        if row.run is not None and row.run.launch_us > WAITS_SHARE * row.run.time_us:
            told.append(
                f"As run {within}, Python takes {row.run.launch_us / 1e3:.3g} ms to launch the {row.run.graphs} graphs of a step and the copies "
                "between them: the card may have waited for it."
            )
        if row.run is not None and (left := len(row.plan.moved) - row.run.moves):
            told.append(
                f"As run {within}, {left} of {len(row.plan.moved)} moves were of what the step holds elsewhere, and left out."
            )
    if offload_plans.run is not None:
        told.append(f"As run: with slow tensors in {offload_plans.run.slow_memory}, each for its whole life.")
        if offload_plans.moves_bytes_per_s is not None:
            told.append(
                "What is moved as run keeps its room in fast memory meanwhile: run is the time that copies and waiting for them take, "
                "not the memory that they free."
            )
    return told
