"""The tile roofline: the time of a call if its multiprocessors compute whole tiles in whole waves.

The plain roofline estimates 133/132 of the time of 132 tiles for 133 tiles on 132 multiprocessors.
The true time is twice as long. This model cuts a product into tiles of the fastest size, and each
multiprocessor computes its tiles one after the other. Full bandwidth needs enough bytes in flight.
Predictors learn the differences of real kernels."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.addons.predict.kernel_rules import KernelPlan, constants
from farm.types.card_kind import OfCardKind
from farm.types.data_sheets import data_sheet
from farm.types.fingerprint import sound_fingerprint
from farm.types.matrix_products import Products
from farm.types.roofline import Roofline, roofline_of


@dataclass(frozen=True)
class CardModel(OfCardKind):
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
        key = "tf32" if tf32 and dtype == "float32" else dtype or "float32"
        return Roofline(
            self.flops_per_s.get(key, self.flops_per_s["float32"]),
            self.bytes_per_s,
            self.launch_floor_us,
        )


def card_model(kind: str, model: str, fingerprints: Iterable[Mapping[str, Any]] = ()) -> CardModel:
    """Build a card model from the median of the fingerprints of its cards; the data sheet supplies
    what they lack.
    """
    prints = [fingerprint for fingerprint in map(sound_fingerprint, fingerprints) if fingerprint]
    sheet = data_sheet(kind, model)

    def middle(name: str, otherwise: float) -> float:
        values = [
            fingerprint[name]
            for fingerprint in prints
            if isinstance(fingerprint.get(name), int | float) and fingerprint[name] > 0
        ]
        return float(statistics.median(values)) if values else otherwise

    rooflines = {
        dtype: [
            roofline_of(kind, model, fingerprint, dtype=dtype, tf32=dtype == "tf32")
            for fingerprint in prints or [{}]
        ]
        for dtype in ("float32", "tf32", "float16", "bfloat16")
    }
    rates = {
        dtype: statistics.median(peaks.flops_per_s for peaks in peaks_of_cards)
        for dtype, peaks_of_cards in rooflines.items()
    }
    # Twice the rate of half precision on every card that multiplies in eight bits.
    rates |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 2 * rates["bfloat16"])
    bytes_per_s = statistics.median(peaks.bytes_per_s for peaks in rooflines["float32"])
    launch_us = statistics.median(peaks.launch_floor_us for peaks in rooflines["float32"])
    limit_w = middle("power_limit_w", sheet.power_limit_w)
    base_w = middle("base_power_w", 0.2 * limit_w)
    return CardModel(
        kind,
        model,
        rates,
        bytes_per_s,
        launch_us,
        sheet.multiprocessors,
        sheet.l2_bytes,
        limit_w,
        base_w,
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
    waves: float  # tiles / multiprocessors
    # waves / waves rounded up, for each size of `WAVE_TILES`; 1 without products
    wave_shares: tuple[float, ...]


def tile_roofline(
    card: CardModel, plan: KernelPlan, products: Products | None, tf32: bool = False
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
    cached = min(1.0, max(0.0, 2 - bytes_moved / card.l2_bytes))
    warm_bytes = bytes_moved - plan.cold_bytes
    traffic_us = max(
        (plan.cold_bytes + warm_bytes / (1 + (_FITTED.l2_rate - 1) * cached))
        / peaks.bytes_per_s
        * 1e6,
        plan.serial_bytes / (peaks.bytes_per_s / card.multiprocessors) * 1e6,
        plan.singles / card.multiprocessors / _FITTED.singles_per_us,
        plan.warps / card.multiprocessors / _FITTED.warps * _FITTED.warp_us,
        _FITTED.latency_us if bytes_moved else 0.0,
    )
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
    card: CardModel, flops_per_s: float, products: Products, sizes: Sequence[tuple[int, int, float]]
) -> tuple[float, int]:
    """Return the minimum time in us over all tile sizes, and the number of tiles of the fastest
    size.
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
