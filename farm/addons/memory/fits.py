"""Whether a module fits into a card, for inference and for training, and with which batch.

The bytes of tensors are exact for the operators that a capture knows. Libraries need more: their
workspaces are unknown without a card. So a peak has two ends, and an answer three values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.addons.memory.step_memory import largest_batch
from farm.errors import UsageError
from farm.training.tensor_lifetime import allocated_peak_bytes
from farm.types.format import count_of

if TYPE_CHECKING:
    from farm.operators.captured import CapturedPass

#: A context of CUDA and what the driver keeps, which a card's memory includes. A usual value; it is
#: not measured.
CONTEXT_BYTES = 700e6
#: The workspaces of cuBLAS, measured in training steps on an H200 and an H100: 67 and 68 MB.
PRODUCT_WORKSPACE_BYTES = 70e6
#: The largest workspaces of cuDNN in the packaged readings, as a multiple of the operands of a
#: model's largest convolution: 4.2 in a forward pass of regnet_y_128gf, 2.3 of vgg13, below 0.5 of
#: all others.
CONVOLUTION_WORKSPACES = 4.5
#: An attention with a mask may write its scores in float32, and its softmax: 2.4 copies in t5-base.
SCORES_BYTES = 3 * 4
#: The position of an attention's mask among its tensors.
MASK = 3


@dataclass(frozen=True)
class Need:
    """The peak memory of a forward pass or a training step, beside that of a card.

    Attributes:
        batch: of the example inputs.
        tensors_bytes: the peak of all tensors, in units of PyTorch's allocator: the least need.
        most_bytes: with the workspaces of libraries as large as any in the packaged readings, and
            a CUDA context.
        card_bytes: the memory of the card.
        largest_batch: the largest batch whose `most_bytes` fit; 0 if none does.
    """

    name: str  # inference or training
    batch: int
    tensors_bytes: int
    most_bytes: int
    card_bytes: int
    largest_batch: int

    @property
    def fits(self) -> bool | None:
        """True if it fits with the largest workspaces; False if the tensors alone do not fit; None
        between these: only a run on the card can tell.
        """
        if self.most_bytes <= self.card_bytes:
            return True
        return False if self.tensors_bytes > self.card_bytes else None

    @property
    def answer(self) -> str:
        return {True: "fits", False: "does not fit", None: "may fit"}[self.fits]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "fits": self.fits}

    def __str__(self) -> str:
        most, least = count_of(self.most_bytes, "B"), count_of(self.tensors_bytes, "B")
        return (
            f"{self.name} with batch {self.batch}: {self.answer}; peak {least} of tensors, at most "
            f"{most} with workspaces and context; largest batch {self.largest_batch}"
        )


@dataclass(frozen=True)
class Fits:
    """What `farm.fits` returns. `print` shows a line for inference and one for training."""

    card: str
    card_bytes: int
    inference: Need
    training: Need | None  # None if the module has no parameters to train

    def to_json(self) -> dict[str, Any]:
        return {
            "card": self.card,
            "card_bytes": self.card_bytes,
            "inference": self.inference.to_json(),
            "training": self.training.to_json() if self.training else None,
        }

    def __str__(self) -> str:
        needs = [str(need) for need in (self.inference, self.training) if need]
        return "\n".join([f"{self.card}, {count_of(self.card_bytes, 'B')} of memory", *needs])


def need(name: str, captured: Callable[[int], CapturedPass], batch: int, card_bytes: int) -> Need:
    """The memory of a pass or a step.

    Args:
        captured: captures it with a batch.
        batch: of the example inputs.
        card_bytes: the memory of the card.
    """
    first = captured(batch)

    def most_of(size: int) -> int:
        return most_bytes(first if size == batch else captured(size))

    largest = 0
    if _held_bytes(first) <= card_bytes:
        with contextlib.suppress(UsageError):  # not even the smallest batch fits
            largest = largest_batch(most_of, card_bytes, batch).batch
    return Need(
        name=name,
        batch=batch,
        tensors_bytes=allocated_peak_bytes(first),
        most_bytes=most_bytes(first),
        card_bytes=card_bytes,
        largest_batch=largest,
    )


def _held_bytes(capture: CapturedPass) -> int:
    """The bytes of weights, buffers and states of an optimizer, which no batch changes."""
    lasting = [tensor for tensor in capture.tensors if tensor.outlives and tensor.role != "input"]
    return sum(tensor.size_bytes for tensor in lasting)


def most_bytes(capture: CapturedPass) -> int:
    """The peak of the tensors, the largest workspaces that libraries may need, and a context."""
    peak_bytes = allocated_peak_bytes(capture)
    workspaces = PRODUCT_WORKSPACE_BYTES + _largest_workspace_bytes(capture)
    return int(peak_bytes + workspaces + CONTEXT_BYTES)


def _largest_workspace_bytes(capture: CapturedPass) -> float:
    """The largest workspace of a convolution, or scores of an attention with a mask."""
    sizes_bytes = {tensor.number: tensor.size_bytes for tensor in capture.tensors}
    largest = 0.0
    for call in capture.calls:
        spec = capture.tuples[call.tuple_id]
        if "conv" in spec.short_name:
            operands = {*call.reads, *call.writes}
            bytes_of_call = sum(sizes_bytes.get(number, 0) for number in operands)
            largest = max(largest, CONVOLUTION_WORKSPACES * bytes_of_call)
        elif "attention" in spec.short_name and len(spec.tensors) > MASK:
            query, key = spec.tensors[0].shape, spec.tensors[1].shape
            scores = math.prod(query[:-1]) * key[-2]
            largest = max(largest, SCORES_BYTES * scores)
    return largest
