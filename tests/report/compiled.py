"""An eager and a compiled job of one small model, as rows of a database; the figures are made up.

The model has two equal blocks: a layer norm, a linear layer and a ReLU in each. The compiled model
has a library call and a generated kernel in each block; the first kernel of a block computes the
ReLU and the next block's layer norm."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from farm.store import content, tables
from farm.store.database import Database
from farm.types.protocol import Protocol
from farm.types.reading import METHOD
from farm.types.request import Request
from farm.types.tuple import Cost, OperatorTuple, TensorSpec
from farm.types.variant import Variant
from farm.verdict.job_results import JobResults
from tests.report.filled import SOFTWARE
from tests.report.rows import reading

EAGER = Variant("resnet18", 2, 64)
COMPILED = dataclasses.replace(EAGER, compile="default")
CARD, MODEL = "GPU-0", "NVIDIA H200"
TENSOR = TensorSpec("activation", "", (512, 512), "float32")
BREAKS = {"Unsupported call\n  more about it": 2, "print": 1}
FIRST = {"tensor": 0}


def kernel(name: str, fused: str, block: int = 1024) -> OperatorTuple:
    """A generated kernel that reads one tensor and writes another one."""
    parameters: dict[str, Any] = {"source": hashlib.md5(name.encode()).hexdigest(), "fused": fused}
    parameters |= {
        "config": {"dict": [["XBLOCK", block]]},
        "writes": [1],
        "outputs": [1],
        "compiler": "3.6.0",
    }
    tensors = (TENSOR, dataclasses.replace(TENSOR, storage=1))
    return OperatorTuple(
        "triton.pointwise", "kernel", parameters, (FIRST, {"tensor": 1}, 262144), {}, tensors
    )


def function(name: str, kind: str = "function") -> OperatorTuple:
    return OperatorTuple(name, kind, {}, (FIRST,), {}, (TENSOR,))


NORM, LINEAR, RELU = (function(f"torch.{name}") for name in ("layer_norm", "linear", "relu"))
_BLOCK = (("ln", NORM, 20.0), ("fc", LINEAR, 50.0), ("act", RELU, 10.0))
EAGER_CALLS = [
    (f"model.h.{block}.{name}", spec, us) for block in (0, 1) for name, spec, us in _BLOCK
]
EAGER_CALLS.append(("model.head", LINEAR, 50.0))
MM = function("aten.mm.default", "aten")


def compiled_calls(
    block: int = 1024, slower: float = 1.0
) -> list[tuple[str, OperatorTuple, float]]:
    fused, last = kernel("fused", "native_layer_norm_relu", block), kernel("last", "relu", 512)
    return [
        ("h.0.ln", kernel("first", "native_layer_norm", block), 15.0),
        ("h.0.fc", MM, 45.0),
        ("h.0.act, h.0.fc, h.1.ln", fused, 12.0 * slower),
        ("h.1.fc", MM, 45.0),
        ("h.1.act, h.1.fc", last, 8.0),
        ("", kernel("unknown", "copy"), 1.0),
    ]


def job(
    database: Database,
    job_id: str,
    variant: Variant,
    calls: Sequence[tuple[str, OperatorTuple, float]],
    **more: Any,
) -> None:
    """A finished job. A compiled job has a first round without calls.

    Args:
        more: `leave_out`, an operator tuple that has no reading.
    """
    protocol = Protocol(data="copied" if variant.compile else "normal")
    request = Request(variant=variant, protocol=protocol)
    with database.write() as session:
        content.store_software(session, SOFTWARE)
        for one in (protocol, protocol.of_whole):
            content.store_protocol(session, one)
        content.store_operators(
            session,
            {spec: Cost(10**9 if spec in (MM, LINEAR) else 0, 2 * 2**20) for _, spec, _ in calls},
        )
        content.store_variant(
            session, variant, flops=2 * 10**9, model_flops=2 * 10**9, bytes_moved=10**7
        )
        card = {
            "id": CARD,
            "kind": "cuda",
            "model": MODEL,
            "memory_bytes": 10**11,
            "software_id": SOFTWARE.id,
        }
        card |= {"capabilities": [], "fingerprint": {}}
        content.insert_new(session, tables.CardRow, [card])
        like = {
            "variant_id": variant.id,
            "device_type": "cuda",
            "torch": SOFTWARE.torch,
            "launch": "graph",
        }
        rounds = [tables.Capture(**like, origin="observed")]
        if variant.compile:
            facts = {
                "choices": {"kernels": {}, "algorithms": {"key": "chosen"}},
                "graph_breaks": BREAKS,
            }
            about = {"card_id": CARD, "card_model": MODEL, "compiled": facts}
            rounds = [
                tables.Capture(**like, card_model=MODEL),
                tables.Capture(**like, origin="observed", **about),
            ]
        for capture in rounds:
            session.add(capture)
        session.flush()
        for index, (path, spec, _) in enumerate(calls):
            call = {"call_index": index, "module_path": path, "operator_id": spec.id}
            session.add(tables.Call(capture_id=rounds[-1].id, **call))
        session.add(
            tables.Job(
                id=job_id,
                kind="model",
                title=str(variant),
                variant_id=variant.id,
                protocol_id=protocol.id,
                request=request.to_json(),
                state="done",
                round=len(rounds),
                created_at_s=1000.0,
            )
        )
        session.flush()
        for number, capture in enumerate(rounds, 1):
            reason = "the card listed its kernels" if number > 1 else "first"
            session.add(
                tables.Round(
                    job_id=job_id,
                    number=number,
                    operators=["all"],
                    capture_id=capture.id,
                    reason=reason,
                )
            )
        session.flush()
        times = {spec: us for _, spec, us in calls if spec is not more.get("leave_out")}
        own = {"card": CARD, "software_id": SOFTWARE.id}
        subjects = [("tuple", "operator", spec.id, us, protocol) for spec, us in times.items()]
        subjects.append(
            ("whole", "variant", variant.id, sum(us for *_, us in calls), protocol.of_whole)
        )
        for role, kind, subject, us, read_with in subjects:
            found = reading(
                session,
                subject,
                us,
                us / 2,
                subject_kind=kind,
                protocol_id=read_with.id,
                method=METHOD,
                **own,
            )
            place = {
                "job_id": job_id,
                "round": len(rounds),
                "role": role,
                "state": "done",
                "reading_id": found,
            }
            about = {
                "subject_kind": kind,
                "subject_id": subject,
                "protocol_id": read_with.id,
                "card_id": CARD,
            }
            session.add(tables.Item(**place, **about, card_model=MODEL))
        session.flush()
        for number in range(1, len(rounds) + 1):
            verdict = JobResults(session, session.get_one(tables.Job, job_id), number).verdict()
            session.add(
                tables.VerdictRow(
                    job_id=job_id, round=number, created_at_s=1001.0, **verdict.columns()
                )
            )
