"""Compiles a variant on fake tensors: the compiler's cache gets its code, and nothing runs.

Fake tensors have shapes, strides and a device, but no memory. The compiler's key of a graph has the
same facts, so a later compilation with real tensors finds the code in the cache. A GPU needs no
CUDA context for this (`farm.operators.compiler.without_card`)."""

from __future__ import annotations

import contextlib

import torch
from torch._functorch import config as functorch
from torch._subclasses.fake_tensor import FakeTensorMode

from farm.models import catalog
from farm.operators.compiler import CompiledModel, without_card
from farm.operators.fake_pass import FakeTensors
from farm.training.extract import autocast_of
from farm.training.step import checkpoint_modules
from farm.types.variant import Variant


def compile_on_fakes(variant: Variant, device: torch.device, *, grad: bool) -> None:
    """Compile the graphs of a variant's forward pass, and in a training step of its backward.

    A compiled optimizer is not compiled here.

    Args:
        variant: the compiled variant. A training step is compiled ahead only for a CPU
            (`farm.jobs.compile_ahead`): on a GPU, autograd needs a CUDA context.
        device: of the card. No tensor is put there.
        grad: whether a forward pass records gradients; a training step always does.

    Raises:
        CaptureError: the compiler refuses the model, or wants to time operators on the card.
        UsageError: no compiler is installed, or the model is unknown.
        Exception: any exception of the model, for example if it reads a value, which fake tensors
            do not have. The model is then compiled in its turn.
    """
    resolved = catalog.resolve(variant.model)
    model = resolved.build(variant, device="meta")
    inputs = resolved.example_inputs(variant, device="meta")
    fakes = FakeTensors(FakeTensorMode(), str(device), keeps_values=False)
    is_step = bool(variant.step)
    grad = grad or is_step
    if not grad:
        # For tensors that require gradients, autograd asks for the stream of the card, which
        # creates a CUDA context. If a weight requires no gradient, PyTorch's matmul may choose
        # another operator for a slice (`should_fold`), and the compiler's key of the graph differs.
        # So qwen3's prefill is compiled again in its turn: its last product takes a slice, the last
        # token of each row.
        model.requires_grad_(False)

    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(without_card())
        if is_step:
            checkpoint_modules(model, variant.recompute)
            # Otherwise a backward is compiled at its first run.
            stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
            stack.enter_context(autocast_of(variant, device.type))
        stack.enter_context(fakes.swapped_into(model))
        fake_inputs = fakes.tree(inputs)
        stack.enter_context(fakes.mode)
        stack.enter_context(torch.set_grad_enabled(grad))
        compiled = CompiledModel(model, variant.compile, device, only_fills_cache=True)
        with compiled.compiling():
            compiled(*fake_inputs)
