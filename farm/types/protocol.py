"""The conditions of a measurement (`Protocol`), and when its window ends (`Stopping`).

Each field is declared here, once (`farm.types.fields`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from farm.types.fields import ContentAddressed, Record, declared, original
from farm.types.placement import Placement
from farm.types.value_profiles import is_class

Launch = Literal["graph", "eager"]
Residency = Literal["resident", "reuse", "stream", "chain"]
#: Called at the start of each phase of a measurement, with the phase's name and details.
OnPhase = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Protocol(ContentAddressed):
    """The conditions of a measurement. Only readings with the same protocol are comparable."""

    launch: Launch = original("graph", choices=get_args(Launch))
    residency: Residency = original("resident", choices=get_args(Residency))
    # If it is `seen`, a job uses the value profile (`farm.types.value_profiles`) of each call
    # instead.
    data: str = original("normal", choices=("normal", "zeros", "seen", "copied"))
    grad: bool = original(False)
    tf32: bool = original(False)
    cudnn_benchmark: bool = original(False)
    cudnn_deterministic: bool = original(False)
    placement: str = declared("")
    cards: int = declared(1, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        Placement.parse(self.placement)

    def _accepts(self, name: str, value: Any) -> bool:
        return name == "data" and is_class(value)

    def with_placement(self, placement: str) -> Self:
        """Return the same protocol with another placement of a tuple's tensors."""
        return dataclasses.replace(self, placement=placement)

    def with_data(self, data: str) -> Self:
        """Return the same protocol with another data class. A job with `seen` uses the profile of
        each call.
        """
        return dataclasses.replace(self, data=data)

    @property
    def slow_tensors(self) -> int:
        """The number of tensors of a tuple in slow memory."""
        return len(Placement.parse(self.placement))

    @property
    def measures_context(self) -> bool:
        """True if the protocol represents a running model. Then tuples are also timed among other
        operators.
        """
        return self.launch == "graph" and self.residency == "resident" and not self.slow_tensors

    @property
    def takes_turns(self) -> bool:
        """True if a CPU may time the subject in turn with others: not if it uses slow memory."""
        return not self.slow_tensors

    @property
    def of_whole(self) -> Self:
        """The protocol for the whole model: standard normal inputs instead of `seen`."""
        return self.with_data("normal") if self.data in ("seen", "copied") else self

    def __str__(self) -> str:
        extras = {
            "grad": self.grad,
            "tf32": self.tf32,
            "cudnn_benchmark": self.cudnn_benchmark,
            "cudnn_deterministic": self.cudnn_deterministic,
            f"{self.placement} slow": self.placement,
            f"{self.cards} cards": self.cards > 1,
        }
        usual = f"{self.launch} launch", f"{self.residency} data ({self.data})"
        return ", ".join([*usual, *(text for text, applies in extras.items() if applies)])


#: If a job allows an interval of the energy as wide as this, a tuple's window is rough: it does not
#: wait for the chip's temperature, and ends as soon as its interval is narrow enough.
ROUGH = 0.05
#: A sum of energies is wanted within this many times the half-width of the sum of times: its sensor
#: is less precise.
ENERGY_PER_TIME = 3.0


@dataclass(frozen=True)
class Stopping(Record):
    """When a window ends. Not part of a protocol's id: a more precise reading satisfies a less
    strict request.

    Half-widths belong to the 95 % interval and are relative to the value.
    """

    warm_up_s: float = original(0.2, unit="s")
    minimum_s: float = original(0.5, unit="s")
    maximum_s: float = original(3.0, unit="s")
    time_half_width: float = original(0.01)
    energy_half_width: float = original(0.02)
    rough: bool = declared(False, given=False)

    @property
    def shortest_s(self) -> float:
        """The shortest expected window. Unit: s."""
        return 0.1 if self.rough else self.minimum_s

    def accepts(self, flags: Collection[str]) -> bool:
        """True if a reading with these flags may satisfy the rule: a study has its own windows, and
        only a rough rule accepts a rough reading."""
        return "study" not in flags and (self.rough or "rough" not in flags)

    def allowing(self, half_width: float) -> Self:
        """Return the rule if this half-width of the time, and `ENERGY_PER_TIME` times it for the
        energy, is enough.

        A rule never becomes stricter: 0 returns an equal one.
        """
        energy = max(self.energy_half_width, ENERGY_PER_TIME * half_width)
        wider = dataclasses.replace(
            self, time_half_width=max(self.time_half_width, half_width), energy_half_width=energy
        )
        if ENERGY_PER_TIME * half_width < ROUGH:
            return wider
        return dataclasses.replace(
            wider, rough=True, warm_up_s=min(self.warm_up_s, 0.05), minimum_s=0.0, maximum_s=0.6
        )


#: `--quick`: a first look, not for publication.
QUICK: dict[str, Any] = {
    "warm_up_s": 0.1,
    "minimum_s": 0.1,
    "maximum_s": 0.5,
    "time_half_width": 0.03,
    "energy_half_width": 0.06,
}
