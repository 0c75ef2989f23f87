"""Requests to a benchmark process: one dataclass each, with the type of its answer. The server has a handler for each.

A request and its answer travel as JSON, one object a line. pydantic derives the JSON from the fields; classes that are
also stored have their own `to_json` and `from_json`. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import TypeAdapter

from farm.slow_memory.transfers import AsRun, Move, Wire
from farm.types.protocol import Protocol, Stopping, Subject
from farm.types.reading import Reading, Verification

A = TypeVar("A", covariant=True)  # the type of the answer


@dataclass(frozen=True)
class Verified:
    """The tuples that a variant has on the card."""

    observed: dict[str, Any] | None  # the capture on the card, as JSON, if it differs from the prediction
    verification: Verification


@dataclass(frozen=True)
class ProcessRequest(Generic[A]):
    """A request whose answer is an `A`."""

    name: ClassVar[str]  # on the wire
    answer: ClassVar[Any]  # the type of the answer
    doing: ClassVar[str]  # what the process does, for messages: "The process did not `doing` in time"
    uses_slow_memory: ClassVar[bool] = False  # no other card of the host may use slow memory meanwhile


@dataclass(frozen=True)
class SubjectRequest(ProcessRequest[A]):
    """A request about a subject under a protocol."""

    subject: Subject
    protocol: Protocol


@dataclass(frozen=True)
class FingerprintRequest(ProcessRequest[dict[str, Any]]):
    """Take the card's rates, power levels and sensor delays (`farm.benchmark.checks`)."""

    name, answer, doing = "fingerprint", dict[str, Any], "take the card's fingerprint"


@dataclass(frozen=True)
class VerifyRequest(SubjectRequest[Verified]):
    """Compare a variant's tuples on the card with its predicted ones (`farm.benchmark.verification`)."""

    name, answer, doing = "verify", Verified, "verify"
    predicted: Mapping[str, int] | None = None  # tuple id -> calls


@dataclass(frozen=True)
class MeasureRequest(SubjectRequest[Reading]):
    """Measure one item (`farm.benchmark.measure`). Only a simulated card uses `predicted`."""

    name, answer, doing = "measure", Reading, "measure"
    stopping: Stopping
    predicted: Mapping[str, int] | None = None

    @property
    def uses_slow_memory(self) -> bool:  # type: ignore[override]
        return bool(self.protocol.placement)


@dataclass(frozen=True)
class InSituRequest(SubjectRequest[dict[str, Any]]):
    """Time calls of a variant with tensors in slow memory (`farm.slow_memory.in_situ`)."""

    name, answer, doing, uses_slow_memory = "in_situ", dict[str, Any], "time calls in their model", True
    most: int | None = None  # configurations


@dataclass(frozen=True)
class StepCaptureRequest(SubjectRequest[dict[str, Any]]):
    """Capture a training step as the card runs it, as JSON (`farm.slow_memory.planned_step.extract_step`)."""

    name, answer, doing = "step_capture", dict[str, Any], "capture the step"


@dataclass(frozen=True)
class WireRequest(SubjectRequest[Wire]):
    """Measure the bandwidth of copies alone and beside a step (`farm.slow_memory.planned_step.measure_wire`)."""

    name, answer, doing, uses_slow_memory = "wire", Wire, "time copies", True


@dataclass(frozen=True)
class PlannedStepRequest(SubjectRequest[AsRun]):
    """Run a step with all tensors fast, and under plans (`farm.slow_memory.planned_step.compare`)."""

    name, answer, doing, uses_slow_memory = "planned_step", AsRun, "run the step", True
    calls: tuple[str, ...]  # the tuple ids of the step's calls
    plans: tuple[tuple[int, ...], ...]  # for each plan, the numbers of the slow tensors
    moves: tuple[tuple[Move, ...], ...] = ()  # for each plan


REQUESTS: dict[str, type[ProcessRequest[Any]]] = {
    kind.name: kind
    for kind in (
        FingerprintRequest,
        VerifyRequest,
        MeasureRequest,
        InSituRequest,
        StepCaptureRequest,
        WireRequest,
        PlannedStepRequest,
    )
}


def to_json(value: Any) -> Any:
    """The plain JSON of a request or an answer."""
    if hasattr(value, "to_json"):
        return value.to_json()
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def from_json(kind: Any, data: Any) -> Any:
    """The request or answer of type `kind` from its JSON.

    Raises:
        ValueError: the JSON does not fit; pydantic's message names the field.
        FarmError: a field has a value that is not allowed.
    """
    if hasattr(kind, "from_json"):
        return kind.from_json(data)
    return TypeAdapter(kind).validate_python(data)
