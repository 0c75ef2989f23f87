"""Simulated cards, for tests of the farm: their device, and a simulated measurement without torch.

All values are functions of the subject's id, so all simulated cards agree and a repeated run gives
the same verdict. Their readings have the flag ``simulated`` and are never reused. If a subject's
parameters contain ``"simulate"``, its measurement fails in the way that the value names
(`_misbehave`); real cards ignore it."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

from farm.devices.device import Card, Device
from farm.devices.vendor import Vendor
from farm.errors import Unmeasurable
from farm.settings import Settings
from farm.types.details import CardConditions, Details
from farm.types.error_counters import ErrorCounters
from farm.types.figure import Figure
from farm.types.protocol import OnPhase, Protocol
from farm.types.reading import Reading
from farm.types.software import Software
from farm.types.subject import Subject

MODEL = "simulated card"
DURATION_VARIABLE = "FARM_SIMULATED_ITEM_S"
UNHEALTHY_VARIABLE = "FARM_SIMULATED_UNHEALTHY"
SLOWER_VARIABLE = "FARM_SIMULATED_SLOWER"
SHARED_VARIABLE = "FARM_SIMULATED_SHARED"
ERRORS_VARIABLE = "FARM_SIMULATED_ERRORS"
SOFTWARE = Software(torch="simulated", driver="simulated")
SLOW_TIMES = 4  # each tensor in slow memory adds this multiple of the time in fast memory


def simulated_cards(settings: Settings) -> list[Card]:
    return [
        Card(
            id=f"SIM-{settings.host}-{number}",
            kind="simulated",
            model=MODEL,
            memory_bytes=64 * 2**30,
            driver="simulated",
            index=number,
            host=settings.host,
        )
        for number in range(settings.simulated_cards)
    ]


def item_s() -> float:
    """Time of one item on a simulated card, from the environment; 0 by default. Unit: s."""
    try:
        return max(0.0, float(os.environ.get(DURATION_VARIABLE, "0")))
    except ValueError:
        return 0.0


class SimulatedDevice(Device):
    """A device without hardware and sensors. It computes time and power from the subject's id."""

    def __init__(self, card: Card) -> None:
        self.card = card

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"simulated"})

    def time_us(self, subject_id: str) -> float:
        """Duration of one pass of a subject: 10 to 1000. Unit: µs."""
        return 10.0 * 100.0 ** _fraction("time", subject_id) * slowdown(self.card.id, subject_id)

    def power_w(self, subject_id: str) -> float:
        """Power while a subject runs: 150 to 650. Unit: W."""
        return 150.0 + 500.0 * _fraction("power", subject_id)


class Simulated(Vendor):
    """Simulated cards, if the settings request them."""

    name = "simulated"
    kind = "simulated"

    def cards(self, settings: Settings) -> list[Card]:
        return simulated_cards(settings)

    def open(self, card: Card) -> Device:
        return SimulatedDevice(card)

    def links(self, card: Card) -> dict[str, Any]:
        return {"communication": "simulated"}

    def error_counters(self, card: Card) -> ErrorCounters | None:
        """FARM_SIMULATED_ERRORS="ecc_uncorrected 2"; None without the variable."""
        name, _, number = os.environ.get(ERRORS_VARIABLE, "").partition(" ")
        if not name:
            return None
        return ErrorCounters({name: int(number)}, {"xid_errors": "/dev/kmsg: simulated"})


def _fraction(word: str, subject_id: str) -> float:
    digest = hashlib.sha256(f"{word} {subject_id}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def measure(
    subject: Subject,
    protocol: Protocol,
    device: SimulatedDevice,
    predicted: Mapping[str, int] | None,
    on_phase: OnPhase,
) -> Reading:
    """A reading that depends only on subject and number of slow tensors. With a prediction it is
    the sum of the predicted tuples. Raises `Unmeasurable` if the subject's parameters request a
    failure."""
    begin_s = time.perf_counter()
    on_phase("rebuild", {})
    _misbehave(subject)
    on_phase("warm-up", {})
    on_phase("window", {})
    time.sleep(item_s())
    slower = 1 if predicted else 1 + SLOW_TIMES * protocol.slow_tensors
    calls = predicted or {subject.id: 1}
    times_us = {id: count * slower * device.time_us(id) for id, count in calls.items()}
    time_us = sum(times_us.values())
    energy_mj = sum(part_us * device.power_w(id) * 1e-3 for id, part_us in times_us.items())
    power_w = energy_mj / time_us * 1e3 if time_us else 0.0
    foreign = foreign_processes(device.card.id)
    return Reading(
        time_us=Figure(time_us, time_us * 0.002),
        time_median_us=time_us,
        time_trimmed_us=time_us,
        passes=100,
        window_s=item_s(),
        warm_up_s=0.0,
        power_w=Figure(power_w, power_w * 0.005),
        power_source="simulated",
        energy_mj=Figure(energy_mj, energy_mj * 0.006),
        idle_power_w=80.0,
        base_power_w=120.0,
        sm_clock_mhz=1980.0,
        memory_clock_mhz=3201.0,
        temperature_c=40.0,
        flags=("shared", "simulated") if foreign else ("simulated",),
        details=Details(conditions=CardConditions(foreign_processes=foreign or None)),
        cost_s={"window": item_s(), "total": time.perf_counter() - begin_s},
    )


def slowdown(card_id: str, subject_id: str) -> float:
    """The factor by which a card is slower for a subject; else 1. FARM_SIMULATED_SLOWER="SIM-host-0
    1.03": for all; with ids of subjects after the factor: for these."""
    words = os.environ.get(SLOWER_VARIABLE, "").split()
    if words[:1] != [card_id]:
        return 1.0
    factor, subject_ids = words[1], words[2:]
    return float(factor) if not subject_ids or subject_id in subject_ids else 1.0


def foreign_processes(card_id: str) -> tuple[int, ...]:
    """The ids of the processes that disturb a card: FARM_SIMULATED_SHARED="SIM-host-0 4711"."""
    words = os.environ.get(SHARED_VARIABLE, "").split()
    return tuple(map(int, words[1:])) if words[:1] == [card_id] else ()


def unhealthy(card_id: str) -> str:
    """The result of the health check: a fault while the file FARM_SIMULATED_UNHEALTHY contains the
    card's id.
    """
    try:
        with open(os.environ.get(UNHEALTHY_VARIABLE, "")) as file:
            return "Simulated: a product came out wrong." if card_id in file.read().split() else ""
    except OSError:
        return ""


def _misbehave(subject: Subject) -> None:
    parameters = subject.spec.get("parameters")
    if not isinstance(parameters, Mapping):
        return
    seconds = parameters.get("seconds")
    given_s = float(seconds) if isinstance(seconds, (int, float)) else None
    match parameters.get("simulate"):
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(3600.0 if given_s is None else given_s)
        case "slow":
            time.sleep(1.0 if given_s is None else given_s)
        case "oom":
            raise Unmeasurable(
                "out_of_memory",
                "Simulated: it does not fit on the card.",
                "Choose a smaller batch.",
            )
        case "not_capturable":
            raise Unmeasurable("not_capturable", "Simulated: no CUDA graph can be made of it.")
        case "raise":
            raise Unmeasurable("raised", "Simulated: the operator raised.")
        case "poison":
            raise RuntimeError("Simulated: CUDA error: an illegal memory access was encountered")
        case "print":
            print("{not json", flush=True)  # noqa: T201 - a user's model may print
