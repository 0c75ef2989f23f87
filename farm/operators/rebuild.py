"""Rebuilds an operator from its tuple: a callable with its tensors, which runs the same operators
as in the model.

The operator comes from the allow-list (`farm.subjects.allow_list`); names in a tuple are never
imported, evaluated or read as attributes. Strides, shared storages, offsets and argument identity
equal those of the original call, because they decide which kernels run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from farm.errors import Unmeasurable
from farm.operators.deciding_values import check_values, write_values
from farm.operators.input_values import fill
from farm.subjects.encoding import decode, dtype_of, storage_key, tensors_in
from farm.subjects.label import label_of
from farm.subjects.registry import kind_of
from farm.subjects.values import Fill, storage_users
from farm.types.placement import configurations
from farm.types.tensor_kinds import with_bits
from farm.types.tuple import OperatorTuple, TensorSpec

#: More than the memory of any card.
MOST_BYTES = 2**40


class Rebuilt:
    """An operator that is ready to run, any number of times."""

    def __init__(
        self,
        spec: OperatorTuple,
        device: torch.device,
        storages: list[torch.Tensor],
        elsewhere: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> None:
        """``elsewhere``: number of a storage outside the device's memory -> the function that
        copies a tensor there.
        """
        self.spec = spec  # the tuple that it was built from
        self.device = device
        self.storages = storages  # one tensor per storage number of ``spec``
        self._elsewhere = elsewhere or {}
        self.tensors: list[torch.Tensor] = []  # one per entry of ``spec.tensors``
        kind = kind_of(spec)
        for tensor in spec.tensors:
            view = base = storages[tensor.storage]
            if not _is_alone(spec, tensor):
                dtype = dtype_of(tensor.dtype)
                flat = base if base.dtype == dtype else base.view(dtype)
                view = flat.as_strided(tensor.shape, tensor.strides, tensor.offset)
            view = with_bits(view, tensor.bits)
            if tensor.role == "parameter" and kind.public:
                # As in a model, also under no_grad: whether matmul folds its batch depends on the
                # gradient requirement of its operand.
                view = nn.Parameter(
                    view, requires_grad=view.is_floating_point() or view.is_complex()
                )
            self.tensors.append(view)
        self.target = kind.target(spec, self.tensors, device)
        self.arguments = tuple(decode(tree, self.tensors, device) for tree in spec.arguments)
        self._keywords = {
            name: decode(tree, self.tensors, device) for name, tree in spec.keywords.items()
        }

    def run(self) -> Any:
        """Calls the operator once, in the caller's grad mode."""
        return self.target(*self.arguments, **self._keywords)

    def run_on(self, activation: torch.Tensor) -> Any:
        """Calls the operator with another tensor as its first argument, for chains of equal
        layers.
        """
        return self.target(activation, *self.arguments[1:], **self._keywords)

    def memory(self, index: int) -> torch.Tensor:
        """The storage of a tensor; it contains each element once, whatever the tensor's strides."""
        return self.storages[self.spec.tensors[index].storage]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """All tensors that a call passes, also those of the host that belong to the arguments."""
        return [*self.tensors, *tensors_in((self.arguments, self._keywords))]

    @property
    def weights(self) -> list[torch.Tensor]:
        return [
            t
            for t, spec in zip(self.tensors, self.spec.tensors, strict=True)
            if spec.role != "activation"
        ]

    @property
    def activations(self) -> list[torch.Tensor]:
        return [
            t
            for t, spec in zip(self.tensors, self.spec.tensors, strict=True)
            if spec.role == "activation"
        ]

    @property
    def read_memory(self) -> list[torch.Tensor]:
        """The storages of the activations that the operator reads, each once."""
        outputs = kind_of(self.spec).outputs(self.spec)
        storages = {self.spec.tensors[index].storage for index in outputs}
        not_read = _weight_storages(self.spec) | storages
        return [base for index, base in enumerate(self.storages) if index not in not_read]

    @property
    def changed_memory(self) -> list[torch.Tensor]:
        """The storages that the operator reads and writes, each once."""
        storage = [tensor.storage for tensor in self.spec.tensors]
        outputs = kind_of(self.spec).outputs(self.spec)
        read = {number for index, number in enumerate(storage) if index not in outputs}
        return [
            self.storages[number]
            for number in sorted(read & {storage[index] for index in self.written})
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the storages of parameters and buffers, each once."""
        return sum(base.nbytes for base in self.storages) - self.activation_bytes

    @property
    def activation_bytes(self) -> int:
        weights = _weight_storages(self.spec)
        return sum(base.nbytes for index, base in enumerate(self.storages) if index not in weights)

    @functools.cached_property
    def written(self) -> frozenset[int]:
        """The indices of the inputs that it writes. Their values stay the same over millions of
        runs.
        """
        return written_inputs(self.spec)

    def replica(
        self, weights: bool = False, activations: bool = False, *, index: int = 0
    ) -> Rebuilt:
        """The same operator with copies of the weights, of the activations, or of both; the rest is
        shared.

        The copies have the same values in other memory, the same strides, shared storages and
        argument identity. A storage that a weight and an activation share counts as a weight.
        ``index`` numbers the copies; all are equal and may run in any order, in place or not."""
        of_weights = _weight_storages(self.spec)
        storages = []
        for number, base in enumerate(self.storages):
            is_copied = weights if number in of_weights else activations
            copy = self._elsewhere.get(number, self._copy)
            storages.append(copy(base) if is_copied else base)
        return Rebuilt(self.spec, self.device, storages, self._elsewhere)

    def placed(
        self, numbers: Collection[int], copied: Callable[[torch.Tensor], torch.Tensor]
    ) -> Rebuilt:
        """The same operator with copies of the storages ``numbers``, made by ``copied``; its
        replicas use ``copied``, too."""
        storages = [
            copied(base) if number in numbers else base for number, base in enumerate(self.storages)
        ]
        return Rebuilt(self.spec, self.device, storages, dict.fromkeys(numbers, copied))

    def _copy(self, base: torch.Tensor) -> torch.Tensor:
        copied = base.clone()
        on_host = base.device.type == "cpu" and kind_of(self.spec).host_storages(self.spec)
        return copied.pin_memory() if on_host and base.is_pinned() else copied

    def __repr__(self) -> str:
        return f"<Rebuilt {label_of(self.spec)} on {self.device}>"


def rebuild(
    spec: OperatorTuple, device: torch.device | str, *, seed: int = 0, filled: bool = True
) -> Rebuilt:
    """Builds the operator with its tensors on ``device``, ``filled`` with values from ``seed`` or
    uninitialized. Raises `Unmeasurable` ('rejected') if the tensors would take more memory than any
    card has; `TupleRejected` if the operator is not in the allow-list, its class does not accept
    the parameters, no rule gives values for its integers, or the values that it describes do not
    fit."""
    device = torch.device(device)
    check_values(spec)
    kind = kind_of(spec)
    kind.admit(spec)
    if (needed := needed_bytes(spec)) > MOST_BYTES:
        text = f"{label_of(spec)} needs {needed} bytes, more memory than any card has."
        raise Unmeasurable("rejected", text, "Choose a smaller batch or smaller sizes.")
    storages = allocate(spec, device)
    if filled and device.type != "meta":
        generator = torch.Generator(device=device).manual_seed(seed)
        written = written_inputs(spec)
        with torch.no_grad():
            for storage, indices in storage_users(spec).items():
                values = [kind.values(spec, index, written) for index in indices]
                strictest = _strictest(values)
                fill(storages[storage], spec.tensors[indices[0]], strictest, generator)
            rebuilt = Rebuilt(spec, device, storages)
            write_values(spec, rebuilt.tensors)
            return rebuilt
    return Rebuilt(spec, device, storages)


def _strictest(values: Sequence[Fill]) -> Fill:
    """The values of a storage that several tensors share: indices valid in each of them."""
    if any(fill.form != "index" for fill in values):
        return values[0]
    return min(values, key=lambda fill: fill.shift + fill.bound)


@functools.lru_cache(maxsize=8192)
def written_inputs(spec: OperatorTuple) -> frozenset[int]:
    """Indices of the tensors whose storage the operator writes.

    If the kind does not know, a run on meta shows them; for an operator without a meta
    implementation, its name."""
    written = kind_of(spec).written(spec)
    return _written_on_meta(spec) if written is None else written


class MadeOnMeta(TorchDispatchMode):
    """While active, operators that make tensors make them on meta, whatever device they name. A
    call without a device would otherwise allocate its output on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _written_on_meta(spec: OperatorTuple) -> frozenset[int]:
    try:
        meta = torch.device("meta")
        trial = Rebuilt(spec, meta, allocate(spec, meta))
        before = [tensor._version for tensor in trial.tensors]
        with torch.no_grad(), MadeOnMeta():
            trial.run()
        touched = set()
        for described, tensor, version in zip(spec.tensors, trial.tensors, before, strict=True):
            if tensor._version != version:
                touched.add(described.storage)
    except Exception:
        has_option = spec.parameters.get("inplace") or spec.keywords.get("inplace")
        touched = set()
        if spec.activations and (has_option or _is_named_in_place(spec)):
            touched = {spec.activations[0].storage}
    return frozenset(
        index for index, tensor in enumerate(spec.tensors) if tensor.storage in touched
    )


def _is_named_in_place(spec: OperatorTuple) -> bool:
    """True for names such as ``add_`` and ``__setitem__``; other names with two underscores write
    nothing.
    """
    name = spec.operator.rsplit(".", 1)[-1]
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def needed_bytes(spec: OperatorTuple) -> int:
    """Bytes of all storages of a tuple."""
    return sum(storage_bytes(spec).values())


@functools.lru_cache(maxsize=8192)
def storage_bytes(spec: OperatorTuple) -> dict[int, int]:
    """Storage number -> size in bytes."""
    sizes: dict[int, int] = {}
    for tensor in spec.tensors:
        end = (tensor.offset + tensor.extent) * tensor.itemsize_bytes
        sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), end)
    return sizes


