"""Measuring on a simulated card: the answer is a function of the subject, and faults happen on request.

For tests of the farm, without torch. A subject whose parameters hold ``"simulate"`` misbehaves as it says; real cards
never look at it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from farm.devices.simulated import SimulatedDevice, item_s
from farm.errors import Unmeasurable
from farm.types.memory_tiers import Placement
from farm.types.protocol import Protocol, Software, Stopping, Subject
from farm.types.reading import Reading

SLOW_TIMES = 4  # its time that each tensor in slow memory adds
SOFTWARE = Software(torch="simulated", driver="simulated")
UNHEALTHY_VARIABLE = "FARM_SIMULATED_UNHEALTHY"
BEHAVIOURS = ("crash", "hang", "oom", "raise", "exit", "slow", "not_capturable", "poison", "print")


def measure(
    subject: Subject,
    protocol: Protocol,
    stopping: Stopping,
    device: SimulatedDevice,
    predicted: Mapping[str, int] | None,
    on_phase: Callable[[str, dict[str, Any]], None],
) -> Reading:
    """A reading that depends on the subject alone (and, for a variant with a prediction, is the sum of its tuples).

    Raises:
        Unmeasurable: when the subject asks for it.
    """
    begin_s = time.perf_counter()
    on_phase("rebuild", {})
    _misbehave(subject)
    on_phase("warm-up", {})
    on_phase("window", {})
    time.sleep(item_s())
    if predicted:
        time_us = sum(count * device.time_us(tuple_id) for tuple_id, count in predicted.items())
        energy_mj = sum(
            count * device.time_us(tuple_id) * device.power_w(tuple_id) * 1e-3 for tuple_id, count in predicted.items()
        )
        power_w = energy_mj / time_us * 1e3 if time_us else 0.0
    else:
        slower = 1 + SLOW_TIMES * len(Placement.parse(protocol.placement))
        time_us, power_w = device.time_us(subject.id) * slower, device.power_w(subject.id)
        energy_mj = time_us * power_w * 1e-3
    return Reading(
        time_us=time_us,
        time_half_width_us=time_us * 0.002,
        time_median_us=time_us,
        time_trimmed_us=time_us,
        passes=100,
        window_s=item_s(),
        warm_up_s=0.0,
        power_w=power_w,
        power_half_width_w=power_w * 0.005,
        power_source="simulated",
        energy_mj=energy_mj,
        energy_half_width_mj=energy_mj * 0.006,
        idle_power_w=80.0,
        base_power_w=120.0,
        sm_clock_mhz=1980.0,
        memory_clock_mhz=3201.0,
        temperature_c=40.0,
        flags=("simulated",),
        cost_s={"window": item_s(), "total": time.perf_counter() - begin_s},
    )


def unhealthy(card_id: str) -> str:
    """What the health check finds: a fault while the file that FARM_SIMULATED_UNHEALTHY names holds the card's id."""
    try:
        with open(os.environ.get(UNHEALTHY_VARIABLE, "")) as file:
            return "Simulated: a product came out wrong." if card_id in file.read().split() else ""
    except OSError:
        return ""


def _misbehave(subject: Subject) -> None:
    parameters = subject.spec.get("parameters")
    if not isinstance(parameters, Mapping) or (behaviour := parameters.get("simulate")) not in BEHAVIOURS:
        return
    seconds = parameters.get("seconds")
    seconds = float(seconds) if isinstance(seconds, (int, float)) else None
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "exit":
        os._exit(3)
    elif behaviour == "hang":
        time.sleep(seconds if seconds is not None else 3600.0)
    elif behaviour == "slow":
        time.sleep(seconds if seconds is not None else 1.0)
    elif behaviour == "oom":
        raise Unmeasurable("out_of_memory", "Simulated: it does not fit on the card.", "Choose a smaller batch.")
    elif behaviour == "not_capturable":
        raise Unmeasurable("not_capturable", "Simulated: no CUDA graph can be made of it.")
    elif behaviour == "raise":
        raise Unmeasurable("raised", "Simulated: the operator raised.")
    elif behaviour == "poison":
        raise RuntimeError("Simulated: CUDA error: an illegal memory access was encountered")
    elif behaviour == "print":
        print("{not json", flush=True)  # noqa: T201 - what a user's model may do
