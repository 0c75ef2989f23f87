"""The interface to a card: its description (`Card`) and its sensors (`Device`).

The farm accesses cards only through this interface, so the same code measures any GPU, a CPU and a
simulated card. If a card does not provide a value, the getter returns None (never zero), and
`Device.capabilities` lacks its name. This module does not import torch: workers and the command
line list cards without it."""

# ruff: noqa: B027 - a getter without code returns None

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

CardKind = Literal["cuda", "cpu", "simulated"]


@dataclass(frozen=True)
class Card:
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


class QueriedDevice(Device):
    """A device whose getters are `queries` of a driver's library: getter -> a function of the
    library's handle.

    If the first query of a sensor fails for any reason, or a later one for lack of the sensor, it
    is not queried again."""

    queries: ClassVar[Mapping[str, Callable[[Any], Any]]]

    def __init_subclass__(cls) -> None:
        for name in cls.queries:
            setattr(cls, name, functools.partialmethod(cls._query, name))

    def __init__(self, card: Card, handle: Any, lacks: frozenset[str] = frozenset()) -> None:
        self.card, self._handle, self._open = card, handle, True
        self._lacks = set(lacks)
        self._lacks |= {name for name in self.queries if self._query(name) is None}

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset(self.queries) - self._lacks

    def _query(self, name: str) -> Any:
        if name in self._lacks or not self._open:
            return None
        try:
            return self.queries[name](self._handle)
        except Exception as error:
            if (lacking := self._is_lacking(error)) is None:
                raise
            self._lacks |= {name} if lacking else set()
        return None

    @abstractmethod
    def _is_lacking(self, error: Exception) -> bool | None:
        """True if the card will never support the query, False for an error in passing, None for
        another error.
        """

    def close(self) -> None:
        self._open = False
