"""A finished job of a real model: its own tuples and calls, with readings made up from what each
should cost.
"""

from __future__ import annotations

import random
from typing import Any

from farm.store import captures, tables
from farm.store.database import Database
from farm.types.request import Request
from farm.types.roofline import roofline_of
from farm.types.variant import Variant
from farm.verdict.job_results import JobResults
from tests.extracted import extract
from tests.report import rows

POWER_W = 500.0


def measured(
    database: Database, variant: Variant = rows.VARIANT, job_id: str = "job1", **request: Any
) -> str:
    """The variant read on an H200 that does not exist, with a verdict; its job's id."""
    apart = extract(variant, device_type="cuda")
    asked = Request(variant=variant, **request)
    roofline = roofline_of("cuda", "NVIDIA H200", dtype=variant.dtype)
    unlike = random.Random(variant.id)
    with database.write() as session:
        if session.get(tables.CardRow, rows.CARD) is None:
            rows.ground(session)
        launch = asked.protocol.launch
        capture = tables.Capture(
            variant_id=variant.id, device_type="cuda", launch=launch, torch="2.11.0"
        )
        captured = captures.store_extraction(session, variant, apart, capture)
        rows.job(session, asked, job_id)
        session.add(
            tables.Round(
                job_id=job_id, number=1, operators=["all"], capture_id=captured, reason="first"
            )
        )
        session.flush()
        total_us = 0.0
        for operator_id, calls in apart.capture.counts.items():
            cost = apart.costs[operator_id]
            time_us = roofline.estimate_us(cost.flops, cost.bytes) * unlike.uniform(1.2, 2.0)
            power_w = POWER_W * unlike.uniform(0.5, 1.2)
            total_us += calls * time_us
            read = rows.reading(
                session,
                operator_id,
                time_us,
                time_us * power_w / 1e3,
                power_w=power_w,
                sm_clock_mhz=unlike.choice((1980.0, 1980.0, 1755.0)),
            )
            rows.item(session, job_id, "tuple", operator_id, reading_id=read)
        whole_us = total_us * unlike.uniform(0.97, 1.04)
        energy_mj = whole_us * POWER_W / 1e3
        whole = rows.reading(
            session, variant.id, whole_us, energy_mj, subject_kind="variant", power_w=POWER_W
        )
        rows.item(session, job_id, "whole", variant.id, reading_id=whole)
    with database.write() as session:
        job = session.get_one(tables.Job, job_id)
        verdict = JobResults(session, job, 1).verdict()
        session.add(tables.VerdictRow(job_id=job_id, round=1, **verdict.columns()))
    return job_id
