"""The roofline of a card: an estimate of the time of a call from its FLOPs and bytes. It is the
lower bound by the card's peak rates, plus a launch.

The estimate compares tuples without a measurement: for coverage, choice of cards and order of the
accuracy loop. It need not be exact in microseconds. It must weigh convolutions, additions and tiny
calls fairly; by FLOPs alone additions and tiny calls would be free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from farm.types.data_sheets import data_sheet
from farm.types.fingerprint import is_number, sound_fingerprint

#: Products of numbers of eight bits, whatever the dtype of the model.
EIGHT_BIT_PRODUCTS = frozenset({"_int_mm", "_scaled_mm"})


#: What limits a call at best: the rate of arithmetic, the bandwidth, or the least time of a kernel.
Bound = Literal["compute", "memory", "launch"]


class Work(Protocol):
    """The work of one call: an operator tuple, stored or needed by a model."""

    @property
    def short_name(self) -> str: ...

    @property
    def flops(self) -> int: ...

    @property
    def bytes_moved(self) -> int: ...


@dataclass(frozen=True)
class Roofline:
    """Peaks of one card for one dtype, and the least time a launch takes. The peaks are positive;
    the least time may be 0."""

    flops_per_s: float
    bytes_per_s: float
    launch_floor_us: float
    eight_bit_flops_per_s: float = 0.0  # of products of int8 and of fp8; 0: as ``flops_per_s``

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.bytes_per_s > 0 and self.launch_floor_us >= 0):
            raise ValueError(f"peaks must be positive, and the launch floor not negative: {self}")

    def rate_of(self, operator: str) -> float:
        """The peak rate of an operator, given its short name. Unit: FLOP/s."""
        is_of_eight_bits = operator in EIGHT_BIT_PRODUCTS and self.eight_bit_flops_per_s
        return self.eight_bit_flops_per_s if is_of_eight_bits else self.flops_per_s

    def compute_s(self, call: Work) -> float:
        """The time of the arithmetic of one call at the peak rate. Unit: s."""
        return call.flops / self.rate_of(call.short_name)

    def memory_s(self, call: Work) -> float:
        """The time to move the bytes of one call at the bandwidth. Unit: s."""
        return call.bytes_moved / self.bytes_per_s

    def bound_of(self, call: Work) -> Bound:
        """What limits a call at best."""
        compute_s, memory_s = self.compute_s(call), self.memory_s(call)
        if max(compute_s, memory_s) * 1e6 < self.launch_floor_us:
            return "launch"
        return "compute" if compute_s > memory_s else "memory"

    def estimate_us(self, flops: float, bytes_moved: float, operator: str = "") -> float:
        """The estimated time of one call in µs, from its FLOPs (2 per multiply-add), the bytes that
        it moves, and the operator's short name, which decides its peak rate.
        """
        bound_s = max(flops / self.rate_of(operator), bytes_moved / self.bytes_per_s)
        return bound_s * 1e6 + self.launch_floor_us

    def call_us(self, call: Work) -> float:
        """The estimated time of one call of an operator tuple in µs."""
        return self.estimate_us(call.flops, call.bytes_moved, call.short_name)


def roofline_of(
    card_kind: str,
    card_model: str,
    fingerprint: Mapping[str, Any] | None = None,
    *,
    dtype: str = "float32",
    tf32: bool = False,
) -> Roofline:
    """The roofline of a card for one dtype.

    Args:
        card_kind: ``cuda``, ``cpu`` or ``simulated``.
        fingerprint: measured when a worker first saw the card: ``copy_bytes_per_s``,
            ``launch_floor_us`` and ``matmul_flops_per_s`` (``float32``, ``tf32``, ``float16``,
            ``bfloat16`` -> FLOP/s). The data sheet replaces absent values and zeros.
        dtype: of the model's activations. Data sheets have no rates of float64, complex64 and
            integers: they count as float32.
    """
    peaks = data_sheet(card_kind, card_model)
    measured = sound_fingerprint(fingerprint)
    if dtype in ("float16", "bfloat16"):
        key, rate = dtype, peaks.half
    elif tf32:
        key, rate = "tf32", peaks.tf32
    else:
        key, rate = "float32", peaks.float32
    rates = measured.get("matmul_flops_per_s") or {}
    return Roofline(
        flops_per_s=positive(rates.get(key), rate),
        bytes_per_s=positive(measured.get("copy_bytes_per_s"), peaks.bytes_per_s),
        launch_floor_us=positive(measured.get("launch_floor_us"), peaks.launch_floor_us),
        eight_bit_flops_per_s=peaks.eight_bits or 2 * peaks.half,
    )


def positive(measured: Any, otherwise: float) -> float:
    """A measured number above 0; else the other number."""
    return float(measured) if is_number(measured) and measured > 0 else otherwise
