"""Calls collectives (`farm.types.collective`) in the process group of a rank, as DTensor and FSDP
do: the collective runs on the stream of the communication library, and the present stream waits for
it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class StartedCollective(NamedTuple):
    """One collective that an operator starts; ``received`` is the tensor that it writes, None: a
    new one.
    """

    name: str
    sent: torch.Tensor
    received: torch.Tensor | None
    parameters: Mapping[str, Any]


def collectives_of(func: Any, args: Any, kwargs: Any) -> list[StartedCollective]:
    """The collectives that an operator of PyTorch's distributed package starts, empty for other
    operators. Raises `NotEncodable` if the farm does not know the collective."""
    if func.namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
        return []
    operator = func._schema.name
    if operator.endswith(_NO_COLLECTIVE):
        return []
    if operator not in _OPERATORS:
        raise NotEncodable(f"the farm does not measure {func}")
    name, sent, received = _OPERATORS[operator]
    arguments = _arguments(func, args, kwargs)
    parameters: dict[str, Any] = {"cards": _group_size(arguments)}
    if COLLECTIVES[name].reduces:
        # The reduction of c10d is an object that cannot be read. The mean takes as long as the sum.
        reduction = arguments["reduce_op"]
        parameters["reduction"] = reduction if isinstance(reduction, str) else "sum"
    inputs = list(tensors_in(arguments[sent]))
    outputs = list(tensors_in(arguments.get(received)))[: len(inputs)]
    return [
        StartedCollective(name, tensor, output, parameters)
        for tensor, output in itertools.zip_longest(inputs, outputs)
    ]


def is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    """True if an operator of PyTorch's distributed package returns before the present stream waits
    for it.
    """
    return bool(_arguments(func, args, kwargs).get("async_op", True))


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _group_size(arguments: Mapping[str, Any]) -> int:
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        resolve: Any = dist.distributed_c10d._resolve_process_group
        return int(resolve(group).size())
    return dist.ProcessGroup.unbox(group).size()


def collective_tuple(
    name: str, elements: int, dtype: str, cards: int, reduction: str = "sum", beside: int = 0
) -> OperatorTuple:
    """The tuple of a collective with ``elements`` in the input of each rank (see
    `farm.types.collective`).
    """
    parameters: dict[str, Any] = {"cards": cards}
    if beside:
        parameters["beside"] = beside
    if COLLECTIVES[name].reduces:
        parameters["reduction"] = reduction
    tensors = (TensorSpec("activation", "", (elements,), dtype),)
    return OperatorTuple(f"{PREFIX}{name}", "collective", parameters, ({"tensor": 0},), {}, tensors)


def inside(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, Any, Any] | None:
    """The aten operator and its arguments in an operator of FSDP; None for other operators."""
    aten = torch.ops.aten
    match func._schema.name:
        case "fsdp::all_gather_copy_in":
            return aten._foreach_copy_.default, (list(out[0].split(args[2])), args[0]), {}
        case "fsdp::split_with_sizes_copy":
            return aten.split_with_sizes_copy.out, args, kwargs
        case "fsdp::chunk_cat":
            return aten._chunk_cat.out, args, kwargs
    return None


def product_beside(spec: OperatorTuple, device: torch.device) -> Callable[[], object] | None:
    """The matrix product that runs at the same time as a collective; None if there is none."""
    size = spec.parameters.get("beside", 0)
    if not size or device.type == "meta":
        return None
    generator = torch.Generator(device).manual_seed(0)
    dtype = dtype_of(spec.tensors[0].dtype)

    def matrix() -> torch.Tensor:
        return torch.randn((size, size), device=device, generator=generator).to(dtype)

    return functools.partial(torch.mm, matrix(), matrix())


def alone(spec: OperatorTuple) -> OperatorTuple:
    """The same collective without a product beside it."""
    parameters = dict(spec.parameters)
    parameters.pop("beside", None)
    return dataclasses.replace(spec, parameters=parameters)


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
    name, cards, elements = spec.short_name, spec.parameters["cards"], output_elements(spec)
    reductions = {
        "sum": dist.ReduceOp.SUM,
        "avg": dist.ReduceOp.AVG,
        "product": dist.ReduceOp.PRODUCT,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
    }
    reduction = reductions[spec.parameters.get("reduction", "sum")]
    product = product_beside(spec, device)

    def started(sent: torch.Tensor, out: torch.Tensor) -> list[Any]:
        match name:
            case "all_reduce":
                return [dist.all_reduce(sent, reduction, async_op=True)]
            case "broadcast":
                return [dist.broadcast(sent, 0, async_op=True)]
            case "all_gather":
                return [dist.all_gather_into_tensor(out, sent, async_op=True)]
            case "reduce_scatter":
                return [dist.reduce_scatter_tensor(out, sent, reduction, async_op=True)]
            case "all_to_all":
                return [dist.all_to_all_single(out, sent, async_op=True)]
        rank = dist.get_rank()
        send = dist.P2POp(dist.isend, sent, (rank + 1) % cards)
        receive = dist.P2POp(dist.irecv, out, (rank - 1) % cards)
        return dist.batch_isend_irecv([send, receive])

    def run(sent: torch.Tensor) -> torch.Tensor:
        out = sent if name in _IN_PLACE else sent.new_empty(elements)
        works = started(sent, out)
        if product is not None:
            product()
        for work in works:
            work.wait()
        return out

    return run
