"""Choose the figures of a tuple's reading that belong in the sum of a model.

A reading holds several states of one operator, all independent of the model: looped with cold weights, looped warm, in
bursts at full clocks, and among other operators. The reading of the whole model tells which state the card was in: by
its clocks, its throttle reasons, and the share of the weights that stays in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from farm.types.reading import Burst
from farm.verdict.figures import Chosen, Figure, ReadingView

PLACE_UNSURE_US = 0.05  # per call: an event in front of a kernel keeps it from starting early
PLACE_UNSURE = 0.1  # of the effect of a place in the model
BURST_THROTTLED_SHARE = 0.05  # of the samples of a burst reading: from this share on, its clocks are not full


def choose(reading: ReadingView, wholes: Sequence[ReadingView], operator_id: str = "") -> Chosen:
    """Choose the figures of one call for the sum, given how the card ran the whole model.

    Args:
        operator_id: of the tuple; the effect of its place in the model is stored with the whole.
    """
    wholes = [whole for whole in wholes if whole.card_id == reading.card_id] or wholes
    chosen, in_cache = _at_model_clocks(reading, wholes), weights_in_cache(wholes) or 0.0
    found = [place for whole in wholes if (place := (whole.details.places or {}).get(operator_id)) is not None]
    if not found:
        return _among_others(chosen, reading, in_cache)
    effect = Figure(sum(one.effect_us for one in found) / len(found), max(one.half_width_us for one in found))
    # The weights are as cold there as in the model: the effect contains the time to fetch them.
    return _among_others(chosen, reading, 1.0, _bounded(effect, reading, in_cache))


def _at_model_clocks(reading: ReadingView, wholes: Sequence[ReadingView]) -> Chosen:
    """Take the steady state, the burst state, or an interpolation between the two.

    A tuple that hits the power limit when looped alone runs faster in the model, where its neighbours let it cool.
    """
    steady = Chosen(reading.time, reading.energy, "steady")
    burst = reading.details.burst
    if burst is None or not burst.time_us:
        return steady
    if not wholes:
        return replace(steady, why="no whole shows how the card runs the model")
    burst_time = Figure(burst.time_us, burst.time_half_width_us or 0.0)
    energy_mj = burst.energy_mj
    burst_energy = None if energy_mj is None else Figure(energy_mj, burst.energy_half_width_mj or 0.0)
    clocks = [whole.sm_clock_mhz for whole in wholes if whole.sm_clock_mhz]
    clock = sum(clocks) / len(clocks) if clocks else None
    low, high = reading.sm_clock_mhz, burst.sm_clock_mhz
    if not any(whole.power_throttled for whole in wholes):
        chosen = Chosen(burst_time, burst_energy or reading.energy, "burst", "the whole does not hit the power limit")
        return _if_throttled(chosen, burst, clock)
    if clock is None or not low or not high or high <= low:
        return replace(steady, why="the whole hits the power limit; the clocks do not distinguish the states")
    share = min(1.0, max(0.0, (clock - low) / (high - low)))
    # Between the two states the true relation is a curve. The error of the straight line is zero at both ends.
    bend = share * (1 - share)
    energy, unsure_mj = steady.energy, 0.0
    if steady.energy and burst_energy:
        energy = _between(steady.energy, burst_energy, share)
        unsure_mj = bend * abs(burst_energy.value - steady.energy.value)
    return Chosen(
        _between(steady.time, burst_time, share),
        energy,
        "interpolated",
        f"the whole hits the power limit at {clock:.0f} MHz, between {low:.0f} (steady) and {high:.0f} (burst)",
        unsure_us=bend * abs(burst_time.value - steady.time.value),
        unsure_mj=unsure_mj,
    )


def _if_throttled(chosen: Chosen, burst: Burst, whole_mhz: float | None) -> Chosen:
    """Widen the interval of bursts that hit the power limit themselves, as passes longer than a burst do.

    They are too slow by an unknown part: at most by the ratio of the clocks, if all time depends on the clock.
    """
    clock_mhz = burst.sm_clock_mhz
    limited = (burst.throttle_shares or {}).get("power_cap", 0.0) >= BURST_THROTTLED_SHARE
    if not limited or not clock_mhz or not whole_mhz or clock_mhz >= whole_mhz:
        return chosen
    unsure = 1 - clock_mhz / whole_mhz
    clocks = f"at {clock_mhz:.0f} MHz; the whole runs at {whole_mhz:.0f} MHz"
    return replace(
        chosen,
        why=f"{chosen.why}; the bursts do, {clocks}: they are too slow by an unknown part",
        unsure_us=unsure * chosen.time.value,
        unsure_mj=unsure * chosen.energy.value if chosen.energy else 0.0,
    )


def _bounded(place: Figure, reading: ReadingView, in_cache: float) -> Figure:
    """Limit the effect of a place if the cache holds all data of a pass: at most the effect of unrelated operators.

    Unrelated operators evict all code of the operator and rewrite its inputs. With events between the calls a pass is
    longer and misses some weights that the model's own pass finds; which ones differs from process to process.
    """
    context = reading.details.context
    excess = max(0.0, place.value - max(0.0, context.effect_us)) if context else 0.0
    return Figure(place.value - in_cache * excess, place.half_width)


def _among_others(chosen: Chosen, reading: ReadingView, in_cache: float, place: Figure | None = None) -> Chosen:
    """Add the effect of the neighbours in a model; remove the time to fetch weights that are in the cache there.

    While a kernel waits for code or data, the card draws more than its idle power and less than the operator's own
    power: the mean is taken, and half of the difference is unsure. Without a measured place, the similarity of the
    neighbours to those in the model is unknown, so the effect is unsure by its own size. Both uncertainties are
    common to all tuples.
    """
    context, burst = reading.details.context, reading.details.burst
    if context is None:
        return chosen
    effect = place or Figure(context.effect_us, context.effect_half_width_us or 0.0)
    fetching_us = 0.0
    if (reading.details.copies or 1) > 1:  # with one copy the loop does not fetch weights either
        looped_us = (burst.time_us if burst else None) or reading.time_us
        fetching_us = looped_us - context.alone_us
    shift = Figure(effect.value - in_cache * fetching_us, effect.half_width)
    unsure_us = abs(effect.value) if place is None else PLACE_UNSURE_US + PLACE_UNSURE * abs(shift.value)
    time = Figure(chosen.time.value + shift.value, math.hypot(chosen.time.half_width, shift.half_width))
    energy, added_mj, unsure_mj = chosen.energy, 0.0, 0.0
    if energy is not None and chosen.time.value:
        own_w = energy.value / chosen.time.value * 1e3
        waiting_w = min(own_w, reading.base_power_w or reading.idle_power_w or own_w)
        added_mj = shift.value * (own_w + waiting_w) / 2 * 1e-3
        unsure_mj = (abs(shift.value) * (own_w - waiting_w) / 2 + unsure_us * own_w) * 1e-3
        noise_mj = shift.half_width * (own_w + waiting_w) / 2 * 1e-3
        energy = Figure(energy.value + added_mj, math.hypot(energy.half_width, noise_mj))
    return replace(
        chosen,
        time=time,
        energy=energy,
        context_us=shift.value,
        context_mj=added_mj,
        unsure_us=chosen.unsure_us + unsure_us,
        unsure_mj=chosen.unsure_mj + unsure_mj,
    )


def weights_in_cache(wholes: Sequence[ReadingView]) -> float | None:
    """The share of a model's weights that the next pass finds in the cache of the card, 0 to 1.

    Measured with the whole (`farm.benchmark.cache`). None if no whole has it; weights then count as cold.
    """
    shares = [share for whole in wholes if (share := whole.details.found_again) is not None]
    return sum(shares) / len(shares) if shares else None


def _between(low: Figure, high: Figure, share: float) -> Figure:
    return Figure(
        low.value + share * (high.value - low.value), low.half_width + share * (high.half_width - low.half_width)
    )
