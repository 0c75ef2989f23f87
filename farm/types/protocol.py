"""Classes that describe a measurement: its object (`Variant`, `Subject`), conditions (`Protocol`)
and `Software`.

The farm sends these records as JSON to a benchmark process; the result is a
`farm.types.reading.Reading`. Each field is declared here, once (`farm.types.fields`)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import MISSING, dataclass
from typing import Any, Literal, Self, get_args

from farm.errors import UsageError
from farm.types.collective import MOST_CARDS
from farm.types.fields import (
    LARGEST_NUMBER,
    ContentAddressed,
    Record,
    content_id,
    declared,
    original,
)
from farm.types.value_profiles import is_class

Launch = Literal["graph", "eager"]
Residency = Literal["resident", "reuse", "stream", "chain"]
#: The optimizers of a training step. SGD has momentum. Without a suffix, PyTorch chooses the
#: implementation.
OPTIMIZERS = tuple(
    f"{optimizer}{how}"
    for optimizer in ("sgd", "adam", "adamw")
    for how in ("", "-foreach", "-fused", "-compiled")
)
#: The modes of torch.compile. `max-autotune` is measured without the compiler's own CUDA graphs:
#: the farm records one.
COMPILE_MODES = ("", "default", "max-autotune")
#: The schemes of quantised models (`farm.models.quantization`).
QUANTIZE_SCHEMES = ("int8-weights", "int8", "int4-weights", "fp8")
#: The value of `Variant.weights` for the file of a user's own model (`farm.models.weights`).
FROM_FILE = "safetensors"
#: Called at the start of each phase of a measurement, with the phase's name and details.
OnPhase = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Protocol(ContentAddressed):
    """The conditions of a measurement. Only readings with the same protocol are comparable."""

    launch: Launch = original("graph", choices=get_args(Launch))
    residency: Residency = original("resident", choices=get_args(Residency))
    # If it is `seen`, a job uses the value profile (`farm.types.value_profiles`) of each call
    # instead.
    data: str = original("normal", choices=("normal", "zeros", "seen", "copied"))
    grad: bool = original(False)
    tf32: bool = original(False)
    cudnn_benchmark: bool = original(False)
    cudnn_deterministic: bool = original(False)
    placement: str = declared("")
    cards: int = declared(1, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        Placement.parse(self.placement)

    def _accepts(self, name: str, value: Any) -> bool:
        return name == "data" and is_class(value)

    def with_placement(self, placement: str) -> Self:
        """Return the same protocol with another placement of a tuple's tensors."""
        return dataclasses.replace(self, placement=placement)

    def with_data(self, data: str) -> Self:
        """Return the same protocol with another data class. A job with `seen` uses the profile of
        each call.
        """
        return dataclasses.replace(self, data=data)

    @property
    def slow_tensors(self) -> int:
        """The number of tensors of a tuple in slow memory."""
        return len(Placement.parse(self.placement))

    @property
    def measures_context(self) -> bool:
        """True if the protocol represents a running model. Then tuples are also timed among other
        operators.
        """
        return self.launch == "graph" and self.residency == "resident" and not self.slow_tensors

    @property
    def takes_turns(self) -> bool:
        """True if a CPU may time the subject in turn with others: not if it uses slow memory."""
        return not self.slow_tensors

    @property
    def of_whole(self) -> Self:
        """The protocol for the whole model: standard normal inputs instead of `seen`."""
        return self.with_data("normal") if self.data in ("seen", "copied") else self

    def __str__(self) -> str:
        extras = {
            "grad": self.grad,
            "tf32": self.tf32,
            "cudnn_benchmark": self.cudnn_benchmark,
            "cudnn_deterministic": self.cudnn_deterministic,
            f"{self.placement} slow": self.placement,
            f"{self.cards} cards": self.cards > 1,
        }
        usual = f"{self.launch} launch", f"{self.residency} data ({self.data})"
        return ", ".join([*usual, *(text for text, applies in extras.items() if applies)])


#: If a job allows an interval of the energy as wide as this, a tuple's window is rough: it does not
#: wait for the chip's temperature, and ends as soon as its interval is narrow enough.
ROUGH = 0.05
#: A sum of energies is wanted within this many times the half-width of the sum of times: its sensor
#: is less precise.
ENERGY_PER_TIME = 3.0


