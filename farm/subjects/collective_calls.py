"""Calls collectives (`farm.types.collective`) in the process group of a rank, as DTensor and FSDP
do: the collective runs on the stream of the communication library, and the present stream waits for
it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from farm.subjects.encoding import NotEncodable, dtype_of, tensors_in
from farm.types.collective import COLLECTIVES, PREFIX, output_elements
from farm.types.tuple import OperatorTuple, TensorSpec, table_named

#: Operator -> collective, the argument with its input, and the one that it writes ("": it returns a
#: new tensor).
_OPERATORS: dict[str, list[str]] = table_named("collectives")
_NO_COLLECTIVE = ("::wait_tensor", "::_wrap_tensor_autograd")
#: Operators that copy their input first and then change the copy.
COPIES_FIRST = frozenset({"_c10d_functional::all_reduce", "_c10d_functional::broadcast"})
_IN_PLACE = ("all_reduce", "broadcast")  # the output is the input
_REDUCTIONS = {"sum": "SUM", "avg": "AVG", "product": "PRODUCT", "max": "MAX", "min": "MIN"}


def collectives_of(
    func: Any, args: Any, kwargs: Any
) -> list[tuple[str, torch.Tensor, torch.Tensor | None, Any]]:
    """The collectives that an operator of PyTorch's distributed package starts, empty for other
    operators. Each comes as its name, its input, the tensor that it writes (None: a new one) and
    its parameters. Raises `NotEncodable` if the farm does not know the collective."""
    if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return []
    given = _named(func, args, kwargs)
    operator = func._schema.name
    if operator.endswith(_NO_COLLECTIVE):
        return []
    if operator not in _OPERATORS:
        raise NotEncodable(f"the farm does not measure {func}")
    name, sent, received = _OPERATORS[operator]
    inputs, outputs = list(tensors_in(given[sent])), list(tensors_in(given.get(received)))
    group = given["process_group"] if "process_group" in given else given["group_name"]
    if isinstance(group, str):
        resolve: Any = dist.distributed_c10d._resolve_process_group
        parameters: dict[str, Any] = {"cards": resolve(group).size()}
    else:
        parameters = {"cards": dist.ProcessGroup.unbox(group).size()}
    if COLLECTIVES[name].reduces:
        # The reduction of c10d is an object that cannot be read. The mean takes as long as the sum.
        parameters["reduction"] = (
            given["reduce_op"] if isinstance(given["reduce_op"], str) else "sum"
        )
    return [
        (name, one, out, parameters)
        for one, out in itertools.zip_longest(inputs, outputs[: len(inputs)])
    ]


def is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    """True if an operator of PyTorch's distributed package returns before the present stream waits
    for it.
    """
    return bool(_named(func, args, kwargs).get("async_op", True))


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs


def collective_tuple(
    name: str, elements: int, dtype: str, cards: int, reduction: str = "sum", beside: int = 0
) -> OperatorTuple:
    """The tuple of a collective with ``elements`` in the input of each rank (see
    `farm.types.collective`).
    """
    parameters: dict[str, Any] = {"cards": cards, **({"beside": beside} if beside else {})}
    if COLLECTIVES[name].reduces:
        parameters["reduction"] = reduction
    tensors = (TensorSpec("activation", "", (elements,), dtype),)
    return OperatorTuple(f"{PREFIX}{name}", "collective", parameters, ({"tensor": 0},), {}, tensors)


def inside(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, Any, Any] | None:
    """The aten operator and its arguments in an operator of FSDP; None for other operators."""
    aten, name = torch.ops.aten, func._schema.name
    if name == "fsdp::all_gather_copy_in":
        return aten._foreach_copy_.default, (list(out[0].split(args[2])), args[0]), {}
    if name == "fsdp::split_with_sizes_copy":
        return aten.split_with_sizes_copy.out, args, kwargs
    return (aten._chunk_cat.out, args, kwargs) if name == "fsdp::chunk_cat" else None


def product_beside(spec: OperatorTuple, device: torch.device) -> Callable[[], object] | None:
    """The matrix product that runs at the same time as a collective; None if there is none."""
    if not (size := spec.parameters.get("beside", 0)) or device.type == "meta":
        return None
    generator = torch.Generator(device).manual_seed(0)
    shape, dtype = (size, size), dtype_of(spec.tensors[0].dtype)
    left, right = (
        torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    return functools.partial(torch.mm, left, right)


def alone(spec: OperatorTuple) -> OperatorTuple:
    """The same collective without a product beside it."""
    kept = {name: value for name, value in spec.parameters.items() if name != "beside"}
    return dataclasses.replace(spec, parameters=kept)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a distributed tensor that this rank holds; any other tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def without_communication(spec: OperatorTuple, sent: torch.Tensor) -> torch.Tensor | None:
    """An output of a collective on ``sent`` with the right shape and similar values; nothing is
    communicated. None if the output is the input."""
    if spec.short_name in _IN_PLACE:
        return None
    elements = output_elements(spec)
    return sent.repeat(-(-elements // sent.numel()))[:elements].clone()


def call_of(spec: OperatorTuple, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that runs a collective on the input of this rank, beside its product, and
    returns its output.
    """
    cards, name, elements = spec.parameters["cards"], spec.short_name, output_elements(spec)
    reduction = getattr(dist.ReduceOp, _REDUCTIONS[spec.parameters.get("reduction", "sum")])

    meanwhile = product_beside(spec, device)

    def run(sent: torch.Tensor) -> torch.Tensor:
        out = sent if name in _IN_PLACE else sent.new_empty(elements)
        works: list[Any]
        if name == "all_reduce":
            works = [dist.all_reduce(sent, reduction, async_op=True)]
        elif name == "broadcast":
            works = [dist.broadcast(sent, 0, async_op=True)]
        elif name == "all_gather":
            works = [dist.all_gather_into_tensor(out, sent, async_op=True)]
        elif name == "reduce_scatter":
            works = [dist.reduce_scatter_tensor(out, sent, reduction, async_op=True)]
        elif name == "all_to_all":
            works = [dist.all_to_all_single(out, sent, async_op=True)]
        else:
            rank = dist.get_rank()
            peers = (dist.isend, sent, (rank + 1) % cards), (dist.irecv, out, (rank - 1) % cards)
            works = dist.batch_isend_irecv([dist.P2POp(*peer) for peer in peers])
        if meanwhile is not None:
            meanwhile()
        for work in works:
            work.wait()
        return out

    return run
