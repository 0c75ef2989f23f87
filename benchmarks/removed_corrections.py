"""The correction that was removed on 2026-11-29, because it had no effect on models that were not
used to design it (docs/results/ablation.md). `ablation.py` computes verdicts with it.

It implements `farm.verdict.corrections.Correction`, and applied after the model's clock."""

from __future__ import annotations

from dataclasses import replace

from farm.verdict.corrections import Correction, MeasuredCall
from farm.verdict.figures import CallCost

# share of throttled samples from which a burst did not run at full clocks
BURST_THROTTLED_SHARE = 0.05


class BurstsAtTheLimit:
    """Bursts may reach the power limit too, if one pass is longer than a burst.

    Such a reading is too slow by an unknown factor. The factor is at most the clock of the whole
    model divided by the clock of the bursts, so the interval becomes that much wider. The figures
    stay. Evidence: the clocks and throttle reasons that the bursts and the whole model report."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool:
        burst, model_mhz = call.burst, call.clock_mhz
        if cost.used != "burst" or burst is None or not burst.sm_clock_mhz or not model_mhz:
            return False
        limited = (burst.throttle_shares or {}).get("power_cap", 0.0) >= BURST_THROTTLED_SHARE
        return limited and burst.sm_clock_mhz < model_mhz

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost:
        assert call.burst
        assert call.burst.sm_clock_mhz
        assert call.clock_mhz
        burst_mhz, model_mhz = call.burst.sm_clock_mhz, call.clock_mhz
        unsure = 1 - burst_mhz / model_mhz
        clocks = f"{burst_mhz:.0f} MHz instead of {model_mhz:.0f} MHz"
        why = f"but the bursts hit it ({clocks}): they are too slow by an unknown amount"
        return replace(
            cost,
            why=f"{cost.why}, {why}",
            unsure_us=unsure * cost.time_us.value,
            loop_unsure_mj=unsure * cost.energy_mj.value if cost.energy_mj else 0.0,
        )


#: In the order in which they applied.
REMOVED: tuple[Correction, ...] = (BurstsAtTheLimit(),)
