"""The reading of a group of cards, from the readings of its ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from farm.types.details import Burst, CallOrder, Place, RankFigures
from farm.types.figure import Figure, exact, total_of, value_of
from farm.types.reading import Reading, Trace


def of_ranks(readings: Sequence[Reading], card_ids: Sequence[str]) -> Reading:
    """The reading of a group from those of its ranks: the time of the slowest, the power and energy
    of all cards.

    Ranks that share a card, such as the CPU, have measured the same power: it counts once.
    """
    slowest = max(readings, key=lambda reading: reading.time_us.value)
    of_card = list(dict(zip(card_ids, readings, strict=True)).values())
    ranks = [
        RankFigures(
            time_us=Figure(reading.time_us.value),
            energy_mj=exact(reading.energy_mj),
            card=card_id,
            power_w=value_of(reading.power_w),
            sm_clock_mhz=reading.sm_clock_mhz,
            temperature_c=reading.temperature_c,
            flags=reading.flags,
        )
        for reading, card_id in zip(readings, card_ids, strict=True)
    ]
    details = replace(
        slowest.details,
        cards=replace(slowest.details.cards, ranks=tuple(ranks)),
        burst=_burst_of_cards([reading.details.burst for reading in of_card]),
        order=_order_of_ranks(
            slowest.details.order, [reading.details.order for reading in readings], of_card
        ),
    )
    reasons = [reading.details.missing.get("in_order") for reading in readings]
    because = next(filter(None, reasons), None)
    missing = dict(details.missing)
    missing.pop("in_order", None)
    details = replace(details, missing=missing)
    if because is not None:
        details = details.lacking("in_order", because)

    clocks = [reading.sm_clock_mhz for reading in readings if reading.sm_clock_mhz is not None]
    temperatures = [
        reading.temperature_c for reading in readings if reading.temperature_c is not None
    ]
    return replace(
        slowest,
        power_w=total_of((reading.power_w, 1) for reading in of_card),
        energy_mj=total_of((reading.energy_mj, 1) for reading in of_card),
        base_power_w=_sum_of([reading.base_power_w for reading in of_card]),
        idle_power_w=None,  # a card with ranks does not reach its idle power
        sm_clock_mhz=math.fsum(clocks) / len(clocks) if clocks else None,
        temperature_c=max(temperatures, default=None),
        throttle_reasons=_union(reading.throttle_reasons for reading in readings),
        flags=_union(reading.flags for reading in readings),
        details=details,
        trace=_trace_of_ranks([reading.trace for reading in readings]),
    )


def _burst_of_cards(bursts: Sequence[Burst | None]) -> Burst | None:
    """The slowest burst, with the power and energy of all cards; None if one card has none."""
    present = [burst for burst in bursts if burst is not None]
    if len(present) < len(bursts):
        return None
    return replace(
        max(present, key=lambda burst: burst.time_us.value),
        power_w=total_of((burst.power_w, 1) for burst in present),
        energy_mj=total_of((burst.energy_mj, 1) for burst in present),
        pause_power_w=_sum_of([burst.pause_power_w for burst in present]),
    )


def _order_of_ranks(
    slowest: CallOrder, orders: Sequence[CallOrder], of_card: Sequence[Reading]
) -> CallOrder:
    replays = []
    for reading in of_card:
        if reading.details.order.in_order is not None:
            replays.append(reading.details.order.in_order)
    in_order = None
    if len(replays) == len(of_card):
        in_order = replace(
            max(replays, key=lambda replay: replay.time_us.value),
            energy_mj=total_of((replay.energy_mj, 1) for replay in replays),
        )
    loops = [order.looped_us or {} for order in orders]
    looped_us = {}
    for tuple_id in loops[0]:
        if all(tuple_id in loop for loop in loops):
            looped_us[tuple_id] = math.fsum(loop[tuple_id] for loop in loops) / len(loops)
    return replace(
        slowest,
        in_order=in_order,
        looped_us=looped_us or None,
        places=_mean_places([order.places or {} for order in orders]),
        added=_mean_places([order.added or {} for order in orders]),
    )


def _mean_places(of_ranks: Sequence[Mapping[str, Place]]) -> dict[str, Place] | None:
    """The mean over the ranks, because a rank that is early waits in a collective for the
    others.
    """
    means = {}
    for tuple_id, place in of_ranks[0].items():
        effects_us = [places[tuple_id].effect_us for places in of_ranks if tuple_id in places]
        value_us = math.fsum(effect.value for effect in effects_us) / len(effects_us)
        half_width_us = math.hypot(*(effect.half_width for effect in effects_us)) / len(effects_us)
        means[tuple_id] = replace(place, effect_us=Figure(value_us, half_width_us))
    return means or None


def _trace_of_ranks(traces: Sequence[Trace | None]) -> Trace | None:
    if traces[0] is None:
        return None
    series = {}
    for rank, trace in enumerate(traces):
        for name, values in trace.series.items() if trace else ():
            series[f"rank_{rank}_{name}" if rank else name] = values
    return Trace(traces[0].window_s, series)


def _sum_of(values: Sequence[float | None]) -> float | None:
    """The sum; None if a value is unknown."""
    present = [value for value in values if value is not None]
    return math.fsum(present) if len(present) == len(values) else None


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted(set(itertools.chain.from_iterable(names))))
