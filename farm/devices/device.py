"""What a card can tell, whatever it is: one abstract class and the card's description.

The farm asks cards through this surface alone, so that a GPU without an energy counter, a CPU and a simulated card
are measured by the same code. What a card cannot tell is None and is missing from `Device.capabilities`: never zero.
No torch here: workers and the command line list cards without it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

CardKind = Literal["cuda", "cpu", "simulated"]

#: The version of fingerprints (`farm.benchmark.fingerprinting`); a card with an older one gets a new one.
FINGERPRINT_VERSION = 2


@dataclass(frozen=True)
class Card:
    """One physical card, known by its id wherever it is talked about.

    `id` is the GPU's UUID ("GPU-..."), `Settings.cpu_card_id` ("CPU-...") or "SIM-<host>-<n>". `refusal` says why
    the card cannot be measured on, and what to do; empty when it can. Only refused cards have other ids: "MIG-..." is
    an instance of a GPU, "NVIDIA-<host>-<n>" a GPU that does not tell its UUID, "NVIDIA-<host>" all that the driver
    does not count.
    """

    id: str
    kind: CardKind
    model: str
    memory_bytes: int
    driver: str = ""
    index: int = 0
    host: str = ""
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)

    def __str__(self) -> str:
        return f"{self.model} ({self.id})"


class Device(ABC):
    """The readings of one card. Each getter returns None where the card has no such reading.

    Getters may be called from any thread, and release the GIL while they wait for a driver.
    """

    card: Card

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """The names of the getters that give something here, e.g. {"energy_counter_mj", "power_instant_w"}."""

    def energy_counter_mj(self) -> float | None:
        """Energy since some moment in the past, which only grows. Unit: mJ."""
        return None

    def power_instant_w(self) -> float | None:
        """Power right now, as little averaged as the card offers. Unit: W."""
        return None

    def power_average_w(self) -> float | None:
        """Power averaged by the driver over a span of its own (1 s on Hopper). Unit: W."""
        return None

    def sm_clock_mhz(self) -> float | None:
        """Clock of the arithmetic units. Unit: MHz."""
        return None

    def memory_clock_mhz(self) -> float | None:
        """Clock of the memory. Unit: MHz."""
        return None

    def temperature_c(self) -> float | None:
        """Temperature of the chip. Unit: degrees Celsius."""
        return None

    def memory_temperature_c(self) -> float | None:
        """Temperature of the memory. Unit: degrees Celsius."""
        return None

    def power_limit_w(self) -> float | None:
        """The power at which the card lowers its clocks. Unit: W."""
        return None

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """Why the clocks are lower than they could be: words such as "power_cap" or "thermal"; () when they are not."""
        return None

    def compute_processes(self) -> frozenset[int] | None:
        """Ids of the processes that compute on the card, as the driver sees them: host ids, inside containers too."""
        return None

    def foreign_cpu_s(self) -> float | None:
        """CPU time that others have had of the cores which this process may use, by core, where these are the card. Unit: s."""
        return None

    def close(self) -> None:
        """Let go of the driver."""
        return None
