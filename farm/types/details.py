"""The details of a reading, by the phase that writes them.

`Details` is stored as one flat JSON object: the keys of its parts (`MemoryUse`, `Timing`, ...) are
keys of the object. Records of one state (`Burst`, `InContext`, ...) are objects of their own. Times
are of one pass, in us. Half-widths are absolute, for the 95 % interval. None means "not examined"
or "the card cannot report it", never zero."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

from farm.types.figure import Figure, PassCost
from farm.types.stored import StoredField, plain, record_from, stored_fields

Kind = TypeVar("Kind")

TimeFigure = Literal["mean", "median", "fastest"]  # the figure of a window in `Reading.time_us`

#: Figures that a phase can fail to measure. The reading is valid without them.
Absent = Literal["context", "eager_time", "places", "added", "in_order", "verification"]
#: Figure -> the JSON key of the reason why it is missing.
REASON_KEYS: Mapping[Absent, str] = {
    "context": "context_missing",
    "eager_time": "eager_time_missing",
    "places": "places_missing",
    "added": "added_missing",
    "in_order": "in_order_missing",
    "verification": "unverified",
}


# ---- records of one state


@dataclass(frozen=True, kw_only=True)
class Burst(PassCost):
    """The measurement of a power-limited operator in bursts with pauses, which allow higher clocks.
    Figures are for one pass. See `farm.benchmark.clock`."""

    power_w: Figure | None = None  # during a pass, without the pauses
    sm_clock_mhz: float | None = None  # the mean over both duty cycles
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
    effect_us: Figure  # time that the other operators add
    # passes among others; 0: not timed, as the effect on a long pass is negligible
    passes: int | None = None


@dataclass(frozen=True)
class Place:
    """The time that a call takes longer at its place in a model than in a loop on warm data: mean
    over the calls. See `farm.benchmark.call_context`."""

    effect_us: Figure = field(metadata={"half_width_key": "half_width_us"})
    calls: int


@dataclass(frozen=True, kw_only=True)
class InOrder(PassCost):
    """One pass of all calls of a model, replayed in order from its tuples, without events between
    them. Its energy shows the power while kernels wait for code and data
    (`farm.verdict.replay.WaitingPower`)."""

    temperature_c: float | None = None


@dataclass(frozen=True, kw_only=True)
class CanaryNote(PassCost):
    """The last measurement of the reference operator before a reading, in the same process
    (`farm.benchmark.checks`). Figures are exact, for one pass. Changes are relative to the first
    undisturbed canary of the process."""

    number: int  # number of the canary in its process, from 1
    process: int | None = None  # the process's id on its host
    power_w: float | None = None
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


@dataclass(frozen=True, kw_only=True)
class RankFigures(PassCost):
    """The figures of one rank in a reading on several cards. Figures are exact, for one pass."""

    card: str
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    flags: tuple[str, ...] = ()


# ---- parts of the details


@dataclass(frozen=True)
class MemoryUse:
    """The memory of a whole model or a step, and of a tuple with a placement
    (`farm.benchmark.passes`).
    """

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
    slow_memory: str | None = None  # of a tuple with a placement: which memory was slow
    # where library workspaces were: fast, or possibly with the output
    workspaces: str | None = None


@dataclass(frozen=True)
class Launching:
    """How passes become rounds (`farm.benchmark.workload`)."""

    copies: int | None = None  # copies of the tensors: the passes use one after the other
    passes_per_round: int | None = None  # a round is launched and timed as one
    copies_wanted_more: bool | None = None  # True: too few copies for the requested residency
    threads: int | None = None  # of a CPU
    # Of a CUDA graph, by operator (`farm.benchmark.host_steps`): copies between host and card in a
    # pass, with values recorded before
    host_copies: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Timing:
    """Times beside those of `Reading`, and how the window was timed (`farm.benchmark.window`)."""

    # number of windows, if the first was hot, shared, drifting or starved
    attempts: int | None = None
    rounds: int | None = None
    late_rounds: int | None = None  # rounds launched when the card was already idle
    starved_share: float | None = None  # share of the window in which the card waited for the host
    time_figure: TimeFigure | None = None  # the figure in `Reading.time_us`
    time_mean_us: Figure | None = None
    time_median_half_width_us: float | None = None
    time_trimmed_half_width_us: float | None = None
    turns_group: str | None = None  # of a CPU: id of the readings whose subjects were timed in turn
    # of a CPU: for each turn, `time_us` without its passes
    without_turn_us: tuple[float, ...] | None = None
    # of a tuple on a CPU: a pass with its weights and its output in the cache
    warm_us: Figure | None = None
    warm_without_turn_us: tuple[float, ...] | None = None  # as `without_turn_us`
    # longest allowed window, if the window ended before it converged
    ceiling_s: float | None = None
    # of a kernel or collective: what restored its inputs before each pass; subtracted
    restore_us: float | None = None
    # eager time of the operators that a CUDA graph omits (`farm.benchmark.host_steps`)
    left_out_us: Mapping[str, float] | None = None
    # of a whole in a CUDA graph: the median pass with eager launch
    eager_time_us: Figure | None = None


@dataclass(frozen=True)
class Powering:
    """How the power of the window was read (`farm.benchmark.sampler`)."""

    ticks: int | None = None  # ticks of the energy counter within the window
    ramp_ticks_dropped: int | None = None  # first ticks, which still belong to the warm-up
    power_integral_w: float | None = None  # mean of the power sensor, to compare with the counter
    paused_share: float | None = None  # share of the window in which the card paused between passes
    power_drift: float | None = None  # relative change between the halves of the window, if large
    # share of the time that the sampler's thread spent in the driver
    sampler_busy_share: float | None = None


@dataclass(frozen=True)
class CardConditions:
    """The card during the window."""

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


@dataclass(frozen=True)
class SeveralCards:
    """A reading on several cards (`farm.benchmark_process.group`)."""

    ranks: tuple[RankFigures, ...] | None = None  # in order
    bus_bytes_per_s: float | None = None  # of a collective: bus bandwidth as nccl-tests defines it
    link_bytes_per_s: float | None = None  # peak of the link between the cards, in one direction
    overlap: Overlap | None = None  # of a collective beside a matrix product


@dataclass(frozen=True)
class CallOrder:
    """The calls of a whole model in their order (`farm.benchmark.phases.order`), by tuple id."""

    places: Mapping[str, Place] | None = None  # of a whole in a CUDA graph
    # of a whole on several cards: loops of the tuples
    looped_us: Mapping[str, float] | None = None
    # of collectives: effect relative to a pass without them, not to a loop
    added: Mapping[str, Place] | None = None
    # with the places, if the card has an energy counter and is below its power limit
    in_order: InOrder | None = None
    # of a pass whose data lie at other addresses; with `in_order`
    layouts_half_width_us: float | None = None


@dataclass(frozen=True)
class Details:
    """The details of a reading."""

    method: int | None = None  # `METHOD` or `CPU_METHOD` of the code that measured
    memory: MemoryUse = MemoryUse()
    launching: Launching = Launching()
    timing: Timing = Timing()
    powering: Powering = Powering()
    conditions: CardConditions = CardConditions()
    cards: SeveralCards = SeveralCards()
    order: CallOrder = CallOrder()
    burst: Burst | None = None
    context: InContext | None = None
    canary: CanaryNote | None = None
    study: Mapping[str, Any] | None = None  # its study: id, name, circumstances
    # of an own model or a test: commit, its time in s, and dirty or clean
    revision: str | None = None
    #: Figure -> why it is missing, in words.
    missing: Mapping[Absent, str] = field(default_factory=dict)
    # keys of other versions, and records of phases that are not listed here (`recording`)
    other: Mapping[str, Any] = field(default_factory=dict)

    def lacking(self, figure: Absent, because: str) -> Self:
        """Return the details with the reason why a figure is missing."""
        return replace(self, missing={**self.missing, figure: because})

    def recording(self, key: str, record: Any) -> Self:
        """Return the details with a record that no field of this class holds: a dataclass, as an
        object under ``key``. Example: ``details.recording("powers", PowersNote(largest=3.0))``.

        Raises:
            ValueError: the key belongs to a field.
        """
        if key in _keys():
            raise ValueError(f"The details have a field with the key {key!r}.")
        return replace(self, other={**self.other, key: plain(record)})

    def recorded(self, key: str, kind: type[Kind]) -> Kind | None:
        """Return the record of ``recording``; None if there is none. Raises ValueError if it is
        incomplete."""
        data = self.other.get(key)
        return None if data is None else record_from(kind, data)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, without fields that are None."""
        data: dict[str, Any] = dict(self.other)
        for name, value in vars(self).items():
            if name in PARTS:
                data |= _without_none(plain(value))
            elif name not in ("missing", "other"):
                data |= _without_none({name: plain(value)})
        for figure, because in self.missing.items():
            data[REASON_KEYS[figure]] = because
        if self.memory.activation_peak_bytes is not None:
            # examined: null means that it could not be determined
            data["found_again"] = self.memory.found_again
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> Self:
        """Parse JSON of any version. Missing keys become None; unknown keys are stored in `other`.
        An incomplete record becomes None.
        """
        data = data or {}
        keys = _keys()
        values: dict[str, dict[str, Any]] = {"": {}}
        other, missing = {}, {}
        for key, value in data.items():
            if key in _FIGURES:
                if value is not None:
                    missing[_FIGURES[key]] = value
            elif key not in keys:
                other[key] = value
            elif keys[key].field.name == key:
                owner = keys[key]
                values.setdefault(owner.part, {})[key] = _value_or_none(owner.field, data)

        fields = values.pop("")
        for part, of_part in values.items():
            fields[part] = PARTS[part](**of_part)
        return cls(**fields, missing=missing, other=other)


