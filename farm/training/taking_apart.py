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
from farm.operators.known import nothing_computed
from farm.operators.taking_apart import example_inputs
from farm.settings import settings
from farm.training.capture import capture_step
from farm.training.losses import Loss, loss_of
from farm.training.recorded import StepCapture
from farm.training.step import TrainingStep, checkpointed
from farm.words.iteration import Iteration
from farm.words.protocol import Variant

_AMP = {"": None, "bfloat16": torch.bfloat16}


def take_step_apart(variant: Variant, iteration: Iteration, *, device_type: str = "cpu") -> StepCapture:
    """One training step of a variant, in train mode, as a kind of device would run it; nothing is computed.

    Without a context on a card the operators are the CPU's, with the optimizer's implementation that a card gets.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.models.catalog`, `farm.training.losses` and `farm.training.step`.
        CaptureError: the step does not run.
    """
    if variant.phase == "decode":
        raise UsageError("A token beside a filled cache is not what a model is trained on.", "Give --phase prefill.")
    with contextlib.redirect_stdout(sys.stderr):  # what a person's own model prints is no result of ours
        variant = dataclasses.replace(variant, mode="train")
        model = catalog.build(variant, device="meta")
        inputs = example_inputs(variant, "meta")
        on = device_type if device_type == "cuda" and torch.cuda.is_initialized() else "cpu"
        recompute = tuple(filter(None, iteration.recompute.split(",")))
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
                optimizer=implementation(iteration.optimizer, device_type),
                make_loss=loss,
                amp=_AMP[iteration.amp],
                accumulate=iteration.accumulate,
            )
            return capture_step(step, device_type=on)


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