@dataclass(frozen=True)
class Stopping(Record):
    """When a window ends. Not part of a protocol's id: a more precise reading satisfies a less
    strict request.

    Half-widths belong to the 95 % interval and are relative to the value.
    """

    warm_up_s: float = original(0.2, unit="s")
    minimum_s: float = original(0.5, unit="s")
    maximum_s: float = original(3.0, unit="s")
    time_half_width: float = original(0.01)
    energy_half_width: float = original(0.02)
    rough: bool = declared(False, given=False)

    @property
    def shortest_s(self) -> float:
        """The shortest expected window. Unit: s."""
        return 0.1 if self.rough else self.minimum_s

    def accepts(self, flags: Collection[str]) -> bool:
        """True if a reading with these flags may satisfy the rule: a study has its own windows, and
        only a rough rule accepts a rough reading."""
        return "study" not in flags and (self.rough or "rough" not in flags)

    def allowing(self, half_width: float) -> Self:
        """Return the rule if this half-width of the time, and `ENERGY_PER_TIME` times it for the
        energy, is enough.

        A rule never becomes stricter: 0 returns an equal one.
        """
        energy = max(self.energy_half_width, ENERGY_PER_TIME * half_width)
        wider = dataclasses.replace(
            self, time_half_width=max(self.time_half_width, half_width), energy_half_width=energy
        )
        if ENERGY_PER_TIME * half_width < ROUGH:
            return wider
        return dataclasses.replace(
            wider, rough=True, warm_up_s=min(self.warm_up_s, 0.05), minimum_s=0.0, maximum_s=0.6
        )


#: `--quick`: a first look, not for publication.
QUICK: dict[str, Any] = {
    "warm_up_s": 0.1,
    "minimum_s": 0.1,
    "maximum_s": 0.5,
    "time_half_width": 0.03,
    "energy_half_width": 0.06,
}

#: The size of the images for a model without example inputs. Unit: px.
IMAGE_PX = 224


