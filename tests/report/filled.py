"""A database with readings of real tuples of real models, as a farm on a card would have them; the
figures are made up."""

from __future__ import annotations

import itertools
import math
from typing import Any

from farm.store import captures, content, tables
from farm.store.database import Database
from farm.training.extract import Extraction
from farm.types.protocol import Protocol
from farm.types.reading import METHOD, Trace
from farm.types.software import Software
from farm.types.variant import Variant
from farm.types.verification import Verification
from tests.extracted import extract

VARIANT = Variant("resnet18", 2, 64)
SOFTWARE = Software(
    torch="2.11.0+cu130",
    torchvision="0.26.0",
    cuda="13.0",
    cudnn="91900",
    driver="580.1",
    python="3.12",
)
PROTOCOL = Protocol()
KERNELS = {"void gemm<float, 4>(float const*)": 1}


def fill(
    database: Database,
    variant: Variant = VARIANT,
    *,
    card: str = "GPU-0",
    model: str = "NVIDIA H200",
    software: Software = SOFTWARE,
    protocol: Protocol = PROTOCOL,
    slower: float = 1.0,
    created_at_s: float = 1.79e9,
    leave_out: Any = lambda spec: False,
    whole: bool = True,
    prefix: str = "",
    half_width: float = 0.002,
) -> Extraction:
    """Readings of a variant's tuples and of the whole, on one card."""
    # a step with a card's optimizer
    taken = extract(variant, device_type="cuda" if variant.step else "cpu")
    costs = {spec: taken.costs[id_] for id_, spec in taken.capture.tuples.items()}
    with database.write() as session:
        content.store_software(session, software)
        content.store_protocol(session, protocol)
        content.store_operators(session, costs)
        content.store_variant(
            session,
            variant,
            flops=taken.flops,
            model_flops=taken.model_flops,
            bytes_moved=taken.bytes_moved,
        )
        peaks = {"float32": 5e13, "bfloat16": 8e14}
        fingerprint = {"matmul_flops_per_s": peaks, "copy_bytes_per_s": 4.2e12}
        content.insert_new(
            session,
            tables.CardRow,
            [
                {
                    "id": card,
                    "kind": "cuda",
                    "model": model,
                    "memory_bytes": 10**11,
                    "fingerprint": fingerprint,
                    "capabilities": [],
                }
            ],
        )
        capture_id = captures.store_capture(
            session,
            taken.capture.calls,
            tables.Capture(
                variant_id=variant.id,
                device_type="cuda",
                grad=False,
                torch=software.torch,
                launch=protocol.launch,
                verification=Verification(
                    card=card,
                    tuple_kernels=dict.fromkeys(taken.capture.tuples, KERNELS),
                    numerics={},
                ).to_json(),
            ),
        )
        assert capture_id
        total_us = 0.0
        for spec, cost in costs.items():
            time_us = slower * (max(cost.flops / 4e13, cost.bytes / 3e12) * 1e6 + 1.5)
            total_us += taken.capture.counts[spec.id] * time_us
            if not leave_out(spec):
                more = {"subject_kind": "operator", "subject_id": spec.id, "time_us": time_us}
                _reading(
                    session, card, model, software, protocol, created_at_s, prefix, half_width, more
                )
        if whole:
            more = {"subject_kind": "variant", "subject_id": variant.id, "time_us": total_us}
            _reading(
                session,
                card,
                model,
                software,
                protocol.of_whole,
                created_at_s,
                prefix,
                half_width,
                more,
            )
    return taken


_number = itertools.count()


def _reading(
    session: Any,
    card: str,
    model: str,
    software: Software,
    protocol: Protocol,
    created_at_s: float,
    prefix: str,
    half_width: float,
    more: dict[str, Any],
) -> None:
    time_us = more["time_us"]
    number = next(_number)
    reading_id = f"{prefix}{number:032x}"[-32:]
    details: dict[str, Any] = {
        "method": METHOD,
        "copies": 2,
        "context": {"alone_us": time_us * 0.9, "effect_us": 0.0},
    }
    if number % 5 == 0:
        details["burst"] = {
            "time_us": time_us * 0.95,
            "time_half_width_us": 0.01,
            "energy_mj": time_us * 0.4,
        }
    session.add(
        tables.ReadingRow(
            id=reading_id,
            card_id=card,
            card_model=model,
            software_id=software.id,
            protocol_id=protocol.id,
            time_half_width_us=half_width * time_us,
            time_median_us=time_us,
            time_trimmed_us=time_us,
            passes=1000,
            window_s=0.5,
            warm_up_s=0.3,
            power_w=500.0,
            power_source="energy_counter",
            energy_mj=time_us * 0.5,
            energy_half_width_mj=half_width * time_us * 0.5,
            idle_power_w=80.0,
            sm_clock_mhz=1980.0,
            flags=["throttled_power"] if number % 5 == 0 else [],
            throttle_reasons=["power_cap"] if number % 5 == 0 else [],
            details=details,
            method=METHOD,
            cost_s={"window": 0.5, "total": 1.25},
            created_at_s=created_at_s + number * 1e-3,
            **more,
        )
    )
    session.flush()
    if number % 7 == 0:
        samples = ([0.0, 0.1], [math.pi, 500.0])
        session.add(
            tables.TraceRow(
                reading_id=reading_id, packed=Trace((0.0, 0.5), {"power_w": samples}).pack()
            )
        )
