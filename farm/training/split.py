"""Models that are split over several cards of one host: tensor parallelism, DDP and FSDP2.

The same functions split a model in the ranks of a group, and in a submitter without cards. There a
fake process group takes the place of the real one: the submitter captures what rank 0 runs, and
nothing communicates. All ranks run equal operators, because models that cannot be split evenly are
refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farm.errors import CaptureError, UnsupportedModel, UsageError
from farm.models import catalog
from farm.models.resolved import ResolvedModel
from farm.operators.capture import WatchedOperators
from farm.subjects.collective_calls import local_part
from farm.training.step import blocks_of
from farm.types.replacement import replaced
from farm.types.variant import Variant


@contextlib.contextmanager
def fake_group(cards: int) -> Iterator[None]:
    """While active, this process is rank 0 of a group that communicates with nobody. One card needs
    no group. Raises `CaptureError` if this process is a rank of another group."""
    if cards == 1:
        yield
        return
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise CaptureError(
            "A model that is split over cards cannot be captured in a process that is a rank of a "
            "group.",
            "Capture it in another process.",
        )
    # The cache of DTensor's rules has the groups of an earlier capture, which no longer exist.
    debug._clear_sharding_prop_cache()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cards)
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(
    variant: Variant, device: torch.device, model: ResolvedModel | None = None
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A variant, or this rank's part of it, with random weights, and its inputs. DDP is not applied
    yet. ``model``: the variant's model, if the caller has found it.

    Only the part is allocated: the whole model may be larger than the card's memory.
    """
    model = model or catalog.resolve(variant.model)
    if variant.tensor_parallel == 1 and variant.sharding == "ddp":
        module = model.build(variant, device=device)
    else:
        module = _part(variant, device, model)
    return module, model.example_inputs(variant, device=device)


def _part(variant: Variant, device: torch.device, model: ResolvedModel) -> nn.Module:
    module = model.build(variant, device="meta", real_buffers=True)
    kept = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    split(module, variant, device.type, model)
    module.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            local = local_part(tensor)
            if name in kept:
                local.copy_(kept[name])
            elif local.dim() > 1:
                # Weights as in most configurations of transformers.
                local.normal_(
                    std=0.02 if isinstance(tensor, nn.Parameter) else 1.0, generator=generator
                )
            else:
                local.fill_(name.endswith("weight"))
    return module


def split(
    module: nn.Module, variant: Variant, device_type: str, model: ResolvedModel
) -> Callable[..., Any]:
    """Split a module in place among the ranks of the group. Return the function that runs its
    forward pass: the module itself, unchanged, for one card. Raises `UnsupportedModel` if the model
    has no plan, or cannot be split evenly."""
    if variant.cards == 1 or variant.distributed > 1:  # a user's model has split itself
        return module
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, (variant.cards,))
    if variant.tensor_parallel > 1:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(module, mesh, _plan(module, variant, model), src_data_rank=None)
    elif variant.sharding == "ddp":
        replicated = nn.parallel.DistributedDataParallel(module)
        # DDP times its first ten runs and every hundredth: in the capture of a CUDA graph it cannot
        # read the events.
        replicated._set_ddp_runtime_logging_sample_rate(2**30)
        return replicated
    else:
        from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp

        paths, device = [""], next(module.parameters()).device
        with contextlib.suppress(UsageError):  # a model without a list of blocks is one unit
            paths = [*blocks_of(module), ""]
        # a mesh does not know "cpu:0"
        replacement = replaced(fsdp, "_get_device_from_mesh", lambda mesh: device)
        with replacement if device.type == "cpu" else contextlib.nullcontext():
            for path in paths:
                fsdp.fully_shard(module.get_submodule(path), mesh=mesh)
    return module


def _plan(module: nn.Module, variant: Variant, model: ResolvedModel) -> dict[str, Any]:
    """Path of a module -> PyTorch's style of tensor parallelism."""
    styles = _styles()
    plan: dict[str, Any] = {}
    for path, style in model.tensor_parallel_plan(variant, module).items():
        if style not in styles:
            raise UnsupportedModel(
                f"The plan of {variant.model} splits '{path}' in the way '{style}', which the "
                "farm does not know.",
                "Choose a dense language model, such as llama-3.1-8b.",
            )
        if styles[style] is not None:
            plan[path] = styles[style]
            weight: Any = module.get_submodule(path).weight
            if uneven := [size for size in weight.shape if size % variant.tensor_parallel]:
                raise UnsupportedModel(
                    f"{variant.model} cannot be split evenly over {variant.tensor_parallel} "
                    f"cards: '{path}' has the "
                    f"size {uneven[0]}.",
                    "Give another number of cards.",
                )
    return plan


def completing_works(cards: int) -> contextlib.AbstractContextManager[Any]:
    """While active, each all-reduce in a `fake_group` has a result, as DDP needs; the group returns
    none."""
    return WatchedOperators(_completed) if cards > 1 else contextlib.nullcontext()


def _completed(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator, and completes the work of an all-reduce."""
    out = func(*args, **kwargs)
    if func is not torch.ops.c10d.allreduce_.default:
        return out
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(list(out[0]))
    c10d: Any = torch._C._distributed_c10d
    return out[0], c10d._create_work_from_future(done).boxed()


def _styles() -> dict[str, Any]:
    """Name in a plan of transformers -> PyTorch's style; None if the weights are whole on each
    card.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    gathered = ColwiseParallel(output_layouts=Replicate())
    whole_input = RowwiseParallel(input_layouts=Replicate())
    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        **dict.fromkeys(("colwise_gather_output", "colwise_rep"), gathered),
        **dict.fromkeys(("rowwise_split_input", "rowwise_rep", "embedding_rowwise"), whole_input),
        "replicated_with_grad_allreduce": None,
    }