#: Field of `Details` -> the record whose keys are keys of the details.
PARTS: Mapping[str, type] = {
    "memory": MemoryUse,
    "launching": Launching,
    "timing": Timing,
    "powering": Powering,
    "conditions": CardConditions,
    "cards": SeveralCards,
    "order": CallOrder,
}
_FIGURES: Mapping[str, Absent] = {key: figure for figure, key in REASON_KEYS.items()}


@dataclass(frozen=True)
class _KeyOwner:
    """The field of a JSON key, and the part that it belongs to; "" for the details themselves."""

    part: str
    field: StoredField


@functools.cache
def _keys() -> Mapping[str, _KeyOwner]:
    """JSON key -> its field."""
    owners = {}
    for entry in stored_fields(Details):
        if entry.name not in ("missing", "other", *PARTS):
            owners[entry.name] = _KeyOwner("", entry)
    for part, kind in PARTS.items():
        for entry in stored_fields(kind):
            owners[entry.name] = _KeyOwner(part, entry)
            if entry.half_width_key:
                owners[entry.half_width_key] = _KeyOwner(part, entry)
    return owners


def _value_or_none(entry: StoredField, data: Mapping[str, Any]) -> Any:
    try:
        return entry.parse(data)
    except ValueError:
        return None


def _without_none(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}


def canary_of(details: Mapping[str, Any]) -> CanaryNote | None:
    """Return the canary's note from the JSON of a reading's details. Much faster than parsing all
    details.
    """
    note = details.get("canary")
    try:
        return None if note is None else record_from(CanaryNote, note)
    except ValueError:
        return None
