"""Generated kernels of compiled models: their operator tuples, and the kernels that this process
can launch.

A tuple of kind `kernel` identifies a kernel by the hash of its source, its launch configuration and
its arguments. It contains no code. `farm.operators.compiled` compiles the model on this host and
registers the kernels that it finds; only a registered kernel can run.

The parameters of such a tuple:

    source    hash of the source
    fused     names of the aten operators that the kernel computes, joined by underscores
    config    block sizes, warps and stages; empty for C++
    compiler  version of Triton; absent for C++
    writes    indices of the tensors that it writes
    outputs   indices of the tensors that it writes and does not read
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from farm.errors import TupleRejected
from farm.subjects.base import Kind, reject
from farm.subjects.label import fused_names, label_of
from farm.subjects.values import NOTHING, Fill, are_integers
from farm.types.tuple import Cost, OperatorTuple, TensorSpec, table_named

if TYPE_CHECKING:
    import torch

#: Beginning of a Triton kernel's name after `triton_` -> its kind.
TRITON_KINDS: dict[str, str] = table_named("triton_kinds")
#: The kinds of kernels: the short names of their tuples. `user` is a Triton kernel of the model,
#: `fused` is C++.
KERNEL_KINDS = frozenset(TRITON_KINDS.values()) | {"user", "fused"}
#: Called at each launch of a C++ kernel; None: not called.
at_launch: Callable[[], object] | None = None
#: Tuple id -> launches the kernel with the tuple's arguments.
_launches: dict[str, Callable[..., Any]] = {}
#: The parameters of each tuple; `compiler` may be absent.
_PARAMETERS = {"source", "fused", "config", "writes", "outputs"}


class Kernel(Kind):
    """A generated kernel; it runs only in a process that has compiled its model."""

    name = "kernel"
    standalone = False
    is_predictable = False

    def check(self, spec: OperatorTuple) -> None:
        parameters = spec.parameters
        if set(parameters) - {"compiler"} != _PARAMETERS:
            raise reject("parameters", "are not those of a generated kernel")
        if spec.keywords:
            raise reject("keywords", "must be empty, because a kernel has none")
        source = parameters["source"]
        is_hash = type(source) is str and re.fullmatch("[0-9a-f]{32}", source)
        if not is_hash or type(parameters["fused"]) is not str:
            raise reject("parameters.source", "is not the hash of a source")
        count = len(spec.tensors)
        for name in ("writes", "outputs"):
            numbers = parameters[name]
            are_indices = type(numbers) is list and all(
                _is_index(entry, count) for entry in numbers
            )
            if not are_indices:
                raise reject(f"parameters.{name}", f"refers to none of the {count} tensors")

    def call_words(self, spec: OperatorTuple) -> list[str]:
        """The names of the operators that the kernel computes."""
        return ["+".join(fused_names(spec.parameters["fused"]))]

    def shown_tensors(self, spec: OperatorTuple) -> Sequence[TensorSpec]:
        """The outputs: the inputs are many."""
        return [spec.tensors[index] for index in spec.parameters["writes"]]

    def target(
        self, spec: OperatorTuple, tensors: list[torch.Tensor], device: torch.device
    ) -> Callable[..., Any]:
        return launch_of(spec)

    def values(self, spec: OperatorTuple, index: int, written: frozenset[int]) -> Fill:
        """Integers are zero, which is a valid index: a measurement uses the values of the running
        model.
        """
        if are_integers(spec.tensors[index]):
            return NOTHING
        return super().values(spec, index, written)

    def written(self, spec: OperatorTuple) -> frozenset[int]:
        return frozenset(spec.parameters["writes"])

    def outputs(self, spec: OperatorTuple) -> frozenset[int]:
        return frozenset(spec.parameters["outputs"])

    def cost(self, spec: OperatorTuple) -> Cost:
        """FLOPs count only matrix products and convolutions of templates.

        A kernel with integer inputs may read only some rows of a table: an input counts at most as
        many bytes as the outputs have, if the kernel gathers (``embedding``, ``index``)."""
        written, outputs = self.written(spec), self.outputs(spec)
        sizes: dict[int, int] = {}  # storage -> bytes
        read_storages, written_storages = set(), set()
        for index, tensor in enumerate(spec.tensors):
            sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), tensor.distinct_bytes)
            if index in written:
                written_storages.add(tensor.storage)
            if index not in outputs:
                read_storages.add(tensor.storage)

        written_bytes = sum(sizes[storage] for storage in written_storages)
        fused = spec.parameters["fused"]
        gathers = any(word in fused for word in ("embedding", "index", "gather"))
        most = written_bytes if gathers else math.inf
        read_bytes = int(sum(min(sizes[storage], most) for storage in read_storages))
        shapes = tuple(spec.tensors[index].shape for index in sorted(outputs))
        return Cost(_template_flops(spec, written), read_bytes + written_bytes, shapes)


def _is_index(number: Any, count: int) -> bool:
    return type(number) is int and 0 <= number < count


def register(tuple_id: str, launch: Callable[..., Any]) -> None:
    """Register a kernel, unless this process has registered one for the tuple."""
    _launches.setdefault(tuple_id, launch)


def forget_all() -> None:
    _launches.clear()


def launch_of(spec: OperatorTuple) -> Callable[..., Any]:
    """The function that launches a kernel with its arguments. It fails at the first call if this
    process lacks it.
    """

    def launch(*arguments: Any) -> Any:
        try:
            return _launches[spec.id](*arguments)
        except KeyError:
            raise TupleRejected(
                f"The compiler on this host does not generate the kernel '{label_of(spec)}'.",
                "Measure a model that contains it, with --compile, on a card of the same model "
                "and software.",
            ) from None

    return _launches.get(spec.id, launch)


def _template_flops(spec: OperatorTuple, written: frozenset[int]) -> int:
    """FLOPs of a template: 2 MNK of a product of matrices, also batched; of a convolution from its
    weight.
    """
    if spec.short_name != "template":
        return 0
    results: list[TensorSpec] = []
    operands: list[TensorSpec] = []
    for index, tensor in enumerate(spec.tensors):
        if "float" in tensor.dtype and len(tensor.shape) >= 2:
            (results if index in written else operands).append(tensor)
    if not results or len(operands) < 2:
        return 0
    result = max(results, key=_numel)
    left, right = sorted(operands, key=_numel, reverse=True)[:2]
    if "conv" in spec.parameters["fused"]:
        weight = min(left, right, key=_numel)
        return 2 * result.numel * math.prod(weight.shape[1:])
    batch = max(_batch(left), _batch(right))
    sizes = left.numel / batch * right.numel / batch * result.numel / batch
    return 2 * round(math.sqrt(sizes)) * batch


def _numel(tensor: TensorSpec) -> int:
    return tensor.numel


def _batch(tensor: TensorSpec) -> int:
    return tensor.shape[0] if len(tensor.shape) == 3 else 1
