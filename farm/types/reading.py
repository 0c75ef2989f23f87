"""What came out of a measurement: a `Reading` with its sampled `Trace`, and what else was found beside it (`Details`).

A reading travels from the benchmark process to the farm and is stored: its figures as columns, its details as JSON.
This is the only place where that JSON is made and read. Data sets are made of it, so every field has its unit in its
name, and None always stands for "not looked at, or the card cannot tell", never for zero.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, Self, cast

from farm.types.fields import declared

METHOD = 5  # raised when a change of the code changes what a reading says; readings of another are not reused
REPEATED = frozenset({"throttled_thermal", "shared", "drifting", "starved"})  # flags of what is read again at once
INSIDE = ("warm_up", "window", "burst", "canary_window")  # costs that are the subject, or the canary, running


def inside_s(cost_s: Mapping[str, float]) -> float:
    """The card time of a reading's warm-ups and windows, with those of its canary. Unit: s."""
    return math.fsum(cost_s.get(name, 0.0) for name in INSIDE)


@dataclass(frozen=True)
class Trace:
    """The sampled time series of one reading: name -> (times in s since the warm-up began, values).

    Names carry their unit (`power_w`, `energy_mj`, `sm_clock_mhz`, `temperature_c`, ...).
    `window_s` is (begin, end) of the window on the same axis.
    """

    window_s: tuple[float, float]
    series: dict[str, tuple[list[float], list[float]]]

    def pack(self) -> bytes:
        """Compressed form, as stored."""
        return zlib.compress(json.dumps({"window_s": self.window_s, "series": self.series}).encode(), 6)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        data = json.loads(zlib.decompress(packed))
        series = {name: (times, values) for name, (times, values) in data["series"].items()}
        return cls((data["window_s"][0], data["window_s"][1]), series)


@dataclass(frozen=True)
class Burst:
    """An operator at the power limit, read in bursts between pauses, at the clocks that these leave it
    (`farm.benchmark.clock`).

    Figures are of one pass, half-widths absolute, of the 95 % interval.
    """

    time_us: float
    time_half_width_us: float | None = None
    power_w: float | None = None  # of the pass itself, the pauses taken out
    power_half_width_w: float | None = None
    energy_mj: float | None = None
    energy_half_width_mj: float | None = None
    sm_clock_mhz: float | None = None  # mean over both duties
    pause_power_w: float | None = None  # what the card draws between two bursts
    duties: tuple[float, ...] | None = None  # shares of the time that were work, the higher first
    duty_power_w: tuple[float, ...] | None = None  # mean power at each of these duties
    throttle_shares: Mapping[str, float] | None = None  # reason -> share of the samples, the larger of both duties
    passes: int | None = None  # of both duties together


@dataclass(frozen=True)
class InContext:
    """An operator alone and among others, on the same memory, at the same clocks (`farm.benchmark.cache`).

    Times are of one pass.
    """

    alone_us: float  # looped, weights and inputs as warm as they get
    effect_us: float  # what the others add
    effect_half_width_us: float | None = None  # of the 95 % interval
    passes: int | None = None  # timed among others; 0: too long for the effect to matter, and not looked at


@dataclass(frozen=True)
class Place:
    """What the place of a tuple's calls in a model adds to one of them, against the operator looped with everything
    warm (`farm.benchmark.call_context`). The mean over the calls."""

    effect_us: float
    half_width_us: float  # of the 95 % interval
    calls: int


@dataclass(frozen=True)
class CanaryNote:
    """The reference operator as it was last read before a reading, in the same process (`farm.benchmark.checks`).

    Figures are of one pass of the reference operator. Changes are fractions, against the process's first canary that
    was not disturbed.
    """

    number: int  # of the process's canaries, from 1
    time_us: float
    process: int | None = None  # the process's id on its host
    power_w: float | None = None
    energy_mj: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    flags: tuple[str, ...] = ()
    time_change: float | None = None
    energy_change: float | None = None
    cost_s: float | None = None  # card time that it took, everything included


