"""The tensors of a forward pass and of a training step of any module, from fake tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from farm.errors import CaptureError, UsageError, refused
from farm.models.user_code import captured_code
from farm.operators.captured import CapturedPass
from farm.operators.fake_pass import STANDS_FOR_A_CARD, FakeTensors, fake_pass
from farm.training.capture import capture_step
from farm.training.card_functions import as_on_card
from farm.training.step import AUTOCAST_DTYPES, ForwardPass, Loss, TrainingStep, loss_of
from farm.types.variant import ALGORITHMS


def pass_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CapturedPass:
    """One forward pass without gradients, in evaluation mode, with the life of each tensor.

    The operators are those of a card, as far as they are known without one. Nothing is computed,
    and the module is unchanged afterwards. Raises `CaptureError` if the module does not run on
    these inputs, or depends on values in its tensors.
    """

    def captured(fakes: FakeTensors, fake_args: Any, fake_kwargs: Any) -> CapturedPass:
        forward = ForwardPass(model, fake_args, grad=False, kwargs=fake_kwargs)
        return capture_step(forward, fakes=fakes)

    return _on_card(model, args, kwargs, captured, train=False)


def step_of(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    optimizer: str = "adamw",
    amp: torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> CapturedPass:
    """One training step: forward pass, loss, backward pass and optimizer; see `pass_of`.

    Args:
        optimizer: sgd, adam or adamw.
        amp: the dtype of autocast in the forward pass.
        loss: makes a scalar of the module's output. Default: the loss that the module returns,
            cross-entropy for an output of two dimensions, else the mean of the squares of its
            outputs.

    Raises as `pass_of`, and `UsageError` if the optimizer is unknown.
    """
    check_optimizer(optimizer)

    def captured(fakes: FakeTensors, fake_args: Any, fake_kwargs: Any) -> CapturedPass:
        def made_loss(output: Any) -> Loss:
            if loss is not None:
                return Loss("loss of the caller", (), lambda output, _: loss(output))
            with _disable_current_modes():
                real = loss_of(output, causal=False, masked=False, device=torch.device("cpu"))
                return dataclasses.replace(real, targets=fakes.tree(real.targets))

        name = f"{optimizer}-foreach"
        step = TrainingStep(model, fake_args, optimizer=name, make_loss=made_loss, amp=amp)
        step.forward = functools.partial(model, **fake_kwargs)
        return capture_step(step, fakes=fakes)

    return _on_card(model, args, kwargs, captured, train=True)


def autocast_dtype(name: str) -> torch.dtype | None:
    """The dtype of autocast; None for "". Raises `UsageError` if it is another one than bfloat16
    and float16.
    """
    if name not in AUTOCAST_DTYPES:
        raise UsageError(f"There is no autocast to '{name}'.", "Give bfloat16 or float16.")
    return AUTOCAST_DTYPES[name]


def check_optimizer(name: str) -> None:
    """Raise `UsageError` if `step_of` has no such optimizer."""
    if name not in ALGORITHMS:
        raise UsageError(
            f"There is no optimizer '{name}'.", f"Give one of {', '.join(ALGORITHMS)}."
        )


@refused("The example inputs cannot be read")
def with_batch(values: Any, batch: int) -> Any:
    """Example inputs with another batch: the first dimension of each tensor that has as many
    entries there as the first tensor. Real tensors are indexed; the others need no memory.
    Raises `UsageError` as `batch_of`.
    """
    size = batch_of(values)

    def resized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != size:
            return value
        if value.is_floating_point() or value.is_complex():
            return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")
        return value[torch.arange(batch, device=value.device) % size]

    return _pytree.tree_map(resized, values)


@refused("The example inputs cannot be read")
def batch_of(values: Any) -> int:
    """The entries of the first dimension of the first tensor; 1 without such a tensor. Raises
    `UsageError` if it has none.
    """
    for value in _pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.dim():
            if not value.shape[0]:
                raise UsageError(
                    "The example inputs are an empty batch: the first tensor has the shape "
                    f"{tuple(value.shape)}.",
                    "Give inputs with at least one entry in the first dimension.",
                )
            return int(value.shape[0])
    return 1


def _on_card(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    captured: Callable[[FakeTensors, Any, Any], CapturedPass],
    *,
    train: bool,
) -> CapturedPass:
    """What a capture of a module's fake tensors returns: as on a card, else as on a CPU, because
    some modules make tensors of a CPU. The modules' modes are those of a pass or a step.
    """
    modes = [(module, module.training) for module in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    try:
        model.train(train)
        # A fused layer of a transformer would hide its tensors.
        torch.backends.mha.set_fastpath_enabled(False)
        with refused(f"{type(model).__name__} cannot be captured"), captured_code(), as_on_card():
            try:
                with fake_pass(model, args, dict(kwargs), STANDS_FOR_A_CARD) as faked:
                    return captured(*faked)
            except CaptureError:
                with fake_pass(model, args, dict(kwargs), "cpu") as faked:
                    return captured(*faked)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in modes:
            module.training = training
