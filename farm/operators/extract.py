"""A model variant taken apart without a card: built on meta, its calls, what each tuple costs, PyTorch's own count of FLOPs."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from farm.errors import CaptureError
from farm.models import catalog
from farm.operators.capture import Capture, capture, predict
from farm.operators.cost import Cost, cost, model_flops
from farm.operators.recorder import UNDER_AUTOCAST
from farm.types.label import label_of
from farm.types.protocol import Variant
from farm.types.tuple import OperatorTuple

if TYPE_CHECKING:
    from torch import nn

MOST_PLACES = 3  # told of one reason
MOST_RUN_BYTES = 2 * 2**30  # of the parameters and buffers of a model that is run for real


@dataclass(frozen=True)
class TakenApart:
    """What a variant is made of. `model_flops` is PyTorch's count over the whole, the witness of the sum."""

    capture: Capture
    costs: dict[str, Cost]  # tuple id -> cost of one call
    model_flops: int
    least_peak_bytes: int = 0  # of a training step: what it needs at once at least

    @property
    def flops(self) -> int:
        """Of one pass, all calls."""
        return sum(self.costs[call.tuple_id].flops for call in self.capture.calls)

    @property
    def bytes_moved(self) -> int:
        """Of one pass, all calls."""
        return sum(self.costs[call.tuple_id].bytes for call in self.capture.calls)

    def refusal(self, name: str) -> CaptureError | None:
        """Why a model of this name cannot be summed from its operators; None where it can."""
        gaps, overlaps = self.capture.gaps, self.capture.overlaps
        if gaps or overlaps:
            mend = "Its sum would miss these calls. Write the part with public PyTorch functions and modules."
            if gaps and all(UNDER_AUTOCAST in gap for gap in gaps):
                mend = "Take torch.autocast out of the model, and have all of it in one type: --dtype bfloat16."
            return CaptureError(f"{name} cannot be taken apart completely: {_each_reason_once(gaps + overlaps)}.", mend)
        if not self.capture.calls:
            return CaptureError(
                f"{name} has no operators: on its example input no call costs anything.",
                "Give it an example input that it works on.",
            )
        return None


def _each_reason_once(gaps: Iterable[str]) -> str:
    """The texts of gaps and overlaps, each reason with the calls that it is about."""
    places: dict[str, dict[str, None]] = {}
    for gap in gaps:
        where, _, reason = gap.partition(": ")
        operator, _, call = where.partition(" at ")
        # What the call is tells more than which aten operators are inside.
        place = f"at {call}" if " in " in call else f"{operator} at {call}"
        places.setdefault(reason, {})[place] = None
    told = []
    for reason, found in places.items():
        more = f" and {len(found) - MOST_PLACES} more" if len(found) > MOST_PLACES else ""
        told.append(f"{reason} ({'; '.join(list(found)[:MOST_PLACES])}{more})")
    return "; ".join(told)


def take_apart(variant: Variant, *, device_type: str = "cpu", grad: bool = False) -> TakenApart:
    """Take a variant apart, as it would run on a kind of device; whether that will do is the caller's to ask
    (`TakenApart.refusal`).

    Computes nothing but small integers (`farm.operators.known`). A model that needs more values than these is run on the CPU,
    where that takes no more than `MOST_RUN_BYTES`.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.models.catalog`.
        CaptureError: the model does not run.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what a person's own model prints is no result of ours
        model, arguments = _built(variant, "meta")
        try:
            # Counted before it is taken apart: PyTorch's own counter over the whole is the witness of the sum.
            flops = model_flops(model, arguments)
            taken = predict(model, arguments, device_type=device_type, grad_enabled=grad)
        except CaptureError as error:
            _refuse_to_run(variant, model, error)
            model, arguments = _built(variant, "cpu")
            flops = model_flops(model, arguments, computed=True)
            taken = capture(model, arguments, grad_enabled=grad)
    return TakenApart(taken, {tuple_id: _cost_of(spec) for tuple_id, spec in taken.tuples.items()}, flops)


def _cost_of(spec: OperatorTuple) -> Cost:
    """
    Raises:
        CaptureError: how much it gives, and with that what it costs, depends on values.
    """
    try:
        return cost(spec)
    except NotImplementedError as error:  # nonzero, unique: PyTorch knows no size of theirs on meta
        raise CaptureError(
            f"What {label_of(spec)} costs cannot be told: how much it gives depends on the values that it gets.",
            "Write the part without it, with shapes that are known.",
        ) from error


def _refuse_to_run(variant: Variant, model: nn.Module, error: CaptureError) -> None:
    """Raises ``error`` again where running the model for real would not help, or would take too much memory."""
    if catalog.find(variant.model).origin == "torchvision":  # these read no values
        raise error
    needed = sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))
    if needed > MOST_RUN_BYTES:
        raise CaptureError(
            f"{error.message} With values its parameters and buffers take {needed / 2**30:.1f} GiB, and a capture takes "
            f"{MOST_RUN_BYTES / 2**30:.0f} GiB at most.",
            f"{error.next_step} A smaller variant of it may be taken apart with values.",
        ) from error


def _built(variant: Variant, device: str) -> tuple[nn.Module, tuple[Any, ...]]:
    return catalog.build(variant, device=device), example_inputs(variant, device)


def example_inputs(variant: Variant, device: str = "meta") -> tuple[Any, ...]:
    """The catalog's for a variant; on meta its integers (token ids, masks) have values all the same, on the CPU."""

    def integers(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not value.is_floating_point()

    given = catalog.example_inputs(variant, device=device)
    if device != "meta" or not any(map(integers, given)):
        return given
    real = catalog.example_inputs(variant, device="cpu")
    return tuple(value if integers(value) else empty for value, empty in zip(real, given, strict=True))
