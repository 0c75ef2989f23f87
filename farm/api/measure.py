"""Measure a model of a program on a card of this host, and return the report of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.api.notebook import JobReport, job_report
from farm.jobs.in_process import run_model
from farm.store.database import Database
from farm.types.placement import Placements
from farm.types.protocol import Protocol, Stopping
from farm.types.request import Reuse
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.training.captured_model import CapturedModel


def measure_model(
    model: CapturedModel | Variant | str,
    *,
    database: Database,
    card: str = "",
    protocol: Protocol | None = None,
    stopping: Stopping | None = None,
    quick: bool = False,
    compile: str = "",
    operators: tuple[str, ...] = ("all",),
    target: float = 0.95,
    reuse: Reuse = "model",
    placements: Placements = "none",
) -> JobReport:
    """Measure a model and its tuples on one card of this host, as `farm run` does, and return the
    report of the job.

    This process measures a copy of a captured model; the model itself is unchanged. On a GPU, this
    process then keeps a CUDA context until it ends, and later readings on that card are flagged
    `shared`.

    Args:
        model: a `CapturedModel`, a variant of a catalog model, or the name of a catalog model.
        database: stores the job, calls and readings. The job reuses its readings as `reuse` says.
        card, protocol, stopping, quick: as in `measure_tuples`.
        compile: the mode of torch.compile: "default" or "max-autotune"; "": eager. Not for a
            `CapturedModel`.
        operators: the operator types to measure: ("all",), ("auto",) or names such as ("Conv2d",
            "Linear").
        target: the accuracy that the outcome "pass" requires, such as 0.95.
        reuse: "model": reuse readings of every card of this card's model; "card": of this card
            only; "none": measure everything. Models with equal calls share their readings; weights
            do not matter.
        placements: "all" or "each": also measure tuples with tensors in slow memory.

    Raises:
        UnknownModel, UnsupportedModel, CaptureError, UsageError, NoSuchCard: the request is
        invalid. CardBusy, CardUnavailable, UnhealthyCard: the card cannot be used. SchemaMismatch,
        DatabaseUnreachable: the database has another schema, or is read-only.
    """
    job_id = run_model(
        model,
        database=database,
        card=card,
        protocol=protocol,
        stopping=stopping,
        quick=quick,
        compile=compile,
        operators=operators,
        target=target,
        reuse=reuse,
        placements=placements,
    )
    return job_report(database, job_id)
