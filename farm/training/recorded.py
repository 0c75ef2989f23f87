"""What one training step consists of, as it was seen: calls of aten operators and the tensors between them. Plain data.

A call belongs to exactly one part: the forward of an owner, its backward, its recomputation, the accumulation of gradients,
the loss or the optimizer. An owner is a leaf module or a function of the forward, as a forward capture has them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from farm.operators.recorder import Call, Capture, StorageSpec
from farm.types.tuple import OperatorTuple, parse

if TYPE_CHECKING:
    import torch

STAGES = ("zero_grad", "forward", "loss", "backward", "optimizer")
PARTS = ("forward", "backward", "recomputation", "accumulation", "loss", "optimizer")
ROLES = ("parameter", "gradient", "optimizer state", "buffer", "input", "activation", "temporary")


@dataclass(frozen=True)
class Owner:
    """A leaf module's call or a function's, in the forward or the loss. ``what`` is its class or function ('Conv2d')."""

    index: int
    path: str
    what: str
    stage: str


@dataclass(frozen=True)
class StepCall:
    """One aten operator that costs anything. ``reads`` and ``writes`` are numbers of `StepCapture.tensors`."""

    index: int
    tuple_id: str
    stage: str
    part: str
    owner: int | None  # the index of an `Owner`; None for accumulation and the optimizer
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class TensorLife:
    """A piece of memory over one step. Calls are named by their index.

    Attributes:
        born: the call that made it; -1 where it was there before the step.
        released: the call behind which nothing held it any more; None where it outlives the step.
        uses: the calls that read or wrote it, in order.
        saved: whether it was made before the backward and is read by it.
    """

    number: int
    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    born: int
    released: int | None
    uses: tuple[int, ...]

    @property
    def outlives(self) -> bool:
        """Whether it is there before the step and behind it: 'global' in the words of planners of memory."""
        return self.born < 0 and self.released is None


@dataclass(frozen=True)
class StepCapture:
    """One step. ``unowned`` and ``overlaps`` are texts for people: what has no part, and what has two; both are to be empty.

    ``operators`` has an entry for every aten operator that ran: the index of its call, or None where it costs nothing.
    ``integers`` is the memory, by its number, of token ids, masks, positions and targets that were there before the step.
    """

    tuples: dict[str, OperatorTuple]
    calls: tuple[StepCall, ...]
    owners: tuple[Owner, ...]
    tensors: tuple[TensorLife, ...]
    unowned: tuple[str, ...]
    overlaps: tuple[str, ...]
    loss: str
    device_type: str
    operators: tuple[int | None, ...] = field(default=(), compare=False, repr=False)
    integers: dict[int, torch.UntypedStorage] = field(default_factory=dict, compare=False, repr=False)
    flops: int | None = None  # by PyTorch's own counter over a whole step; None where nobody counted

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """Calls per tuple id, in order of first appearance."""
        return dict(Counter(call.tuple_id for call in self.calls))

    @functools.cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """What is held while each call runs: the tensors that are born by then and not released before."""
        changes = [0] * (len(self.calls) + 1)
        for tensor in self.tensors:
            changes[max(tensor.born, 0)] += tensor.size_bytes
            if tensor.released is not None:
                changes[min(tensor.released + 1, len(self.calls))] -= tensor.size_bytes
        held, curve = 0, []
        for change in changes[:-1]:
            held += change
            curve.append(held)
        return tuple(curve)

    def as_capture(self) -> Capture:
        """The step as a forward pass is kept: to be stored, estimated and measured in the same way."""
        calls = []
        for call in self.calls:
            owner = self.owners[call.owner] if call.owner is not None else None
            path, what = (owner.path, owner.what) if owner else ("", "")
            calls.append(Call(call.index, path, call.tuple_id, call.reads, call.writes, call.part, what))
        roles = {"parameter": "parameter", "buffer": "buffer", "optimizer state": "buffer"}
        return Capture(
            tuples=self.tuples,
            calls=tuple(calls),
            storages=tuple(StorageSpec(one.size_bytes, roles.get(one.role, "activation")) for one in self.tensors),
            gaps=self.unowned,
            overlaps=self.overlaps,
            device_type=self.device_type,
            grad_enabled=True,
            training=True,
            operators=Counter(self.tuples[call.tuple_id].operator for call in self.calls),
            traces={},
            owners=self.operators,
            integers=self.integers,
        )

    def to_json(self) -> dict[str, Any]:
        """All but ``operators`` and ``integers``."""
        return {
            "tuples": [spec.to_json() for spec in self.tuples.values()],
            "calls": [asdict(call) for call in self.calls],
            "owners": [asdict(owner) for owner in self.owners],
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "unowned": self.unowned,
            "overlaps": self.overlaps,
            "loss": self.loss,
            "device_type": self.device_type,
            "flops": self.flops,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """
        Raises:
            TupleRejected: one of its tuples is none.
        """
        specs = map(parse, data["tuples"])
        return cls(
            tuples={spec.id: spec for spec in specs},
            calls=tuple(
                StepCall(**{**call, "reads": tuple(call["reads"]), "writes": tuple(call["writes"])})
                for call in data["calls"]
            ),
            owners=tuple(Owner(**owner) for owner in data["owners"]),
            tensors=tuple(
                TensorLife(**{**tensor, "shape": tuple(tensor["shape"]), "uses": tuple(tensor["uses"])})
                for tensor in data["tensors"]
            ),
            unowned=tuple(data["unowned"]),
            overlaps=tuple(data["overlaps"]),
            loss=data["loss"],
            device_type=data["device_type"],
            flops=data["flops"],
        )

    def __repr__(self) -> str:
        return (
            f"<StepCapture {len(self.calls)} calls, {len(self.tuples)} tuples, {len(self.owners)} owners, "
            f"{len(self.unowned)} without one on {self.device_type}>"
        )
