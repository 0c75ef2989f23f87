"""The result of a measurement (`Reading` with `Trace` and `Details`), and the `Verification` of a
capture.

The benchmark process sends a reading to the farm, which stores its figures as columns and its
details as JSON. Only this module writes and parses that JSON. Field names end with the unit. None
means "not examined" or "the card cannot report it", never zero."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, Self, cast, get_args, get_type_hints

from farm.errors import Unmeasurable, Unreadable
from farm.types.fields import adapter, declared, names_of

METHOD = 5  # increased if a code change changes results; readings of another method are not reused
# the same for readings of a CPU. 5 and earlier: like a GPU; 6: one window; 7: outputs in the cache
CPU_METHOD = 8
TimeFigure = Literal["mean", "median", "fastest"]  # the figure of a window in `Reading.time_us`
REPEATED = frozenset(
    {"throttled_thermal", "shared", "drifting", "starved"}
)  # flags: the measurement repeats at once
_INSIDE = (
    "warm_up",
    "window",
    "burst",
    "canary_window",
)  # phases in which the measured operator, model or canary runs


def method_of(card_id: str) -> int:
    """Return the version of the method that this code uses on a card."""
    return CPU_METHOD if card_id.startswith("CPU-") else METHOD


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
class Burst:
    """The measurement of a power-limited operator in bursts with pauses, which allow higher clocks.
    Figures are for one pass. Half-widths are absolute, for the 95 % interval. See
    `farm.benchmark.clock`."""

    time_us: float = declared(
        MISSING,
        "time of one pass in bursts at full clocks, if the loop reaches the power limit",
        unit="µs",
    )
    time_half_width_us: float | None = declared(
        None, "half-width of the 95 % interval of burst_time_us", unit="µs"
    )
    power_w: float | None = declared(
        None, "mean power in bursts", unit="W"
    )  # during a pass, without the pauses
    power_half_width_w: float | None = None
    energy_mj: float | None = declared(None, "energy of one pass in bursts", unit="mJ")
    energy_half_width_mj: float | None = declared(
        None, "half-width of the 95 % interval of burst_energy_mj", unit="mJ"
    )
    # The mean over both duty cycles:
    sm_clock_mhz: float | None = declared(
        None, "mean clock of the multiprocessors in bursts", unit="MHz"
    )
    pause_power_w: float | None = None  # power between two bursts
    # duty cycles (share of time with work), the higher first
    duties: tuple[float, ...] | None = None
    duty_power_w: tuple[float, ...] | None = None  # mean power at each duty cycle
    # reason -> share of samples, the larger of both duty cycles
    throttle_shares: Mapping[str, float] | None = None
    passes: int | None = None  # number of passes in both duty cycles


@dataclass(frozen=True)
class InContext:
    """The time of an operator in a loop, and how much longer it takes among other operators. Unit:
    µs per pass. Both are measured on the same memory at the same clocks
    (`farm.benchmark.cache`)."""

    alone_us: float  # time in a loop, with as much of weights and inputs in the cache as possible
    effect_us: float  # time that the other operators add
    effect_half_width_us: float | None = None  # of the 95 % interval
    # passes among others; 0: not timed, as the effect on a long pass is negligible
    passes: int | None = None


@dataclass(frozen=True)
class Place:
    """The time that a call takes longer at its place in a model than in a loop on warm data: mean
    over the calls. See `farm.benchmark.call_context`."""

    effect_us: float
    half_width_us: float  # of the 95 % interval
    calls: int


@dataclass(frozen=True)
class InOrder:
    """One pass of all calls of a model, replayed in order from its tuples, without events between
    them. Its energy shows the power while kernels wait for code and data
    (`farm.verdict.replay.WaitingPower`)."""

    time_us: float
    time_half_width_us: float
    energy_mj: float
    energy_half_width_mj: float
    temperature_c: float | None = None


@dataclass(frozen=True)
class CanaryNote:
    """The last measurement of the reference operator before a reading, in the same process
    (`farm.benchmark.checks`). Figures are for one pass. Changes are relative to the first
    undisturbed canary of the process."""

    number: int  # number of the canary in its process, from 1
    time_us: float
    process: int | None = None  # the process's id on its host
    power_w: float | None = None
    energy_mj: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    flags: tuple[str, ...] = ()
    time_change: float | None = None
    energy_change: float | None = None
    cost_s: float | None = None  # total card time of the canary


@dataclass(frozen=True)
class Overlap:
    """A collective and a matrix product that run at the same time, and each alone. Times of one
    pass, in µs.

    What the pair takes longer than the product is the exposed communication. The rest of the
    collective is hidden."""

    collective_us: float
    product_us: float
    together_us: float
    exposed_us: float
    hidden_us: float

    @classmethod
    def of(cls, collective_us: float, product_us: float, together_us: float) -> Self:
        exposed_us = together_us - product_us
        return cls(collective_us, product_us, together_us, exposed_us, collective_us - exposed_us)


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank in a reading on several cards. Figures are for one pass."""

    card: str
    time_us: float
    energy_mj: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    flags: tuple[str, ...] = ()


