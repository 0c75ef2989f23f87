"""A training step of a model variant taken apart without a card: built on meta, stepped on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import UsageError
from farm.models import catalog, own
from farm.operators.cost import cost
from farm.operators.extract import TakenApart, example_inputs, take_apart
from farm.operators.known import nothing_computed
from farm.settings import settings
from farm.training.capture import capture_step
from farm.training.losses import Loss, loss_of
from farm.training.recorded import StepCapture
from farm.training.step import TrainingStep, checkpoint_modules, checkpointed
from farm.training.tensor_lifetime import least_peak_bytes
from farm.types.protocol import Variant

_AMP = {"": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def take_step_apart(variant: Variant, *, device_type: str = "cpu") -> StepCapture:
    """One training step of a variant, in train mode, as a kind of device would run it; nothing is computed.

    Without a context on a card the operators are the CPU's, with the optimizer's implementation that a card gets.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.models.catalog`, `farm.training.losses` and `farm.training.step`.
        CaptureError: the step does not run.
    """
    if variant.phase == "decode":
        raise UsageError("A token beside a filled cache is not what a model is trained on.", "Give --phase prefill.")
    with contextlib.redirect_stdout(sys.stderr):  # what a person's own model prints is no result of ours
        model = catalog.build(variant, device="meta")
        inputs = example_inputs(variant, "meta")
        on = device_type if device_type == "cuda" and torch.cuda.is_initialized() else "cpu"
        recompute = tuple(filter(None, variant.recompute.split(",")))
        with nothing_computed(model, inputs, None, on) as (fakes, stand_ins, _), contextlib.ExitStack() as until:
            if recompute:
                until.enter_context(checkpointed(model, recompute))

            def loss(output: Any) -> Loss:
                with _disable_current_modes():
                    found = loss_for(variant, output, torch.device("cpu"))
                    return dataclasses.replace(found, targets=fakes.tree(found.targets))

            step = TrainingStep(
                model,
                stand_ins,
                optimizer=implementation(variant.optimizer, device_type),
                make_loss=loss,
                amp=_AMP[variant.amp],
                accumulate=variant.accumulate,
            )
            return capture_step(step, device_type=on)


def build_step(variant: Variant, device: torch.device, *, launch: str = "eager") -> TrainingStep:
    """A variant's training step on a device, with seeded random weights, as it is run and measured; grad must be enabled.

    Adam and AdamW keep their count of steps on the card where a CUDA graph is made of the step.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `take_step_apart`.
    """
    model, inputs = catalog.build(variant, device=device), catalog.example_inputs(variant, device=device)
    if recompute := tuple(filter(None, variant.recompute.split(","))):
        checkpoint_modules(model, recompute)
    step = TrainingStep(
        model,
        inputs,
        optimizer=implementation(variant.optimizer, device.type),
        make_loss=lambda output: loss_for(variant, output, device),
        amp=_AMP[variant.amp],
        accumulate=variant.accumulate,
        capturable=device.type == "cuda" and launch == "graph",
    )
    step.run()  # makes the optimizer's state, and shows what the loss is of
    return step


def taken_apart(variant: Variant, *, device_type: str = "cpu", grad: bool = False) -> TakenApart:
    """A variant taken apart, whether its forward pass or a training step is meant.

    Raises:
        See `take_step_apart` and `farm.operators.extract.take_apart`.
    """
    if not variant.step:
        return take_apart(variant, device_type=device_type, grad=grad)
    step = take_step_apart(variant, device_type=device_type)
    costs = {tuple_id: cost(spec) for tuple_id, spec in step.tuples.items()}
    assert step.flops is not None, "the first step was run here"
    on_its_card = step.device_type == device_type
    least_bytes = max(step.memory_bytes) if on_its_card else least_peak_bytes(step)
    return TakenApart(step.as_capture(), costs, step.flops, least_bytes)


def loss_for(variant: Variant, output: Any, device: torch.device) -> Loss:
    """What the variant is trained for: the user's own loss where one is registered beside the model, else by its output."""
    entry = catalog.find(variant.model)
    if entry.origin == own.NAME and (registered := own.loss(entry.own_name)) is not None:
        return Loss(settings().losses[entry.own_name], (), lambda output, _: registered(output))
    masked = bool(variant.length) and not entry.generates
    return loss_of(output, causal=entry.generates, masked=masked, device=device)


def implementation(optimizer: str, device_type: str) -> str:
    """PyTorch updates all parameters at once on a card, unless told otherwise."""
    return optimizer if "-" in optimizer or device_type == "cpu" else f"{optimizer}-foreach"
