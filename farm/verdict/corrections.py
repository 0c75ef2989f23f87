"""The corrections that turn the reading of a tuple into the figures of one call in a model.

A tuple is measured in a loop, at the clocks, temperature and cache contents of that loop. The model
runs it under other conditions. `cost_in_model` begins with the figures of the loop and applies
`CORRECTIONS` in order. Each one states its evidence, when it applies, and its uncertainty.

`farm.verdict.replay` has the correction of all calls together, and `farm.verdict.gap_errors` those
of the interval of a gap. `benchmarks/ablation.py` computes the stored verdicts without each of
them, and has one that was removed because it had no effect."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from farm.types.details import Burst, InContext, Place
from farm.types.figure import Figure
from farm.types.measured_constants import MEASURED
from farm.verdict.figures import CallCost, ReadingView

#: The power while a kernel waits for code or data, if it is not measured: between the card without
#: work (0) and the operator's own power (1).
WAITING = Figure(0.5, 0.5)
# per call: a CUDA event before a kernel prevents an early start of the kernel
PLACE_UNSURE_US = MEASURED["place"].value
# fraction of the effect of a place in the model
PLACE_UNSURE = MEASURED["place_share"].value
#: Relative change of the power per degree (C) at constant work and clocks.
POWER_PER_C = Figure(MEASURED["power_per_c"].value, MEASURED["power_per_c"].half_width)
# share of the energy: error that rough readings share, because the chip is not yet warm
ROUGH_POWER = MEASURED["rough_power"].value
#: Half-width of a time that differs each time the operator is built, for a time of 1 us; it grows
#: with the square root of the time.
BUILD_UNSURE_US = MEASURED["build"].value


@dataclass(frozen=True)
class MeasuredCall:
    """A call of a tuple in a model: the tuple's reading, and what the wholes say about the call.

    Attributes:
        wholes: the readings of the whole model, on the card of the tuple if there are such.
        waiting: the power of a waiting kernel, see `WAITING`.
    """

    reading: ReadingView
    wholes: Sequence[ReadingView]
    operator_id: str
    waiting: Figure

    @classmethod
    def of(
        cls,
        reading: ReadingView,
        wholes: Sequence[ReadingView],
        operator_id: str,
        waiting: Figure,
    ) -> MeasuredCall:
        same_card = [whole for whole in wholes if whole.card_id == reading.card_id]
        return cls(reading, same_card or wholes, operator_id, waiting)

    @property
    def context(self) -> InContext | None:
        """The effect of unrelated operators, measured with the tuple."""
        return self.reading.details.context

    @functools.cached_property
    def looped_us(self) -> float | None:
        """The time in short loops between the calls of a split model; None if not measured."""
        loops = []
        for whole in self.wholes:
            looped_us = (whole.details.order.looped_us or {}).get(self.operator_id)
            if looped_us is not None:
                loops.append(looped_us)
        return sum(loops) / len(loops) if loops else None

    @functools.cached_property
    def burst(self) -> Burst | None:
        """The figures in bursts, of a tuple at the power limit; the time is that in short loops
        between the calls of a split model, if it was measured.

        Bursts of one operator alone take longer, probably because they reach the limit, too: 1,388
        us instead of 1,210 us for a matrix product on H200s."""
        burst = self.reading.details.burst
        if burst is None or self.looped_us is None:
            return burst
        return replace(burst, time_us=replace(burst.time_us, value=self.looped_us))

    @property
    def clock_mhz(self) -> float | None:
        """The mean clock of the whole model; None if it is unknown."""
        clocks = [whole.sm_clock_mhz for whole in self.wholes if whole.sm_clock_mhz]
        return sum(clocks) / len(clocks) if clocks else None

    @property
    def place(self) -> Figure | None:
        """How much longer the call takes at its place in the model, in us."""
        return _mean_place([whole.details.order.places for whole in self.wholes], self.operator_id)

    @property
    def added(self) -> Figure | None:
        """What a collective adds to a pass, in us."""
        return _mean_place([whole.details.order.added for whole in self.wholes], self.operator_id)

    @property
    def among_others(self) -> bool:
        """True if the tuple or its calls were timed among other operators."""
        if self.context is not None or self.added is not None:
            return True
        in_ranks = self.looped_us is not None and self.burst is not None
        return in_ranks and self.place is not None


class Correction(Protocol):
    """One difference between the loop of a tuple and its calls in a model.

    `correct` is called only if `applies` is True. It returns the figures of the call with the
    uncertainty that the correction adds."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool: ...

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost: ...


