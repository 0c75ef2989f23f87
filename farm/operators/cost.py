"""The theoretical cost of an operator tuple: FLOPs by PyTorch's counter, and the bytes that it must
read and write.

FLOPs are always counted on meta tensors. On a device PyTorch's counter gives 22, 34 or 35 GFLOP for
the same attention, depending on device and grad mode, because fused operators hide their parts. On
meta no fused operator runs, so the sum over the tuples equals the count for the whole model."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from farm.errors import CaptureError, FarmError, TupleRejected, told
from farm.operators.captured import CapturedPass
from farm.operators.fake_pass import MOST_MADE_BYTES, MetaRules, fake_pass, holds_other_tensors
from farm.operators.rebuild import MadeOnMeta, Rebuilt, rebuild, written_inputs
from farm.operators.unseen import Unseen, raised_by_model
from farm.subjects.encoding import decode, storage_key, tensors_in
from farm.subjects.label import label_of
from farm.subjects.registry import kind_of
from farm.types.deciding import deciding_input
from farm.types.program_state import seeded, tensors_restored
from farm.types.tuple import (
    Cost,
    OperatorTuple,
    TensorSpec,
    holds_tensor,
    names_listed,
    plain,
    tensor_references,
    words,
)

#: In the names of operators of aten that compute the layers `nn.LSTM`, `nn.GRU` and `nn.RNN`.
_RECURRENT = ("rnn", "lstm", "gru")
_RECURRENT_STEP = (
    "Measure the forward pass, without --step. Or write the layer as a loop over nn.LSTMCell, "
    "nn.GRUCell or nn.RNNCell: their training steps are measured."
)
_WITHOUT_RULE = (
    "Measure the forward pass, without --step, or replace this operator in the model: "
    "this version of the farm does not measure it in a training step."
)


def costs_of(captured: CapturedPass) -> dict[str, Cost]:
    """The cost of one call of each tuple of a capture, by tuple id.

    A call that PyTorch cannot run on meta, for example because the size of its output depends on
    values, has the cost that it had in the capture.

    Raises:
        CaptureError: a cost is unknown; the error names the operator and its place in the model.
    """
    return {id_: cost_in(captured, spec) for id_, spec in captured.tuples.items()}


def cost_in(captured: CapturedPass, spec: OperatorTuple) -> Cost:
    """The cost of one call of a tuple of a capture; see `costs_of`."""
    try:
        return _cost_on_meta(spec)
    except TupleRejected as error:
        recurrent = any(word in spec.operator for word in _RECURRENT)
        raise TupleRejected(
            f"{error.message[:-1]}{_location(captured, spec)}.",
            _RECURRENT_STEP if recurrent else _WITHOUT_RULE,
        ) from error
    except FarmError:
        raise
    except Exception as error:  # a meta function may raise anything
        trace = captured.traces.get(spec.id)
        if trace is None:
            raise _unknown_cost(spec, error, _location(captured, spec)) from error
    return _cost_of_outputs(spec, trace.flops, trace.new_bytes, trace.shapes, written_inputs(spec))


def cost(spec: OperatorTuple) -> Cost:
    """The cost of one call of ``spec``.

    Raises:
        TupleRejected: the operator cannot be built.
        CaptureError: PyTorch cannot run it on meta, and the tuple has no ``observed_cost``.
    """
    if spec.observed_cost is not None:
        return spec.observed_cost
    try:
        return _cost_on_meta(spec)
    except FarmError:
        raise
    except Exception as error:
        raise _unknown_cost(spec, error) from error


def _location(captured: CapturedPass, spec: OperatorTuple) -> str:
    """The module of the first call of a tuple, for messages; "" for the model itself."""
    path = next(call.module_path for call in captured.calls if call.tuple_id == spec.id)
    return f" (called at '{path}')" if path else ""


def _unknown_cost(spec: OperatorTuple, error: Exception, where: str = "") -> CaptureError:
    return CaptureError(
        f"The cost of {label_of(spec)}{where} is unknown, because PyTorch cannot run it without "
        f"values: {told(error)}.",
        "Replace this operator in the model by one whose output has a known size.",
    )


@functools.lru_cache(maxsize=65536)
def _cost_on_meta(spec: OperatorTuple) -> Cost:
    known_cost = kind_of(spec).cost(spec)
    if known_cost is not None:
        return known_cost
    built = rebuild(spec, "meta")
    out, flops = run_on_meta(spec, built)
    return cost_of_run(spec, flops, built.inputs, out, built.written)


def run_on_meta(spec: OperatorTuple, built: Rebuilt) -> tuple[Any, int]:
    """Run a call that was rebuilt on meta; return its outputs and FLOPs. It computes and allocates
    nothing. Raises any exception of PyTorch."""
    with torch.no_grad(), MadeOnMeta(), MetaRules(), flop_counter() as counter:
        out = kind_of(spec).run_on_meta(spec, built)
    return out, counter.get_total_flops()


def cost_of_run(
    spec: OperatorTuple,
    flops: int,
    tensors: Iterable[torch.Tensor],
    out: Any,
    written: Collection[int],
) -> Cost:
    """The cost of a call that has run. ``tensors``: its inputs; ``written``: the indices of the
    tensors of the tuple that it wrote."""
    inputs = {storage_key(tensor) for tensor in tensors}
    return _cost_of_outputs(spec, flops, new_bytes(out, inputs), shapes_of(out), written)


def new_bytes(out: Any, inputs: Collection[int]) -> int:
    """The size of the tensors in ``out`` that share no storage with an input (``inputs``: keys by
    `storage_key`).
    """
    produced: dict[int, int] = {}
    for tensor in tensors_in(out):
        key = storage_key(tensor)
        if key not in inputs:
            size_bytes = min(tensor.nbytes, tensor.untyped_storage().nbytes())
            produced[key] = max(produced.get(key, 0), size_bytes)
    return sum(produced.values())


def shapes_of(out: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, tensor.shape)) for tensor in tensors_in(out))


def _cost_of_outputs(
    spec: OperatorTuple,
    flops: int,
    produced: int,
    shapes: tuple[tuple[int, ...], ...],
    written: Collection[int],
) -> Cost:
    part = _part(spec, produced)
    read = _storage_bytes_touched(spec, part)
    storages = {spec.tensors[index].storage for index in written}
    written_bytes = sum(read[storage] for storage in storages)
    kind = kind_of(spec)
    for storage in kind.unread_storages(spec):
        del read[storage]
    if part is not None and kind.called_name(spec) in _PLACING_ANEW:  # the old content is not read
        read.pop(spec.tensors[part.tensor].storage, None)
    return Cost(flops, sum(read.values()) + produced + written_bytes, shapes)


#: Operators that read only a part of their first tensor, as many elements as they return.
_TAKING = names_listed("taking_a_part")
#: Operators that write their last tensor to a part of their first one; those only in `_PLACING`
#: read the old content.
_PLACING_ANEW = words("index_copy_ scatter_ index_put_ put_ __setitem__ index_fill_")
_PLACING = _PLACING_ANEW | set(["index_add_", "scatter_add_", "scatter_reduce_", "index_reduce_"])


class _Part(NamedTuple):
    """The part of a tensor that a call reads or writes; ``tensor`` is its index."""

    tensor: int
    size_bytes: int


def _part(spec: OperatorTuple, produced_bytes: int) -> _Part | None:
    """The part of a tensor that a call reads or writes; None if it uses all tensors as a whole.

    An embedding reads as many rows of its weight as it has indices, at most all. A product of
    groups reads the matrices of the groups that have rows. The part that a boolean mask selects is
    unknown and counts as the full tensor."""
    name = kind_of(spec).called_name(spec)
    if name == "_grouped_mm":
        return _used_matrices(spec)
    index = next(tensor_references(spec.arguments), None)
    if index is None or any(tensor.dtype == "bool" for tensor in spec.tensors[1:]):
        return None
    size_bytes: int | None = produced_bytes
    if name == "embedding":
        index = max(range(len(spec.tensors)), key=lambda index: len(spec.tensors[index].shape))
    elif name in _PLACING:
        size_bytes = _placed_bytes(spec, spec.tensors[index], name)
    elif name not in _TAKING:
        return None
    if size_bytes is None:
        return None
    return _Part(index, min(size_bytes, spec.tensors[index].distinct_bytes))


def _placed_bytes(spec: OperatorTuple, target: TensorSpec, name: str) -> int | None:
    """The bytes that a call writes into a part of a tensor; None if it writes a number to an
    unknown count of elements.
    """
    if name == "__setitem__" and not holds_tensor(spec.arguments[1]):
        meta = torch.device("meta")
        key = decode(spec.arguments[1], [], meta)
        return torch.empty(target.shape, device=meta)[key].numel() * target.itemsize_bytes
    sources = [
        tensor.numel * target.itemsize_bytes
        for tensor in spec.tensors
        if tensor is not target and tensor.dtype == target.dtype
    ]
    return max(sources, default=None)


def _used_matrices(spec: OperatorTuple) -> _Part | None:
    """The matrices of a product of groups that it reads: without recorded values, as many as rows
    can use.
    """
    groups = deciding_input(spec)
    dimensions = [len(tensor.shape) for tensor in spec.tensors]
    if groups is None or 3 not in dimensions:
        return None
    matrices = dimensions.index(3)
    values = spec.tensors[groups.index].values
    used = min(groups.parts, groups.bound if values is None else values.used_segments)
    return _Part(matrices, spec.tensors[matrices].distinct_bytes * used // groups.parts)


def model_flops(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Any = None,
    *,
    computed: bool = False,
    made: int = MOST_MADE_BYTES,
    passes_before: int = 0,
) -> int:
    """FLOPs of a whole model by PyTorch's counter, to check the sum over the tuples. With
    ``computed``, the model runs on its real tensors; otherwise on meta or fake tensors, which
    compute nothing. ``passes_before``: of that pass which follows them. Raises `CaptureError` if
    the model raises an error."""
    with Unseen().watching():
        return _model_flops(model, args, kwargs or {}, computed, made, passes_before)


def _model_flops(
    model: nn.Module,
    args: tuple[Any, ...],
    named: dict[str, Any],
    computed: bool,
    made: int,
    passes_before: int,
) -> int:
    try:
        if computed:
            with tensors_restored(model), _no_fused_path():
                return _counted(model, args, named, passes_before)
        on_meta = all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        if on_meta and not holds_other_tensors(model):
            # for example, the model reads values
            with contextlib.suppress(Exception, SystemExit), tensors_restored(model):
                return _counted(model, _on_meta(args), _on_meta(named), passes_before)
        with (
            fake_pass(model, args, named, "cpu", made=made) as (_, fake_args, fake_kwargs),
            _no_fused_path(),
        ):
            return _counted(model, fake_args, fake_kwargs, passes_before)
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        raise raised_by_model(
            "The model raised on its example input",
            error,
            "Check that the model runs on this input. Create tensors on the device of the input, "
            "and read no values.",
        ) from error


def _on_meta(tree: Any) -> Any:
    """The tree with its tensors on meta. Raises `TypeError` if another object than a list, a tuple
    or a dictionary may hold tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.to("meta")
    if type(tree) in (list, tuple):
        return type(tree)(map(_on_meta, tree))
    if type(tree) is dict:
        return {key: _on_meta(value) for key, value in tree.items()}
    if hasattr(tree, "__dict__"):
        raise TypeError(
            f"A {type(tree).__name__} may contain tensors, which cannot be moved to the device "
            "meta."
        )
    return tree


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, _with_heads(key, query), _with_heads(value, query)))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(
        sdpa_backward_flop_count(
            gradient, query, _with_heads(key, query), _with_heads(value, query)
        )
    )


