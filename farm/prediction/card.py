"""A card model as predictors see it: peaks and levels of its fingerprint, and what its data sheet says of its build."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from farm.operators.roofline import Roofline, roofline_of


@dataclass(frozen=True)
class Build:
    """`l2_bytes` is what lies nearer than the memory."""

    multiprocessors: int
    l2_bytes: int
    power_limit_w: float


# The first name found in the card's model counts, so the longer names stand first.
_BUILDS: tuple[tuple[str, Build], ...] = (
    ("H200", Build(132, 50 << 20, 700.0)),
    ("H100 PCIe", Build(114, 50 << 20, 350.0)),
    ("H100", Build(132, 50 << 20, 700.0)),
    ("B200", Build(148, 126 << 20, 1000.0)),
    ("A100", Build(108, 40 << 20, 400.0)),
    ("L40", Build(142, 96 << 20, 300.0)),
    ("L4", Build(58, 48 << 20, 72.0)),
    ("V100", Build(80, 6 << 20, 300.0)),
    ("T4", Build(40, 4 << 20, 70.0)),
)
_GENERIC, _CPU = Build(80, 32 << 20, 300.0), Build(1, 32 << 20, 200.0)


@dataclass(frozen=True)
class CardModel:
    """Rates are of FLOP/s by dtype (`tf32` beside the dtypes) and of bytes/s."""

    kind: str
    model: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    launch_floor_us: float
    multiprocessors: int
    l2_bytes: int
    power_limit_w: float
    base_power_w: float  # at full clocks with nothing to do

    def roofline(self, dtype: str | None, tf32: bool = False) -> Roofline:
        key = "tf32" if tf32 and dtype == "float32" else dtype or "float32"
        return Roofline(self.flops_per_s.get(key, self.flops_per_s["float32"]), self.bytes_per_s, self.launch_floor_us)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "flops_per_s": dict(self.flops_per_s)}


def card_model(kind: str, model: str, fingerprints: Iterable[Mapping[str, Any]] = ()) -> CardModel:
    """A card model: the median of what the fingerprints of its cards say, and of its data sheet what they lack."""
    prints = [one for one in fingerprints if one]
    build = _CPU if kind == "cpu" else next((build for name, build in _BUILDS if name in model), _GENERIC)

    def middle(name: str, otherwise: float) -> float:
        known = [one[name] for one in prints if isinstance(one.get(name), int | float) and one[name] > 0]
        return float(statistics.median(known)) if known else otherwise

    rooflines = {
        dtype: [roofline_of(kind, model, one, dtype=dtype, tf32=dtype == "tf32") for one in prints or [{}]]
        for dtype in ("float32", "tf32", "float16", "bfloat16")
    }
    rates = {dtype: statistics.median(one.flops_per_s for one in found) for dtype, found in rooflines.items()}
    # Twice the rate of half precision on every card that multiplies in eight bits.
    rates |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 2 * rates["bfloat16"])
    of_float32 = rooflines["float32"]
    limit_w = middle("power_limit_w", build.power_limit_w)
    return CardModel(
        kind,
        model,
        rates,
        statistics.median(one.bytes_per_s for one in of_float32),
        statistics.median(one.launch_floor_us for one in of_float32),
        build.multiprocessors,
        build.l2_bytes,
        limit_w,
        middle("base_power_w", 0.2 * limit_w),
    )