def cost_in_model(
    reading: ReadingView,
    wholes: Sequence[ReadingView],
    operator_id: str = "",
    waiting: Figure = WAITING,
) -> CallCost:
    """Return what one call adds to the sum.

    Args:
        reading: the tuple's reading.
        wholes: readings of the whole model. They say at which clocks the card ran it, and store by
            `operator_id` how much the neighbouring operators change the tuple's time.
        waiting: the power of a waiting kernel, see `farm.verdict.replay.WaitingPower`.
    """
    call = MeasuredCall.of(reading, wholes, operator_id, waiting)
    cost = CallCost(call.reading.time_us, call.reading.energy_mj)
    for correction in CORRECTIONS:
        if correction.applies(cost, call):
            cost = correction.correct(cost, call)
    return cost.settled()


def _mean_place(of_wholes: Iterable[Mapping[str, Place] | None], operator_id: str) -> Figure | None:
    places = [places[operator_id] for places in of_wholes if places and operator_id in places]
    if not places:
        return None
    effects_us = [place.effect_us for place in places]
    mean_us = sum(effect.value for effect in effects_us) / len(effects_us)
    return Figure(mean_us, max(effect.half_width for effect in effects_us))


# ---- short windows


class RoughReadings:
    """In the window of a rough reading the chip is not yet as warm as in the window of a whole
    model, so the energies of all rough readings share an error (`ROUGH_POWER`). The figures stay.

    Evidence: rough and precise readings of the same tuples on H200s (`measured_constants.toml`)."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool:
        return bool(cost.energy_mj) and "rough" in call.reading.flags

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost:
        assert cost.energy_mj
        return replace(cost, loop_unsure_mj=ROUGH_POWER * cost.energy_mj.value)


# ---- the model's clock


class ModelClock:
    """A tuple that reaches the power limit in a loop runs faster in the model, because its
    neighbours draw less power.

    The sum uses the burst figures if the model is below the limit. Else it uses figures between
    steady and burst, at the model's clock. The true relation is a curve; the error of the linear
    interpolation is zero at both ends, and half way a quarter of the difference is uncertain.

    Evidence: six variants of H200s with both figures (docs/design/power-limit.md), and
    `benchmarks/power_limit.py`, which puts one product among lighter operators."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool:
        return call.burst is not None and bool(call.burst.time_us.value)

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost:
        burst = call.burst
        assert burst is not None
        if not call.wholes:
            why = "the clock in the model is unknown: the whole model has no reading"
            return replace(cost, why=why)

        time, energy = burst.time_us, burst.energy_mj
        if not any(whole.power_throttled for whole in call.wholes):
            why = "the whole model is below the power limit"
            return CallCost(time, energy or cost.energy_mj, "burst", why)

        clock_mhz = call.clock_mhz
        low_mhz = call.reading.sm_clock_mhz
        high_mhz = burst.sm_clock_mhz
        if clock_mhz is None or not low_mhz or not high_mhz or high_mhz <= low_mhz:
            why = "the whole model hits the power limit, but no recorded clocks show by how much"
            return replace(cost, why=why)

        share = min(1.0, max(0.0, (clock_mhz - low_mhz) / (high_mhz - low_mhz)))
        bend = share * (1 - share)
        between, unsure_mj = cost.energy_mj, 0.0
        if cost.energy_mj and energy:
            between = _between(cost.energy_mj, energy, share)
            unsure_mj = bend * abs(energy.value - cost.energy_mj.value)
        return CallCost(
            _between(cost.time_us, time, share),
            between,
            "interpolated",
            f"the whole model hits the power limit and runs at {clock_mhz:.0f} MHz; the tuple runs "
            f"at {low_mhz:.0f} MHz (steady) and {high_mhz:.0f} MHz (burst)",
            unsure_us=bend * abs(time.value - cost.time_us.value),
            loop_unsure_mj=unsure_mj,
        )


def _between(low: Figure, high: Figure, share: float) -> Figure:
    return Figure(
        low.value + share * (high.value - low.value),
        low.half_width + share * (high.half_width - low.half_width),
    )


