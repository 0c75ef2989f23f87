"""The result of a measurement: `Reading` with `Trace`.

The benchmark process sends a reading to the farm, which stores its figures as columns and its
details as JSON (`farm.types.details`). Field names end with the unit. None
means "not examined" or "the card cannot report it", never zero."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from typing import Any, Self

from farm.errors import Unmeasurable, Unreadable
from farm.types.card_kind import is_cpu_id
from farm.types.details import Absent, Burst, Details
from farm.types.fields import (
    declared,
    figure_from_json,
    figure_json,
    figure_keys,
)
from farm.types.figure import Figure

METHOD = 5  # increased if a code change changes results; readings of another method are not reused
# the same for readings of a CPU. 5 and earlier: like a GPU; 6: one window; 7: outputs in the cache;
# 8: with the time of the clock, without warm data; compiled models were compiled again while they
# were timed, and Python of the farm redirected slow outputs
CPU_METHOD = 9
# flags: the measurement repeats at once
REPEATED = frozenset({"throttled_thermal", "shared", "drifting", "starved"})
# phases in which the measured operator, model or canary runs
_INSIDE = (
    "warm_up",
    "window",
    "burst",
    "canary_window",
)


def method_of(card_id: str) -> int:
    """Return the version of the method that this code uses on a card."""
    return CPU_METHOD if is_cpu_id(card_id) else METHOD


def inside_s(cost_s: Mapping[str, float]) -> float:
    """Return the card time of a reading's and its canary's warm-ups, windows and bursts, in s."""
    return math.fsum(cost_s.get(name, 0.0) for name in _INSIDE)


#: Most bytes of the JSON of a reading's series. An hour of five series at 100 values per second has
#: 40 MB.
MOST_TRACE_BYTES = 64 << 20
_MEASURE_AGAIN = "Measure it again: `farm run MODEL --reuse none`."


@dataclass(frozen=True)
class Trace:
    """The sampled time series of one reading: name -> (times in s since the warm-up began, values).

    Names end with their unit (`power_w`, `energy_mj`, `sm_clock_mhz`, `temperature_c`, ...).
    `window_s` is (begin, end) of the window on the same axis.
    """

    window_s: tuple[float, float]
    series: dict[str, tuple[list[float], list[float]]]

    def pack(self) -> bytes:
        """Return the compressed form for the database."""
        return zlib.compress(
            json.dumps({"window_s": self.window_s, "series": self.series}).encode(), 6
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """The inverse of `pack`. Raises `Unreadable` for data that is damaged, or larger than
        `MOST_TRACE_BYTES`.
        """
        unpacking = zlib.decompressobj()
        try:
            unpacked = unpacking.decompress(packed, MOST_TRACE_BYTES)
        except zlib.error as error:
            raise Unreadable(
                f"The sampled series of a reading are damaged: {error}.", _MEASURE_AGAIN
            ) from error
        if not unpacking.eof:
            text = (
                f"The sampled series of a reading are cut off, or larger than {MOST_TRACE_BYTES} "
                "bytes."
            )
            raise Unreadable(text, _MEASURE_AGAIN)
        data = json.loads(unpacked)
        series = {name: (times, values) for name, (times, values) in data["series"].items()}
        return cls((data["window_s"][0], data["window_s"][1]), series)


@dataclass(frozen=True)
class Reading:
    """The result for a tuple or model, card, software and protocol: time, power, energy, their
    intervals, and flags.

    Times are of one pass, in microseconds. If the card cannot report a value, the value is None and
    a flag says so."""

    time_us: Figure = declared(
        MISSING, "one pass: the mean over the window (the median if there is no power)", unit="µs"
    )
    time_median_us: float = declared(MISSING, "median over the window", unit="µs")
    time_trimmed_us: float = declared(
        MISSING, "mean without values beyond three standard deviations", unit="µs"
    )
    passes: int = declared(MISSING, "passes in the window")
    window_s: float = declared(MISSING, "length of the window", unit="s")
    warm_up_s: float = declared(MISSING, "length of the warm-up", unit="s")
    power_w: Figure | None = declared(
        None, "mean over the window; empty if the card has no sensor", unit="W"
    )
    power_source: str = declared(
        "", "energy_counter, instant_power, average_power, rapl or simulated"
    )
    energy_mj: Figure | None = declared(None, "one pass, gross", unit="mJ")
    idle_power_w: float | None = declared(None, "the card at rest", unit="W")
    base_power_w: float | None = declared(None, "the card at full clocks without work", unit="W")
    sm_clock_mhz: float | None = declared(None, "mean clock of the multiprocessors", unit="MHz")
    memory_clock_mhz: float | None = declared(None, "mean clock of the memory", unit="MHz")
    temperature_c: float | None = declared(None, "mean temperature", unit="°C")
    throttle_reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    details: Details = field(default_factory=Details)  # other states, cross-checks
    # card time by phase: rebuild, warm_up, window ...
    cost_s: dict[str, float] = field(default_factory=dict)
    trace: Trace | None = None

    def noting(self, **changed: Any) -> Self:
        """Return a copy of the reading with these fields changed in its details."""
        return replace(self, details=replace(self.details, **changed))

    def lacking(self, figure: Absent, because: str) -> Self:
        """Return a copy of the reading whose details say why a figure is missing."""
        return replace(self, details=self.details.lacking(figure, because))

    def without(self, other: Self) -> Self:
        """Return the reading of a pass without the work of another reading, which each pass
        contains.

        Bursts are at most a little faster than the other reading's window, because that work is
        limited by memory."""
        time_us = self.time_us.minus(other.time_us)
        energy_mj, power_w = self.energy_mj, self.power_w
        if self.energy_mj is not None and other.energy_mj is not None:
            energy_mj = self.energy_mj.minus(other.energy_mj)
            mean_w = energy_mj.value / time_us.value * 1e3 if time_us.value > 0 else 0.0
            power_w = Figure(mean_w, power_w.half_width if power_w else 0.0)

        burst = self.details.burst
        if burst is not None and burst.time_us.value:
            burst = _burst_without(burst, other)
        timing = replace(self.details.timing, restore_us=round(other.time_us.value, 4))
        return replace(
            self,
            time_us=time_us,
            time_median_us=self.time_median_us - other.time_median_us,
            time_trimmed_us=self.time_trimmed_us - other.time_trimmed_us,
            power_w=power_w,
            energy_mj=energy_mj,
            details=replace(self.details, timing=timing, burst=burst),
            flags=tuple(sorted({*self.flags, *other.flags})),
        )

    def plausible(self) -> Self:
        """Return the reading without powers and energies that are not positive. The flag
        `no_energy` replaces them. Further figures in its details that are not positive are left
        out, with the reason. Raises `Unmeasurable` if a time of the reading is not positive."""
        for name, value in (
            ("time_us", self.time_us.value),
            ("time_median_us", self.time_median_us),
            ("time_trimmed_us", self.time_trimmed_us),
        ):
            if value <= 0:
                text = f"The measured time of a pass is not positive: {name} is {value:.6g}."
                raise Unmeasurable("not_positive", text, "Measure it again, with a longer window.")

        details, why = self.details, "the measured figures are not positive"
        burst, replay = details.burst, details.order.in_order
        if burst is not None and _is_not_positive(burst.time_us, burst.power_w, burst.energy_mj):
            details = replace(details, burst=None)
        if replay is not None and _is_not_positive(replay.time_us, replay.energy_mj):
            order = replace(details.order, in_order=None)
            details = replace(details, order=order).lacking("in_order", why)
        if _is_not_positive(details.timing.eager_time_us):
            timing = replace(details.timing, eager_time_us=None)
            details = replace(details, timing=timing).lacking("eager_time", why)

        plausible = replace(self, details=details)
        if _is_not_positive(self.power_w, self.energy_mj):
            plausible = replace(plausible, power_w=None, energy_mj=None).flagged("no_energy")
        return plausible

    def flagged(self, *flags: str) -> Self:
        """Return a copy of the reading with more flags. The flags are sorted."""
        return replace(self, flags=tuple(sorted({*self.flags, *flags})))

    def columns(self) -> dict[str, Any]:
        """Return the values by the names of their columns, without the trace. A figure is two
        numbers.
        """
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name in _FIGURES:
                values |= figure_json(*_FIGURES[name], value)
            elif name != "trace":
                values[name] = value
        values["details"] = self.details.to_json()
        return values

    def to_json(self) -> dict[str, Any]:
        data = self.columns()
        data["trace"] = base64.b64encode(self.trace.pack()).decode() if self.trace else None
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values: dict[str, Any] = dict(data)
        for name, (quantity, unit) in _FIGURES.items():
            values[name] = figure_from_json(data, quantity, unit)
            del values[figure_keys(quantity, unit)[1]]
        packed = data.get("trace")
        values["throttle_reasons"] = tuple(data.get("throttle_reasons", ()))
        values["flags"] = tuple(data.get("flags", ()))
        values["details"] = Details.from_json(data.get("details"))
        values["trace"] = Trace.unpack(base64.b64decode(packed)) if packed else None
        return cls(**values)


#: Figure of a reading -> its quantity and unit.
_FIGURES = {"time_us": ("time", "us"), "power_w": ("power", "w"), "energy_mj": ("energy", "mj")}


def _burst_without(burst: Burst, other: Reading) -> Burst:
    """The burst of `Reading.without`. It keeps its half-widths and its power; the errors of the
    other reading are not added."""
    time_us = replace(burst.time_us, value=burst.time_us.value - other.time_us.value)
    energy_mj = burst.energy_mj
    if energy_mj is not None and other.energy_mj is not None:
        energy_mj = replace(energy_mj, value=energy_mj.value - other.energy_mj.value)
    return replace(burst, time_us=time_us, energy_mj=energy_mj)


def _is_not_positive(*figures: Figure | None) -> bool:
    return any(figure is not None and figure.value <= 0 for figure in figures)
