"""A model variant: all options that decide what a model computes.

Each field is declared here, once (`farm.types.fields`)."""

from __future__ import annotations

import itertools
from dataclasses import MISSING, dataclass

from farm.errors import UsageError
from farm.types.collective import MOST_CARDS
from farm.types.fields import LARGEST_NUMBER, ContentAddressed, declared, original

#: The algorithms of the optimizers.
ALGORITHMS = ("sgd", "adam", "adamw")
#: The optimizers of a training step. SGD has momentum. Without a suffix, PyTorch chooses the
#: implementation.
OPTIMIZERS = tuple(
    map("".join, itertools.product(ALGORITHMS, ("", "-foreach", "-fused", "-compiled")))
)
#: The modes of torch.compile. `max-autotune` is measured without the compiler's own CUDA graphs:
#: the farm records one.
COMPILE_MODES = ("", "default", "max-autotune")
#: The schemes of quantised models (`farm.models.quantization`).
QUANTIZE_SCHEMES = ("int8-weights", "int8", "int4-weights", "fp8")
#: The value of `Variant.weights` for the file of a user's own model (`farm.models.weights`).
FROM_FILE = "safetensors"
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
        split = [self.tensor_parallel > 1, self.data_parallel > 1, self.distributed > 1]
        both = sum(split) > 1
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
        size = f"{self.batch}x{self.length or self.input_size}"
        if self.phase:
            size += " tokens"
        if self.phase and self.input_size:
            size += f" and {self.input_size} px"
        if self.phase == "prefill" and not self.step:
            size = f"prefill {size}"
        return self.titled(size)

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
