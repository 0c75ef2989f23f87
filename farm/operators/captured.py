"""The data of a capture: operator calls, operator tuples and tensors of one forward pass or one
training step.

This is plain data, without torch. `farm.operators.capture` captures forward passes: their calls are
leaf modules and public functions. `farm.training.capture` captures training steps: their calls are
aten operators, and each belongs to exactly one part (the forward of an owner, its backward, its
recomputation, gradient accumulation, the loss or the optimizer)."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from farm.subjects.parsing import parse
from farm.types.fields import adapter
from farm.types.tuple import OperatorTuple

if TYPE_CHECKING:
    import torch

MOST_TOLD = 3  # operators or outputs in the text of a difference
ROLES = ("parameter", "gradient", "optimizer state", "buffer", "input", "activation", "temporary")


def role_in_tuple(role: str) -> str:
    """The role of a tensor in an operator tuple: parameter, buffer or activation."""
    return {"parameter": "parameter", "buffer": "buffer", "optimizer state": "buffer"}.get(
        role, "activation"
    )


@dataclass(frozen=True)
class Owner:
    """A call of a leaf module or a function in the forward or the loss. ``what``: its class or
    function ('Conv2d').
    """

    index: int
    path: str
    what: str
    stage: str


@dataclass(frozen=True)
class CapturedCall:
    """One operator call. ``reads`` and ``writes`` are indices of `CapturedPass.tensors`.

    The last four fields are empty in a forward pass. In a training step, ``part`` is "forward",
    "backward", "recomputation", "accumulation", "loss" or "optimizer"; ``stage`` is a stage of
    `farm.training.step`; ``owner`` and ``owner_index`` are `Owner.what` and `Owner.index` of the
    call's owner. Accumulation and the optimizer have no owner."""

    index: int
    module_path: str
    tuple_id: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    part: str = ""
    owner: str = ""
    stage: str = ""
    owner_index: int | None = None


@dataclass(frozen=True)
class CapturedTensor:
    """A storage that calls read or write; the views of one tensor share it. ``released`` is the
    index of the last call during which it exists; None if it exists after the step, and in a
    forward pass, where it is not recorded."""

    number: int
    name: str
    role: str
    shape: tuple[int, ...]  # of the first tensor that the capture found in this storage
    dtype: str  # of the same tensor
    size_bytes: int
    born: int  # the index of the call that created it; -1 if no call did
    released: int | None
    uses: tuple[int, ...]  # the indices of the calls that read or wrote it, in order

    @property
    def outlives(self) -> bool:
        """True if the tensor exists before and after the step; memory planners call such a tensor
        'global'.
        """
        return self.born < 0 and self.released is None


@dataclass(frozen=True)
class Launch:
    """The stream of a card on which a call runs (0: the stream of the pass), the earlier calls for
    which this stream has waited since the previous call on it, and the stream's priority for the
    card's scheduler."""

    stream: int
    after: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class CallTrace:
    """What the dispatcher saw of one call: the aten operators that run a kernel, in order; a
    description of each output; and the bits of each input that change its values when they are read
    (conjugated, negated).

    In inference mode PyTorch shows other names for the same operators. ``flops`` counts 2 per
    multiply-add; ``shapes`` are those of the outputs, and ``new_bytes`` the size of those that the
    call created. They give the cost of a call that PyTorch cannot run on meta."""

    operators: tuple[str, ...]
    outputs: tuple[str, ...]
    flops: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    new_bytes: int = 0
    input_bits: tuple[str, ...] = ()
    inference: bool = field(default=False, compare=False)
    # of each input: a trained parameter, or a view of one
    trained: tuple[bool, ...] = field(default=(), compare=False)
    # the integers among the inputs had values, and were not fake
    has_values: bool = field(default=True, compare=False)

    def difference(self, other: CallTrace, this: str, that: str) -> str:
        """The first difference from another trace, in words; "" if there is none. ``this``,
        ``that``: what has them.
        """
        for verb, mine, others in (
            ("runs", _without_numbers(self.operators), _without_numbers(other.operators)),
            ("returns", self.outputs, other.outputs),
            ("reads", self.input_bits, other.input_bits),
        ):
            if mine != others:
                texts = _told_apart(mine, others)
                return f"{this} {verb} {texts[0]}; {that} {verb} {texts[1]}"
        return ""


def _without_numbers(operators: Iterable[str]) -> list[str]:
    """The operators without those that make a tensor of a number: without a card, fakes cannot tell
    its device.
    """
    return [name for name in operators if name != "aten.scalar_tensor.default"]


def _told_apart(these: Sequence[str], those: Sequence[str]) -> tuple[str, str]:
    """What two sequences have from their first difference on, as texts of a few entries."""
    same = 0
    while same < min(len(these), len(those)) and these[same] == those[same]:
        same += 1
    texts = []
    for entries in (these[same:], those[same:]):
        more = f" and {len(entries) - MOST_TOLD} more" if len(entries) > MOST_TOLD else ""
        texts.append(", ".join(entries[:MOST_TOLD]) + more or "nothing")
    return texts[0], texts[1]


