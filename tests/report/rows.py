"""A small finished job as rows of a real database: what the tests of the report are about."""

from __future__ import annotations

import uuid
from typing import Any

from sqlmodel import select

from farm.store import tables
from farm.store.database import Database
from farm.types.protocol import Protocol
from farm.types.reading import METHOD
from farm.types.request import Request, Sweep
from farm.types.variant import Variant

CARD, OTHER_CARD = (
    "GPU-aaaa0000-1111-2222-3333-444455556666",
    "GPU-bbbb0000-1111-2222-3333-444455556666",
)
VARIANT = Variant("resnet18", 32, 224)


def operator(
    session: Any, name: str, label: str, flops: int = 0, bytes_moved: int = 1_000_000
) -> str:
    key = f"{name}-{label}".replace(" ", "")[:32]
    session.add(
        tables.Operator(
            id=key,
            schema_version=1,
            name=f"torch.nn.{name}",
            short_name=name,
            kind="module",
            label=f"{name} {label}",
            spec={"tensors": []},
            flops=flops,
            bytes_moved=bytes_moved,
        )
    )
    return key


def reading(
    session: Any,
    subject: str,
    time_us: float,
    energy_mj: float | None,
    card: str = CARD,
    **more: Any,
) -> str:
    values: dict[str, Any] = {
        "subject_kind": "operator",
        "card_model": "NVIDIA H200",
        "software_id": "software",
        "protocol_id": Protocol().id,
        "time_half_width_us": 0.002 * time_us,
        "time_median_us": time_us,
        "time_trimmed_us": time_us,
        "passes": 1000,
        "window_s": 0.5,
        "warm_up_s": 0.3,
        "energy_mj": energy_mj,
        "energy_half_width_mj": None if energy_mj is None else 0.01 * energy_mj,
        "idle_power_w": 80.0,
        "sm_clock_mhz": 1980.0,
        "cost_s": {"rebuild": 0.1, "window": 0.5},
        "details": {"method": METHOD},
        "id": uuid.uuid4().hex,
    }
    row = tables.ReadingRow(subject_id=subject, card_id=card, time_us=time_us, **values | more)
    session.add(row)
    session.flush()
    return row.id


def item(
    session: Any, job: str, role: str, subject: str, state: str = "done", **more: Any
) -> tables.Item:
    values: dict[str, Any] = {
        "round": 1,
        "card_id": CARD,
        "subject_kind": "variant" if role == "whole" else "operator",
    }
    row = tables.Item(
        job_id=job,
        role=role,
        subject_id=subject,
        protocol_id=Protocol().id,
        card_model="NVIDIA H200",
        state=state,
        **values | more,
    )
    session.add(row)
    return row


def ground(session: Any) -> None:
    """Cards, software, protocols and the variant."""
    session.add(
        tables.SoftwareRow(id="software", torch="2.11.0", cuda="13.0", cudnn="9.1", driver="580.65")
    )
    session.flush()
    for number, card in enumerate((CARD, OTHER_CARD)):
        session.add(
            tables.CardRow(
                id=card,
                kind="cuda",
                model="NVIDIA H200",
                memory_bytes=150_000_000_000,
                driver="580.65",
                host="gpu-host",
                card_index=number,
                software_id="software",
            )
        )
    for launch in ("graph", "eager"):
        protocol = Protocol(launch=launch)
        session.add(
            tables.ProtocolRow(
                id=protocol.id,
                launch=launch,
                residency="resident",
                data="normal",
                spec=protocol.to_json(),
            )
        )
    session.add(tables.ModelVariant(id=VARIANT.id, **VARIANT.to_json()))
    session.flush()


def job(session: Any, request: Request, job_id: str = "job1", **more: Any) -> tables.Job:
    row = tables.Job(
        id=job_id,
        kind="model" if request.variant else "sweep",
        title=request.title,
        variant_id=request.variant.id if request.variant else None,
        protocol_id=request.protocol.id,
        request=request.to_json(),
        **{"state": "done", "round": 1, "created_at_s": 1000.0, "ended_at_s": 1042.0} | more,
    )
    session.add(row)
    session.flush()
    return row


