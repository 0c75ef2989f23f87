"""Phases that replay the calls of a whole model in their order: one player serves all of them.

If the player could not be made, the reason is that of the places; the later phases add nothing."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from farm.benchmark import ranks
from farm.benchmark.call_context import Player, time_added, time_in_order, time_layouts, time_loops
from farm.benchmark.cost_ledger import CostLedger
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import Passes
from farm.benchmark.phases.base import FigurePhase, Measurement
from farm.benchmark.policies import POLICIES
from farm.benchmark.steady import silent
from farm.benchmark.workload import arrange
from farm.types.details import Details, InOrder
from farm.types.reading import REPEATED

#: Flags of a replay in order that has another power than the whole model.
UNLIKE_WHOLE = REPEATED | {"throttled_power", "unsettled", "no_energy"}


class Places(FigurePhase):
    """`CallOrder.places`: what each call takes longer at its place in the model."""

    name = "places"
    figure = "places"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.in_model_order

    def measure(self, measurement: Measurement, details: Details) -> Details:
        assert measurement.passes.order is not None
        capture = measurement.passes.order()
        player = ranks.together(lambda: Player(capture, measurement.torch_device))
        measurement.player = player
        places = time_in_order(player, measurement.pass_s)
        return replace(details, order=replace(details.order, places=places))


class WithoutCollectives(FigurePhase):
    """`CallOrder.added` and `CallOrder.looped_us`, of a model on several cards."""

    name = "added"
    figure = "added"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.in_model_order and ranks.world() > 1

    def measure(self, measurement: Measurement, details: Details) -> Details:
        player = measurement.player
        if player is None:
            return details
        order = replace(
            details.order,
            added=time_added(player, measurement.pass_s),
            looped_us=time_loops(player, measurement.pass_s),
        )
        return replace(details, order=order)


class InOrderReplay(FigurePhase):
    """`CallOrder.in_order`: time and energy of the replay, and how much it depends on the addresses
    of the data.
    """

    name = "in_order"
    figure = "in_order"

    def applies(self, measurement: Measurement) -> bool:
        counts_energy = "energy_counter_mj" in measurement.windows.device.capabilities
        return measurement.in_model_order and counts_energy and not measurement.limited

    def measure(self, measurement: Measurement, details: Details) -> Details:
        player = measurement.player
        if player is None:
            return details
        steps = HostSteps.of(player.once, measurement.torch_device)
        passes = Passes(steps.around(player.once))
        with contextlib.closing(
            arrange(passes, measurement.protocol, measurement.torch_device)
        ) as replay:
            reading = measurement.windows.measure_until_good(
                replay, measurement.stopping, POLICIES["replay"], silent, CostLedger()
            )
        if reading.energy_mj is None or UNLIKE_WHOLE & set(reading.flags):
            because = f"flags of the replay: {', '.join(reading.flags)}"
            return details.lacking("in_order", because)

        in_order = InOrder(
            time_us=reading.time_us,
            energy_mj=reading.energy_mj,
            temperature_c=reading.temperature_c,
        )
        layouts_us = None
        if ranks.world() == 1:
            layouts_us = time_layouts(player, steps, measurement.pass_s)
        order = replace(details.order, in_order=in_order, layouts_half_width_us=layouts_us)
        return replace(details, order=order)
