"""The result of a measurement (`Reading` with `Trace`), and the `Verification` of a capture.

The benchmark process sends a reading to the farm, which stores its figures as columns and its
details as JSON (`farm.types.details`). Field names end with the unit. None
means "not examined" or "the card cannot report it", never zero."""

from __future__ import annotations

import base64
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from typing import Any, Self

from farm.errors import Unmeasurable, Unreadable
from farm.types.card_kind import is_cpu_id
from farm.types.details import Absent, Burst, CallOrder, Details, Place, RankFigures
from farm.types.fields import (
    declared,
    figure_from_json,
    figure_json,
    figure_keys,
)
from farm.types.figure import Figure, exact, total_of, value_of
from farm.types.stored import plain, stored_fields

METHOD = 5  # increased if a code change changes results; readings of another method are not reused
# the same for readings of a CPU. 5 and earlier: like a GPU; 6: one window; 7: outputs in the cache;
# 8: compiled models were compiled again while they were timed, and Python of the farm redirected
# slow outputs
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
    time_us = replace(burst.time_us, value=burst.time_us.value - other.time_us.value)
    energy_mj = burst.energy_mj
    if energy_mj is not None and other.energy_mj is not None:
        energy_mj = replace(energy_mj, value=energy_mj.value - other.energy_mj.value)
    return replace(burst, time_us=time_us, energy_mj=energy_mj)


def _is_not_positive(*figures: Figure | None) -> bool:
    return any(figure is not None and figure.value <= 0 for figure in figures)


def of_ranks(readings: Sequence[Reading], card_ids: Sequence[str]) -> Reading:
    """The reading of a group from those of its ranks: the time of the slowest, the power and energy
    of all cards.

    Ranks that share a card, such as the CPU, have measured the same power: it counts once.
    """
    slowest = max(readings, key=lambda reading: reading.time_us.value)
    of_card = list(dict(zip(card_ids, readings, strict=True)).values())
    ranks = [
        RankFigures(
            time_us=Figure(reading.time_us.value),
            energy_mj=exact(reading.energy_mj),
            card=card_id,
            power_w=value_of(reading.power_w),
            sm_clock_mhz=reading.sm_clock_mhz,
            temperature_c=reading.temperature_c,
            flags=reading.flags,
        )
        for reading, card_id in zip(readings, card_ids, strict=True)
    ]
    details = replace(
        slowest.details,
        cards=replace(slowest.details.cards, ranks=tuple(ranks)),
        burst=_burst_of_cards([reading.details.burst for reading in of_card]),
        order=_order_of_ranks(
            slowest.details.order, [reading.details.order for reading in readings], of_card
        ),
    )
    reasons = [reading.details.missing.get("in_order") for reading in readings]
    because = next(filter(None, reasons), None)
    missing = dict(details.missing)
    missing.pop("in_order", None)
    details = replace(details, missing=missing)
    if because is not None:
        details = details.lacking("in_order", because)

    clocks = [reading.sm_clock_mhz for reading in readings if reading.sm_clock_mhz is not None]
    temperatures = [
        reading.temperature_c for reading in readings if reading.temperature_c is not None
    ]
    return replace(
        slowest,
        power_w=total_of((reading.power_w, 1) for reading in of_card),
        energy_mj=total_of((reading.energy_mj, 1) for reading in of_card),
        base_power_w=_sum_of([reading.base_power_w for reading in of_card]),
        idle_power_w=None,  # a card with ranks does not reach its idle power
        sm_clock_mhz=math.fsum(clocks) / len(clocks) if clocks else None,
        temperature_c=max(temperatures, default=None),
        throttle_reasons=_union(reading.throttle_reasons for reading in readings),
        flags=_union(reading.flags for reading in readings),
        details=details,
        trace=_trace_of_ranks([reading.trace for reading in readings]),
    )


def _burst_of_cards(bursts: Sequence[Burst | None]) -> Burst | None:
    """The slowest burst, with the power and energy of all cards; None if one card has none."""
    present = [burst for burst in bursts if burst is not None]
    if len(present) < len(bursts):
        return None
    return replace(
        max(present, key=lambda burst: burst.time_us.value),
        power_w=total_of((burst.power_w, 1) for burst in present),
        energy_mj=total_of((burst.energy_mj, 1) for burst in present),
        pause_power_w=_sum_of([burst.pause_power_w for burst in present]),
    )


def _order_of_ranks(
    slowest: CallOrder, orders: Sequence[CallOrder], of_card: Sequence[Reading]
) -> CallOrder:
    replays = []
    for reading in of_card:
        if reading.details.order.in_order is not None:
            replays.append(reading.details.order.in_order)
    in_order = None
    if len(replays) == len(of_card):
        in_order = replace(
            max(replays, key=lambda replay: replay.time_us.value),
            energy_mj=total_of((replay.energy_mj, 1) for replay in replays),
        )
    loops = [order.looped_us or {} for order in orders]
    looped_us = {}
    for tuple_id in loops[0]:
        if all(tuple_id in loop for loop in loops):
            looped_us[tuple_id] = math.fsum(loop[tuple_id] for loop in loops) / len(loops)
    return replace(
        slowest,
        in_order=in_order,
        looped_us=looped_us or None,
        places=_mean_places([order.places or {} for order in orders]),
        added=_mean_places([order.added or {} for order in orders]),
    )


