"""What memory a training step needs, and which tensors to put where: `farm memory` for programs and notebooks."""

from __future__ import annotations

from farm.errors import UsageError
from farm.exchange.packaged import database_of, packaged_files
from farm.memory_report import step_memory as memories
from farm.memory_report.step_memory import Memory
from farm.requests.memory import amounts_of, bytes_of
from farm.settings import settings
from farm.store.database import Database
from farm.types.protocol import Variant


def step_memory(
    variant: Variant, *, database: Database | None = None, card: str = "H200", fast: str = "", slow_bandwidth: str = ""
) -> Memory:
    """Say what memory a training step needs, and plan it. Runs nothing.

    Args:
        variant: of a step: ``farm.variant("resnet50", batch=32, step="training")``.
        database: that times come from, and what tensors add in slow memory; the readings that come with the package without.
        card: part of the model of card; or ``cpu``.
        fast: amounts of fast memory to plan for: ``8GB``, or shares of the peak, ``75%,50%``.
        slow_bandwidth: of the wire, ``55GB/s``, for operators that nobody has read in slow memory; as readings have it without.

    Returns:
        The memory over the step; with ``fast``, ``placing.plans`` name the tensors that are to be slow, ``placing.curve`` what less
        and more would give. ``to_json()`` is what ``farm memory --json`` prints.

    Raises:
        UsageError: a forward pass, no such card, an amount that is none, less than the largest operator needs, or nothing to plan from.
        CaptureError: the step cannot be taken apart.
    """
    if variant.step != "training":
        raise UsageError(
            f"{variant} is a forward pass.", 'Say step="training": farm.variant("resnet50", 32, step="training").'
        )
    amounts = amounts_of("fast", fast) if fast else []
    bytes_per_s = bytes_of("slow_bandwidth", slow_bandwidth, per_second=True) if slow_bandwidth else None
    found = memories.memory(variant, card)
    known = database or database_of(packaged_files(), settings().state_dir / "packaged")
    with known.read() as session:
        found = memories.with_readings(session, found)
        read = memories.read_in_slow_memory(session, found) if amounts else None
    return memories.with_placing(found, read, amounts, bytes_per_s) if amounts else found
