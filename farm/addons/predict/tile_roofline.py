"""The tile roofline: the time of a call if its multiprocessors compute whole tiles in whole waves.

The plain roofline estimates 133/132 of the time of 132 tiles for 133 tiles on 132 multiprocessors.
The true time is twice as long. This model cuts a product into tiles of the fastest size, and each
multiprocessor computes its tiles one after the other. Full bandwidth needs enough bytes in flight.
Predictors learn the differences of real kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.addons.predict.kernel_rules import KernelPlan, constants
from farm.types.card_kind import OfCardKind
from farm.types.data_sheets import data_sheet
from farm.types.fingerprint import median_fingerprint
from farm.types.matrix_products import Products
from farm.types.roofline import Roofline, positive, roofline_of

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
BASE_POWER_SHARE = 0.2  # of the power limit: the base power of a card that has not measured it


@dataclass(frozen=True)
class CardRates(OfCardKind):
    """A card model: rates and power levels from its fingerprint; multiprocessors and L2 size from
    its data sheet.
    """

    kind: str
    model: str
    flops_per_s: Mapping[str, float]  # by dtype, and `tf32`
    bytes_per_s: float
    launch_floor_us: float
    multiprocessors: int
    l2_bytes: int
    power_limit_w: float
    base_power_w: float  # at full clocks without work

    def roofline(self, dtype: str | None, tf32: bool = False) -> Roofline:
        """The peaks for one dtype; of a dtype without a rate (float64, complex64, int64 ...),
        those of float32. Products of int8 have the rate of eight-bit floats."""
        key = "tf32" if tf32 and dtype == "float32" else dtype or "float32"
        eight_bits = self.flops_per_s[EIGHT_BITS[0]]
        if dtype == "int8":
            key = EIGHT_BITS[0]
        return Roofline(
            self.flops_per_s.get(key, self.flops_per_s["float32"]),
            self.bytes_per_s,
            self.launch_floor_us,
            eight_bit_flops_per_s=eight_bits,
        )


def card_rates(kind: str, model: str, fingerprints: Iterable[Mapping[str, Any]] = ()) -> CardRates:
    """Build a card model from the median of the fingerprints of its cards; the data sheet supplies
    what they lack.
    """
    fingerprint, sheet = median_fingerprint(fingerprints), data_sheet(kind, model)
    peaks = {
        dtype: roofline_of(kind, model, fingerprint, dtype=dtype, tf32=dtype == "tf32")
        for dtype in ("float32", "tf32", "float16", "bfloat16")
    }
    rates = {dtype: of_dtype.flops_per_s for dtype, of_dtype in peaks.items()}
    # Fingerprints have no rate of eight bits; the data sheet gives it relative to half precision.
    times_half = sheet.eight_bits / sheet.half if sheet.eight_bits else 2
    rates |= dict.fromkeys(EIGHT_BITS, times_half * rates["bfloat16"])
    limit_w = positive(fingerprint.get("power_limit_w"), sheet.power_limit_w)
    return CardRates(
        kind,
        model,
        flops_per_s=rates,
        bytes_per_s=peaks["float32"].bytes_per_s,
        launch_floor_us=peaks["float32"].launch_floor_us,
        multiprocessors=sheet.multiprocessors,
        l2_bytes=sheet.l2_bytes,
        power_limit_w=limit_w,
        base_power_w=positive(fingerprint.get("base_power_w"), BASE_POWER_SHARE * limit_w),
    )


_FITTED = constants("tile_roofline")
# libraries choose kernels by the last wave's occupancy
WAVE_TILES = (
    (64, 64),
    (128, 64),
    (256, 128),
)


@dataclass(frozen=True)
class TileRoofline:
    """The time of one call."""

    time_us: float
    compute_us: float
    traffic_us: float
    tiles: int  # of its products; 0 without products
    waves: float  # tiles / multiprocessors, not rounded
    # waves / waves rounded up, for each size of `WAVE_TILES`; 1 without products
    wave_shares: tuple[float, ...]


def tile_roofline(
    card: CardRates, plan: KernelPlan, products: Products | None, tf32: bool = False
) -> TileRoofline:
    """Estimate the time of a call.

    Args:
        plan: bytes, FLOPs and launches of the call's kernels.
        products: the matrix products that the call computes; None if it computes none. If their
            FLOPs differ from those of `plan`, their time is multiplied by the ratio (FLOPs of
            `plan` / FLOPs of `products`).
    """
    bytes_moved, flops = plan.bytes_moved, plan.flops
    peaks = card.roofline(plan.dtype, tf32 and plan.tensor_cores)
    flops_per_s = peaks.flops_per_s / (1 if plan.aligned else _FITTED.unaligned_times)
    compute_us, tiles = flops / flops_per_s * 1e6, 0
    if products is not None and flops:
        products_us, tiles = _cut(
            card, flops_per_s, products, _FITTED.coarse if plan.coarse else _FITTED.tiles
        )
        compute_us = products_us * flops / products.flops
    wave_shares = [1.0] * len(WAVE_TILES)
    if products is not None:
        waves = [_tiles(products, *size) / card.multiprocessors for size in WAVE_TILES]
        wave_shares = [number / max(1, math.ceil(number)) for number in waves]
    # The share that stays in the L2 cache falls from 1 to 0 between one and two times its size.
    cached = min(1.0, max(0.0, 2 - bytes_moved / card.l2_bytes))
    warm_bytes = bytes_moved - plan.cold_bytes
    memory_bytes = plan.cold_bytes + warm_bytes / (1 + (_FITTED.l2_rate - 1) * cached)
    memory_us = memory_bytes / peaks.bytes_per_s * 1e6
    # one multiprocessor has its part of the bandwidth
    one_block_us = plan.serial_bytes / (peaks.bytes_per_s / card.multiprocessors) * 1e6
    scattered_us = plan.singles / card.multiprocessors / _FITTED.singles_per_us
    # full bandwidth needs enough warps in flight
    warps_us = plan.warps / card.multiprocessors / _FITTED.warps * _FITTED.warp_us
    latency_us = _FITTED.latency_us if bytes_moved else 0.0
    traffic_us = max(memory_us, one_block_us, scattered_us, warps_us, latency_us)
    before_us = plan.before / card.multiprocessors / _FITTED.singles_per_us
    return TileRoofline(
        max(compute_us, traffic_us) + before_us + plan.launches * peaks.launch_floor_us,
        compute_us,
        traffic_us,
        tiles,
        tiles / card.multiprocessors,
        tuple(wave_shares),
    )


def _tiles(products: Products, rows: int, columns: int) -> int:
    return math.ceil(products.m / rows) * math.ceil(products.n / columns) * products.count


def _cut(
    card: CardRates, flops_per_s: float, products: Products, sizes: Sequence[tuple[int, int, float]]
) -> tuple[float, int]:
    """Return the time of the products in us with the fastest tile size, and its number of tiles.
    Many narrow products have a kernel without tiles: a share of the peak rate.
    """
    if products.n < _FITTED.narrow and products.count > 1:
        tiles = math.ceil(products.m * products.n * products.count / 128)
        return products.flops / (flops_per_s * _FITTED.narrow_share) * 1e6, tiles
    candidates = []
    for rows, columns, share in sizes:
        tiles = _tiles(products, rows, columns)
        # of one multiprocessor
        flops = math.ceil(tiles / card.multiprocessors) * 2 * rows * columns * products.k
        candidates.append((flops / (flops_per_s / card.multiprocessors * share) * 1e6, tiles))
    return min(candidates)