def _mean_places(of_ranks: Sequence[Mapping[str, Place]]) -> dict[str, Place] | None:
    """The mean over the ranks, because a rank that is early waits in a collective for the
    others.
    """
    means = {}
    for tuple_id, place in of_ranks[0].items():
        effects_us = [places[tuple_id].effect_us for places in of_ranks if tuple_id in places]
        value_us = math.fsum(effect.value for effect in effects_us) / len(effects_us)
        half_width_us = math.hypot(*(effect.half_width for effect in effects_us)) / len(effects_us)
        means[tuple_id] = replace(place, effect_us=Figure(value_us, half_width_us))
    return means or None


def _trace_of_ranks(traces: Sequence[Trace | None]) -> Trace | None:
    if traces[0] is None:
        return None
    series = {}
    for rank, trace in enumerate(traces):
        for name, values in trace.series.items() if trace else ():
            series[f"rank_{rank}_{name}" if rank else name] = values
    return Trace(traces[0].window_s, series)


def _sum_of(values: Sequence[float | None]) -> float | None:
    """The sum; None if a value is unknown."""
    present = [value for value in values if value is not None]
    return math.fsum(present) if len(present) == len(values) else None


def _union(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(sorted(set(itertools.chain.from_iterable(names))))


# ----- the verification of a capture on a card (`farm.benchmark.verification`), stored as JSON with
# the capture


@dataclass(frozen=True)
class Launches:
    """One kernel in one unobserved pass of a whole model: its launches and their total time."""

    count: int
    time_us: float


@dataclass(frozen=True)
class InModelTimes:
    """The time of each call in the running model: the median over several passes."""

    # by tuple id; None: kernels of a call unknown
    calls_us: Mapping[str, tuple[float | None, ...]] | None = None
    # kernels (the sum of a call's kernel times, without gaps) or ranges (wall-clock time)
    source: str | None = None
    passes: int | None = None
    # share of the kernel time that was assigned to calls, 0 to 1; 1 for ranges
    attributed_share: float | None = None
    sum_us: float | None = None  # sum over the calls with known times


@dataclass(frozen=True)
class OtherCalls:
    """A tuple whose number of calls differs between an eager pass and the measured run."""

    operator_id: str
    label: str
    launched: int  # calls in the measured run
    eager: int


@dataclass(frozen=True)
class Eagerly:
    """The differences between an eager pass and the measured run."""

    operators: tuple[OtherCalls, ...] = ()
    # Name -> launches in the measured run and eagerly, if they differ. Older records: {"launched":
    # 0, "eager": 12}.
    kernels: Mapping[str, tuple[int, int] | Mapping[str, int]] = field(default_factory=dict)
    kernel_time_us: float | None = None  # of all kernels of a pass in the measured run
    eager_kernel_time_us: float | None = None


@dataclass(frozen=True)
class Verification:
    """The comparison of a capture with a pass of the model on a card. None: not examined."""

    # of the examined run, graph or eager; None in old records, which are eager
    launch: str | None = None
    not_captured: str | None = None  # why the run is eager although a graph was requested
    eagerly: Eagerly | None = None  # the differences of an eager pass; None if there are none
    # True if prediction and observation agree and the observation changed nothing
    matches: bool | None = None
    # differences of the observed from the unobserved pass, in words
    observer_effect: tuple[str, ...] | None = None
    missing: Mapping[str, int] | None = None  # tuple id -> predicted calls that did not occur
    unexpected: Mapping[str, int] | None = None  # tuple id -> calls that were not predicted
    # tuple id -> how its rebuilt operator differs from the model's call
    mismatches: Mapping[str, str] | None = None
    gaps: tuple[str, ...] | None = None  # in the observed capture, in words
    overlaps: tuple[str, ...] | None = None
    unobserved_kernels: int | None = None  # number of kernels launched in the unobserved pass
    # name -> launches, for the heaviest of these kernels
    kernels: Mapping[str, Launches] | None = None
    # tuple id -> kernel -> launches, rebuilt tuple
    tuple_kernels: Mapping[str, Mapping[str, int]] | None = None
    in_model: InModelTimes | None = None  # the time of each call in the running model
    # the numeric flags (tf32 ...), which decide kernels and times
    numerics: Mapping[str, bool] | None = None
    # from the prediction, in words; only some of `difference_count`
    differences: tuple[str, ...] | None = None
    difference_count: int | None = None
    card: str | None = None  # the id of the card
    read_at_s: float | None = None  # when it was stored, by the database's clock, in s since 1970
    simulated: bool | None = None  # True if no model ran
    other: Mapping[str, Any] = field(default_factory=dict)  # keys of other versions

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: field name -> value, without fields that are None."""
        data: dict[str, Any] = dict(self.other)
        for name, value in vars(self).items():
            if name != "other" and value is not None:
                data[name] = plain(value)
        if self.in_model is not None:
            items = vars(self.in_model).items()
            data["in_model"] = {name: value for name, value in items if value is not None}
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Parse JSON of any version. Missing keys become None; unknown keys are stored in `other`.
        Raises ValueError for an incomplete record.
        """
        data = data or {}
        values = {}
        for entry in stored_fields(cls):  # type: ignore[arg-type]
            if entry.name in data and entry.name != "other":
                values[entry.name] = entry.parse(data)
        other = {name: value for name, value in data.items() if name not in values}
        return cls(**values, other=other)

    def ran_as(self, request: Mapping[str, Any]) -> bool:
        """True if the pass had the numeric flags of a job's request."""
        protocol = request.get("protocol") or {}
        return all(
            protocol.get(name, False) == value for name, value in (self.numerics or {}).items()
        )