def _integer_product(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(left) * int(right[-1])


def _packed_product(left: Any, packed: Any, *_: Any, **__: Any) -> int:
    """FLOPs of a product with packed weights of shape (columns / 8, ...)."""
    return 2 * math.prod(left) * int(packed[0]) * 8


def _product_with_rows(left: Any, rows: Any, *_: Any, **__: Any) -> int:
    """FLOPs of a product with weights of shape (columns, features)."""
    return 2 * math.prod(left) * int(rows[0])


def _with_heads(shape: Any, query: Any) -> Any:
    """The shape of keys or values that are repeated for all heads of the queries."""
    return (shape[0], query[1], *shape[2:])


#: FLOPs of operators that PyTorch's counter lacks, as functions of their arguments' shapes: the
#: CPU's attention, attention with fewer heads of keys than of queries (PyTorch 2.11 refuses to
#: count it), products of integers, and `_grouped_mm`, which multiplies each of the rows (m, k) by
#: one of the matrices (groups, k, n). A multiply-add of integers counts as two, too.
_UNKNOWN_TO_TORCH: dict[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: lambda rows, experts, *_, **__: (
        2 * math.prod(rows) * int(experts[-1])
    ),
    torch.ops.aten._int_mm: _integer_product,
    torch.ops.aten._weight_int4pack_mm: _packed_product,
    torch.ops.aten._weight_int8pack_mm: _product_with_rows,
    torch.ops.aten._scaled_dot_product_flash_attention: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}


def operator_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of an aten operator that has run; 0 if it is no matrix product, convolution or
    attention.
    """
    packet = func._overloadpacket
    formula = _COUNTED.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


class _WithoutModules:
    """Replaces the part of PyTorch's counter that follows modules. Its hooks add operators if
    inputs require gradients, and raise an error under a transform such as `torch.func.grad`."""

    parents = frozenset({"Global"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def flop_counter() -> FlopCounterMode:
    counter: Any = FlopCounterMode(display=False, custom_mapping=_UNKNOWN_TO_TORCH)
    counter.mod_tracker = _WithoutModules()
    return counter  # type: ignore[no-any-return]


#: FLOPs of all counted operators, as functions of their arguments and their output.
_COUNTED: dict[Any, Callable[..., int]] = dict(flop_counter().flop_registry)


def _counted(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], passes_before: int
) -> int:
    with torch.no_grad():
        for _ in range(passes_before):
            with seeded():
                model(*args, **kwargs)
        with flop_counter() as counter, seeded():
            model(*args, **kwargs)
    return counter.get_total_flops()


@contextlib.contextmanager
def _no_fused_path() -> Iterator[None]:
    """While active, PyTorch runs the same unfused operators as on meta tensors."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _storage_bytes_touched(spec: OperatorTuple, part: _Part | None) -> dict[int, int]:
    """Storage number -> bytes that the call reads or writes there; tensors whose extents overlap
    count once.
    """
    touched: dict[int, tuple[int, int, int]] = {}  # bytes, begin and end
    for index, tensor in enumerate(spec.tensors):
        size = tensor.distinct_bytes
        if part is not None and part.tensor == index:
            size = part.size_bytes
        elif "num_embeddings" in spec.parameters and tensor.name == "weight":
            # only the rows of the indices
            rows = min(sum(other.numel for other in spec.activations), tensor.shape[0])
            size = rows * int(plain(spec.parameters["embedding_dim"])) * tensor.itemsize_bytes
        first = tensor.offset * tensor.itemsize_bytes
        others, begin, end = touched.get(tensor.storage, (0, first, 0))
        last = first + tensor.extent * tensor.itemsize_bytes
        touched[tensor.storage] = others + size, min(begin, first), max(end, last)
    return {storage: min(size, end - begin) for storage, (size, begin, end) in touched.items()}