# ---- the model's temperature


class Temperature:
    """A warmer chip draws more power for the same work (`POWER_PER_C`), so the energy is restated
    to the temperature of the whole model.

    It does not apply at the power limit, which decides the power there, nor to a first step of the
    energy counter, which is compared with long runs as it is
    (`farm.benchmark.window.FIRST_STEP`). The uncertainty is common to all tuples.

    Evidence: the slope of the power within 800 readings of H200s and H100s
    (docs/design/temperature.md). Its effect on gaps is small; without it, fewer than 90 % of the
    intervals of energy gaps contain zero (docs/results/ablation.md)."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool:
        reading = call.reading
        if not cost.energy_mj or cost.used != "steady" or reading.temperature_c is None:
            return False
        if all(whole.temperature_c is None for whole in call.wholes):
            return False
        first_step = "rough" in reading.flags and reading.details.powering.ticks == 2
        return not first_step and not any(view.power_throttled for view in (reading, *call.wholes))

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost:
        assert cost.energy_mj
        assert call.reading.temperature_c is not None
        temperatures_c = [
            whole.temperature_c for whole in call.wholes if whole.temperature_c is not None
        ]
        model_c = math.fsum(temperatures_c) / len(temperatures_c)
        per_c = (model_c - call.reading.temperature_c) * cost.energy_mj.value
        warmth_mj = POWER_PER_C.value * per_c
        return replace(
            cost,
            energy_mj=replace(cost.energy_mj, value=cost.energy_mj.value + warmth_mj),
            warmth_mj=warmth_mj,
            loop_unsure_mj=cost.loop_unsure_mj + POWER_PER_C.half_width * abs(per_c),
        )


# ---- the neighbours in the model


class Neighbours:
    """In a model, other operators run before the call: they evict its code and data from the
    caches.

    While a kernel waits for code or data, the card draws a power between the power without work and
    the operator's power: `MeasuredCall.waiting` says where. The uncertainties are common to all
    tuples.

    Evidence: sums of loops, with unrelated operators and at the place in the model, on H200s
    (docs/design/neighbours.md)."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool:
        return call.among_others

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost:
        shift, unsure_us = self._shift(cost, call)
        # Beside other calls, the power without work counts only once.
        hidden = call.added is not None and shift.value < 0
        longer = replace(
            cost,
            time_us=replace(cost.time_us, value=cost.time_us.value + shift.value),
            own_us=(*cost.own_us, shift.half_width),
            context_us=shift.value,
            unsure_us=cost.unsure_us + unsure_us,
        )
        energy = cost.energy_mj
        own_w = cost.mean_power_w
        if energy is None or own_w is None:
            return longer

        base_w = min(own_w, call.reading.base_power_w or call.reading.idle_power_w or own_w)
        swing_w = 0.0 if hidden else own_w - base_w
        waiting_w = base_w + call.waiting.value * swing_w
        added_mj = shift.value * waiting_w * 1e-3
        waiting_mj = shift.value * swing_w * 1e-3
        noise_mj = shift.half_width * waiting_w * 1e-3
        return replace(
            longer,
            energy_mj=Figure(energy.value + added_mj, math.hypot(energy.half_width, noise_mj)),
            context_mj=added_mj,
            waiting_mj=waiting_mj,
            context_unsure_mj=abs(waiting_mj) * call.waiting.half_width + unsure_us * own_w * 1e-3,
        )

    def _shift(self, cost: CallCost, call: MeasuredCall) -> tuple[Figure, float]:
        """Return how much longer the call takes in the model than in its loop, and the uncertainty
        that all tuples share. Unit: us.

        The best source counts: what a collective adds to a pass, the call's place in the model, or
        unrelated operators. The real neighbours may act differently from unrelated ones, so that
        uncertainty is as large as the effect."""
        added, place, context = call.added, call.place, call.context
        if added is not None:
            return _at_place(replace(added, value=added.value - cost.time_us.value))

        in_cache = weights_in_cache(call.wholes) or 0.0
        if place is None:
            assert context
            effect = context.effect_us
            fetched_us = in_cache * self._fetching_us(call)
            return replace(effect, value=effect.value - fetched_us), abs(effect.value)

        # The effect was measured with weights as cold as in the model, so it contains the time to
        # fetch them. The loops in the ranks had their weights in the cache.
        place = _bounded(place, context, in_cache)
        if call.looped_us is not None and call.burst is not None:
            return _at_place(place)
        assert context
        if call.looped_us is not None:
            place = replace(place, value=place.value + call.looped_us - context.alone_us)
        return _at_place(replace(place, value=place.value - self._fetching_us(call)))

    def _fetching_us(self, call: MeasuredCall) -> float:
        """Return the time to fetch the weights in the loop. With one copy, they stay in the cache
        in the loop, too.
        """
        if call.context is None or (call.reading.details.launching.copies or 1) <= 1:
            return 0.0
        burst_us = call.burst.time_us.value if call.burst else None
        return (burst_us or call.reading.time_us.value) - call.context.alone_us


