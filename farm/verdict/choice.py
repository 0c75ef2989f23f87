"""What of one tuple's reading belongs into a model's sum.

A reading holds several states of one operator, each measured and none of them a matter of the model that asked: looped
with cold weights, looped warm, in bursts at full clocks, among other operators. Which of them the model was in, the
reading of the whole says: its clocks, its throttle reasons, and how much of what a pass touches stays in the cache.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from farm.types.reading import Burst
from farm.verdict.figures import Chosen, Figure, ReadingView

PLACE_UNSURE_US = 0.05  # of what a place adds, to each call: an event keeps the kernel behind it from starting early
PLACE_UNSURE = 0.1  # of what it adds
BURST_THROTTLED_SHARE = 0.05  # of a burst reading's samples: from there on its clocks are not full


def choose(reading: ReadingView, wholes: Sequence[ReadingView], operator_id: str = "") -> Chosen:
    """The figures of one call for the sum, given how the card ran the whole.

    Args:
        operator_id: of the tuple that the reading is of: what its place in the model adds stands with the whole.
    """
    same_card = [whole for whole in wholes if whole.card_id == reading.card_id]
    wholes = same_card or wholes
    chosen = _at_its_clocks(reading, wholes)
    place = _place(wholes, operator_id)
    if place is not None:
        # Its weights are as cold there as in the model: what fetching them costs is in the effect, not in the loop's rest.
        return _among_others(chosen, reading, 1.0, _bounded(place, reading, weights_in_cache(wholes) or 0.0))
    return _among_others(chosen, reading, weights_in_cache(wholes) or 0.0)


def _at_its_clocks(reading: ReadingView, wholes: Sequence[ReadingView]) -> Chosen:
    """Steady, in bursts, or between the two.

    A tuple that hits the power limit when looped alone runs faster in the model, where its neighbours let the card
    cool. Its reading holds both states; the whole's clocks and throttle reasons say which one the model was in.
    """
    steady = Chosen(reading.time, reading.energy, "steady")
    burst = reading.details.burst
    if burst is None or not burst.time_us:
        return steady
    if not wholes:
        return dataclasses.replace(steady, why="no whole says how the card runs the model")
    burst_time = Figure(burst.time_us, burst.time_half_width_us or 0.0)
    burst_energy = None
    if burst.energy_mj is not None:
        burst_energy = Figure(burst.energy_mj, burst.energy_half_width_mj or 0.0)
    clocks = [whole.sm_clock_mhz for whole in wholes if whole.sm_clock_mhz]
    low, high = reading.sm_clock_mhz, burst.sm_clock_mhz
    if not any(whole.power_throttled for whole in wholes):
        chosen = Chosen(burst_time, burst_energy or reading.energy, "burst", "the whole does not hit the power limit")
        return _if_throttled(chosen, burst, sum(clocks) / len(clocks) if clocks else None)
    if not clocks or not low or not high or high <= low:
        return dataclasses.replace(steady, why="the whole hits the power limit; clocks do not tell the states apart")
    clock = sum(clocks) / len(clocks)
    share = min(1.0, max(0.0, (clock - low) / (high - low)))
    energy = steady.energy
    if steady.energy and burst_energy:
        energy = _between(steady.energy, burst_energy, share)
    why = f"the whole hits the power limit at {clock:.0f} MHz, between {low:.0f} (steady) and {high:.0f} (burst)"
    # What lies between two states is a curve, and a straight line is taken: off by nothing at its ends.
    bent = share * (1 - share)
    return Chosen(
        _between(steady.time, burst_time, share),
        energy,
        "interpolated",
        why,
        unsure_us=bent * abs(burst_time.value - steady.time.value),
        unsure_mj=bent * abs(burst_energy.value - steady.energy.value) if steady.energy and burst_energy else 0.0,
    )


def _if_throttled(chosen: Chosen, burst: Burst, whole_mhz: float | None) -> Chosen:
    """Bursts that hit the limit themselves, as passes longer than a burst do, are still too slow.

    By how much is not known: at most by what the clocks differ, if all of the time goes with the clock.
    """
    clock_mhz = burst.sm_clock_mhz
    limited = (burst.throttle_shares or {}).get("power_cap", 0.0) >= BURST_THROTTLED_SHARE
    if not limited or not clock_mhz or not whole_mhz or clock_mhz >= whole_mhz:
        return chosen
    why = f"{chosen.why}; bursts do, at {clock_mhz:.0f} MHz where the whole has {whole_mhz:.0f}: too slow by an unknown part"
    unsure = 1 - clock_mhz / whole_mhz
    return dataclasses.replace(
        chosen,
        why=why,
        unsure_us=unsure * chosen.time.value,
        unsure_mj=unsure * chosen.energy.value if chosen.energy else 0.0,
    )


def _place(wholes: Sequence[ReadingView], operator_id: str) -> Figure | None:
    """What the place of a tuple's calls in the model adds to one of them; None where no whole tells."""
    found = [place for whole in wholes if (place := (whole.details.places or {}).get(operator_id)) is not None]
    if not found:
        return None
    return Figure(sum(place.effect_us for place in found) / len(found), max(place.half_width_us for place in found))


def _bounded(place: Figure, reading: ReadingView, in_cache: float) -> Figure:
    """What a place adds where the cache holds all that a pass touches: no more than strangers do.

    They leave of the operator's code nothing, and its inputs newly written. Played between events, a pass is longer and
    some weights are not found again that the model's own pass finds; which ones differs from process to process.
    """
    context = reading.details.context
    beyond = max(0.0, place.value - max(0.0, context.effect_us)) if context else 0.0
    return Figure(place.value - in_cache * beyond, place.half_width)


def _among_others(chosen: Chosen, reading: ReadingView, in_cache: float, place: Figure | None = None) -> Chosen:
    """With what the neighbours in a model add, and without the fetching of weights that are in the cache there.

    While a kernel waits for its code or its data the card draws more than with nothing to do and less than the
    operator's own power: the middle is taken, and half of the difference is unsure. How much like the model's own the
    others are that it was timed among is not known: as much as the effect is unsure, unless it was timed in the place that
    it has in the model. Both are common to all tuples.
    """
    context, burst = reading.details.context, reading.details.burst
    if context is None:
        return chosen
    effect = place or Figure(context.effect_us, context.effect_half_width_us or 0.0)
    fetching_us = 0.0
    if (reading.details.copies or 1) > 1:  # else the loop fetched no weights either
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
    return dataclasses.replace(
        chosen,
        time=time,
        energy=energy,
        context_us=shift.value,
        context_mj=added_mj,
        unsure_us=chosen.unsure_us + unsure_us,
        unsure_mj=chosen.unsure_mj + unsure_mj,
    )


def weights_in_cache(wholes: Sequence[ReadingView]) -> float | None:
    """The share of a model's weights that is still in the card's cache when the next pass comes to them, 0 to 1.

    Measured with the whole (`farm.benchmark.cache`); None where no whole tells, and weights are then taken as cold.
    """
    shares = [share for whole in wholes if (share := whole.details.found_again) is not None]
    return sum(shares) / len(shares) if shares else None


def _between(low: Figure, high: Figure, share: float) -> Figure:
    return Figure(
        low.value + share * (high.value - low.value), low.half_width + share * (high.half_width - low.half_width)
    )