@dataclass(frozen=True)
class Variant(ContentAddressed):
    """A model variant: all options that decide the computation. Models are built with seeded random
    weights, or a user's own model with those of a file.

    A field that the model does not use has its default, such as the image size of a language model.
    """

    model: str = original(MISSING)
    batch: int = original(MISSING, minimum=1, several=True)
    input_size: int = original(MISSING, unit="px", minimum=0)
    dtype: str = original("float32", choices=("float32", "float16", "bfloat16", "float64"))
    memory_format: str = original("contiguous", choices=("contiguous", "channels_last"))
    mode: str = original("eval", choices=("eval", "train"))
    weights: str = original("random", choices=("random", FROM_FILE))
    length: int = declared(0, minimum=0, several=True)
    padded: bool = declared(False)
    phase: str = declared("", choices=("", "encode", "prefill", "decode"))
    cache: int = declared(0, minimum=0, several=True)
    compile: str = declared("", choices=COMPILE_MODES)
    quantize: str = declared("", choices=("", *QUANTIZE_SCHEMES), several=True)
    layers: int = declared(0, minimum=0)
    # The content id of the token ids. Users give a file instead
    # (`farm.requests.partial_request.TextFiles`).
    text: str = declared("")
    step: str = declared("", choices=("", "training"))
    optimizer: str = declared("", choices=("", *OPTIMIZERS))
    amp: str = declared("", choices=("", "bfloat16", "float16"))
    accumulate: int = declared(1, minimum=1)
    recompute: str = declared("")
    tensor_parallel: int = declared(1, minimum=1)
    data_parallel: int = declared(1, minimum=1)
    sharding: str = declared("ddp", choices=("ddp", "fsdp"))
    distributed: int = declared(1, minimum=1)
    version: str = declared("", given=False)

    def __post_init__(self) -> None:
        if self.compile == "reduce-overhead":
            raise UsageError(
                "The mode reduce-overhead runs the kernels of default in CUDA graphs of the "
                "compiler; the farm records "
                "a graph of its own.",
                "Give --compile default: it has the same kernels and is measured in a CUDA graph.",
            )
        super().__post_init__()
        self._check_split()
        self._check_quantized()
        if not self.input_size and not (self.length or self.phase):
            raise UsageError(
                f"The input size is 0; it must be from 1 to {LARGEST_NUMBER}.",
                "Give --input-size 224, for example.",
            )

    def _check_split(self) -> None:
        """Refuse combinations of options of split models that the farm does not measure."""
        both = (
            sum(
                number > 1
                for number in (self.tensor_parallel, self.data_parallel, self.distributed)
            )
            > 1
        )
        step_too = self.step and self.data_parallel == 1 < self.cards
        for wrong, problem, step in (
            (
                both,
                "--tensor-parallel, --data-parallel and --cards do not work together.",
                "Give one of them.",
            ),
            (
                self.data_parallel > 1 and not self.step,
                "--data-parallel is for training.",
                "Add --step training.",
            ),
            (
                step_too,
                "--step training on several cards needs --data-parallel.",
                "Give it instead.",
            ),
            (
                self.sharding == "fsdp" and self.data_parallel == 1,
                "--sharding needs --data-parallel.",
                "Add it.",
            ),
            (
                self.cards > MOST_CARDS,
                f"At most {MOST_CARDS} cards work together.",
                "Give fewer cards.",
            ),
            (
                self.cards > 1 and self.compile,
                "--compile does not work with several cards.",
                "Omit --compile.",
            ),
        ):
            if wrong:
                raise UsageError(problem, step)

    def _check_quantized(self) -> None:
        """Refuse combinations of options of quantised models that the farm does not measure."""
        if not self.quantize:
            return
        if self.step:
            raise UsageError("--quantize is for forward passes, not for training.", "Omit --step.")
        if self.cards > 1:
            raise UsageError(
                "--quantize does not work with several cards.", "Measure the model on one card."
            )

    @property
    def cards(self) -> int:
        """The number of cards that the variant is split over."""
        return self.tensor_parallel * self.data_parallel * self.distributed

    @property
    def records_values(self) -> bool:
        """True if the input values of its calls can be recorded: in a forward pass, on one card."""
        return not (self.step or self.cards > 1)

    @property
    def generates_kernels(self) -> bool:
        """True if a compiler generates its kernels: only a card can list them for a measurement.
        False if it runs operators, which a host lists without a card."""
        return self.compile != ""

    @property
    def data_of_calls(self) -> str:
        """The data class that stands for the values in the running model."""
        return "copied" if self.generates_kernels else "seen"

    @property
    def computes_in(self) -> str:
        """The dtype of most of the model's arithmetic."""
        return self.amp or self.dtype

    @property
    def tokens(self) -> int:
        """The number of tokens in one pass; 0 if the input is not tokens."""
        return self.batch * self.length if self.phase else 0

    def __str__(self) -> str:
        if self.phase == "decode":
            return self.titled(f"decode {self.batch} beside {self.cache} tokens")
        size = f"{self.batch}x{self.length or self.input_size}{' tokens' if self.phase else ''}"
        size += f" and {self.input_size} px" if self.phase and self.input_size else ""
        return self.titled(
            f"{self.phase} {size}" if self.phase == "prefill" and not self.step else size
        )

    def titled(self, size: str) -> str:
        """Return the title, with the size of the input: 'resnet50 32x224 float32', 'bert 8x128
        float32'.
        """
        extras = [
            self.memory_format if self.memory_format != "contiguous" else "",
            self.mode if self.mode != "eval" and not self.step else "",
            "padded" if self.padded else "",
            f"weights {self.weights}" if self.weights == FROM_FILE else "",
            f"quantized {self.quantize}" if self.quantize else "",
            f"of {self.layers} layers" if self.layers else "",
            f"text {self.text[:8]}" if self.text else "",
            f"{self.step} {self.optimizer}" if self.step else "",
            f"amp {self.amp}" if self.amp else "",
            f"accumulate {self.accumulate}" if self.accumulate > 1 else "",
            f"recompute {self.recompute}" if self.recompute else "",
            f"compiled {self.compile}" if self.compile else "",
            f"{self.sharding} on {self.data_parallel} cards" if self.data_parallel > 1 else "",
            f"on {self.cards} cards" if self.cards > self.data_parallel else "",
        ]
        return " ".join([self.model, size, self.dtype, *filter(None, extras)])

    def with_version(self, title: str) -> str:
        """Add the version to a title, to distinguish it from other versions of the same model."""
        return f"{title} version {self.version[:8]}" if self.version else title


@dataclass(frozen=True)
class Subject(Record):
    """The measured object of a reading: an operator tuple or a model variant, as JSON."""

    kind: Literal["operator", "variant"]
    id: str
    spec: dict[str, Any]
    # only for a variant with a text: `farm.types.tokens.Tokens` as JSON
    tokens: dict[str, Any] | None = None
    # only for a variant with generated kernels and for its tuples: `kernel_source` of
    # `farm.store.captures`
    compiled: dict[str, Any] | None = None

    @property
    def whole(self) -> bool:
        """True if it is a whole model or step, False if it is an operator tuple."""
        return self.kind == "variant"

    @property
    def built_variant(self) -> Variant | None:
        """The model that a process builds to measure it: the variant itself, or the compiled model
        of a tuple. None for other tuples."""
        source = (self.compiled or {}).get("variant") or (self.spec if self.whole else None)
        return None if source is None else Variant.from_json(source)


