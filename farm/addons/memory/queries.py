"""Compute the memory of a training step from Python. Nothing here runs on a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.addons.memory import step_memory as memories
from farm.addons.memory.fits import Fits, need
from farm.addons.memory.memory_options import amounts_of, bytes_of
from farm.addons.memory.step_memory import StepMemory
from farm.errors import UsageError
from farm.exchange.first_answer import first_answer
from farm.exchange.packaged import packaged_database
from farm.models import catalog
from farm.store.card_models import card_bytes, card_model_named
from farm.store.database import Database
from farm.training.captured_model import no_model, positional
from farm.training.version import versioned
from farm.types.card_file import card_of_file
from farm.types.data_sheets import data_sheet
from farm.types.variant import Variant

if TYPE_CHECKING:
    import torch

    from farm.operators.captured import CapturedPass


def step_memory(
    variant: Variant,
    *,
    database: Database | None = None,
    card: str = "H200",
    fast: str = "",
    slow_bandwidth: str = "",
) -> StepMemory:
    """Compute the memory that a training step needs. With ``fast``, plan its slow tensors. Runs
    nothing on a card.

    Args:
        variant: a training step: ``farm.variant("resnet50", batch=32, step="training")``.
        database: source of times and of the cost of slow memory. Default: the readings that come
            with the package.
        card: part of the model name of a card, or ``cpu``.
        fast: amounts of fast memory to plan for: ``8GB``, or shares of the peak, ``75%,50%``.
        slow_bandwidth: bandwidth of slow memory, ``55GB/s``, for operators without readings in slow
            memory.
            Default: derived from the readings.

    Returns:
        The memory over the step. With ``fast``, ``offload_plans.plans`` name the tensors in slow
        memory, and ``offload_plans.curve`` has the step's time by fast memory. ``to_json()`` equals
        ``farm memory --json``.

    Raises:
        UsageError: the variant is a forward pass, the card is unknown, an amount is malformed or
            too small for the largest operator, or a plan has no readings to use.
        CaptureError: the step cannot be captured.
    """
    if not isinstance(variant, Variant):
        raise no_model(variant)
    model = catalog.resolve(variant.model)
    if variant.step != "training":
        raise UsageError(
            f"{model.title_of(variant)} is a forward pass, not a training step.",
            'Give step="training": farm.variant("resnet50", 32, step="training").',
        )
    amounts = amounts_of("fast", fast) if fast else []
    bytes_per_s = (
        bytes_of("slow_bandwidth", slow_bandwidth, per_second=True) if slow_bandwidth else None
    )
    step = memories.memory(model, versioned(variant, model), card)
    readings = database or packaged_database()
    with readings.read() as session:
        step = memories.with_readings(session, step)
        read = memories.read_in_slow_memory(session, step) if amounts else None
    return memories.with_offload_plans(step, read, amounts, bytes_per_s) if amounts else step


def fits(
    module: torch.nn.Module,
    inputs: Any,
    *,
    card: str | Path,
    optimizer: str = "adamw",
    amp: str = "",
    loss: Callable[[Any], torch.Tensor] | None = None,
    database: Database | None = None,
) -> Fits:
    """Compute if a module fits into a card's memory, for inference and for training, and with which
    largest batch. Runs nothing on a card, and needs no memory for the tensors.

    Args:
        module: the module; may be on the meta device.
        inputs: example inputs: a tensor, a tuple of positional arguments, or a mapping of keyword
            arguments. Other batches change the first dimension of all tensors that have the batch
            of the first tensor there.
        card: part of a card model's name, the name of a data sheet, or the path of a file that
            describes a card (`farm.types.card_file`).
        optimizer: sgd, adam or adamw, with PyTorch's default implementation on a GPU.
        amp: the dtype of autocast in a training step: "", bfloat16 or float16.
        loss: makes a scalar of the module's output. Default: the loss that the module returns,
            cross-entropy for an output of two dimensions, else the mean of squares of its outputs.
        database: source of the card's memory. Default: the database of the settings, then the
            packaged readings.

    Returns:
        Two needs, ``inference`` and ``training``: ``fits`` is True, False, or None if only the
        workspaces of libraries decide; ``tensors_bytes`` and ``most_bytes`` are the ends of the
        peak.

    Raises:
        UsageError: the card, the optimizer or the dtype is unknown, or the inputs are an empty
            batch.
        CaptureError: the module does not run on these inputs, or depends on values in its tensors.

    Example:
        >>> print(farm.fits(torch.nn.Linear(64, 8), torch.randn(4, 64), card="RTX 4090"))
        RTX 4090, 24 GB of memory
        inference with batch 4: fits; peak 4.1 kB of tensors, at most 770 MB with workspaces and ...
    """
    from farm.training.module_memory import (
        autocast_dtype,
        batch_of,
        check_optimizer,
        pass_of,
        step_of,
        with_batch,
    )

    dtype = autocast_dtype(amp)
    check_optimizer(optimizer)
    model, size_bytes = _card_and_bytes(card, database)
    args, kwargs = positional(inputs)

    def inference(batch: int) -> CapturedPass:
        return pass_of(module, *with_batch((args, kwargs), batch))

    def training(batch: int) -> CapturedPass:
        changed_args, changed_kwargs = with_batch((args, kwargs), batch)
        return step_of(
            module, changed_args, changed_kwargs, optimizer=optimizer, amp=dtype, loss=loss
        )

    batch = batch_of((args, kwargs))
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return Fits(
        card=model,
        card_bytes=size_bytes,
        inference=need("inference", inference, batch, size_bytes),
        training=need("training", training, batch, size_bytes) if trained else None,
    )


def _card_and_bytes(card: str | Path, database: Database | None) -> tuple[str, int]:
    """The name of a card model and its memory. Raises `UsageError` if it is unknown."""
    if isinstance(card, Path):
        named = card_of_file(card)
        return named, int(named.sheet.memory_bytes)
    try:
        model, size_bytes = first_answer(
            lambda session: (
                card_model_named(session, card),
                card_bytes(session, card_model_named(session, card)),
            ),
            database=database,
        )
    except UsageError:
        model = memories.card_named(card)
        size_bytes = int(data_sheet("cuda", model).memory_bytes)
    if not size_bytes:
        raise UsageError(
            f"The memory of {model} is unknown.", "Name a card with a data sheet, or a card file."
        )
    return model, size_bytes
