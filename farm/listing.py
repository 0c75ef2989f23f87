"""Lists for people and programs: the operator tuples of a model variant, the jobs, the cards.

Each list is made of plain rows whose names carry their unit, ready for JSON and for a table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farm.benchmark.protocol import Variant
from farm.roofline import Roofline, roofline_of

if TYPE_CHECKING:
    from sqlmodel import Session

    from farm.devices.device import Card
    from farm.store.tables import Verdict


@dataclass(frozen=True)
class OperatorRow:
    """One operator tuple: how often it is called, the cost of *one* call, and its share of the estimated cost."""

    operator_id: str
    short_name: str
    label: str
    count: int
    flops: int
    bytes_moved: int
    share: float


@dataclass(frozen=True)
class Operators:
    """A variant's tuples, the costliest first. ``model_flops`` is PyTorch's own count over the whole model."""

    variant: Variant
    rows: tuple[OperatorRow, ...]
    model_flops: int
    gaps: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def flops(self) -> int:
        return sum(row.count * row.flops for row in self.rows)

    @property
    def bytes_moved(self) -> int:
        return sum(row.count * row.bytes_moved for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant.to_json(),
            "calls": self.calls,
            "tuples": len(self.rows),
            "flops": self.flops,
            "model_flops": self.model_flops,
            "bytes_moved": self.bytes_moved,
            "gaps": list(self.gaps),
            "operators": [
                {
                    "operator_id": row.operator_id,
                    "operator": row.short_name,
                    "label": row.label,
                    "count": row.count,
                    "flops_per_call": row.flops,
                    "bytes_per_call": row.bytes_moved,
                    "estimated_cost_share": row.share,
                }
                for row in self.rows
            ],
        }


def operators(variant: Variant, roofline: Roofline | None = None) -> Operators:
    """Take a variant apart and count each tuple's cost. Imports torch; measures nothing.

    Args:
        roofline: what the shares of the estimated cost are estimated with; a generic GPU's if None.

    Raises:
        UnknownModel, UnsupportedModel, UsageError: see `farm.catalog`.
        CaptureError: the model could not be taken apart.
    """
    from farm import catalog
    from farm.operators.capture import predict
    from farm.operators.cost import cost, model_flops
    from farm.operators.label import told_apart

    peaks = roofline or roofline_of("cuda", "", dtype=variant.dtype)
    inputs = catalog.example_inputs(
        variant.model, variant.batch, variant.input_size, dtype=variant.dtype, memory_format=variant.memory_format
    )
    model = catalog.build(variant.model, dtype=variant.dtype, memory_format=variant.memory_format, mode=variant.mode)
    taken = predict(model, inputs, device_type="cpu", grad_enabled=False)
    costs = {operator_id: cost(spec) for operator_id, spec in taken.tuples.items()}
    weights_us = {
        operator_id: count * peaks.estimate_us(costs[operator_id].flops, costs[operator_id].bytes)
        for operator_id, count in taken.counts.items()
    }
    whole_us = sum(weights_us.values())
    labels = told_apart({operator_id: spec.label for operator_id, spec in taken.tuples.items()})
    rows = [
        OperatorRow(
            operator_id,
            taken.tuples[operator_id].short_name,
            labels[operator_id],
            count,
            costs[operator_id].flops,
            costs[operator_id].bytes,
            weights_us[operator_id] / whole_us,
        )
        for operator_id, count in taken.counts.items()
    ]
    rows.sort(key=lambda row: (-row.share, row.label))
    return Operators(variant, tuple(rows), model_flops(model, inputs), taken.gaps)


def jobs(session: Session, limit: int) -> list[dict[str, Any]]:
    """The newest jobs, each with its newest verdict. Accuracies and coverage are fractions, None where there is none."""
    from sqlmodel import col, func, select

    from farm.store import tables

    newest = session.exec(select(tables.Job).order_by(col(tables.Job.created_at_s).desc()).limit(limit)).all()
    ids = [job.id for job in newest]
    items: dict[str, int] = defaultdict(int)
    closed: dict[str, int] = defaultdict(int)
    counted = (
        select(tables.Item.job_id, tables.Item.state, func.count())
        .where(col(tables.Item.job_id).in_(ids))
        .group_by(col(tables.Item.job_id), col(tables.Item.state))
    )
    for job_id, state, number in session.execute(counted):
        items[job_id] += number
        closed[job_id] += number if state in tables.CLOSED else 0
    by_round = select(tables.Verdict).where(col(tables.Verdict.job_id).in_(ids)).order_by(col(tables.Verdict.round))
    verdicts = {verdict.job_id: verdict for verdict in session.exec(by_round)}
    return [
        {
            "id": job.id,
            "kind": job.kind,
            "title": job.title,
            "state": str(job.state),
            "round": job.round,
            "items": items[job.id],
            "closed": closed[job.id],
            "created_at_s": job.created_at_s,
            "ended_at_s": job.ended_at_s,
            # As its report says it: what was read before its end is no basis for a verdict.
            **(_judged(verdicts.get(job.id)) if job.state != tables.JobState.CANCELLED else _judged(None, "none")),
        }
        for job in newest
    ]


def _judged(verdict: Verdict | None, outcome: str | None = None) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome if verdict else outcome,
        "accuracy_time": verdict.accuracy_time if verdict else None,
        "accuracy_energy": verdict.accuracy_energy if verdict else None,
        "coverage": verdict.coverage if verdict else None,
    }


def registered_cards(session: Session, heartbeat_s: float) -> list[dict[str, Any]]:
    """Every card that ever joined the farm, with what it does now."""
    from sqlmodel import select

    from farm import cards
    from farm.store import tables

    software = {row.id: row.model_dump() for row in session.exec(select(tables.Software))}
    return [
        {
            "id": view.card.id,
            "kind": view.card.kind,
            "model": view.card.model,
            "host": view.card.host,
            "index": view.card.index,
            "memory_bytes": view.card.memory_bytes,
            "driver": view.card.driver,
            "state": str(view.state),
            "state_reason": view.card.state_reason,
            "measuring": view.measuring,
            "waiting": view.waiting,
            "deferred": view.deferred,
            "done_last_hour": view.done_last_hour,
            "last_seen_ago_s": view.seen_ago_s,
            "software": software.get(view.card.software_id or ""),
            "queue": view.card.queue,
            "worker": view.card.worker,
            "capabilities": list(view.card.capabilities),
            "fingerprint": dict(view.card.fingerprint),
        }
        for view in cards.views(session, heartbeat_s)
    ]


def local_cards(found: Sequence[Card]) -> list[dict[str, Any]]:
    """Cards of this host as rows; a card that cannot be measured on says why."""
    rows = []
    for card in found:
        row = card.to_json()
        refusal = row.pop("refusal")
        rows.append({**row, "state": "refused" if refusal else "here", "state_reason": refusal})
    return rows