@functools.lru_cache(maxsize=8192)
def _weight_storages(spec: OperatorTuple) -> frozenset[int]:
    return frozenset(tensor.storage for tensor in spec.tensors if tensor.role != "activation")


def _is_alone(spec: OperatorTuple, tensor: TensorSpec) -> bool:
    """True if the tensor is the only one of its storage and covers it exactly once, so it is not a
    view.
    """
    expected = 1
    for step, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
        if size != 1 and step != expected and tensor.numel:
            return False
        expected *= size
    return tensor.offset == 0 and len(storage_users(spec)[tensor.storage]) == 1


#: Makes a tensor with a storage of its own: shape, strides, dtype.
Make = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]


def allocate(
    spec: OperatorTuple, device: torch.device, make: Make | None = None
) -> list[torch.Tensor]:
    """Allocates each storage: in its tensor's layout if that is alone, otherwise flat in its first
    tensor's dtype. ``make``: by default uninitialized memory on the device."""
    make = make or (
        lambda shape, strides, dtype: torch.empty_strided(
            shape, strides, dtype=dtype, device=device
        )
    )
    made = []
    on_host = kind_of(spec).host_storages(spec) if device.type == "cuda" else ()
    for storage, size_bytes in sorted(storage_bytes(spec).items()):
        users = [spec.tensors[index] for index in storage_users(spec)[storage]]
        first, dtype = users[0], dtype_of(users[0].dtype)
        if storage in on_host:  # host and card both read it
            made.append(torch.empty(first.shape, dtype=dtype, pin_memory=True))
        elif _is_alone(spec, first):
            made.append(make(first.shape, first.strides, dtype))
        else:
            widest = max(user.itemsize_bytes for user in users)
            elements = -(-size_bytes // widest) * widest // first.itemsize_bytes
            made.append(make((elements,), (1,), dtype))
    return made


@functools.lru_cache(maxsize=8192)
def offloadable(spec: OperatorTuple) -> tuple[tuple[int, ...], int]:
    """Return the storages that can be in slow memory: (numbers of the input storages, count of the
    output storages).

    Output storages are allocated and returned by a call. Their count is 0 if it does not run on
    fake tensors. The cache has room for the tuples of the largest model: a job fills it before the
    transaction that plans the placements (`farm.jobs.slow_memory`)."""
    on_host = kind_of(spec).host_storages(spec)
    inputs = tuple(
        number
        for number, size in sorted(storage_bytes(spec).items())
        if size and number not in on_host
    )
    try:
        with FakeTensorMode(), torch.no_grad():
            built = rebuild(spec, torch.device("cpu"), filled=False)
            return inputs, len(new_storages(built.run(), frozenset(map(storage_key, built.inputs))))
    except Exception:  # the meta function of an operator may raise anything
        return inputs, 0


def placements_of(spec: OperatorTuple, which: str) -> list[str]:
    """The placements of a tuple's storages that ``which`` selects, see
    `farm.types.placement.configurations`.
    """
    return configurations(*offloadable(spec), which)


def new_storages(output: object, inputs: frozenset[int]) -> list[torch.Tensor]:
    """The first tensor of each storage in ``output`` that is not an input (``inputs``: keys by
    `storage_key`).
    """
    storages: dict[int, torch.Tensor] = {}
    for tensor in tensors_in(output):
        if (key := storage_key(tensor)) not in inputs and tensor.untyped_storage().nbytes():
            storages.setdefault(key, tensor)
    return list(storages.values())
