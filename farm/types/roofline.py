"""The roofline of a card: a lower bound for the time of a call from its FLOPs and bytes, plus a
launch.

The estimate compares tuples without a measurement: for coverage, choice of cards and order of the
accuracy loop. It need not be exact in microseconds. It must weigh convolutions, additions and tiny
calls fairly; by FLOPs alone additions and tiny calls would be free."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from farm.types.data_sheets import data_sheet
from farm.types.fingerprint import sound_fingerprint

#: Products of numbers of eight bits, whatever the dtype of the model.
EIGHT_BIT_PRODUCTS = frozenset({"_int_mm", "_scaled_mm"})


@dataclass(frozen=True)
class Roofline:
    """Peaks of one card for one dtype, and the least time a launch takes."""

    flops_per_s: float
    bytes_per_s: float
    launch_floor_us: float
    eight_bit_flops_per_s: float = 0.0  # of products of int8 and of fp8; 0: as ``flops_per_s``

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.bytes_per_s > 0 and self.launch_floor_us >= 0):
            raise ValueError(f"peaks must be positive: {self}")

    def rate_of(self, operator: str) -> float:
        """The peak rate of an operator, given its short name. Unit: FLOP/s."""
        is_of_eight_bits = operator in EIGHT_BIT_PRODUCTS and self.eight_bit_flops_per_s
        return self.eight_bit_flops_per_s if is_of_eight_bits else self.flops_per_s

    def estimate_us(self, flops: float, bytes_moved: float) -> float:
        """The estimated time of one call in µs, from its FLOPs (2 per multiply-add) and the bytes
        that it moves.
        """
        return (
            max(flops / self.flops_per_s, bytes_moved / self.bytes_per_s) * 1e6
            + self.launch_floor_us
        )


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
        dtype: of the model's activations.
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
        flops_per_s=_positive(rates.get(key), rate),
        bytes_per_s=_positive(measured.get("copy_bytes_per_s"), peaks.bytes_per_s),
        launch_floor_us=_positive(measured.get("launch_floor_us"), peaks.launch_floor_us),
        eight_bit_flops_per_s=peaks.eight_bits or 2 * peaks.half,
    )


def median_fingerprint(fingerprints: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the fingerprint of a card model: of each figure, the median over its cards.

    One card may be an outlier: of 67 packaged NVIDIA H200s, one computes float32 at two thirds of
    the usual rate.

    Args:
        fingerprints: of the cards of one model; None or an empty one for a card without.

    Returns:
        The figures that are numbers, and the rates of matrix products by dtype; {} without a
        fingerprint.
    """
    figures: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for fingerprint in filter(None, fingerprints):
        for name, value in fingerprint.items():
            if _is_number(value):
                figures[name].append(value)
        for dtype, rate in (fingerprint.get("matmul_flops_per_s") or {}).items():
            if _is_number(rate):
                rates[dtype].append(rate)

    medians: dict[str, Any] = {name: statistics.median(values) for name, values in figures.items()}
    if rates:
        medians["matmul_flops_per_s"] = {
            dtype: statistics.median(values) for dtype, values in rates.items()
        }
    return medians


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(measured: Any, otherwise: float) -> float:
    return float(measured) if isinstance(measured, (int, float)) and measured > 0 else otherwise
