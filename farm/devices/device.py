"""The interface to a card: its description (`Card`) and its sensors (`Device`).

The farm uses cards through this interface alone: the same code measures a GPU without an energy counter, a CPU and a
simulated card. A value that a card does not provide is None and is missing from `Device.capabilities`; it is never
zero. No torch: workers and the command line list cards without it.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

CardKind = Literal["cuda", "cpu", "simulated"]

#: The version of fingerprints (`farm.benchmark.checks`); a card with an older one gets a new one.
FINGERPRINT_VERSION = 2


@dataclass(frozen=True)
class Card:
    """One physical card.

    Attributes:
        id: the GPU's UUID ("GPU-..."), `Settings.cpu_card_id` ("CPU-...") or "SIM-<host>-<n>". Only cards with a
            refusal have other ids: "MIG-..." is an instance of a GPU, "NVIDIA-<host>-<n>" a GPU whose UUID is unknown,
            "NVIDIA-<host>" all GPUs of a driver that does not count them.
        refusal: why the card cannot be measured, and what to do; "" if it can.
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
    """The sensors of one card. A getter returns None if the card does not have the sensor.

    Getters may be called from any thread, and release the GIL while they wait for a driver.
    """

    card: Card

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """The names of the getters that return values, for example {"energy_counter_mj", "power_instant_w"}."""

    def energy_counter_mj(self) -> float | None:
        """Energy since a fixed moment in the past; it never decreases. Unit: mJ."""
        return None

    def power_instant_w(self) -> float | None:
        """Instantaneous power, averaged as little as the card offers. Unit: W."""
        return None

    def power_average_w(self) -> float | None:
        """Power averaged by the driver over its own period (1 s on Hopper). Unit: W."""
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
        """The power limit: above it the card lowers its clocks. Unit: W."""
        return None

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """Why the clocks are reduced: words such as "power_cap" or "thermal"; () if they are not."""
        return None

    def compute_processes(self) -> frozenset[int] | None:
        """Ids of the processes that compute on the card: ids of the host, even inside a container."""
        return None

    def foreign_cpu_s(self) -> float | None:
        """For a CPU: time of other processes per core, on the cores that this process may use. Unit: s."""
        return None

    def close(self) -> None:  # noqa: B027 - most devices have nothing to release
        """Release the driver."""