@dataclass(frozen=True)
class CapturedPass:
    """One captured forward pass or training step. A capture without gaps and overlaps is complete.

    ``slots``: for each call that had the slot (in a training step: for each aten operator), the
    index of its `CapturedCall`; None if it runs no kernel. ``integers``: tensor number -> storage,
    for token ids, positions and masks that no call created. ``launches``: of each call of a split
    model on a card, which runs communication on streams of its own; else empty."""

    tuples: dict[str, OperatorTuple]
    calls: tuple[CapturedCall, ...]
    tensors: tuple[CapturedTensor, ...]
    gaps: tuple[
        str, ...
    ] = ()  # messages about aten operators without an owner: where each ran, and the reason
    overlaps: tuple[str, ...] = ()  # the same for aten operators with two owners
    # tuple id -> how it differs from the call that ran
    mismatches: Mapping[str, str] = field(default_factory=dict)
    device_type: str = "cpu"
    grad_enabled: bool = False
    training: bool = False
    # calls of each aten operator that runs a kernel
    operators: Counter[str] = field(default_factory=Counter)
    # by tuple id: of its first call
    traces: dict[str, CallTrace] = field(default_factory=dict, compare=False)
    slots: tuple[int | None, ...] = field(default=(), compare=False, repr=False)
    integers: dict[int, torch.UntypedStorage] = field(
        default_factory=dict, compare=False, repr=False
    )
    launches: tuple[Launch, ...] = field(default=(), compare=False, repr=False)
    owners: tuple[Owner, ...] = ()  # only of a training step
    loss: str = ""  # only of a training step
    with_values: bool = False  # ran on real tensors of the CPU, because it depends on values
    # passes that ran before this one, because the first one differs
    passes_before: int = field(default=0, compare=False)
    # of a training step, counted by PyTorch's own counter; None if not counted
    flops: int | None = None

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """Calls per tuple id, in order of first appearance."""
        return dict(Counter(call.tuple_id for call in self.calls))

    @functools.cached_property
    def memory_bytes(self) -> tuple[int, ...]:
        """For each call, the bytes of all tensors that exist during it."""
        return self.held_bytes(self.tensors)

    def stands_for(self, device_type: str) -> bool:
        """True if fake tensors of the CPU stood for those of a GPU: there was no CUDA context."""
        return device_type == "cuda" and self.device_type == "cpu"

    def held_bytes(
        self, tensors: Iterable[CapturedTensor], *, rounded_to: int = 1
    ) -> tuple[int, ...]:
        """For each call, the bytes of the ``tensors`` that exist during it; each size is rounded up
        to a multiple of ``rounded_to``."""
        changes = [0] * (len(self.calls) + 1)
        for tensor in tensors:
            size_bytes = -(-tensor.size_bytes // rounded_to) * rounded_to
            changes[max(tensor.born, 0)] += size_bytes
            changes[min(self.last_held(tensor) + 1, len(self.calls))] -= size_bytes
        return tuple(itertools.accumulate(changes[:-1]))

    def last_held(self, tensor: CapturedTensor) -> int:
        """The index of the last call during which the tensor exists."""
        return len(self.calls) - 1 if tensor.released is None else tensor.released

    @functools.cached_property
    def waits(self) -> tuple[tuple[int, ...], ...]:
        """For each call, the calls on other streams for which it waits: as the model did, and
        because they wrote what it reads or writes, or read what it writes. Of each stream only the
        last one, and none for which the stream of the call has waited before. Empty without
        ``launches``."""
        waits: list[tuple[int, ...]] = []
        # storage -> the last call that wrote it, and the calls that have read it since
        writer: dict[int, int] = {}
        readers: defaultdict[int, list[int]] = defaultdict(list)
        # stream -> other stream -> its last awaited call
        awaited: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for call, launch in zip(self.calls, self.launches, strict=False):
            before = set(launch.after)
            for storage in (*call.reads, *call.writes):
                if storage in writer:
                    before.add(writer[storage])
            for storage in call.writes:
                before.update(readers[storage])
            last = {self.launches[index].stream: index for index in sorted(before)}
            awaited_before = awaited[launch.stream] | {launch.stream: call.index}
            new = {
                stream: index
                for stream, index in last.items()
                if index > awaited_before.get(stream, -1)
            }
            awaited[launch.stream] |= new
            waits.append(tuple(sorted(new.values())))
            for storage in call.reads:
                readers[storage].append(call.index)
            for storage in call.writes:
                writer[storage] = call.index
                readers[storage] = []
        return tuple(waits)

    def to_json(self) -> dict[str, Any]:
        """The capture as JSON, without ``traces``, ``slots``, ``integers`` and ``launches``."""
        return {
            "tuples": [spec.to_json() for spec in self.tuples.values()],
            "calls": [asdict(call) for call in self.calls],
            "tensors": [asdict(tensor) for tensor in self.tensors],
            "gaps": self.gaps,
            "overlaps": self.overlaps,
            "mismatches": self.mismatches,
            "device_type": self.device_type,
            "grad_enabled": self.grad_enabled,
            "training": self.training,
            "operators": self.operators,
            "owners": [asdict(owner) for owner in self.owners],
            "loss": self.loss,
            "with_values": self.with_values,
            "flops": self.flops,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises `TupleRejected` if one of its tuples is malformed."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        for name, kind in {
            "calls": CapturedCall,
            "tensors": CapturedTensor,
            "owners": Owner,
        }.items():
            values[name] = tuple(map(adapter(kind).validate_python, data[name]))
        values["tuples"] = {spec.id: spec for spec in map(parse, data["tuples"])}
        return cls(**values | {"operators": Counter(data["operators"])})

    def __repr__(self) -> str:
        return (
            f"<CapturedPass {len(self.calls)} calls, {len(self.tuples)} tuples on "
            f"{self.device_type}>"
        )
