"""A job on simulated cards, planned in a database without a worker: for tests of decisions of the
database.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlmodel import select

from farm.devices.device import Card
from farm.devices.simulated import SOFTWARE
from farm.devices.software import torch_version
from farm.jobs import cards, items, jobs
from farm.jobs.captures import capture_for
from farm.models import catalog
from farm.operators.captured import CapturedCall
from farm.store import captures, content, tables
from farm.store.database import Database
from farm.types.details import Details
from farm.types.figure import Figure
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import METHOD, Reading, method_of
from farm.types.request import Request, Sweep
from farm.types.variant import Variant
from tests.farms import store_operators

READING = Reading(
    time_us=Figure(10.0, 0.01),
    time_median_us=10.0,
    time_trimmed_us=10.0,
    passes=100,
    window_s=0.7,
    warm_up_s=0.3,
    power_w=Figure(100.0),
    energy_mj=Figure(1.0, 0.001),
    details=Details(method=METHOD),
)


def sweep(number: int = 1, **changes: Any) -> Request:
    request = Request(
        sweep=Sweep("Conv2d", {"in_channels": tuple(range(number))}, "a test"),
        protocol=Protocol(launch="eager"),
        stopping=Stopping(),
    )
    return request.replace(**changes)


def register(database: Database, *numbers: int, model: str = "a card") -> list[str]:
    """Register cards as their workers do; return their ids."""
    ids = []
    for number in numbers:
        card = Card(
            id=f"SIM-{number}",
            kind="simulated",
            model=model,
            memory_bytes=0,
            host="here",
            index=number,
        )
        cards.register(
            database, card, SOFTWARE, holder=f"holder-{number}", queue=f"card.SIM-{number}"
        )
        ids.append(card.id)
    return ids


def plan(
    database: Database,
    card_ids: Sequence[str],
    *,
    number: int = 1,
    operators: Sequence[str] = (),
    cards: int = 1,
) -> str:
    """Plan a sweep job of `number` tuples, each measured by so many cards together; return its
    id.
    """
    ids = list(operators) or store_operators(database, [""] * number)
    request = sweep(len(ids), protocol=Protocol(launch="eager", cards=cards))
    return jobs.create(database, request, card_ids, operator_ids=ids).job_id


def plan_model(
    database: Database, card_ids: Sequence[str], short_names: Sequence[str], **changes: Any
) -> str:
    """Plan a model job of one call per operator type; return its id."""
    variant = Variant("resnet18", batch=1, input_size=224)
    ids = store_operators(database, [""] * len(short_names))
    with database.write() as session:
        for operator_id, short_name in zip(ids, short_names, strict=True):
            operator = session.get_one(tables.Operator, operator_id)
            operator.short_name = short_name
            session.add(operator)
        content.store_variant(session, variant)
        calls = [
            CapturedCall(index, "", operator_id, (), ()) for index, operator_id in enumerate(ids)
        ]
        capture_id = captures.store_capture(
            session,
            calls,
            tables.Capture(
                variant_id=variant.id,
                device_type="cpu",
                grad=False,
                torch="t",
                launch="eager",
                origin="predicted",
            ),
        )
    scope = changes.pop("scope", ("all",))
    request = Request(variant=variant, protocol=Protocol(launch="eager"), **changes)
    return jobs.create(database, request, card_ids, scope=scope, capture_id=capture_id).job_id


def items_of(database: Database, job_id: str, role: str = "") -> list[tables.Item]:
    with database.read() as session:
        query = select(tables.Item).where(tables.Item.job_id == job_id).order_by(tables.Item.id)  # type: ignore[arg-type]
        return [item for item in session.exec(query) if role in ("", item.role)]


def claim(
    database: Database,
    item: tables.Item,
    holder: str = "somebody",
    *,
    software_id: str = SOFTWARE.id,
    lease_s: float = 60.0,
    max_attempts: int = 3,
) -> Any:
    assert item.id is not None
    return items.claim(
        database,
        item.id,
        card_id=item.card_id,
        holder=holder,
        software_id=software_id,
        lease_s=lease_s,
        max_attempts=max_attempts,
    )


def complete(
    database: Database,
    claimed: items.Claim,
    card_id: str,
    *,
    software_id: str = SOFTWARE.id,
    reading: Reading = READING,
) -> items.FollowUp:
    details = (
        dataclasses.replace(reading.details, method=method_of(card_id))
        if reading is READING
        else reading.details
    )
    reading = dataclasses.replace(reading, details=details)
    return items.complete(database, claimed, reading, card_id=card_id, software_id=software_id)


def readings(database: Database) -> int:
    with database.read() as session:
        return len(session.exec(select(tables.ReadingRow.id)).all())


def know(database: Database, model: str, batch: int = 32) -> None:
    """Store the capture of a model, as after an earlier request, so that a command for it need not
    import torch.
    """
    request = Request(variant=catalog.variant(model, batch), protocol=Protocol())
    capture_for(database, request, device_type="cpu", torch=torch_version())
