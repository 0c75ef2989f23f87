"""How a subject is measured (`Protocol`), how long (`Stopping`), of what (`Subject`) and what came out (`Reading`).

These are the only things that travel between the farm and a benchmark process, as plain JSON. No torch here:
the command line and the store read them too.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from farm.errors import UsageError
from farm.words.data_classes import is_class

Launch = Literal["graph", "eager"]
Residency = Literal["resident", "reuse", "stream", "chain"]
# normal, zeros, a class of `farm.words.data_classes`; or seen, which a job resolves to a class for each call
DataPolicy = str
SubjectKind = Literal["operator", "variant"]
OnPhase = Callable[[str, dict[str, Any]], None]  # told the name of each phase of a measurement as it begins


def content_id(data: Any) -> str:
    """The content address of plain JSON: 32 hex digits of the SHA-256 of its canonical form."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Plain:
    """What is plain JSON field by field."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - not a field

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


@dataclass(frozen=True)
class Protocol(Plain):
    """What must be equal for two readings to be comparable. Its `id` is part of a reading's identity."""

    launch: Launch = "graph"
    residency: Residency = "resident"
    data: DataPolicy = "normal"
    grad: bool = False
    tf32: bool = False  # both matmul and cuDNN
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = False

    CHOICES = {  # noqa: RUF012 - not a field
        "launch": get_args(Launch),
        "residency": get_args(Residency),
        "data": ("normal", "zeros", "seen"),
    }

    def __post_init__(self) -> None:
        for name, choices in self.CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "data" and is_class(value)):
                raise UsageError(f"{name} '{value}' is unknown.", f"Choose one of {', '.join(choices)}.")

    @property
    def id(self) -> str:
        return content_id(self.to_json())

    def with_data(self, data: DataPolicy) -> Self:
        """The same protocol for a class of data: under `seen` each tuple is read under the class of its calls."""
        return dataclasses.replace(self, data=data)

    @property
    def measures_context(self) -> bool:
        """Whether tuples are also timed among other operators: where the policy stands for a running model."""
        return self.launch == "graph" and self.residency == "resident"

    @property
    def of_whole(self) -> Self:
        """What a whole model is read under: its own layers make the values, from standard normal inputs."""
        return self.with_data("normal") if self.data == "seen" else self

    def __str__(self) -> str:
        extras = [name for name in ("grad", "tf32", "cudnn_benchmark", "cudnn_deterministic") if getattr(self, name)]
        return ", ".join([f"{self.launch} launch", f"{self.residency} data ({self.data})", *extras])


@dataclass(frozen=True)
class Stopping(Plain):
    """When a window may end. Not part of a protocol's identity: a tighter reading satisfies a looser request.

    Half-widths are of the 95 % interval, relative to the figure.
    """

    warm_up_s: float = 0.3
    minimum_s: float = 0.5
    maximum_s: float = 3.0
    time_half_width: float = 0.01
    energy_half_width: float = 0.02


@dataclass(frozen=True)
class Variant(Plain):
    """A model variant: all that decides what a model computes. Models are built with seeded random weights."""

    model: str
    batch: int
    input_size: int
    dtype: str = "float32"
    memory_format: str = "contiguous"
    mode: str = "eval"
    weights: str = "random"

    CHOICES = {  # noqa: RUF012 - not a field
        "dtype": ("float32", "float16", "bfloat16"),
        "memory_format": ("contiguous", "channels_last"),
        "mode": ("eval", "train"),
        "weights": ("random",),
    }

    def __post_init__(self) -> None:
        for name, choices in self.CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise UsageError(
                    f"{name.replace('_', ' ')} '{value}' is unknown.", f"Choose one of {', '.join(choices)}."
                )
        if self.batch < 1:
            raise UsageError(f"The batch is {self.batch}; it must be at least 1.", "Give -b 1 or more.")
        if self.input_size < 1:
            raise UsageError(
                f"The input size is {self.input_size}; it must be at least 1.", "Give --input-size 224, say."
            )

    @property
    def id(self) -> str:
        return content_id(self.to_json())

    def __str__(self) -> str:
        extra = "" if self.memory_format == "contiguous" else f" {self.memory_format}"
        extra += "" if self.mode == "eval" else f" {self.mode}"
        return f"{self.model} {self.batch}x{self.input_size} {self.dtype}{extra}"


@dataclass(frozen=True)
class Subject(Plain):
    """What a reading is about: an operator tuple's JSON, or a model variant's."""

    kind: SubjectKind
    id: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Software(Plain):
    """The software a reading was taken with: part of its identity."""

    torch: str
    torchvision: str = ""
    cuda: str = ""
    cudnn: str = ""
    driver: str = ""
    python: str = ""
    platform: str = ""

    @property
    def id(self) -> str:
        # The Python version and the kernel change no kernel on the card: shown, not compared.
        return content_id({"torch": self.torch, "cuda": self.cuda, "cudnn": self.cudnn, "driver": self.driver})


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


METHOD = 4  # raised when a change of the code changes what a reading says; readings of another are not reused
REPEATED = frozenset({"throttled_thermal", "shared", "drifting", "starved"})  # flags of what is read again at once
INSIDE = ("warm_up", "window", "burst", "canary_window")  # costs that are the subject, or the canary, running


def inside_s(cost_s: Mapping[str, float]) -> float:
    """What of a reading's card time was warm-ups and windows, its own and those of a canary that came with it."""
    return math.fsum(cost_s.get(name, 0.0) for name in INSIDE)


@dataclass(frozen=True)
class Reading:
    """One result: subject x card x software x protocol -> time, power, energy, their intervals, flags.

    Times are of one pass, in microseconds; half-widths are absolute, of the 95 % interval. What the card
    cannot tell is None and has a flag, never zero.
    """

    time_us: float  # what aggregation uses: mean over the window (the median where there is no power to go with it)
    time_half_width_us: float
    time_median_us: float
    time_trimmed_us: float  # 3-sigma-trimmed mean
    passes: int
    window_s: float
    warm_up_s: float
    power_w: float | None = None
    power_half_width_w: float | None = None
    power_source: str = ""  # energy_counter | instant_power | average_power | rapl | simulated | ""
    energy_mj: float | None = None  # gross, of one pass
    energy_half_width_mj: float | None = None
    idle_power_w: float | None = None  # the card at rest
    base_power_w: float | None = None  # full clocks, nothing to do
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)  # burst reading, context, cross-checks, copies made ...
    cost_s: dict[str, float] = field(default_factory=dict)  # where the card's time went: rebuild, warm_up, window ...
    trace: Trace | None = None

    def to_json(self) -> dict[str, Any]:
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "trace"}
        data["trace"] = base64.b64encode(self.trace.pack()).decode() if self.trace else None
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        values = dict(data)
        packed = values.pop("trace", None)
        values["throttle_reasons"] = tuple(values.get("throttle_reasons", ()))
        values["flags"] = tuple(values.get("flags", ()))
        return cls(**values, trace=Trace.unpack(base64.b64decode(packed)) if packed else None)
