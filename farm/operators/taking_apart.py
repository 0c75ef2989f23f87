"""A model variant taken apart without a card: built on meta, its calls, what each tuple costs, PyTorch's own count of FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from farm.models import catalog
from farm.operators.capture import Capture, predict
from farm.operators.cost import Cost, cost, model_flops
from farm.words.protocol import Variant


@dataclass(frozen=True)
class TakenApart:
    """What a variant is made of. `model_flops` is PyTorch's count over the whole, the witness of the sum."""

    capture: Capture
    costs: dict[str, Cost]  # tuple id -> cost of one call
    model_flops: int

    @property
    def flops(self) -> int:
        """Of one pass, all calls."""
        return sum(self.costs[call.tuple_id].flops for call in self.capture.calls)

    @property
    def bytes_moved(self) -> int:
        """Of one pass, all calls."""
        return sum(self.costs[call.tuple_id].bytes for call in self.capture.calls)


def take_apart(variant: Variant, *, device_type: str = "cpu", grad: bool = False) -> TakenApart:
    """Take a variant apart, as it would run on a kind of device. Computes nothing; gaps and overlaps are the caller's to judge.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.models.catalog`.
        CaptureError: the model does not run.
    """
    model = catalog.build(
        variant.model, device="meta", dtype=variant.dtype, memory_format=variant.memory_format, mode=variant.mode
    )
    arguments = catalog.example_inputs(
        variant.model,
        variant.batch,
        variant.input_size,
        dtype=variant.dtype,
        device="meta",
        memory_format=variant.memory_format,
    )
    # Counted before it is taken apart: PyTorch's own counter over the whole is the witness of the sum.
    flops = model_flops(model, arguments)
    taken = predict(model, arguments, device_type=device_type, grad_enabled=grad)
    return TakenApart(taken, {tuple_id: cost(spec) for tuple_id, spec in taken.tuples.items()}, flops)
