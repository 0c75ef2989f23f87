"""Phases that replay the calls of a whole model in their order: one player serves all of them.

If the player could not be made, the reason is that of the places; the later phases add nothing."""

from __future__ import annotations

import contextlib
from typing import Any

from farm.benchmark import ranks
from farm.benchmark.call_context import Player, time_added, time_in_order, time_layouts, time_loops
from farm.benchmark.cost_ledger import CostLedger
from farm.benchmark.host_steps import HostSteps
from farm.benchmark.passes import Passes
from farm.benchmark.phases.base import FigurePhase, Measurement
from farm.benchmark.policies import POLICIES
from farm.benchmark.steady import silent
from farm.benchmark.workload import arrange
from farm.types.reading import REPEATED, InOrder

#: Flags of a replay in order that has another power than the whole model.
UNLIKE_WHOLE = REPEATED | {"throttled_power", "unsettled", "no_energy"}


class Places(FigurePhase):
    """`Details.places`: what each call takes longer at its place in the model."""

    name = "places"
    missing = "places_missing"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.in_model_order

    def figures(self, measurement: Measurement) -> dict[str, Any]:
        assert measurement.passes.order is not None
        capture = measurement.passes.order()
        player = ranks.together(lambda: Player(capture, measurement.torch_device))
        measurement.player = player
        return {"places": time_in_order(player, measurement.pass_s)}


class WithoutCollectives(FigurePhase):
    """`Details.added` and `Details.looped_us`, of a model on several cards."""

    name = "added"
    missing = "added_missing"

    def applies(self, measurement: Measurement) -> bool:
        return measurement.in_model_order and ranks.world() > 1

    def figures(self, measurement: Measurement) -> dict[str, Any]:
        player = measurement.player
        if player is None:
            return {}
        added = time_added(player, measurement.pass_s)
        return {"added": added, "looped_us": time_loops(player, measurement.pass_s)}


class InOrderReplay(FigurePhase):
    """`Details.in_order`: time and energy of the replay, and how much it depends on the addresses
    of the data.
    """

    name = "in_order"
    missing = "in_order_missing"

    def applies(self, measurement: Measurement) -> bool:
        counts_energy = "energy_counter_mj" in measurement.windows.device.capabilities
        return measurement.in_model_order and counts_energy and not measurement.limited

    def figures(self, measurement: Measurement) -> dict[str, Any]:
        player = measurement.player
        if player is None:
            return {}
        steps = HostSteps.of(player.once, measurement.torch_device)
        passes = Passes(steps.around(player.once))
        with contextlib.closing(
            arrange(passes, measurement.protocol, measurement.torch_device)
        ) as replay:
            reading = measurement.windows.measure_until_good(
                replay, measurement.stopping, POLICIES["replay"], silent, CostLedger()
            )
        if reading.energy_mj is None or UNLIKE_WHOLE & set(reading.flags):
            return {"in_order_missing": f"flags of the replay: {', '.join(reading.flags)}"}

        assert reading.energy_half_width_mj is not None
        in_order = InOrder(
            time_us=reading.time_us,
            time_half_width_us=reading.time_half_width_us,
            energy_mj=reading.energy_mj,
            energy_half_width_mj=reading.energy_half_width_mj,
            temperature_c=reading.temperature_c,
        )
        layouts_us = None
        if ranks.world() == 1:
            layouts_us = time_layouts(player, steps, measurement.pass_s)
        return {"in_order": in_order, "layouts_half_width_us": layouts_us}