_PARTS: dict[str, type] = {"burst": Burst, "context": InContext, "canary": CanaryNote}


@dataclass(frozen=True)
class Details:
    """What a reading found beside its figures. Times are of one pass; half-widths absolute, of the 95 % interval.

    `other` holds what this version does not know, as it was written.
    """

    method: int | None = None  # `METHOD` of the code that took it

    # what was run
    copies: int | None = None  # of the tensors that the passes walk through in turn
    passes_per_round: int | None = None  # a round is launched and timed at once
    copies_wanted_more: bool | None = None  # True: too few copies for the residency that was asked for
    parameter_bytes: int | None = None  # of a whole model, buffers included
    activation_peak_bytes: int | None = None  # of a whole model: most allocated in one pass, beyond what was before it
    allocated_peak_bytes: int | None = (
        None  # of a training step on a GPU: most allocated at once, all that it holds included
    )
    reserved_peak_bytes: int | None = (
        None  # of a training step on a GPU: what PyTorch's allocator had of the card meanwhile
    )
    workspace_bytes: int | None = None  # of what is allocated: workspaces that cuBLAS keeps from call to call
    found_again: float | None = None  # share of what a pass touches that the cache still holds at the next, 0 to 1
    threads: int | None = None  # of a CPU
    slow_memory: str | None = None  # of a tuple with a placement: what was slow
    workspaces: str | None = None  # of the same: where a library's workspaces were, fast or may be with the output
    attempts: int | None = None  # windows read, where the first was hot, shared, drifting or starved

    # the window: time
    rounds: int | None = None
    late_rounds: int | None = None  # launched when the card had nothing left to do
    starved_share: float | None = None  # of the window's time, in which the card waited for the host
    time_figure: Literal["mean", "median"] | None = None  # which of them `Reading.time_us` is
    time_mean_us: float | None = None
    time_mean_half_width_us: float | None = None
    time_median_half_width_us: float | None = None
    time_trimmed_half_width_us: float | None = None
    ceiling_s: float | None = None  # the longest window that was allowed, where it did not converge within

    # the window: power
    ticks: int | None = None  # of the energy counter, that the window holds
    ramp_ticks_dropped: int | None = None  # first ticks that were still warm-up
    power_integral_w: float | None = None  # the power sensor's mean, beside the counter's
    power_drift: float | None = None  # second half against the first, a fraction, where that is much

    # the card meanwhile
    lacks: tuple[str, ...] | None = None  # what it does not tell of what a reading is known to be good by
    throttle_shares: Mapping[str, float] | None = None  # reason -> share of the samples
    foreign_processes: tuple[int, ...] | None = None  # process ids seen on the card that are not the benchmark's
    foreign_cpu_share: float | None = None  # of a CPU's cores: their time that other processes had, 0 to 1
    temperature_slope_c_per_s: float | None = None  # within the window
    warm_up_slope_c_per_s: float | None = None  # when the warm-up ended
    memory_temperature_c: float | None = None
    sampler_busy_share: float | None = None  # of the time, that the sampler's thread spent in the driver

    # other states, and second opinions
    burst: Burst | None = None
    context: InContext | None = None
    context_missing: str | None = None  # why there is none
    eager_time_us: float | None = None  # of a replayed whole: one pass launched eagerly, the median
    eager_time_half_width_us: float | None = None
    eager_time_missing: str | None = None  # why there is none
    places: Mapping[str, Place] | None = None  # of a whole that is replayed: by tuple id
    places_missing: str | None = None  # why there are none
    canary: CanaryNote | None = None
    unverified: str | None = None  # why a whole could not be verified on its card
    study: Mapping[str, Any] | None = None  # the study that it was read for: id, name, circumstances

    other: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON by field name, without None."""
        found = {name: value for name in _NAMES if (value := getattr(self, name)) is not None}
        if self.activation_peak_bytes is not None:
            found["found_again"] = self.found_again  # looked at: null says that it could not be told
        if self.places is not None:
            found["places"] = {tuple_id: dataclasses.asdict(place) for tuple_id, place in self.places.items()}
        return {**self.other, **found, **{name: dataclasses.asdict(found[name]) for name in _PARTS if name in found}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Read JSON of any version: missing keys become None, unknown ones go to `other`."""
        data = data or {}
        values = known(cls, data)
        for name in values.keys() & _PARTS.keys():
            values[name] = _part(_PARTS[name], values[name])
        if places := values.get("places"):
            values["places"] = {tuple_id: Place(**known(Place, one)) for tuple_id, one in places.items()}
        other = {name: data[name] for name in data.keys() - values.keys()} if len(values) < len(data) else {}
        # Of its fifty fields a reading has five, and a job tens of thousands of readings: the class has what all others
        # are.
        details = cls.__new__(cls)
        vars(details).update(values, other=other)
        return details


