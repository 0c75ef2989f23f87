"""Requests to a benchmark process. Each kind is a dataclass that names the type of its answer.

A request or an answer is sent as a JSON object on one line. pydantic derives the JSON from the
fields; classes that are also stored have their own `to_json` and `from_json`. This module does not
import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from farm.types.fields import adapter
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import Reading
from farm.types.subject import Subject
from farm.types.verification import Verification

A = TypeVar("A", covariant=True)  # the type of the answer


@dataclass(frozen=True)
class ProcessRequest(Generic[A]):
    """A request with an answer of type `A`."""

    name: ClassVar[str]  # the value of "request" in the JSON
    answer: ClassVar[Any]  # the type of the answer
    doing: ClassVar[str]  # a verb phrase for messages: "The process did not `doing` in time"
    #: The next step if the answer is late: the time limit is usually that of an item.
    if_late: ClassVar[str] = (
        "Set a longer FARM_ITEM_TIMEOUT_S (seconds), or leave the operator out."
    )
    # True: the client locks the host's slow memory during the request
    uses_slow_memory: ClassVar[bool] = False


@dataclass(frozen=True)
class SubjectRequest(ProcessRequest[A]):
    """A request about a subject under a protocol."""

    subject: Subject
    protocol: Protocol


@dataclass(frozen=True)
class FingerprintRequest(ProcessRequest[dict[str, Any]]):
    """Measure the card's rates, power levels and sensor delays
    (`farm.benchmark.fingerprinting`).
    """

    name = "fingerprint"
    answer = dict[str, Any]
    doing = "take the card's fingerprint"
    if_late = "Look for other programs that use the card, and start the worker again."


@dataclass(frozen=True)
class VerifyRequest(SubjectRequest[Verification]):
    """Compare a variant's tuples on the card with the predicted tuples
    (`farm.benchmark.verification`).
    """

    name = "verify"
    answer = Verification
    doing = "verify the model's operators"
    predicted: Mapping[str, int] | None = None  # tuple id -> calls


@dataclass(frozen=True)
class CompiledAhead:
    """The result of a compilation ahead of an item's turn."""

    has_context: bool  # True if the process has a CUDA context


@dataclass(frozen=True)
class CompileRequest(SubjectRequest[CompiledAhead]):
    """Compile a variant on fake tensors, so that the compiler's cache has its code
    (`farm.training.fake_compilation`).
    """

    name = "compile"
    answer = CompiledAhead
    doing = "compile the model"
    if_late = "Read the worker's log. The model is compiled in its turn."
    most_bytes: int  # of memory that the process may use


@dataclass(frozen=True)
class MeasureRequest(SubjectRequest[Reading]):
    """Measure one item (`farm.benchmark.bench`).

    Only a simulated card uses ``predicted`` in its measurement. A client verifies the prediction
    before."""

    name = "measure"
    answer = Reading
    doing = "measure the item"
    stopping: Stopping
    predicted: Mapping[str, int] | None = None  # of a variant: tuple id -> calls

    @property
    def uses_slow_memory(self) -> bool:  # type: ignore[override]
        return bool(self.protocol.slow_tensors)


@dataclass(frozen=True)
class TurnsRequest(ProcessRequest[list[int]]):
    """Time the subjects of several items in turn on a CPU
    (`farm.benchmark.bench.Bench.time_in_turn`).

    The answer is the list of positions of the items that were timed. A `MeasureRequest` then gets
    the reading."""

    name = "turns"
    answer = list[int]
    doing = "time the items in turn"
    subjects: tuple[Subject, ...]
    protocols: tuple[Protocol, ...]  # one for each subject
    calls: tuple[int, ...]  # of each subject in the model
    stopping: Stopping


def to_json(value: Any) -> Any:
    """A request or an answer as JSON values (dicts, lists, strings, numbers)."""
    kind: Any = type(value)
    return (
        value.to_json()
        if hasattr(value, "to_json")
        else adapter(kind).dump_python(value, mode="json")
    )


def from_json(kind: Any, data: Any) -> Any:
    """The request or answer of type `kind` from its JSON. Raises `ValueError`, with pydantic's
    message, if the JSON does not match the type, and `FarmError` if the value of a field is not
    allowed."""
    return (
        kind.from_json(data) if hasattr(kind, "from_json") else adapter(kind).validate_python(data)
    )
