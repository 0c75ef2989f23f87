"""Corrections that were removed on 2026-11-29, because they had no effect on models that were not
used to design them (docs/results/ablation.md). `ablation.py` computes verdicts with them.

They implement `farm.verdict.corrections.Correction`, and applied after the model's clock."""

from __future__ import annotations

import math
from dataclasses import replace

from farm.verdict.corrections import Call, Correction
from farm.verdict.figures import Chosen
from farm.verdict.replay import POWER_PER_C

# share of throttled samples from which a burst did not run at full clocks
BURST_THROTTLED_SHARE = 0.05


class BurstsAtTheLimit:
    """Bursts may reach the power limit too, if one pass is longer than a burst.

    Such a reading is too slow by an unknown factor. The factor is at most the clock of the whole
    model divided by the clock of the bursts, so the interval becomes that much wider. The figures
    stay. Evidence: the clocks and throttle reasons that the bursts and the whole model report."""

    def applies(self, chosen: Chosen, call: Call) -> bool:
        burst, model_mhz = call.burst, call.clock_mhz
        if chosen.used != "burst" or burst is None or not burst.sm_clock_mhz or not model_mhz:
            return False
        limited = (burst.throttle_shares or {}).get("power_cap", 0.0) >= BURST_THROTTLED_SHARE
        return limited and burst.sm_clock_mhz < model_mhz

    def correct(self, chosen: Chosen, call: Call) -> Chosen:
        assert call.burst
        assert call.burst.sm_clock_mhz
        assert call.clock_mhz
        burst_mhz, model_mhz = call.burst.sm_clock_mhz, call.clock_mhz
        unsure = 1 - burst_mhz / model_mhz
        clocks = f"{burst_mhz:.0f} MHz instead of {model_mhz:.0f} MHz"
        why = f"but the bursts hit it ({clocks}): they are too slow by an unknown amount"
        return replace(
            chosen,
            why=f"{chosen.why}, {why}",
            unsure_us=unsure * chosen.time.value,
            loop_unsure_mj=unsure * chosen.energy.value if chosen.energy else 0.0,
        )


class Temperature:
    """A warmer chip draws more power for the same work (`POWER_PER_C`), so the energy is restated
    to the temperature of the whole model.

    It does not apply at the power limit, which decides the power there, nor to a first step of the
    energy counter, which is compared with long runs as it is
    (`farm.benchmark.window.FIRST_STEP`). The uncertainty is common to all tuples.

    Evidence: the slope of the power within 800 readings of H200s and H100s (docs/method.md,
    Temperature)."""

    def applies(self, chosen: Chosen, call: Call) -> bool:
        reading = call.reading
        if not chosen.energy or chosen.used != "steady" or reading.temperature_c is None:
            return False
        if all(whole.temperature_c is None for whole in call.wholes):
            return False
        first_step = "rough" in reading.flags and reading.details.powering.ticks == 2
        return not first_step and not any(view.power_throttled for view in (reading, *call.wholes))

    def correct(self, chosen: Chosen, call: Call) -> Chosen:
        assert chosen.energy
        assert call.reading.temperature_c is not None
        temperatures_c = [
            whole.temperature_c for whole in call.wholes if whole.temperature_c is not None
        ]
        model_c = math.fsum(temperatures_c) / len(temperatures_c)
        per_c = (model_c - call.reading.temperature_c) * chosen.energy.value
        warmth_mj = POWER_PER_C.value * per_c
        return replace(
            chosen,
            energy=replace(chosen.energy, value=chosen.energy.value + warmth_mj),
            loop_unsure_mj=chosen.loop_unsure_mj + POWER_PER_C.half_width * abs(per_c),
        )


#: In the order in which they applied.
REMOVED: tuple[Correction, ...] = (BurstsAtTheLimit(), Temperature())