_NAMES = tuple(entry.name for entry in dataclasses.fields(Details) if entry.name != "other")


@functools.cache
def _fields(kind: type) -> frozenset[str]:
    return frozenset(entry.name for entry in dataclasses.fields(kind)) - {"other"}


def known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The part of JSON of any version that a dataclass has fields for; lists become tuples."""
    names = _fields(kind)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in names}


def canary_of(details: Mapping[str, Any]) -> CanaryNote | None:
    """The canary's note alone, from the JSON of a reading's details: for who looks through thousands of them."""
    return cast("CanaryNote | None", _part(CanaryNote, details.get("canary")))


def _part(kind: type, data: Any) -> Any:
    """A part of the details; None where there is none, or it lacks what makes it one."""
    if data is None:
        return None
    try:
        return kind(**known(kind, data))
    except (TypeError, AttributeError):
        return None


@dataclass(frozen=True)
class Reading:
    """One result: subject x card x software x protocol -> time, power, energy, their intervals, flags.

    Times are of one pass, in microseconds; half-widths are absolute, of the 95 % interval. What the card
    cannot tell is None and has a flag, never zero.
    """

    time_us: float = declared(
        MISSING, "one pass: the mean over the window (the median if there is no power)", unit="µs"
    )
    time_half_width_us: float = declared(MISSING, "half of its 95 % interval", unit="µs")
    time_median_us: float = declared(MISSING, "median over the window", unit="µs")
    time_trimmed_us: float = declared(MISSING, "mean without values beyond three standard deviations", unit="µs")
    passes: int = declared(MISSING, "passes in the window")
    window_s: float = declared(MISSING, "length of the window", unit="s")
    warm_up_s: float = declared(MISSING, "length of the warm-up", unit="s")
    power_w: float | None = declared(None, "mean over the window; empty if the card has no sensor", unit="W")
    power_half_width_w: float | None = declared(None, "half of its 95 % interval", unit="W")
    power_source: str = declared("", "energy_counter, instant_power, average_power, rapl or simulated")
    energy_mj: float | None = declared(None, "one pass, gross", unit="mJ")
    energy_half_width_mj: float | None = declared(None, "half of its 95 % interval", unit="mJ")
    idle_power_w: float | None = declared(None, "the card at rest", unit="W")
    base_power_w: float | None = declared(None, "the card at full clocks without work", unit="W")
    sm_clock_mhz: float | None = declared(None, "mean clock of the multiprocessors", unit="MHz")
    memory_clock_mhz: float | None = declared(None, "mean clock of the memory", unit="MHz")
    temperature_c: float | None = declared(None, "mean temperature", unit="°C")
    throttle_reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    details: Details = field(default_factory=Details)  # other states of the subject, cross-checks, copies made ...
    cost_s: dict[str, float] = field(default_factory=dict)  # where the card's time went: rebuild, warm_up, window ...
    trace: Trace | None = None

    def noting(self, **found: Any) -> Self:
        """The same reading with other fields of its details."""
        return dataclasses.replace(self, details=dataclasses.replace(self.details, **found))

    def flagged(self, *flags: str) -> Self:
        """The same reading with more flags, sorted."""
        return dataclasses.replace(self, flags=tuple(sorted({*self.flags, *flags})))

    def to_json(self) -> dict[str, Any]:
        data = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        data["details"] = self.details.to_json()
        data["trace"] = base64.b64encode(self.trace.pack()).decode() if self.trace else None
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values = dict(data)
        packed = values.pop("trace", None)
        values["throttle_reasons"] = tuple(values.get("throttle_reasons", ()))
        values["flags"] = tuple(values.get("flags", ()))
        values["details"] = Details.from_json(values.get("details"))
        return cls(**values, trace=Trace.unpack(base64.b64decode(packed)) if packed else None)


#: Flag -> its meaning, for people; `docs/method.md` has the same text.
FLAGS: dict[str, str] = {
    "not_converged": "the window reached its maximum length before the interval was narrow enough",
    "few_passes": "fewer than three rounds: the interval is as wide as the figure",
    "no_energy": "the card reports no power: time only",
    "lesser_power_source": "power from samples instead of the energy counter",
    "power_disagrees": "counter and integrated instant power differ by more than 2 %",
    "drifting": "the power of the two halves of the window differs by more than 3 %, also after repetition",
    "starved": "the card waited for the host for more than 0.5 % of the window, also after repetition",
    "unsettled": "the temperature was still changing when the window had to open, or the wait was too short to decide",
    "lacks_sensors": (
        "the card does not report something that a reading is judged by (lacks in the details): processes, "
        "throttle reasons, temperature, clock, instant power"
    ),
    "not_cold": "under stream: there are too few copies to exceed the cache",
    "values_moved": "the operator writes its input, and the values there grew, shrank or overflowed from pass to pass",
    "canary_off": (
        "the reference operator had changed by more than 3 % at the time of the reading; in a report also: "
        "by its next measurement"
    ),
    "throttled_power": "the power limit lowered the clocks; a burst reading is stored beside it",
    "throttled_thermal": "heat lowered the clocks, also after repetition",
    "throttled_other": "hardware slowdown, power brake or sync boost",
    "shared": "another process computed on the card",
    "busy_host": (
        "on a CPU: other processes used more than 10 % of the cores' time in the window (foreign_cpu_share "
        "in the details of every reading on a CPU whose kernel reports it). Not checked for a GPU: a host "
        "too busy to feed it shows as starved"
    ),
    "study": "taken by farm study under its own conditions; never reused",
    "simulated": "not a measurement; never reused",
}


# ----- verification of a capture on a card (`farm.benchmark.verification`), stored as JSON beside the capture


@dataclass(frozen=True)
class Launches:
    """One kernel in one unobserved pass of a whole model: its launches and their total time."""

    count: int
    time_us: float


@dataclass(frozen=True)
class InModelTimes:
    """The time of each call within the running model: the median over several passes.

    Attributes:
        calls_us: tuple id -> the times of its calls, in order; None where a call's kernels could not be told.
        source: ``kernels`` (a call's kernels together, the gaps between them left out) or ``ranges`` (by the clock).
        passes: over which the median was taken.
        attributed_share: of the kernels' time, what lies in some call, 0 to 1; 1 for ranges.
        sum_us: of the calls whose times are known.
    """

    calls_us: Mapping[str, tuple[float | None, ...]] | None = None
    source: str | None = None
    passes: int | None = None
    attributed_share: float | None = None
    sum_us: float | None = None


@dataclass(frozen=True)
class OtherCalls:
    """A tuple whose number of calls differs between an eager pass and the measured run."""

    operator_id: str
    label: str
    launched: int  # calls in the run that is measured
    eager: int


@dataclass(frozen=True)
class Eagerly:
    """The differences between an eager pass and the measured run.

    Attributes:
        kernels: name -> launches in the run that is measured, and in the eager pass, where they differ.
        kernel_time_us, eager_kernel_time_us: of all kernels of a pass.
    """

    operators: tuple[OtherCalls, ...] = ()
    kernels: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    kernel_time_us: float | None = None
    eager_kernel_time_us: float | None = None


@dataclass(frozen=True)
class Verification:
    """The comparison of a capture with a pass of the model on a card. None: not examined.

    Attributes:
        launch: of the run that was looked at, ``graph`` or ``eager``; None of old, when it was eager.
        not_captured: why that is an eager one where a graph was asked for.
        eagerly: what an eager pass runs otherwise; None where it runs the same.
        matches: prediction and observation agree, and observing changed nothing.
        observer_effect: what ran only observed, or only unobserved, in words.
        missing: tuple id -> calls that were predicted and did not come.
        unexpected: tuple id -> calls that came and were not predicted.
        gaps, overlaps: of the observed capture, in words.
        unobserved_kernels: kernels launched in the unobserved pass.
        kernels: those of the unobserved pass by name, the heaviest.
        tuple_kernels: tuple id -> kernel -> launches in one pass of the rebuilt tuple.
        in_model: what each call took in the running model.
        numerics: the flags under which kernels were chosen and calls timed (``tf32`` ...), on or off.
        differences: all of the above that speaks against the prediction, in words; some of `difference_count`.
        card: the id of the card.
        read_at_s: when it was kept, by the database's clock, in seconds since 1970.
        simulated: no model ran.
        other: what this version does not know, as it was written.
    """

    launch: str | None = None
    not_captured: str | None = None
    eagerly: Eagerly | None = None
    matches: bool | None = None
    observer_effect: tuple[str, ...] | None = None
    missing: Mapping[str, int] | None = None
    unexpected: Mapping[str, int] | None = None
    gaps: tuple[str, ...] | None = None
    overlaps: tuple[str, ...] | None = None
    unobserved_kernels: int | None = None
    kernels: Mapping[str, Launches] | None = None
    tuple_kernels: Mapping[str, Mapping[str, int]] | None = None
    in_model: InModelTimes | None = None
    numerics: Mapping[str, bool] | None = None
    differences: tuple[str, ...] | None = None
    difference_count: int | None = None
    card: str | None = None
    read_at_s: float | None = None
    simulated: bool | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    def without_the_card(self) -> Self:
        """The part that holds on any card. Kernels and times depend on the card model and on the numeric flags."""
        return dataclasses.replace(self, kernels=None, tuple_kernels=None, in_model=None, eagerly=None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON by field name, without None."""
        data = {**self.other, **_found(self)}
        if self.kernels is not None:
            data["kernels"] = {name: dataclasses.asdict(launches) for name, launches in self.kernels.items()}
        if self.eagerly is not None:
            data["eagerly"] = dataclasses.asdict(self.eagerly)
        if self.in_model is not None:
            data["in_model"] = _found(self.in_model)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Read JSON of any version: missing keys become None, unknown ones go to `other`."""
        data = data or {}
        values = known(cls, data)
        if kernels := values.get("kernels"):
            values["kernels"] = {
                name: Launches(int(one["count"]), float(one["time_us"])) for name, one in kernels.items()
            }
        if eagerly := values.get("eagerly"):
            operators = tuple(OtherCalls(**known(OtherCalls, one)) for one in eagerly.get("operators", ()))
            kernels = {name: tuple(counts) for name, counts in eagerly.get("kernels", {}).items()}
            values["eagerly"] = Eagerly(**{**known(Eagerly, eagerly), "operators": operators, "kernels": kernels})
        if "in_model" in values:
            values["in_model"] = _in_model(values["in_model"])
        return cls(**values, other={name: value for name, value in data.items() if name not in values})


def _found(one: Verification | InModelTimes) -> dict[str, Any]:
    """The fields that are not None."""
    values = {entry.name: getattr(one, entry.name) for entry in dataclasses.fields(one) if entry.name != "other"}
    return {name: value for name, value in values.items() if value is not None}


def _in_model(data: Mapping[str, Any] | None) -> InModelTimes | None:
    if not data:
        return None
    calls_us = {tuple_id: tuple(times_us) for tuple_id, times_us in (data.get("calls_us") or {}).items()}
    return InModelTimes(**{**known(InModelTimes, data), "calls_us": calls_us})
