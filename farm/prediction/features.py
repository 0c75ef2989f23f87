"""The numbers that a learning predictor sees of a call. Sizes are logarithms to base 2, shares are as they are.

`VERSION` is raised whenever a number is added, goes or changes its meaning: what was fitted to others is stale then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from farm.prediction.described import Described

VERSION = 5
Floats = npt.NDArray[np.float64]


def _log(value: float | None) -> float:
    return math.log2(1 + value) if value else 0.0


def _grain(value: int | None) -> float:
    """Of how high a power of two it is a multiple, up to 64: kernels for odd sizes are others."""
    return float(min(6, (value & -value).bit_length() - 1)) if value else 6.0


def _winograd(call: Described) -> float:
    """Whether a convolution can be done with fewer multiplications: 3 x 3, step 1, in one group."""
    return float(call.window == 9 and call.stride == 1 and call.dilation == 1 and call.products == 1)


#: In this order. Each is of one call.
_FEATURES: dict[str, Callable[[Described], float]] = {
    "tile_roofline": lambda call: math.log2(call.tile_roofline_us),
    "over_roofline": lambda call: math.log2(call.tile_roofline_us / call.roofline_us),
    "bound": lambda call: math.log2((call.compute_us + 1e-2) / (call.traffic_us + 1e-2)),
    "bytes_moved": lambda call: _log(call.bytes_moved),
    "flops_per_byte": lambda call: _log(call.flops_per_byte),
    "m": lambda call: _log(call.m),
    "n": lambda call: _log(call.n),
    "k": lambda call: _log(call.k),
    "products": lambda call: _log(call.products),
    "tiles": lambda call: _log(call.tiles),
    "last_wave": lambda call: call.waves / math.ceil(call.waves) if call.waves else 1.0,
    "wave_share_64x64": lambda call: call.wave_share_64x64,
    "wave_share_128x64": lambda call: call.wave_share_128x64,
    "wave_share_256x128": lambda call: call.wave_share_256x128,
    "grain_m": lambda call: _grain(call.m),
    "grain_n": lambda call: _grain(call.n),
    "grain_k": lambda call: _grain(call.k),
    "itemsize": lambda call: math.log2(call.itemsize_bytes),
    "floating": lambda call: float("float" in call.dtype),
    "training": lambda call: float(call.training),
    "tensors": lambda call: _log(call.tensors),
    "elements": lambda call: _log(call.elements),
    "elements_given": lambda call: _log(call.elements_given),
    "parameter_bytes": lambda call: _log(call.parameter_bytes),
    "strided": lambda call: call.strided_share,
    "expanded": lambda call: call.expanded_share,
    "written": lambda call: call.written_share,
    "casts": lambda call: float(call.casts),
    "run": lambda call: _log(call.run_bytes),
    "casts_to_whole": lambda call: float(call.casts_to_whole),
    "masked": lambda call: call.masked,
    "drops": lambda call: float(call.drops),
    "causal": lambda call: float(call.causal),
    "materialised": lambda call: float(call.materialised),
    "along_last": lambda call: call.along_last,
    "along": lambda call: _log(call.along),
    "winograd": lambda call: _winograd(call),
    "last_size": lambda call: _log(call.last_size),
    "grain_last": lambda call: _grain(call.last_size),
    "rows": lambda call: _log(call.rows),
    "batch": lambda call: _log(call.batch),
    "window": lambda call: _log(call.window),
    "stride": lambda call: _log(call.stride),
    "dilation": lambda call: _log(call.dilation),
    "channels_in": lambda call: _log(call.channels_in),
    "channels_out": lambda call: _log(call.channels_out),
    "pixels": lambda call: _log(call.pixels),
    "grain_pixels": lambda call: _grain(call.pixels),
    "zeros": lambda call: call.zeros,
    "positive": lambda call: call.positive,
    "channels": lambda call: call.channels,
}
NAMES = tuple(_FEATURES)


def numbers_of(calls: Sequence[Described]) -> Floats:
    """A row for each call, a column for each of `NAMES`."""
    rows = [[feature(call) for feature in _FEATURES.values()] for call in calls]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(NAMES))
