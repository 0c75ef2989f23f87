"""Plans for slow memory as table rows (predicted and measured), as sentences and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farm.addons.memory.offload_plan import OffloadPlan, OffloadPlans
from farm.addons.memory.transfers import Copied, Run
from farm.training.tensor_lifetime import Life
from farm.types.figure import Figure
from farm.types.format import count_of, percent, plural

# share of a step's time: if launching takes longer, the card may have waited for Python
WAITS_SHARE = 0.9


@dataclass(frozen=True)
class PlanRow:
    """A plan, and the result of running the step under the plan."""

    plan: OffloadPlan
    run: Run | None = None  # None if the step was not run under the plan
    why_not: str = ""  # the reason, if a run was requested
    stayed_fast_bytes: int = 0  # size of the planned slow tensors that had to stay in fast memory
    moved_bytes: int = 0  # bytes that one step copies out; it copies as many back

    @property
    def moves_told(self) -> str:
        """Number and size of the moves in a step, as text: ``12, 1.20 GB``."""
        return (
            f"{len(self.plan.moved)}, {count_of(self.moved_bytes, 'B')}" if self.plan.moved else "0"
        )

    @property
    def run_us(self) -> Figure | None:
        return self.run.time_us if self.run is not None else None

    @property
    def deviation(self) -> Figure | None:
        """Predicted time / measured time - 1."""
        return Figure(self.plan.time_us).deviation_from(self.run.time_us) if self.run else None

    def run_json(self) -> dict[str, Any] | None:
        if self.run is None or self.deviation is None:
            return None
        return {
            **asdict(self.run),
            "time_us": self.run.time_us.value,
            "half_width_us": self.run.time_us.half_width,
            "stayed_fast_bytes": self.stayed_fast_bytes,
            "prediction_off": self.deviation.value,
        }


def offload_json(life: Life, offload_plans: OffloadPlans) -> dict[str, Any]:
    """Return all plans and the curve as JSON. The keys of the first plan are also at the top
    level.
    """
    costs, run, wire = offload_plans.costs, offload_plans.run, offload_plans.wire
    all_fast, *rows = plan_rows(life, offload_plans)

    def plan_json(plan: OffloadPlan) -> dict[str, Any]:
        moved = [asdict(life.periods[number][index]) for number, index in plan.moved]
        return {**vars(plan), "slow": sorted(plan.slow), "moved": moved}

    return {
        **plan_json(offload_plans.plan),
        "slow": [
            {
                "tensor": tensor.number,
                "slow_us": costs.slow_us.get(tensor.number, 0.0),
                "name": tensor.name,
                "role": tensor.role,
                "size_bytes": tensor.size_bytes,
            }
            for tensor in offload_plans.slow(life, offload_plans.plan)
        ],
        "all_fast_us": offload_plans.all_fast.time_us,
        "all_slow_us": offload_plans.all_slow_us,
        "least_bytes": offload_plans.least_bytes,
        "moves_bytes_per_s": offload_plans.moves_bytes_per_s,
        "slow_bytes_per_s": costs.bytes_per_s,
        "read_share": costs.read_share,
        "costs_from": costs.source,
        "sum_over_together": costs.together,
        "moves": offload_plans.moves_bytes_per_s is not None,
        "wire": wire and {**asdict(wire), "bytes_per_s": wire.bytes_per_s},
        "curve": [
            {
                "fast_bytes": plan.fast_bytes,
                "time_us": plan.time_us,
                "gap": plan.gap,
                "slow": len(plan.slow),
            }
            for plan in offload_plans.curve
        ],
        "unsolved_bytes": list(offload_plans.unsolved),
        "plans": [
            plan_json(row.plan)
            | {
                "moved_bytes": row.moved_bytes,
                "run": row.run_json(),
                "not_run": row.why_not or None,
            }
            for row in rows
        ],
        "run": run
        and {"slow_memory": run.slow_memory, "took_s": run.took_s, "all_fast": all_fast.run_json()},
    }


def plan_rows(life: Life, offload_plans: OffloadPlans) -> list[PlanRow]:
    """Return a row for the step with all tensors in fast memory, and a row for each plan."""
    sizes = life.sizes_bytes
    ran = offload_plans.run
    runs = (ran.fast, *ran.plans) if ran else [None] * (1 + len(offload_plans.plans))
    rows = []
    for plan, run in zip((offload_plans.all_fast, *offload_plans.plans), runs, strict=True):
        row = PlanRow(plan, moved_bytes=sum(sizes[number] for number, _ in plan.moved))
        if isinstance(run, str):
            row = replace(row, why_not=run)
        elif run is not None:
            stayed_bytes = sum(sizes.get(number, 0) for number in run.stayed_fast)
            row = replace(row, run=run, stayed_fast_bytes=stayed_bytes)
        rows.append(row)
    return rows


def sentences(life: Life, offload_plans: OffloadPlans) -> list[str]:
    """Describe the plans, copies and runs in sentences, with the template ``sentences.txt``."""
    import jinja2

    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"plural": plural, "percent": percent, "rates": _rates, "form": format}
    environment.filters |= {
        "bytes": lambda size: count_of(size, "B"),
        "ms": lambda time_us: f"{time_us / 1e3:.4g} ms",
    }
    template = environment.from_string(Path(__file__).with_name("sentences.txt").read_text("utf-8"))
    slow_bytes = sum(tensor.size_bytes for tensor in offload_plans.slow(life, offload_plans.plan))
    text = template.render(
        plans=offload_plans,
        rows=plan_rows(life, offload_plans),
        slow_bytes=slow_bytes,
        waits_share=WAITS_SHARE,
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _rates(copied: Copied) -> str:
    ways = (("to slow memory", copied.out_bytes_per_s), ("back", copied.back_bytes_per_s))
    return " and ".join(f"{count_of(rate, 'B')}/s {way}" for way, rate in ways if rate is not None)
