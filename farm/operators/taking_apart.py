"""A model variant taken apart without a card: built on meta, its calls, what each tuple costs, PyTorch's own count of FLOPs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from farm.errors import CaptureError
from farm.models import catalog
from farm.operators.capture import Capture, capture, predict
from farm.operators.cost import Cost, cost, model_flops
from farm.operators.recorder import UNDER_AUTOCAST
from farm.words.protocol import Variant

if TYPE_CHECKING:
    from torch import nn

MOST_PLACES = 3  # told of one reason
MOST_PARAMETERS = 500_000_000  # of a model that is run for real: 2 GB in single precision


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

    Computes nothing, but for a user's model that reads values back, as one does that looks whether its mask hides
    anything: where it does not run without values, it is run on the CPU.

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
        except CaptureError:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            if catalog.find(variant.model).origin != "user" or parameters > MOST_PARAMETERS:
                raise
            model, arguments = _built(variant, "cpu")
            with sdpa_kernel(SDPBackend.MATH):  # the counter knows no CPU's fused attention; meta takes none either
                flops = model_flops(model, arguments)
            taken = capture(model, arguments, grad_enabled=grad)
    return TakenApart(taken, {tuple_id: cost(spec) for tuple_id, spec in taken.tuples.items()}, flops)


def _built(variant: Variant, device: str) -> tuple[nn.Module, tuple[Any, ...]]:
    about: dict[str, Any] = {"device": device, "dtype": variant.dtype, "memory_format": variant.memory_format}
    model = catalog.build(variant.model, mode=variant.mode, **about)
    return model, catalog.example_inputs(variant.model, variant.batch, variant.input_size, **about)