def capture(session: Any, operators: list[str], variant_id: str = VARIANT.id) -> int:
    row = tables.Capture(
        variant_id=variant_id,
        device_type="cuda",
        torch="2.11.0",
        launch="graph",
        origin="observed",
        card_id=CARD,
        verification={"launch": "graph", "matches": True, "differences": []},
    )
    session.add(row)
    session.flush()
    assert row.id is not None
    for index, subject in enumerate(operators):
        session.add(tables.Call(capture_id=row.id, call_index=index, operator_id=subject))
    return row.id


def model_job(database: Database, **request: Any) -> str:
    """Four operator types in resnet18: two convolutions, additions (reused), a ReLU that failed, a
    pool nobody asked for."""
    asked = Request(variant=VARIANT, operators=("Conv2d", "add", "ReLU"), **request)
    with database.write() as session:
        ground(session)
        big = operator(session, "Conv2d", "64->64 k3 | 32x64x56x56 fp32", 7_400_000_000, 51_000_000)
        small = operator(
            session, "Conv2d", "64->128 k1 s2 | 32x64x56x56 fp32", 411_000_000, 38_000_000
        )
        add = operator(session, "add", "32x64x56x56 + 32x64x56x56 fp32", 6_400_000, 77_000_000)
        relu = operator(session, "ReLU", "32x64[0] fp32", 0, 8_000)
        pool = operator(session, "MaxPool2d", "k3 s2 | 32x64x112x112 fp32", 0, 120_000_000)
        session.flush()
        job(session, asked)
        captured = capture(session, [big] * 4 + [small] + [add] * 3 + [relu] * 2 + [pool])
        session.add(
            tables.Round(
                job_id="job1",
                number=1,
                operators=list(asked.operators),
                capture_id=captured,
                reason="first",
            )
        )
        session.flush()
        conv_reading = reading(session, big, 150.0, 80.0)
        item(session, "job1", "tuple", big, reading_id=conv_reading)
        item(
            session,
            "job1",
            "tuple",
            small,
            reading_id=reading(session, small, 30.0, 12.0, flags=["not_converged"]),
        )
        other = reading(session, add, 22.0, 9.0, card=OTHER_CARD)
        item(session, "job1", "tuple", add, reading_id=other, reused=True, card_id=OTHER_CARD)
        item(
            session,
            "job1",
            "tuple",
            relu,
            "failed",
            reason="raised",
            message="an illegal [memory] access\nmore",
        )
        item(session, "job1", "canary", big, reading_id=conv_reading, reused=True)
        item(
            session,
            "job1",
            "canary",
            big,
            reading_id=reading(session, big, 153.0, 82.0, OTHER_CARD),
            card_id=OTHER_CARD,
        )
        whole = reading(session, VARIANT.id, 720.0, 375.0, subject_kind="variant")
        item(session, "job1", "whole", VARIANT.id, reading_id=whole)
    return "job1"


def sweep_job(database: Database, energy: bool = True) -> str:
    asked = Request(sweep=Sweep("Conv2d", {"in_channels": (64, 128)}))
    with database.write() as session:
        ground(session)
        job(session, asked, "sweep1")
        session.add(tables.Round(job_id="sweep1", number=1, operators=["all"]))
        for channels in (64, 128):
            subject = operator(session, "Conv2d", f"{channels}->64 k3", channels * 1_000_000)
            session.flush()
            done = reading(session, subject, channels / 4, channels / 8 if energy else None)
            item(session, "sweep1", "tuple", subject, reading_id=done)
    return "sweep1"


def cancel_early(database: Database, job_id: str) -> None:
    """A job was cancelled when its whole model and one of its tuples had been measured."""
    with database.write() as session:
        session.get_one(tables.Job, job_id).state = "cancelled"
        for verdict in session.exec(select(tables.VerdictRow).filter_by(job_id=job_id)).all():
            session.delete(verdict)
        tuples = select(tables.Item).filter_by(job_id=job_id, role="tuple")
        for left in session.exec(tuples).all()[1:]:
            left.state, left.reading_id = "cancelled", None