@dataclass(frozen=True)
class Software(ContentAddressed):
    """The software versions of a reading. Only readings with the same software are compared."""

    torch: str = original(MISSING, "version of PyTorch")
    torchvision: str = original("", "version")
    cuda: str = original("", "version that torch was built with")
    cudnn: str = original("", "version")
    driver: str = original("", "version")
    python: str = original("", "version", note="not part of the software's identity")
    platform: str = original("", "the host's system", note="not part of the software's identity")
    communication: str = declared(
        "",
        "of a reading on several cards: communication library, link between the cards, and "
        "settings of the environment"
        " that change the algorithm",
        note="empty: one card",
    )

    @property
    def id(self) -> str:
        # The versions of Python and the operating system do not affect the kernels on the card.
        # The tuples of torchvision's own operators name its version.
        kept = {"torch": self.torch, "cuda": self.cuda, "cudnn": self.cudnn, "driver": self.driver}
        return content_id(
            kept | ({"communication": self.communication} if self.communication else {})
        )

    @property
    def of_one_card(self) -> Self:
        """The software of readings on one card."""
        return dataclasses.replace(self, communication="")


def software_values(of: Iterable[Any], name: str) -> set[str]:
    """The values of a field that readings differ in. Only readings on several cards have a
    communication library.
    """
    return {str(getattr(software, name)) for software in of} - (
        {""} if name == "communication" else set()
    )


# ---- placement in memory tiers


Placements = Literal["none", "each", "all"]
PLACEMENTS = get_args(Placements)
#: Up to this number n of tensors, all 2^n configurations are measured; above it, each tensor alone
#: and all together.
FEW = 5
#: Above this number of tensors (such as an optimizer's call), only all tensors together are
#: measured.
MANY = 64
_PART = re.compile(r"(in|out)(0|[1-9]\d{0,5})(?:-([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Placement:
    """The tensors of a tuple that are in slow memory. Empty: all are in fast memory."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, word: str) -> Self:
        """
        Raises:
            UsageError: the word is not a placement in canonical form.
        """
        numbers_of: dict[str, set[int]] = {"in": set(), "out": set()}
        for part in word.split("+") if word else ():
            if (match := _PART.fullmatch(part)) is None:
                raise _unknown(word)
            side, first, last = match[1], int(match[2]), int(match[3] or match[2])
            numbers_of[side].update(range(first, last + 1))
        placement = cls(frozenset(numbers_of["in"]), frozenset(numbers_of["out"]))
        if str(placement) != word:
            raise _unknown(word)
        return placement

    def __str__(self) -> str:
        return "+".join([*_ranges("in", self.inputs), *_ranges("out", self.outputs)])

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)

    def __len__(self) -> int:
        return len(self.inputs) + len(self.outputs)


def configurations(inputs: Collection[int], outputs: int, how: str) -> list[str]:
    """Return the words of all requested configurations. The one with all tensors in fast memory is
    left out.

    Args:
        inputs: the numbers of the input storages that can be in slow memory.
        how: ``each`` (each tensor alone, and all together), ``all`` (every subset; above `FEW`
            tensors as ``each``) or ``none``.
    """
    tensors = [("in", number) for number in sorted(inputs)] + [
        ("out", number) for number in range(outputs)
    ]
    if how == "none" or not tensors:
        return []
    every = len(tensors)
    if every > MANY:
        sizes: Collection[int] = [every]
    else:
        sizes = range(1, every + 1) if how == "all" and every <= FEW else sorted({1, every})
    words = []
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(tensors, size) for size in sizes
    ):
        slow = {
            direction: frozenset(number for side, number in chosen if side == direction)
            for direction in ("in", "out")
        }
        words.append(str(Placement(slow["in"], slow["out"])))
    return words


def _ranges(side: str, numbers: Collection[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield f"{side}{members[0]}" + (f"-{members[-1]}" if len(members) > 1 else "")


def _unknown(word: str) -> UsageError:
    return UsageError(
        f"'{word[:80]}' is not a placement of tensors in slow memory.",
        "Name the slow tensors, inputs before outputs, in rising order: in0, in0+out0 or "
        "in1-3+out0.",
    )
