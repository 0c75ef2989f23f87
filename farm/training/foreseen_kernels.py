"""The kernels of a variant after `torch.compile` on a card that nobody has compiled it on."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.errors import CaptureError
from farm.models import catalog
from farm.operators.captured import CapturedPass
from farm.operators.cost import costs_of
from farm.operators.fake_pass import FakeTensors
from farm.operators.foreseen_kernels import ForeseenPass, Unwritten, foreseen
from farm.training.card_functions import scaled_dot_product_attention
from farm.training.extract import Extraction
from farm.types.variant import Variant

_CARD = torch.device("cuda", 0)


def foreseen_kernels(variant: Variant, multiprocessors: int) -> Extraction:
    """List the launches of a compiled forward pass without a card: generated kernels, and calls of
    libraries as aten operators.

    The compiler takes from 5 s to a minute, as on a card. ``max-autotune`` times kernels on the
    card; its kernels are listed as those of ``default``.

    Args:
        multiprocessors: of the card. All cards with this number have the same kernels.

    Raises:
        CaptureError: the compiler refuses the model or calls an operator that no tuple describes,
            the model reads a value, or the variant is a training step.
    """
    model = catalog.resolve(variant.model)
    if variant.step:
        raise CaptureError(
            f"The kernels of {model.title_of(variant)} cannot be listed without a card: it is a "
            "training step.",
            "Estimate it without --compile, or compile and measure it on a card.",
        )
    module, inputs = model.build(variant, device="meta"), model.meta_inputs(variant)
    captured = foreseen_pass(module, inputs, multiprocessors)
    if captured.gaps:
        raise CaptureError(
            f"The kernels of {model.title_of(variant)} cannot be summed: {captured.gaps[0]}.",
            "Estimate it without --compile, or measure the whole model on a card.",
        )
    return Extraction(captured, costs_of(captured))


def foreseen_pass(
    module: torch.nn.Module, inputs: tuple[object, ...], multiprocessors: int
) -> CapturedPass:
    """As `foreseen_kernels`, for a module and inputs on the device ``meta``."""
    fakes = FakeTensors(FakeTensorMode(), str(_CARD), keeps_values=False)
    with foreseen(multiprocessors, scaled_dot_product_attention), fakes.swapped_into(module):
        fake_inputs = fakes.tree(inputs)
        with fakes.mode, Unwritten(), torch.no_grad():
            compiled = ForeseenPass(module, fake_inputs, _CARD, mode="default", cached=False)
            return compiled.capture()
