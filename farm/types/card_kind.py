"""The kinds of cards: GPUs, the CPU of a host, and simulated cards for tests of the farm."""

from __future__ import annotations

from typing import Literal

from farm.types.protocol import Launch

CardKind = Literal["cuda", "cpu", "simulated"]
DeviceType = Literal["cuda", "cpu"]

#: Compute capability of the card for which a model is captured or compiled without a card: that of
#: an H100 or H200.
ASSUMED_CAPABILITY = (9, 0)
#: Beginning of a card's id -> its kind. All other ids are those of GPUs.
_KIND_BY_PREFIX: dict[str, CardKind] = {"SIM-": "simulated", "CPU-": "cpu"}


class OfCardKind:
    """What a record with the column or field ``kind`` of a card says about it."""

    kind: str

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def is_simulated(self) -> bool:
        return self.kind == "simulated"

    @property
    def device_type(self) -> DeviceType:
        """PyTorch's device type: of the captures for the card."""
        return device_type_of(self.kind)

    @property
    def usual_launch(self) -> Launch:
        return usual_launch(self.kind)


def card_kind_of(card_id: str) -> CardKind:
    """The kind of the card with an id: "cpu" for "CPU-2f5e...", "cuda" for "GPU-11f9..."."""
    for prefix, kind in _KIND_BY_PREFIX.items():
        if card_id.startswith(prefix):
            return kind
    return "cuda"


def is_gpu_kind(kind: str) -> bool:
    return kind == "cuda"


def is_gpu_id(card_id: str) -> bool:
    return card_kind_of(card_id) == "cuda"


def is_cpu_id(card_id: str) -> bool:
    return card_kind_of(card_id) == "cpu"


def device_type_of(kind: str) -> DeviceType:
    """PyTorch's device type of a kind of cards. A simulated card uses captures of a CPU."""
    return "cuda" if kind == "cuda" else "cpu"


def usual_launch(kind: str) -> Launch:
    """The launch of a protocol for which no one chose a launch: a CPU has no graphs."""
    return "eager" if kind == "cpu" else "graph"
