"""The contract of a card's sensors: its description (`Card`) and its getters (`Device`).

The farm accesses cards only through this interface, so the same code measures any GPU, a CPU and a
simulated card:

    card = find_card("GPU-11f91e27-22c9-475a-34e7-a560edfe914c", settings())
    with contextlib.closing(open_device(card)) as device:
        if "energy_counter_mj" in device.capabilities:
            begin_mj = device.energy_counter_mj()  # 812345678.0

A device keeps these rules, which `tests/devices/contract.py` checks for every class:

- A getter returns a value in the unit that its name ends with, or None (never zero) if the card
  lacks the sensor. `capabilities` has the names of the getters that return values.
- A getter may be called from any thread, and releases the GIL while it waits for a driver.
- A query that fails in passing gives None once; the capability stays. Other errors of a driver are
  raised as they are.
- `close` may be called twice. A getter of a closed device raises nothing.
- Opening a card that no longer answers raises `farm.errors.NoSuchCard`.

`farm.devices.vendor` is the contract of the module that finds and opens the cards of one vendor.
Neither imports torch: workers and the command line list cards without it."""

# ruff: noqa: B027 - a getter without code returns None

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from farm.types.card_kind import CardKind, OfCardKind


@dataclass(frozen=True)
class Card(OfCardKind):
    """One physical card.

    Attributes:
        id: the GPU's UUID ("GPU-..."), `Settings.cpu_card_id` ("CPU-...") or "SIM-<host>-<n>".
            Cards with a refusal may have other ids: "MIG-..." is a MIG instance of a GPU,
            "NVIDIA-<host>-<n>" a GPU with unknown UUID, "NVIDIA-<host>" or "AMD-<host>" all GPUs of
            the host if the driver cannot count them.
        kind: PyTorch's device type, or "simulated". PyTorch for ROCm uses AMD cards as "cuda", too.
        refusal: the reason why the farm cannot measure on the card, and what to do; "" if it can.
    """

    id: str
    kind: CardKind
    model: str
    memory_bytes: int
    driver: str = ""
    index: int = 0
    host: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        return f"{self.model} ({self.id})"


class Device(ABC):
    """The sensors of one card. A getter returns None if the card lacks the sensor.

    Getters may be called from any thread, and release the GIL while they wait for a driver.
    """

    #: True if a pause inside a graph has a known length: the card's clock for it is the same on all
    #: cards of the vendor.
    times_pauses: ClassVar[bool] = True
    #: `power_source` of a reading whose power is the slope of `energy_counter_mj`.
    counter_source: ClassVar[str] = "energy_counter"
    #: What the samplers of this device have learned: a
    #: `farm.benchmark.counter_period.CounterPeriod`.
    counter_period: Any = None

    card: Card

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """The names of the getters that return values, for example {"energy_counter_mj",
        "power_instant_w"}.
        """

    def energy_counter_mj(self) -> float | None:
        """Energy since a fixed moment in the past; it never decreases. Unit: mJ."""

    def power_instant_w(self) -> float | None:
        """Instantaneous power, averaged over the shortest period that the card offers. Unit: W."""

    def power_average_w(self) -> float | None:
        """Power averaged by the driver over its own period (1 s on Hopper). Unit: W."""

    def sm_clock_mhz(self) -> float | None:
        """Clock of the arithmetic units. Unit: MHz."""

    def memory_clock_mhz(self) -> float | None:
        """Clock of the memory. Unit: MHz."""

    def temperature_c(self) -> float | None:
        """Temperature of the chip. Unit: degrees Celsius."""

    def memory_temperature_c(self) -> float | None:
        """Temperature of the memory. Unit: degrees Celsius."""

    def power_limit_w(self) -> float | None:
        """The power limit. The card lowers its clocks to stay below it. Unit: W."""

    def throttle_reasons(self) -> tuple[str, ...] | None:
        """The reasons why the clocks are reduced, such as "power_cap" or "thermal"; () if they are
        not reduced.
        """

    def compute_processes(self) -> frozenset[int] | None:
        """Ids of the processes that compute on the card. In a container these are still the ids on
        the host.
        """

    def close(self) -> None:
        """Release the driver. Most devices have nothing to release."""
