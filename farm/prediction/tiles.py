"""The tile roofline: what a call should cost on a card that works in whole tiles, on whole waves of its multiprocessors.

The plain roofline lets 133 tiles on 132 multiprocessors take 133/132 of the time; they take twice of it. Here a product is cut
into tiles of the size that ends soonest, each multiprocessor does a tile after the other, and what moves bytes needs enough of
them in flight. The rest - kernels that are better or worse than that - is what predictors learn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farm.prediction.card import CardModel
from farm.prediction.kernel_rules import Course
from farm.prediction.products import Products

#: Rows and columns of what one multiprocessor works on at a time, as libraries have them, and the share of its peak that
#: it reaches on such a tile: the smaller, the more often a value is fetched again.
TILES = (
    (256, 128, 1.0),
    (128, 128, 0.95),
    (128, 64, 0.85),
    (64, 64, 0.7),
    (64, 32, 0.5),
    (32, 32, 0.35),
    (16, 16, 0.15),
)
#: Of convolutions and of products in half precision: smaller tiles are there, but none of their kernels is as much faster as
#: the above would have it. Sizes and shares are those that readings of an H200 scatter least about.
COARSE = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 1.0), (64, 64, 0.95))
WAVES_OF = ((64, 64), (128, 64), (256, 128))  # tiles; libraries choose among kernels by how full the last wave is
#: Of fewer columns no tiles are made: each output is summed up by itself, at this share of the peak.
NARROW, NARROW_SHARE = 8, 0.25
LATENCY_US = 0.3  # that the first bytes take to come
L2_RATE = 1.5  # of the memory's, for what the cache holds from one call to the next: all, to nothing of twice its size
SINGLES_PER_US = 3000.0  # elements that a multiprocessor fetches one by one
WARPS, WARP_US = 64, 2.0  # that a multiprocessor holds at once, and what each waits from its first value to its last
UNALIGNED_SHARE = 1 / 6  # of the peak, where tensor cores are fed by loads of single values


@dataclass(frozen=True)
class TileRoofline:
    """`time_us` of one call; `tiles` of its products (0: it makes none) and the `waves` that they come to, a fraction.

    `wave_shares`: of whole waves, what tiles of each size of `WAVES_OF` come to; 1 where it makes no product.
    """

    time_us: float
    compute_us: float
    traffic_us: float
    tiles: int = 0
    waves: float = 0.0
    wave_shares: tuple[float, ...] = (1.0,) * len(WAVES_OF)


def tile_roofline(card: CardModel, course: Course, products: Products | None, tf32: bool = False) -> TileRoofline:
    """
    Args:
        course: where its FLOPs are not those of its products, the products' time is scaled to them.
    """
    bytes_moved, flops = course.bytes_moved, course.flops
    peaks = card.roofline(course.dtype, tf32 and course.tensor_cores)
    flops_per_s = peaks.flops_per_s * (1.0 if course.aligned else UNALIGNED_SHARE)
    compute_us, tiles = flops / flops_per_s * 1e6, 0
    if products is not None and flops:
        plain_us, tiles = _cut(card, flops_per_s, products, COARSE if course.coarse else TILES)
        compute_us = plain_us * flops / products.flops
    near = min(1.0, max(0.0, 2 - bytes_moved / card.l2_bytes))
    warm = bytes_moved - course.cold_bytes
    moving_us = (course.cold_bytes + warm / (1 + (L2_RATE - 1) * near)) / peaks.bytes_per_s * 1e6
    alone_us = course.serial_bytes / (peaks.bytes_per_s / card.multiprocessors) * 1e6
    singles_us = course.singles / card.multiprocessors / SINGLES_PER_US
    warps_us = course.warps / card.multiprocessors / WARPS * WARP_US
    traffic_us = max(moving_us, alone_us, singles_us, warps_us, LATENCY_US if bytes_moved else 0.0)
    before_us = course.before / card.multiprocessors / SINGLES_PER_US
    return TileRoofline(
        max(compute_us, traffic_us) + before_us + course.launches * peaks.launch_floor_us,
        compute_us,
        traffic_us,
        tiles,
        tiles / card.multiprocessors,
        tuple(_wave_share(card, products, *size) for size in WAVES_OF),
    )


def _wave_share(card: CardModel, products: Products | None, rows: int, columns: int) -> float:
    if products is None:
        return 1.0
    waves = _tiles(products, rows, columns) / card.multiprocessors
    return waves / max(1, math.ceil(waves))


def _tiles(products: Products, rows: int, columns: int) -> int:
    return math.ceil(products.m / rows) * math.ceil(products.n / columns) * products.count


def _cut(
    card: CardModel, flops_per_s: float, products: Products, sizes: Sequence[tuple[int, int, float]]
) -> tuple[float, int]:
    """The least time in microseconds over the sizes of tiles, and how many tiles that is."""
    best = (math.inf, 0)
    if products.n < NARROW and products.count > 1:
        tiles = math.ceil(products.m * products.n * products.count / 128)
        return products.flops / (flops_per_s * NARROW_SHARE) * 1e6, tiles
    for rows, columns, share in sizes:
        tiles = _tiles(products, rows, columns)
        waves = math.ceil(tiles / card.multiprocessors)
        flops_of_tile = 2 * rows * columns * products.k
        best = min(best, (waves * flops_of_tile / (flops_per_s / card.multiprocessors * share) * 1e6, tiles))
    return best
