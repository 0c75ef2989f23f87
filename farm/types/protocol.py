"""How a subject is measured (`Protocol`), how long (`Stopping`), of what (`Subject`, `Variant`) and with what (`Software`).

They travel between the farm and a benchmark process as plain JSON; what comes back is in `farm.types.reading`. No torch
here: the command line and the store read them too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from farm.errors import UsageError
from farm.types.memory_tiers import Placement
from farm.types.value_profiles import is_class

Launch = Literal["graph", "eager"]
Residency = Literal["resident", "reuse", "stream", "chain"]
# normal, zeros, a class of `farm.types.value_profiles`; or seen, which a job resolves to a class for each call
DataPolicy = str
SubjectKind = Literal["operator", "variant"]
#: What a database's column of whole numbers holds.
LARGEST_NUMBER = 2**31 - 1
#: Of a training step. SGD has momentum; without an implementation behind it, PyTorch's own choice on that kind of device.
OPTIMIZERS = tuple(f"{kind}{how}" for kind in ("sgd", "adam", "adamw") for how in ("", "-foreach", "-fused"))
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
    placement: str = ""  # of a tuple: what lies in slow memory (`farm.types.memory_tiers`); "" nothing

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
        Placement.parse(self.placement)

    def to_json(self) -> dict[str, Any]:
        data = super().to_json()
        if not self.placement:  # ids of readings from before there were placements stay what they are
            del data["placement"]
        return data

    @property
    def id(self) -> str:
        return content_id(self.to_json())

    def with_placement(self, placement: str) -> Self:
        """The same protocol with other tensors of a tuple in slow memory."""
        return dataclasses.replace(self, placement=placement)

    def with_data(self, data: DataPolicy) -> Self:
        """The same protocol for a class of data: under `seen` each tuple is read under the class of its calls."""
        return dataclasses.replace(self, data=data)

    @property
    def measures_context(self) -> bool:
        """Whether tuples are also timed among other operators: where the policy stands for a running model."""
        return self.launch == "graph" and self.residency == "resident" and not self.placement

    @property
    def of_whole(self) -> Self:
        """What a whole model is read under: its own layers make the values, from standard normal inputs."""
        return self.with_data("normal") if self.data == "seen" else self

    def __str__(self) -> str:
        extras = [name for name in ("grad", "tf32", "cudnn_benchmark", "cudnn_deterministic") if getattr(self, name)]
        slow = [f"{self.placement} slow"] if self.placement else []
        return ", ".join([f"{self.launch} launch", f"{self.residency} data ({self.data})", *extras, *slow])


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
    """A model variant: all that decides what a model computes. Models are built with seeded random weights.

    What a model has no use for is at its default, and stands in neither its JSON nor its id: sizes of images for one of
    tokens, and the other way round.
    """

    model: str
    batch: int
    input_size: int  # 0: it takes no images
    dtype: str = "float32"
    memory_format: str = "contiguous"
    mode: str = "eval"
    weights: str = "random"
    length: int = 0  # of each sequence in the batch: tokens, or a sound's values where there is no phase
    padded: bool = False  # whether the sequences are shorter than that, filled up and masked
    phase: str = ""  # encode | prefill | decode, of a model of tokens
    cache: int = 0  # with decode: tokens that the caches have room for, the new one among them
    layers: int = 0  # what is left of a deep model; 0 all
    text: str = ""  # the content id of the tokens; "" of the corpus that the farm brings
    step: str = ""  # training: one iteration of it, from zero_grad to the optimizer; "" the forward alone
    optimizer: str = ""  # of a step
    amp: str = ""  # of a step: what autocast computes in
    accumulate: int = 1  # of a step: passes before the optimizer
    recompute: str = ""  # of a step: modules that are run anew in the backward, by path, with commas between; or blocks

    CHOICES = {  # noqa: RUF012 - not a field
        "phase": ("", "encode", "prefill", "decode"),
        "dtype": ("float32", "float16", "bfloat16"),
        "memory_format": ("contiguous", "channels_last"),
        "mode": ("eval", "train"),
        "weights": ("random",),
        "step": ("", "training"),
        "optimizer": ("", *OPTIMIZERS),
        "amp": ("", "bfloat16", "float16"),
    }

    def __post_init__(self) -> None:
        for name, choices in self.CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise UsageError(
                    f"{name.replace('_', ' ')} '{value}' is unknown.",
                    f"Choose one of {', '.join(filter(None, choices))}.",
                )
        least = 0 if self.length or self.phase else 1
        for what, value, smallest, step in (
            ("batch", self.batch, 1, "Give -b 1 or more."),
            ("input size", self.input_size, least, "Give --input-size 224, say."),
            ("length", self.length, 0, "Give --length 128, say."),
            ("cache", self.cache, 0, "Give --cache 1024, say."),
            ("number of layers", self.layers, 0, "Give --layers 4, say, or leave it out for all."),
            ("number of accumulated passes", self.accumulate, 1, "Give --accumulate 4, say, or leave it out."),
        ):
            if not smallest <= value <= LARGEST_NUMBER:
                raise UsageError(f"The {what} is {value}; it must be from {smallest} to {LARGEST_NUMBER}.", step)

    def to_json(self) -> dict[str, Any]:
        data = super().to_json()
        return {name: value for name, value in data.items() if name in _ALWAYS or value != _VARIANT_DEFAULTS[name]}

    @property
    def id(self) -> str:
        return content_id(self.to_json())

    @property
    def computes_in(self) -> str:
        """The type that most of its arithmetic is in."""
        return self.amp or self.dtype

    @property
    def tokens(self) -> int:
        """That one pass goes over; 0 of a model that takes none."""
        return self.batch * self.length if self.phase else 0

    def __str__(self) -> str:
        if self.phase == "decode":
            return self.titled(f"decode {self.batch} beside {self.cache} tokens")
        size = f"{self.batch}x{self.length or self.input_size}"
        if self.phase:
            size += " tokens"
            size += f" and {self.input_size} px" if self.input_size else ""
        return self.titled(f"{self.phase} {size}" if self.phase == "prefill" and not self.step else size)

    def titled(self, size: str) -> str:
        """What people call it, by the size of what goes in: 'resnet50 32x224 float32', 'bert 8x128 float32'."""
        extra = "" if self.memory_format == "contiguous" else f" {self.memory_format}"
        extra += "" if self.mode == "eval" or self.step else f" {self.mode}"
        extra += " padded" if self.padded else ""
        extra += f" of {self.layers} layers" if self.layers else ""
        extra += f" text {self.text[:8]}" if self.text else ""
        extra += f" {self.step} {self.optimizer}" if self.step else ""
        extra += f" amp {self.amp}" if self.amp else ""
        extra += f" accumulate {self.accumulate}" if self.accumulate > 1 else ""
        extra += f" recompute {self.recompute}" if self.recompute else ""
        return f"{self.model} {size} {self.dtype}{extra}"


#: What stood in a variant's JSON before there were others.
_ALWAYS = frozenset({"model", "batch", "input_size", "dtype", "memory_format", "mode", "weights"})
_VARIANT_DEFAULTS = {one.name: one.default for one in dataclasses.fields(Variant)}


@dataclass(frozen=True)
class Subject(Plain):
    """What a reading is about: an operator tuple's JSON, or a model variant's."""

    kind: SubjectKind
    id: str
    spec: dict[str, Any]
    tokens: dict[str, Any] | None = None  # of a variant with a text: `farm.types.tokens.Tokens` as JSON


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