def _at_place(shift: Figure) -> tuple[Figure, float]:
    """Return a shift that was measured at the place of the call, and its uncertainty in us."""
    return shift, PLACE_UNSURE_US + PLACE_UNSURE * abs(shift.value)


def _bounded(place: Figure, context: InContext | None, in_cache: float) -> Figure:
    """Limit the effect of a place, if all data of a pass fit in the cache, to the effect of
    unrelated operators.

    Unrelated operators evict all code of the operator and rewrite its inputs. CUDA events between
    the calls make a pass longer, so the cache loses some weights that a normal pass finds. The lost
    weights differ between processes."""
    if context is None:
        return place
    excess_us = max(0.0, place.value - max(0.0, context.effect_us.value))
    return replace(place, value=place.value - in_cache * excess_us)


def weights_in_cache(wholes: Sequence[ReadingView]) -> float | None:
    """Return the share of a model's weights that the next pass finds in the card's cache, 0 to 1.
    It is measured with the whole (`farm.benchmark.cache`). None if no whole has it; then all
    weights count as cold."""
    shares = []
    for whole in wholes:
        found_again = whole.details.memory.found_again
        if found_again is not None:
            shares.append(found_again)
    return sum(shares) / len(shares) if shares else None


# ---- the place in the model on a CPU


class PlaceOnHost:
    """On a CPU, the loop of a tuple has cold weights and cold outputs, and a second loop has warm
    ones. In a model, the other calls decide what the caches have: the call takes the time of the
    warm loop and what its place in the model adds.

    The power of the loop and of the call count as equal. Evidence: docs/design/cpu-places.md."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool:
        return call.reading.details.timing.warm_us is not None and call.place is not None

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost:
        warm_us, place = call.reading.details.timing.warm_us, call.place
        assert warm_us is not None
        assert place is not None
        time_us = replace(warm_us, value=warm_us.value + place.value)
        change = time_us.value / cost.time_us.value
        energy_mj, added_mj = None, 0.0
        if cost.energy_mj is not None:
            energy_mj = cost.energy_mj.times(change)
            added_mj = energy_mj.value - cost.energy_mj.value
        return replace(
            cost,
            time_us=time_us,
            energy_mj=energy_mj,
            own_us=(*cost.own_us, place.half_width),
            context_us=time_us.value - cost.time_us.value,
            context_mj=added_mj,
        )


# ---- the build of the model


class Builds:
    """The time of an operator differs each time it is built, because its tensors have other
    addresses. The figures stay; each tuple gets an error of its own (`BUILD_UNSURE_US`).

    Evidence: 50 operators on H200s, built and measured five times each (docs/design/intervals.md).
    It applies to tuples that were timed among other operators: those of GPUs. It hardly changes the
    intervals of sums, but those of single tuples (docs/results/ablation.md)."""

    def applies(self, cost: CallCost, call: MeasuredCall) -> bool:
        return call.among_others

    def correct(self, cost: CallCost, call: MeasuredCall) -> CallCost:
        build_us = BUILD_UNSURE_US * math.sqrt(call.reading.time_us.value)
        return replace(cost, own_us=(*cost.own_us, build_us))


#: In the order in which they apply: each one corrects the figures that those before it left.
CORRECTIONS: tuple[Correction, ...] = (
    RoughReadings(),
    ModelClock(),
    Temperature(),
    Neighbours(),
    PlaceOnHost(),
    Builds(),
)
