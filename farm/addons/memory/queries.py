"""Compute the memory of a training step from Python. Nothing here runs on a card."""

from __future__ import annotations

from farm.addons.memory import step_memory as memories
from farm.addons.memory.memory_options import amounts_of, bytes_of
from farm.addons.memory.step_memory import StepMemory
from farm.errors import UsageError
from farm.exchange.packaged import packaged_database
from farm.models import catalog
from farm.store.database import Database
from farm.training.captured_model import no_model
from farm.training.version import versioned
from farm.types.protocol import Variant


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
    if variant.step != "training":
        raise UsageError(
            f"{variant} is a forward pass, not a training step.",
            'Give step="training": farm.variant("resnet50", 32, step="training").',
        )
    amounts = amounts_of("fast", fast) if fast else []
    bytes_per_s = (
        bytes_of("slow_bandwidth", slow_bandwidth, per_second=True) if slow_bandwidth else None
    )
    model = catalog.resolve(variant.model)
    step = memories.memory(model, versioned(variant, model), card)
    readings = database or packaged_database()
    with readings.read() as session:
        step = memories.with_readings(session, step)
        read = memories.read_in_slow_memory(session, step) if amounts else None
    return memories.with_offload_plans(step, read, amounts, bytes_per_s) if amounts else step