class _Stored:
    """A record that is stored as JSON. `other` contains the keys that this version does not
    know.
    """

    other: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: field name -> value, without fields that are None."""
        values = {name: getattr(self, name) for name in names_of(type(self)) if name != "other"}  # type: ignore[arg-type]
        return {
            **self.other,
            **{name: _plain(value) for name, value in values.items() if value is not None},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Parse JSON of any version. Missing keys become None; unknown keys are stored in
        `other`.
        """
        data = data or {}
        names = frozenset(names_of(cls)) - {"other"}  # type: ignore[arg-type]
        values = {name: _parsed(name, value) for name, value in data.items() if name in names}
        # A job has tens of thousands of readings, and few of the fifty fields of `Details` are set.
        # So only these are assigned; the other fields use the defaults of the class.
        record = cls.__new__(cls)
        vars(record).update(values, other={name: data[name] for name in data.keys() - names})
        return record


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], RankFigures):
        return [dataclasses.asdict(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, InModelTimes):
        return {name: item for name, item in dataclasses.asdict(value).items() if item is not None}
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def _parsed(name: str, value: Any) -> Any:
    """Parse a field's value: lists become tuples, objects become records; an incomplete record
    becomes None.
    """
    if value is None or name not in _PARTS:
        return tuple(value) if isinstance(value, list) else value
    try:
        return adapter(_PARTS[name]).validate_python(value)
    except ValueError:
        if name in names_of(Verification):
            raise
        return None


@dataclass(frozen=True)
class Details(_Stored):
    """The details of a reading. Times are for one pass. Half-widths are absolute, for the 95 %
    interval.
    """

    method: int | None = None  # `METHOD` or `CPU_METHOD` of the code that measured

    # what ran on the card
    copies: int | None = None  # copies of the tensors: the passes use one after the other
    passes_per_round: int | None = None  # a round is launched and timed as one
    copies_wanted_more: bool | None = None  # True: too few copies for the requested residency
    parameter_bytes: int | None = None  # of a whole model, with buffers
    # of a whole model: peak memory that one pass allocates
    activation_peak_bytes: int | None = None
    # of a training step on a GPU: peak of all allocated memory
    allocated_peak_bytes: int | None = None
    # of a training step: memory that PyTorch's allocator reserved
    reserved_peak_bytes: int | None = None
    # part of the allocated memory: workspaces that cuBLAS keeps between calls
    workspace_bytes: int | None = None
    # share of a pass's data that is still in the cache at the next pass, 0 to 1
    found_again: float | None = None
    threads: int | None = None  # of a CPU
    slow_memory: str | None = None  # of a tuple with a placement: which memory was slow
    # where library workspaces were: fast, or possibly with the output
    workspaces: str | None = None
    # of a kernel or collective: what restored its inputs before each pass; subtracted
    restore_us: float | None = None
    # Of a CUDA graph, by operator (`farm.benchmark.host_steps`):
    # copies between host and card in a pass, with values recorded before
    host_copies: Mapping[str, int] | None = None
    # eager time of the operators that the pass leaves out
    left_out_us: Mapping[str, float] | None = None
    # number of windows, if the first was hot, shared, drifting or starved
    attempts: int | None = None

    # the window: time
    rounds: int | None = None
    late_rounds: int | None = None  # rounds launched when the card was already idle
    starved_share: float | None = None  # share of the window in which the card waited for the host
    time_figure: TimeFigure | None = None  # the figure in `Reading.time_us`
    time_mean_us: float | None = None
    time_mean_half_width_us: float | None = None
    time_median_half_width_us: float | None = None
    time_trimmed_half_width_us: float | None = None
    turns_group: str | None = None  # of a CPU: id of the readings whose subjects were timed in turn
    # of a CPU: for each turn, `time_us` without its passes
    without_turn_us: tuple[float, ...] | None = None
    # longest allowed window, if the window ended before it converged
    ceiling_s: float | None = None

    # the window: power
    ticks: int | None = None  # ticks of the energy counter within the window
    ramp_ticks_dropped: int | None = None  # first ticks, which still belong to the warm-up
    power_integral_w: float | None = None  # mean of the power sensor, to compare with the counter
    paused_share: float | None = None  # share of the window in which the card paused between passes
    power_drift: float | None = None  # relative change between the halves of the window, if large

    # the card during the window
    # sensors that the card lacks, but that checks of a reading need
    lacks: tuple[str, ...] | None = None
    throttle_shares: Mapping[str, float] | None = None  # reason -> share of the samples
    foreign_processes: tuple[int, ...] | None = None  # ids of other processes on the card
    # of a CPU: share of the window in which it did other work, 0 to 1
    waited_share: float | None = None
    temperature_slope_c_per_s: float | None = None  # during the window
    # before the window of a whole, at the end of the window of a tuple
    warm_up_slope_c_per_s: float | None = None
    memory_temperature_c: float | None = None
    # share of the time that the sampler's thread spent in the driver
    sampler_busy_share: float | None = None

    # of a reading on several cards
    ranks: tuple[RankFigures, ...] | None = None  # in order
    bus_bytes_per_s: float | None = None  # of a collective: bus bandwidth as nccl-tests defines it
    link_bytes_per_s: float | None = None  # peak of the link between the cards, in one direction
    overlap: Overlap | None = None  # of a collective beside a matrix product

    # other states, and cross-checks
    burst: Burst | None = None
    context: InContext | None = None
    context_missing: str | None = None  # why it is missing
    # of a whole in a CUDA graph: the median pass with eager launch
    eager_time_us: float | None = None
    eager_time_half_width_us: float | None = None
    eager_time_missing: str | None = None  # why it is missing
    places: Mapping[str, Place] | None = None  # of a whole in a CUDA graph: by tuple id
    # of a whole on several cards: loops of the tuples, by tuple id
    looped_us: Mapping[str, float] | None = None
    # of collectives: effect relative to a pass without them, not to a loop
    added: Mapping[str, Place] | None = None
    # with the places, if the card has an energy counter and is below its power limit
    in_order: InOrder | None = None
    # of a pass whose data lie at other addresses; with `in_order`
    layouts_half_width_us: float | None = None
    places_missing: str | None = None  # why they are missing
    added_missing: str | None = None  # why it is missing
    in_order_missing: str | None = None  # why it is missing
    canary: CanaryNote | None = None
    unverified: str | None = None  # why a whole could not be verified on its card
    study: Mapping[str, Any] | None = None  # its study: id, name, circumstances
    # of an own model or a test: commit, its time in s, and dirty or clean
    revision: str | None = None

    other: Mapping[str, Any] = field(default_factory=dict)  # keys of other versions

    def to_json(self) -> dict[str, Any]:
        data = super().to_json()
        if self.activation_peak_bytes is not None:
            data["found_again"] = (
                self.found_again
            )  # examined: null means that it could not be determined
        return data


def canary_of(details: Mapping[str, Any]) -> CanaryNote | None:
    """Return the canary's note from the JSON of a reading's details. Much faster than parsing all
    details.
    """
    return cast("CanaryNote | None", _parsed("canary", details.get("canary")))


@dataclass(frozen=True)
class Reading:
    """The result for a tuple or model, card, software and protocol: time, power, energy, their
    intervals, and flags.

    Times are of one pass, in microseconds. Half-widths are absolute, of the 95 % interval. If the
    card cannot report a value, the value is None and a flag says so."""

    time_us: float = declared(
        MISSING, "one pass: the mean over the window (the median if there is no power)", unit="µs"
    )
    time_half_width_us: float = declared(MISSING, "half of its 95 % interval", unit="µs")
    time_median_us: float = declared(MISSING, "median over the window", unit="µs")
    time_trimmed_us: float = declared(
        MISSING, "mean without values beyond three standard deviations", unit="µs"
    )
    passes: int = declared(MISSING, "passes in the window")
    window_s: float = declared(MISSING, "length of the window", unit="s")
    warm_up_s: float = declared(MISSING, "length of the warm-up", unit="s")
    power_w: float | None = declared(
        None, "mean over the window; empty if the card has no sensor", unit="W"
    )
    power_half_width_w: float | None = declared(None, "half of its 95 % interval", unit="W")
    power_source: str = declared(
        "", "energy_counter, instant_power, average_power, rapl or simulated"
    )
    energy_mj: float | None = declared(None, "one pass, gross", unit="mJ")
    energy_half_width_mj: float | None = declared(None, "half of its 95 % interval", unit="mJ")
    idle_power_w: float | None = declared(None, "the card at rest", unit="W")
    base_power_w: float | None = declared(None, "the card at full clocks without work", unit="W")
    sm_clock_mhz: float | None = declared(None, "mean clock of the multiprocessors", unit="MHz")
    memory_clock_mhz: float | None = declared(None, "mean clock of the memory", unit="MHz")
    temperature_c: float | None = declared(None, "mean temperature", unit="°C")
    throttle_reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    details: Details = field(default_factory=Details)  # other states, cross-checks
    cost_s: dict[str, float] = field(
        default_factory=dict
    )  # card time by phase: rebuild, warm_up, window ...
    trace: Trace | None = None

    def noting(self, **found: Any) -> Self:
        """Return a copy of the reading with these fields changed in its details."""
        return dataclasses.replace(self, details=dataclasses.replace(self.details, **found))

    def without(self, other: Self) -> Self:
        """Return the reading of a pass without the work of another reading, which each pass
        contains.

        Bursts are at most a little faster than the other reading's window, because that work is
        limited by memory."""
        values: dict[str, Any] = {
            "time_us": self.time_us - other.time_us,
            "time_median_us": self.time_median_us - other.time_median_us,
            "time_trimmed_us": self.time_trimmed_us - other.time_trimmed_us,
            "time_half_width_us": math.hypot(self.time_half_width_us, other.time_half_width_us),
        }
        details = dataclasses.replace(self.details, restore_us=round(other.time_us, 4))
        if self.energy_mj is not None and other.energy_mj is not None:
            values["energy_mj"] = self.energy_mj - other.energy_mj
            half_widths_mj = self.energy_half_width_mj or 0.0, other.energy_half_width_mj or 0.0
            values["energy_half_width_mj"] = math.hypot(*half_widths_mj)
            values["power_w"] = (
                values["energy_mj"] / values["time_us"] * 1e3 if values["time_us"] > 0 else 0.0
            )
        if (burst := details.burst) is not None and burst.time_us:
            energy_mj = (
                None if burst.energy_mj is None else burst.energy_mj - (other.energy_mj or 0.0)
            )
            burst = dataclasses.replace(
                burst, time_us=burst.time_us - other.time_us, energy_mj=energy_mj
            )
            details = dataclasses.replace(details, burst=burst)
        flags = tuple(sorted({*self.flags, *other.flags}))
        return dataclasses.replace(self, **values, details=details, flags=flags)

    def plausible(self) -> Self:
        """Return the reading without powers and energies that are not positive. The flag
        `no_energy` replaces them. Further figures in its details that are not positive are left
        out, with the reason. Raises `Unmeasurable` if a time of the reading is not positive."""
        for name, value in (
            ("time_us", self.time_us),
            ("time_median_us", self.time_median_us),
            ("time_trimmed_us", self.time_trimmed_us),
        ):
            if value <= 0:
                text = f"The measured time of a pass is not positive: {name} is {value:.6g}."
                raise Unmeasurable("not_positive", text, "Measure it again, with a longer window.")
        reading, why = self, "the measured figures are not positive"
        burst, replay, eager_us = (
            self.details.burst,
            self.details.in_order,
            self.details.eager_time_us,
        )
        if burst is not None and _is_not_positive(burst.time_us, burst.power_w, burst.energy_mj):
            reading = reading.noting(burst=None)
        if replay is not None and _is_not_positive(replay.time_us, replay.energy_mj):
            reading = reading.noting(in_order=None, in_order_missing=why)
        if _is_not_positive(eager_us):
            reading = reading.noting(eager_time_us=None, eager_time_missing=why)
        if _is_not_positive(self.power_w, self.energy_mj):
            absent: dict[str, Any] = dict.fromkeys(
                ("power_w", "power_half_width_w", "energy_mj", "energy_half_width_mj")
            )
            reading = dataclasses.replace(reading, **absent).flagged("no_energy")
        return reading

    def flagged(self, *flags: str) -> Self:
        """Return a copy of the reading with more flags. The flags are sorted."""
        return dataclasses.replace(self, flags=tuple(sorted({*self.flags, *flags})))

    def to_json(self) -> dict[str, Any]:
        data = dict(vars(self))
        data["details"] = self.details.to_json()
        data["trace"] = base64.b64encode(self.trace.pack()).decode() if self.trace else None
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        packed = data.get("trace")
        parsed = {
            "throttle_reasons": tuple(data.get("throttle_reasons", ())),
            "flags": tuple(data.get("flags", ())),
            "details": Details.from_json(data.get("details")),
            "trace": Trace.unpack(base64.b64decode(packed)) if packed else None,
        }
        return cls(**{**data, **parsed})


def _is_not_positive(*values: float | None) -> bool:
    return any(value is not None and value <= 0 for value in values)


def of_ranks(readings: Sequence[Reading], card_ids: Sequence[str]) -> Reading:
    """The reading of a group from those of its ranks: the time of the slowest, the power and energy
    of all cards.

    Ranks that share a card, such as the CPU, have measured the same power: it counts once.
    """
    slowest = max(readings, key=lambda one: one.time_us)
    of_card = {
        card_id: reading for reading, card_id in zip(readings, card_ids, strict=True)
    }.values()
    summed = ("power_w", "power_half_width_w", "energy_mj", "energy_half_width_mj")
    bursts = [reading.details.burst for reading in of_card if reading.details.burst is not None]
    burst = max(bursts, key=lambda one: one.time_us) if len(bursts) == len(of_card) else None
    if burst is not None:
        burst = dataclasses.replace(burst, **_totals(bursts, *summed, "pause_power_w"))
    replays = [
        reading.details.in_order for reading in of_card if reading.details.in_order is not None
    ]
    in_order = max(replays, key=lambda one: one.time_us) if len(replays) == len(of_card) else None
    if in_order is not None:
        in_order = dataclasses.replace(in_order, **_totals(replays, *summed[2:]))
    clocks = [reading.sm_clock_mhz for reading in readings if reading.sm_clock_mhz is not None]
    ranks = tuple(
        RankFigures(
            card_id,
            reading.time_us,
            reading.energy_mj,
            reading.power_w,
            reading.sm_clock_mhz,
            reading.temperature_c,
            reading.flags,
        )
        for reading, card_id in zip(readings, card_ids, strict=True)
    )
    details: dict[str, Any] = {"ranks": ranks, "burst": burst, "in_order": in_order}
    loops = [reading.details.looped_us or {} for reading in readings]
    shared = set.intersection(*map(set, loops))
    details["looped_us"] = {
        key: math.fsum(loop[key] for loop in loops) / len(loops)
        for key in loops[0]
        if key in shared
    } or None
    details["in_order_missing"] = next(
        (why for reading in readings if (why := reading.details.in_order_missing)), None
    )
    details["places"] = _mean_places([reading.details.places or {} for reading in readings])
    details["added"] = _mean_places([reading.details.added or {} for reading in readings])
    traces = [reading.trace for reading in readings]
    series = {
        f"rank_{rank}_{name}" if rank else name: values
        for rank, trace in enumerate(traces)
        for name, values in (trace.series.items() if trace else ())
    }
    return dataclasses.replace(
        slowest,
        **_totals(list(of_card), *summed, "base_power_w"),
        idle_power_w=None,  # a card with ranks does not reach its idle power
        sm_clock_mhz=math.fsum(clocks) / len(clocks) if clocks else None,
        temperature_c=max(
            (reading.temperature_c for reading in readings if reading.temperature_c is not None),
            default=None,
        ),
        throttle_reasons=tuple(
            sorted({name for reading in readings for name in reading.throttle_reasons})
        ),
        flags=tuple(sorted({name for reading in readings for name in reading.flags})),
        details=dataclasses.replace(slowest.details, **details),
        trace=Trace(traces[0].window_s, series) if traces[0] else None,
    )


def _mean_places(of_ranks: Sequence[Mapping[str, Place]]) -> dict[str, Place] | None:
    """The mean over the ranks, because a rank that is early waits in a collective for the
    others.
    """
    means = {}
    for tuple_id, first in of_ranks[0].items():
        each = [places[tuple_id] for places in of_ranks if tuple_id in places]
        half_width_us = math.hypot(*(place.half_width_us for place in each)) / len(each)
        means[tuple_id] = Place(
            math.fsum(place.effect_us for place in each) / len(each), half_width_us, first.calls
        )
    return means or None


def _totals(figures: Sequence[Any], *names: str) -> dict[str, Any]:
    """The sums of fields over all cards; None if one card lacks the figure. Half-widths add up in
    squares.
    """
    values = {name: [getattr(figure, name) for figure in figures] for name in names}
    add = {
        name: math.hypot if "half_width" in name else lambda *each: math.fsum(each)
        for name in names
    }
    return {name: None if None in each else add[name](*each) for name, each in values.items()}


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
class Verification(_Stored):
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

    def ran_as(self, request: Mapping[str, Any]) -> bool:
        """True if the pass had the numeric flags of a job's request."""
        protocol = request.get("protocol") or {}
        return all(
            protocol.get(name, False) == value for name, value in (self.numerics or {}).items()
        )


def _holds_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(map(_holds_record, get_args(hint)))


#: Field -> type, for the fields of details and verifications that are or contain records.
_HINTS = get_type_hints(Details) | get_type_hints(Verification)
_PARTS = {name: hint for name, hint in _HINTS.items() if _holds_record(hint)}
