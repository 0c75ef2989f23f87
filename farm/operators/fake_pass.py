"""Runs a model on fake tensors, which have shapes, strides and a device, but no memory and no
arithmetic.

Requirements:

- A model checks whether its mask hides a token, or where its cache ends, and branches on the
  result. Such values depend only on numbers and on integer inputs: token ids, masks and positions.
  So these inputs stay real tensors, and results that depend on them and on numbers alone are
  computed. Every result that depends on a weight or an activation is fake.
- The real tensors are plain tensors, not fake tensors with a value attached: if a mask is fake,
  transformers assumes tracing and runs other code than in a normal pass.
- The memory of the host is not that of the card: a card spends nothing on what models compute on
  the host. Without a CUDA context no tensor can be on a card, so fake tensors are on
  ``STANDS_FOR_A_CARD``, and `FakeTensors` knows which real tensors are on the card.
- A model may ask for the device of a tensor and run other operators on a card. So the model gets
  the answer "cuda", and a function of PyTorch to which it passes this device gets
  ``STANDS_FOR_A_CARD``.
- After a fake tensor was written to a real storage, the values of the storage are unknown: every
  result computed from it is fake, and reading a value fails, as for every fake tensor.
- Three of four calls in a model repeat an earlier one, and a call on fake tensors takes up to a
  millisecond of Python. Its result depends only on the layouts of its inputs, so a second call with
  the same layouts is not run. This is done for calls of modules and functions (`RepeatedCalls`),
  and below them for aten operators (`_RepeatedOperators`).
- The steps of a scan read other places of one tensor, so their views do not repeat. A view needs
  only the layout of its tensor, so it is made on meta, in a tenth of the time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import sys
import types
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from farm.subjects.allow_list import LEAF_CLASSES
from farm.subjects.collective_calls import local_part
from farm.subjects.encoding import DescribedCall, storage_key, tensors_in, written_tensors
from farm.types.card_kind import ASSUMED_CAPABILITY
from farm.types.program_state import tensors_restored
from farm.types.replacement import replaced
from farm.types.tensor_kinds import (
    WRAPPERS,
    bits_of,
    is_composite,
    is_plain,
    only_views,
    rebuilt_of,
    refusal,
    with_bits,
)

#: Largest integer tensor of the model or its inputs whose values are kept: two million token ids.
MOST_BYTES = 2**24
#: Largest result that is computed from real tensors or numbers: a mask of 1024 x 1024. Larger
#: results are fake.
MOST_MADE_BYTES = 2**20

#: The device of a pass on a card without a CUDA context. PyTorch runs the operators of a CPU, but
#: tensors that a model makes on the host say "cpu".
STANDS_FOR_A_CARD = "cpu:0"
_FAKE_DEVICE: Any = FakeTensor.__dict__["device"]
#: The device that a model sees in such a pass.
_SHOWN_CARD = torch.device("cuda", 0)
#: Functions that tell the device of a tensor -> their answer for a tensor on a card.
_ANSWERS: dict[Any, Any] = {
    torch.Tensor.device.__get__: _SHOWN_CARD,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: _SHOWN_CARD.index,
}
#: Functions that make a tensor on a device without an aten operator that shows the device.
_MAKES_TENSOR = frozenset({torch.tensor, torch.as_tensor, torch.Tensor.new_tensor})

#: Values that are never copied: they have no tensors of their own, or other code replaces their
#: tensors.
_OPAQUE = (
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.ModuleType,
    torch.device,
    torch.dtype,
)
_OWN_ATTRIBUTES = frozenset(nn.Module().__dict__)  # they hold parameters and children
_DEPENDS_ON_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_IS_LEFT_ALIGNED = torch.ops.aten._nested_tensor_from_mask_left_aligned.default
_CTC_LOSS = torch.ops.aten._ctc_loss.default
#: Operators that accept a boolean mask as an index; it selects the places that it marks.
_INDEXING = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.index_put_.default,
    }
)
#: Operators that read lengths of sequences on the host.
_PACKING = frozenset(
    {
        torch.ops.aten._pack_padded_sequence.default,
        torch.ops.aten._pack_padded_sequence_backward.default,
        torch.ops.aten._pad_packed_sequence.default,
    }
)


@contextlib.contextmanager
def fake_pass(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    device: str,
    *,
    made: int = MOST_MADE_BYTES,
) -> Iterator[tuple[FakeTensors, tuple[Any, ...], dict[str, Any]]]:
    """While active, the tensors of ``model`` are replaced by fake ones on ``device``. Yields the
    replacements, and the replaced ``args`` and ``kwargs``. Computed results have at most ``made``
    bytes."""
    fakes = FakeTensors(FakeTensorMode(), device)
    # If the mode cannot fake an operator, its log repeats the error: silence the log.
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        kept = tensors_restored(model), _not_taken_for_tracing()
        with kept[0], kept[1], fakes.swapped_into(model), fakes.shown_as_card():
            inputs = fakes.tree(args), fakes.tree(kwargs or {})
            with fakes.mode, _RealIntegers(fakes, made):
                yield fakes, *inputs
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _not_taken_for_tracing() -> Iterator[None]:
    """While active, transformers does not ask whether a tensor is fake. It would take the pass for
    the trace of a compiler, and run other operators than without one: it would not look whether a
    mask hides anything."""
    utilities = sys.modules.get("transformers.utils.import_utils")
    if utilities is None:
        yield
        return
    with replaced(utilities, "is_fake_tensor", lambda value: False):
        yield


class FakeTensors:
    """Replaces tensors and keeps their identity and strides: small integer tensors that have values
    become real copies, all others become fake tensors."""

    def __init__(self, mode: FakeTensorMode, device: str, *, keeps_values: bool = True) -> None:
        """``keeps_values``: False if small integer tensors become fake tensors, too."""
        self.mode, self.device, self._keeps_values = mode, torch.device(device), keeps_values
        self.stands = self.device == torch.device(STANDS_FOR_A_CARD)
        self.on_card: dict[
            int, StorageWeakRef
        ] = {}  # storages of real tensors, if that is the device
        #: Storages of real tensors whose values are unknown; a weak reference keeps the address
        #: from being used again.
        self.overwritten: dict[int, StorageWeakRef] = {}
        self._replacements: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # id -> original and replacement
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}

    def tensor(self, tensor: torch.Tensor, *, fake: bool = False) -> torch.Tensor:
        """The replacement of a tensor, always the same for the same tensor. A small integer tensor
        gets a real copy, unless ``fake`` is set; a special tensor stays; any other tensor gets a
        fake one."""
        if is_composite(type(tensor)) and id(tensor) not in self._replacements:
            twin = rebuilt_of(tensor, functools.partial(self.tensor, fake=True))
            self._replacements[id(tensor)] = (tensor, twin)
        if not is_plain(tensor) and id(tensor) not in self._replacements:
            return tensor
        if id(tensor) not in self._replacements and (part := local_part(tensor)) is not tensor:
            whole: Any = tensor  # a distributed tensor keeps its layout
            twin = type(whole)(
                self.tensor(part, fake=True), whole._spec, requires_grad=tensor.requires_grad
            )
            twin._is_param = isinstance(tensor, nn.Parameter)
            self._replacements[id(tensor)] = (tensor, twin)
        if id(tensor) not in self._replacements:
            is_parameter, storage = isinstance(tensor, nn.Parameter), tensor.untyped_storage()
            numbers_matter = self._keeps_values and not (
                tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or fake
            )
            if numbers_matter and storage.nbytes() <= MOST_BYTES:
                if storage._cdata not in self._storages:
                    copied = torch.empty(storage.nbytes(), dtype=torch.uint8, device=self.device)
                    copied.copy_(
                        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                    )
                    self._storages[storage._cdata] = copied.untyped_storage()
                replacement = torch.empty(0, dtype=tensor.dtype, device=self.device)
                layout = tensor.storage_offset(), tensor.shape, tensor.stride()
                replacement.set_(self._storages[storage._cdata], *layout)
                self.put_on_card(replacement)
            else:
                trained = is_parameter and tensor.requires_grad
                bits = bits_of(tensor)
                replacement = self.fresh(
                    tensor.size(), tensor.stride(), tensor.dtype, bits, requires_grad=trained
                )
            if is_parameter:
                # as nn.Parameter marks other classes
                replacement._is_param = True  # type: ignore[attr-defined]
                _copy_hooks(tensor, replacement)
            # the reference to the original keeps its id unique
            self._replacements[id(tensor)] = (tensor, replacement)
        return self._replacements[id(tensor)][1]

    def fresh(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        bits: Sequence[str] = (),
        *,
        requires_grad: bool = False,
    ) -> FakeTensor:
        """A fake tensor with its own storage. `FakeTensorMode` also makes one from a meta tensor;
        below the dispatcher this takes a tenth of the time, and a model has thousands of
        tensors."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(
                shape, stride, dtype=dtype, device="meta", requires_grad=requires_grad
            )
            meta = with_bits(meta, bits) if bits else meta
        return FakeTensor(self.mode, meta, self.device)

    def layout(self, tensor: Any, used: Collection[int]) -> _NewTensor | None:
        """The layout of a new tensor; None if it has a storage of ``used``, or differs from the
        result of `fresh`.
        """
        layout, storage = (
            (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype),
            tensor.untyped_storage(),
        )
        made = self.fresh(*layout)
        alike = (
            tensor.fake_device == made.fake_device
            and storage.nbytes() == made.untyped_storage().nbytes()
        )
        return None if storage._cdata in used or tensor.storage_offset() or not alike else layout

    def on_host(self, tensor: torch.Tensor) -> bool:
        """True if a pass on a card has this tensor in the memory of the host."""
        if type(tensor) is FakeTensor or not self.stands:
            device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
            return device.type == "cpu" and device != self.device
        return storage_key(tensor) not in self.on_card

    def knows(self, tensor: torch.Tensor) -> bool:
        """True if a real tensor has the values that it has in the model."""
        return storage_key(tensor) not in self.overwritten

    def put_on_card(self, out: Any) -> None:
        """Mark real tensors."""
        for tensor in tensors_in(out):
            if self.stands and type(tensor) is not FakeTensor and is_plain(tensor):
                self.on_card[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def placed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function on the device of the pass, although the model may name another one."""
        if not self.stands:
            return func(*args, **kwargs)
        if func in _ANSWERS:
            on_host = self.on_host(args[0]) or not is_plain(args[0])
            return func(*args, **kwargs) if on_host else _ANSWERS[func]
        args = tuple(map(self.as_run, args))
        kwargs = {name: self.as_run(value) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        if func not in _MAKES_TENSOR:
            return out
        device = kwargs.get("device")
        on_card = func is torch.Tensor.new_tensor and not self.on_host(args[0])
        if device is not None:
            on_card = torch.device(device) == self.device
        if on_card:
            self.put_on_card(out)
        return out

    def as_run(self, value: Any) -> Any:
        """The device of the pass in place of the card that the model sees."""
        return self.device if type(value) is torch.device and value.type == "cuda" else value

    def tree(self, tree: Any) -> Any:
        """A copy of a list, tuple, dictionary or object (a cache with its layers) with its tensors
        replaced.
        """
        if isinstance(tree, torch.Tensor):
            return self.tensor(tree)
        if id(tree) in self._copies:
            return self._copies[id(tree)][1]
        if isinstance(tree, PackedSequence):
            orders = [order if order is None else self.tensor(order) for order in tree[2:]]
            # the host reads these sizes
            return PackedSequence(self.tensor(tree.data), tree.batch_sizes, *orders)
        if isinstance(tree, tuple):
            entries = [self.tree(entry) for entry in tree]
            return type(tree)(*entries) if hasattr(tree, "_fields") else type(tree)(entries)
        if isinstance(tree, _OPAQUE):
            return tree
        twin = copy.copy(tree)
        if twin is tree:
            return tree
        self._copies[id(tree)] = tree, twin  # ends the recursion at an object that contains itself
        if isinstance(twin, list):
            twin[:] = map(self.tree, tree)
        elif isinstance(twin, dict):
            for key, value in tree.items():
                dict.__setitem__(twin, key, self.tree(value))
        for name, value in getattr(twin, "__dict__", {}).items():
            twin.__dict__[name] = self.tree(value)
        return twin

    @contextlib.contextmanager
    def shown_as_card(self) -> Iterator[None]:
        """While active, code of the model sees a card where fake tensors stand for one."""
        if not self.stands:
            yield
            return

        def device(tensor: FakeTensor) -> torch.device:
            actual = actual_device(tensor)
            is_shown = actual == self.device and tensor.fake_mode is self.mode
            return _SHOWN_CARD if is_shown and _is_code_of_model() else actual

        def capability(device: Any = None) -> tuple[int, int]:
            return ASSUMED_CAPABILITY

        begin_autocast = torch.autocast.__init__

        def autocast(
            context: Any, device_type: str, dtype: Any = None, *rest: Any, **options: Any
        ) -> None:
            """Autocast of the card, by the rules of a CPU: the fake tensors are on one."""
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
            begin_autocast(context, device_type, dtype, *rest, **options)

        shown = property(device, _FAKE_DEVICE.fset)
        with (
            replaced(FakeTensor, "device", shown),
            replaced(torch.cuda, "get_device_capability", capability),
            replaced(torch.autocast, "__init__", autocast),
        ):
            yield

    def originals(self) -> dict[int, torch.Tensor]:
        """``id()`` of a replacement -> the original tensor."""
        return {id(replacement): original for original, replacement in self._replacements.values()}

    @contextlib.contextmanager
    def swapped_into(self, model: nn.Module) -> Iterator[None]:
        """While active, all tensors of the model are replaced. Afterwards each module has the
        attributes that it had before, without what a pass keeps on it."""
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        visited: dict[int, bool] = {}
        try:
            for module in model.modules():
                # A leaf never reads values of its own tensors; with fake ones its equal calls can
                # be skipped.
                leaf = type(module) in LEAF_CLASSES
                dictionaries: tuple[dict[str, Any], ...] = (
                    module._parameters,
                    module._buffers,
                    module.__dict__,
                )
                for dictionary in dictionaries:
                    saved.append((dictionary, dict(dictionary)))
                    for name, value in list(dictionary.items()):
                        if name in _OWN_ATTRIBUTES:
                            continue
                        if isinstance(value, torch.Tensor):
                            dictionary[name] = self.tensor(value, fake=leaf)
                        elif _holds_tensors(value, visited) or _is_empty(value):
                            dictionary[name] = self.tree(value)
                if isinstance(module, nn.RNNBase):
                    # a list of its own parameters, passed to the kernel
                    module.__dict__["_flat_weights"] = [
                        getattr(module, name) for name in module._flat_weights_names
                    ]
            yield
        finally:
            for dictionary, before in reversed(saved):
                dictionary.clear()
                dictionary.update(before)


def _copy_hooks(tensor: torch.Tensor, replacement: torch.Tensor) -> None:
    """Gives a replacement the hooks of a parameter: they compute with its gradient."""
    if not replacement.requires_grad:
        return
    for hook in (tensor._backward_hooks or {}).values():
        replacement.register_hook(hook)
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():
        replacement.register_post_accumulate_grad_hook(hook)


def actual_device(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor, for PyTorch itself, whatever the model sees."""
    if not isinstance(tensor, FakeTensor):
        return tensor.device
    device: torch.device = _FAKE_DEVICE.__get__(tensor)
    return device


def _is_code_of_model() -> bool:
    """True unless a function of PyTorch or a leaf module runs: there, a recorder's function mode is
    off.
    """
    is_watched: int = torch._C._len_torch_function_stack()
    return is_watched > 0 and torch._C._is_torch_function_enabled()


def holds_other_tensors(model: nn.Module) -> bool:
    """True if a model holds tensors that are neither parameters nor buffers, for example in its own
    cache.
    """
    visited: dict[int, bool] = {}
    skipped = {*_OWN_ATTRIBUTES, "_flat_weights"}
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name not in skipped and _holds_tensors(value, visited):
                return True
    return False


def held_tensors(model: nn.Module) -> dict[int, torch.Tensor]:
    """The tensors of a model that are no parameters, by their ids: buffers, and what its modules
    keep in other attributes.
    """
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        others = [value for name, value in vars(module).items() if name not in _OWN_ATTRIBUTES]
        tensors |= {
            id(tensor): tensor for tensor in tensors_in([*module._buffers.values(), *others])
        }
    return tensors


def _is_empty(value: Any) -> bool:
    """True for a container that a pass may fill with tensors."""
    return type(value) in (dict, list) and not value


def _holds_tensors(value: Any, visited: dict[int, bool]) -> bool:
    """True if there is a tensor anywhere in a list, a tuple, a dictionary or an object."""
    if isinstance(value, torch.Tensor):
        return True
    if value is None or isinstance(value, (str, int, float, *_OPAQUE)):
        return False
    if id(value) not in visited:
        visited[id(value)] = False
        entries: list[Any] = []
        if isinstance(value, dict):
            entries += value.values()
        elif isinstance(value, list | tuple):
            entries.extend(iter(value))  # a class of sequences may refuse to tell its length
        entries += getattr(value, "__dict__", {}).values()
        visited[id(value)] = any(_holds_tensors(entry, visited) for entry in entries)
    return visited[id(value)]


_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
_HISTOGRAM = torch.ops.aten.histc.default
#: Its meta function reads an attribute of fake tensors in PyTorch 2.11.
_PACKED_PRODUCT = torch.ops.aten._weight_int4pack_mm.default
_PACKED_COLUMNS = 8
_DEFAULT_BINS = 100
_ROW_ALIGNMENT_BYTES = 16
_ShapeAndStride = tuple[tuple[int, ...], tuple[int, ...]]


def _made_on_card(func: Any, args: Any, kwargs: Any) -> _ShapeAndStride | None:
    """The shape and the stride of the result of an operator that runs on a card, but not on meta or
    on a CPU; its dtype is that of the first argument. None for other operators."""
    if func is _HISTOGRAM:
        bins = int(args[1]) if len(args) > 1 else _DEFAULT_BINS
        return None if args[0].is_floating_point() else ((bins,), (1,))
    if func is _PACKED_PRODUCT:
        columns = int(args[1].shape[0]) * _PACKED_COLUMNS
        return (int(args[0].shape[0]), columns), (columns, 1)
    is_missing = func is _GROUPED_PRODUCT and args[0].dtype is not torch.bfloat16
    if not is_missing or kwargs.get("out_dtype") is not None:
        return None
    rows, experts = args[0].shape, args[1].shape
    if len(rows) != 2 or len(experts) != 3:
        return None
    columns = int(experts[-1])
    alignment = _ROW_ALIGNMENT_BYTES // args[0].element_size()
    padded = -(-columns // alignment) * alignment
    return (int(rows[0]), columns), (padded, 1)


class MetaRules(TorchDispatchMode):
    """While active, operators run on meta whose meta function PyTorch lacks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = _made_on_card(func, args, kwargs)
        if made is not None:
            return torch.empty_strided(*made, dtype=args[0].dtype, device=args[0].device)
        if func._overloadname != "out":
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            return _checked_by_default(func, args, kwargs)


def _checked_by_default(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The output that is passed to an overload `out`; the overload that returns an output checks
    the other arguments, because it has a meta function.
    """
    names = {argument.name for argument in func._schema.arguments if argument.is_out}
    outputs = [kwargs[name] for name in names]
    func._overloadpacket.default(
        *args, **{name: value for name, value in kwargs.items() if name not in names}
    )
    return outputs[0]


class _RealIntegers(TorchDispatchMode):
    """Runs above a `FakeTensorMode`: computes an operator if all its inputs are real and no result
    is large; leaves all other operators to that mode."""

    def __init__(self, fakes: FakeTensors, made: int) -> None:
        super().__init__()
        self.fakes, self.made = fakes, made
        self.repeated = _RepeatedOperators(fakes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in WRAPPERS or is_composite(kind) for kind in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        if self.fakes.stands and "device" in kwargs:
            kwargs["device"] = self.fakes.as_run(kwargs["device"])
        inputs = list(tensors_in((args, kwargs)))
        real = [tensor for tensor in inputs if type(tensor) is not FakeTensor]
        special = next((tensor for tensor in real if not is_plain(tensor)), None)
        if special is not None:
            return self._run_special(func, args, kwargs, special)
        moved = (
            func is torch.ops.aten._to_copy.default
            and real
            and kwargs.get("device") == self.fakes.device
        )
        if (
            moved
            and storage_key(real[0]) in self.fakes.on_card
            and kwargs.get("dtype", real[0].dtype) == real[0].dtype
        ):
            return real[0]  # it is there already, but says "cpu"
        if func is _IS_LEFT_ALIGNED:
            return _is_left_aligned(*args)
        if func in _PACKING and type(args[0]) is FakeTensor and type(args[1]) is not FakeTensor:
            return self._run_packing(func, args, kwargs)
        made = _made_on_card(func, args, kwargs)
        if made is not None and (self.fakes.stands or func is _GROUPED_PRODUCT):
            return self.fakes.fresh(*made, args[0].dtype)
        if func is _CTC_LOSS:
            return self._run_ctc_loss(*args)
        if len(real) < len(inputs) or not self._computes(func, args, kwargs, real):
            return (
                self._run_fake(func, args, kwargs)
                if real
                else self.repeated.run(func, args, kwargs, inputs)
            )
        with torch._C._DisableTorchDispatch():
            out = func(*args, **kwargs)
            if kwargs.get("device") == self.fakes.device or not all(map(self.fakes.on_host, real)):
                # also for `a.type_as(b)`, which names the device of a real `b`, a CPU
                self.fakes.put_on_card(out)
            return out

    def _run_ctc_loss(
        self, scores: Any, targets: Any, lengths: Any, target_lengths: Any, *_: Any
    ) -> Any:
        """Its tags say that sizes depend on values, but the lengths are numbers here."""
        batch = scores.shape[1]
        steps = 2 * max(target_lengths, default=0) + 1
        shape = (batch, max(lengths, default=0), steps)
        strides = (shape[1] * steps, steps, 1)
        loss = self.fakes.fresh((batch,), (1,), scores.dtype)
        return loss, self.fakes.fresh(shape, strides, scores.dtype)

    def _run_special(self, func: Any, args: Any, kwargs: Any, special: torch.Tensor) -> Any:
        """Runs an operator on a special tensor, which is real. Raises `UnsupportedTensor` if it
        computes anything.
        """
        if not only_views(func, special):
            raise refusal(special, f"A call of {func}")
        if type(special) in (torch.Tensor, nn.Parameter):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        return func(*args, **kwargs)  # the class of the tensor runs it

    def _computes(self, func: Any, args: Any, kwargs: Any, real: list[torch.Tensor]) -> bool:
        if func.is_view:  # a view needs no values
            return True
        if not all(map(self.fakes.knows, real)):
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            # Only a single random number is computed: it decides whether to skip a layer, for
            # example.
            return not real and func is torch.ops.aten.rand.default and args[0] == []
        placed = any(argument.name == "device" for argument in func._schema.arguments)
        if (
            func._schema.is_mutable
            or not _DEPENDS_ON_VALUES.isdisjoint(func.tags)
            or not (real or placed)
        ):
            return True  # without tensors and a device: the division of two numbers, for example
        meta = (
            {"device": torch.device("meta")} if placed and ("device" in kwargs or not real) else {}
        )

        def on_meta(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )

        with torch._C._DisableTorchDispatch():
            meta_args, meta_kwargs = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
            try:
                out = func(*meta_args, **meta_kwargs | meta)
            except (RuntimeError, NotImplementedError):  # it has no meta implementation
                return bool(real)
        # also integers from booleans
        most = max(self.made, 8 * sum(tensor.nbytes for tensor in real))
        if not real and not any(tensor.numel() for tensor in tensors_in(out)):
            return False  # it has no values, and a model may resize it to be like a fake tensor
        return all(tensor.untyped_storage().nbytes() <= most for tensor in tensors_in(out))

    def _run_packing(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator that reads lengths on the host: on meta, with the real lengths."""

        def on_meta(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is not FakeTensor:
                return tensor
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )

        with torch._C._DisableTorchDispatch():
            made = func(*tree_map_only(torch.Tensor, on_meta, args), **kwargs)

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return (
                self.fakes.fresh(tensor.shape, tensor.stride(), tensor.dtype)
                if tensor.is_meta
                else tensor
            )

        return tree_map_only(torch.Tensor, fake, made)

    def _run_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Replaces real inputs by fake tensors and runs the operator in the `FakeTensorMode`."""
        if func in _INDEXING:
            indices: list[torch.Tensor | None] = []
            for index in args[1]:
                is_real = index is not None and type(index) is not FakeTensor
                if is_real and index.dtype in (torch.bool, torch.uint8) and self.fakes.knows(index):
                    with torch._C._DisableTorchDispatch():
                        indices.extend(index.nonzero().unbind(1))
                else:
                    indices.append(index)
            args = (args[0], indices, *args[2:])
        twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        on_host = all(map(self.fakes.on_host, tensors_in((args, kwargs))))

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is FakeTensor:
                return tensor
            if id(tensor) not in twins:
                bits = bits_of(tensor)
                twin = self.fakes.fresh(tensor.shape, tensor.stride(), tensor.dtype, bits)
                if on_host:
                    twin.fake_device = torch.device("cpu")
                twins[id(tensor)] = tensor, twin
            return twins[id(tensor)][1]

        out = func(
            *tree_map_only(torch.Tensor, fake, args), **tree_map_only(torch.Tensor, fake, kwargs)
        )
        for tensor in written_tensors(func, args, kwargs):
            if id(tensor) in twins:
                self.fakes.overwritten[storage_key(tensor)] = StorageWeakRef(
                    tensor.untyped_storage()
                )
        originals = {id(twin): tensor for tensor, twin in twins.values()}
        return tree_map_only(torch.Tensor, lambda tensor: originals.get(id(tensor), tensor), out)


def _is_left_aligned(values: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether a mask hides only the ends of sequences. PyTorch computes a wrong answer on fake
    tensors.
    """
    if type(mask) is FakeTensor:
        raise DataDependentOutputException(_IS_LEFT_ALIGNED)
    with torch._C._DisableTorchDispatch():
        return bool(_IS_LEFT_ALIGNED(torch.empty(values.shape), mask))


#: Shape, stride and dtype of a tensor with a storage of its own.
_NewTensor = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class _NotRepeatable(Exception):
    """The result of an operator may depend on more than the layouts of its inputs."""


class _RepeatedOperators:
    """Runs aten operators on fake tensors in the `FakeTensorMode`; creates the outputs of a
    repeated call itself.

    `FakeTensorMode` also remembers results, but its keys take ten times as long.
    """

    _MOST = 100_000  # remembered calls of all passes of the process
    _known: ClassVar[dict[Hashable, tuple[type, tuple[_NewTensor | None, ...]] | None]] = {}

    def __init__(self, fakes: FakeTensors) -> None:
        self.fakes = fakes

    def run(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """``inputs`` are the tensors among the arguments; all are fake."""
        if len(inputs) == 1 and _always_a_view(func) and _is_simple(inputs[0]):
            return self._view(func, args, kwargs, inputs[0])
        repeats = _repeatable_kind(func) if inputs else ""
        if not repeats:
            return func(*args, **kwargs)
        key: Hashable = None
        with torch._C.DisableTorchFunction():
            with contextlib.suppress(_NotRepeatable):
                key = func, self.fakes.device, _layouts(args), _layouts(tuple(kwargs.items()))
            if key in self._known:
                return args[0] if (made := self._known[key]) is None else self._fresh(*made)
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if key is not None and len(self._known) < self._MOST:
                if repeats == "in place" and out is args[0]:
                    self._known[key] = None
                elif repeats == "functional" and (made := self._made(out, inputs)):
                    self._known[key] = made
        return out

    def _view(self, func: Any, args: Any, kwargs: Any, viewed: Any) -> Any:
        """Runs a view on the memory of a fake tensor, which is on meta."""
        with in_kernel_invocation_manager(self.fakes.mode):
            views = func(*args, **kwargs)
        device = viewed.fake_device
        return tree_map_only(
            torch.Tensor, lambda view: FakeTensor(self.fakes.mode, view, device), views
        )

    def _fresh(self, class_: type, layouts: tuple[_NewTensor | None, ...]) -> Any:
        made = (layout and self.fakes.fresh(*layout) for layout in layouts)
        return next(made) if class_ is FakeTensor else class_(made)

    def _made(
        self, out: Any, inputs: Sequence[torch.Tensor]
    ) -> tuple[type, tuple[_NewTensor | None, ...]] | None:
        """The type and the layouts of the outputs; None if one of them is not a new tensor like
        those of `fresh`.
        """
        used = set(map(storage_key, inputs))
        layouts: list[_NewTensor | None] = []
        for tensor in out if type(out) in (tuple, list) else (out,):
            if tensor is None:
                layouts.append(None)
                continue
            if type(tensor) is not FakeTensor or tensor.constant is not None:
                return None
            if (
                tensor.layout is not torch.strided
                or tensor.requires_grad
                or tensor.is_conj()
                or tensor.is_neg()
            ):
                return None
            if (layout := self.fakes.layout(tensor, used)) is None:
                return None
            used.add(storage_key(tensor))
            layouts.append(layout)
        return (type(out), tuple(layouts)) if any(layouts) else None


@functools.cache
def _always_a_view(func: Any) -> bool:
    """True if an operator returns views of its input whatever the arguments are. One that consists
    of others (`to`, `reshape`) may copy."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return func.is_view and not func.has_kernel_for_dispatch_key(composite)


def _is_simple(tensor: Any) -> bool:
    """True for a fake tensor without a value, whose memory is as its strides say."""
    return tensor.constant is None and tensor.layout is torch.strided


@functools.cache
def _repeatable_kind(func: Any) -> str:
    """Return "functional" if an operator returns new tensors and writes nothing; "in place" if it
    writes and returns its first argument and changes no layout; "" for all others. The place of an
    input in its storage makes no difference to these two kinds."""
    schema = func._schema
    if func.namespace != "aten" or func.is_view or not _DEPENDS_ON_VALUES.isdisjoint(func.tags):
        return ""
    # tags do not say that a resize changes the layout; an as_strided has a place of its own
    if schema.name.startswith(("aten::resize", "aten::as_strided")):
        return ""
    if not schema.is_mutable:
        return "functional"
    written = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    ]
    in_place = written == ["self"] == [schema.arguments[0].name] and len(schema.returns) == 1
    return "in place" if in_place and torch.Tag.inplace_view not in func.tags else ""


_PLAIN = (
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def _layouts(value: Any) -> Hashable:
    """The arguments of an operator, with layouts in place of tensors: without their places in
    their storages. Raises `_NotRepeatable` if a
    tensor has a known value or is not strided, or there is an argument of another type."""
    class_ = type(value)
    if class_ is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided:
            raise _NotRepeatable
        flags = value.requires_grad, value.is_conj(), value.is_neg()
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.fake_device,
            flags,
        )
    if class_ in (tuple, list):
        return class_, tuple(map(_layouts, value))
    if class_ in _PLAIN:
        return class_, value  # 1, 1.0 and True are equal
    raise _NotRepeatable


@dataclass(frozen=True)
class _Effect:
    """The effect of a call: its aten operators that run a kernel, the tensors that it wrote, and
    its only output.

    ``written`` are indices of the call's tensors. ``output`` is such an index if the call returned
    that tensor; otherwise it describes a new tensor."""

    operators: tuple[str, ...]
    written: tuple[int, ...]
    output: int | _NewTensor


class RepeatedCalls:
    """Stores the effects of calls in a fake pass, to skip equal calls. Passes on a device do not
    use it.
    """

    def __init__(self, fakes: FakeTensors) -> None:
        self.fakes = fakes
        self.effects: dict[Hashable, _Effect] = {}
        #: Functions with a stored effect; most others return views and are not worth describing.
        self.functions: set[str] = set()

    def repeat(self, call: DescribedCall) -> tuple[tuple[str, ...], set[int], torch.Tensor] | None:
        """The aten operators, written storages and output of this call, if an equal call ran
        before; else None.
        """
        if (effect := None if _has_real_tensors(call) else self.effects.get(_key(call))) is None:
            return None
        place = effect.output
        out = call.tensors[place] if isinstance(place, int) else self.fakes.fresh(*place)
        return effect.operators, {call.storages[position] for position in effect.written}, out

    def learn(
        self, call: DescribedCall, operators: list[str], written: set[int], out: object
    ) -> bool:
        """Stores the effect of a call that wrote the storages ``written``. Returns False if equal
        calls must run: the output is a view, requires gradients, or is not a single tensor."""
        if (
            type(out) is not FakeTensor
            or out.requires_grad
            or out.is_conj()
            or out.is_neg()
            or _has_real_tensors(call)
        ):
            return False
        inputs = list(map(id, call.tensors))
        output: Any
        if id(out) in inputs:
            output = inputs.index(id(out))
        else:
            output = self.fakes.layout(out, call.storages)
        if output is None:
            return False
        positions = tuple(
            index for index, storage in enumerate(call.storages) if storage in written
        )
        self.effects[_key(call)] = _Effect(tuple(operators), positions, output)
        return True


def _key(call: DescribedCall) -> Hashable:
    # Operators may also depend on these flags, which a tuple does not contain.
    flags = [
        (tensor.device, tensor.requires_grad, tensor.is_conj(), tensor.is_neg())
        for tensor in call.tensors
    ]
    return call.key, torch.is_grad_enabled(), tuple(flags)


def _has_real_tensors(call: DescribedCall) -> bool:
    """True if an input is real, or if the call has no input tensors, so that its output may be
    real.
    """
    return not call.tensors or any(type(tensor) is not FakeTensor for tensor in call.tensors)
