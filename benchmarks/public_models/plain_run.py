"""Runs on the CPU under PyTorch's counter and profiler: a model without the farm, and the rebuilt
tuples of its capture.

Both are counted in the same way, so a model and its tuples can be compared. Counted are the
operators of aten that the program calls, with the shapes of their inputs. An operator that only
calls others counts as these. Left out are views and operators that only make memory, because they
compute nothing."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import flop_counter

from benchmarks.public_models import models

aten = torch.ops.aten
SEED = 0
#: Beginnings of the names of operators that only make memory or cut a tensor from its gradient.
WITHOUT_WORK = (
    "aten::detach",
    "aten::empty",
    "aten::new_empty",
    "aten::resize",
    "aten::set_",
    "aten::_efficientzero",
    "aten::_unsafe_view",
)


def counts_of_forward(name: str) -> dict[str, Any]:
    """FLOPs and operators of a model's forward pass."""
    model, positional, named = example(name)

    def run() -> None:
        model(*positional, **named)

    with torch.no_grad():
        operators = operators_of(run)
        return {"flops": flops_of(run), "operators": operators}


def counts_of_step(name: str) -> dict[str, Any]:
    """FLOPs of a training step. Its operators are not counted: a capture of a step has the
    attention and the dropout of a card, and sees operators below autograd."""
    from farm.training.step import TrainingStep, loss_of

    model, positional, named = example(name)
    step = TrainingStep(
        Called(model.train(), named),
        positional,
        optimizer="sgd",
        make_loss=lambda output: loss_of(
            output, causal=False, masked=False, device=torch.device("cpu")
        ),
    )
    step.run()
    return {"flops": flops_of(step.run), "operators": None}


class Called(torch.nn.Module):
    """A module with some of its keyword arguments."""

    def __init__(self, module: torch.nn.Module, named: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.named = module, named

    def forward(self, *positional: Any) -> Any:
        return self.module(*positional, **self.named)


def example(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model with its positional and its keyword arguments."""
    torch.manual_seed(SEED)
    model, *inputs = inspect.getattr_static(models, name)()
    arguments = inputs[0] if inputs else ()
    if isinstance(arguments, dict):
        return model, (), arguments
    if len(arguments) == 2 and isinstance(arguments[0], tuple) and isinstance(arguments[1], dict):
        return model, *arguments
    return model, arguments, {}


# ---- PyTorch's counter


def attention(query: Any, key: Any, value: Any, *others: Any, out_shape: Any, **named: Any) -> int:
    """Fused attention of CPUs, which PyTorch's counter does not know."""
    return flop_counter.sdpa_flop_count(query, key, value)


def attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *others: Any, out_shape: Any, **named: Any
) -> int:
    """The backward of the fused attention of CPUs."""
    return flop_counter.sdpa_backward_flop_count(gradient, query, key, value)


def grouped_product(left: Any, right: Any, *others: Any, out_shape: Any, **named: Any) -> int:
    """A grouped product, which PyTorch's counter does not know: each row meets one matrix."""
    return 2 * left[-2] * left[-1] * right[-1]


def fused_attention_layer(
    query: Any, key: Any, value: Any, width: int, *others: Any, out_shape: Any, **named: Any
) -> int:
    """A whole `nn.MultiheadAttention` without a mask, which PyTorch's counter does not know: for
    each row of the batch the products with the weights of queries, keys and values, and of the
    output (four matrices of width x width), queries with keys, and probabilities with values."""
    rows, length, _ = query
    return 2 * rows * length * width * (4 * width + 2 * key[1])


MORE_OPERATORS = {
    aten._native_multi_head_attention: fused_attention_layer,
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    aten._grouped_mm: grouped_product,
}


def flops_of(run: Callable[[], object]) -> int | None:
    """FLOPs of one run by PyTorch's counter; None if the counter raises. The run draws the same
    random numbers as the one whose operators are counted."""
    torch.manual_seed(SEED)
    counter = flop_counter.FlopCounterMode(display=False, custom_mapping=MORE_OPERATORS)
    try:
        with counter:
            run()
    except Exception:
        return None
    return counter.get_total_flops()


# ---- PyTorch's profiler


def operators_of(run: Callable[[], object]) -> dict[str, int]:
    """Operator with the shapes of its inputs -> calls in one run, after a run that warms up."""
    torch.manual_seed(SEED)
    run()
    torch.manual_seed(SEED)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
    return dict(Counter(map(described, called(profile.events() or ()))))


def operators_of_tuples(capture: Any) -> dict[str, int] | str:
    """The operators of all calls of a capture, as its rebuilt tuples run them on the CPU; why a
    tuple cannot run there."""
    from farm.operators.rebuild import rebuild
    from farm.subjects.label import label_of

    total = Counter[str]()
    is_public = not capture.owners
    for tuple_id, calls in capture.counts.items():
        spec = capture.tuples[tuple_id]
        try:
            with torch.set_grad_enabled(capture.grad_enabled and is_public):
                rebuilt = rebuild(spec, torch.device("cpu"))
                operators = operators_of(rebuilt.run)
        except Exception as error:
            return f"{label_of(spec)} cannot run alone on a CPU: {error}"[:300]
        for operator, count in operators.items():
            total[operator] += count * calls
    return dict(total)


def called(events: Iterable[Any]) -> Iterable[Any]:
    """The operators of aten that a program calls and that compute. An operator that only calls
    others is replaced by these; what other operators call inside is left out."""
    for event in events:
        if is_operator(event) and is_reached(event.cpu_parent) and computes(event):
            yield event


def is_operator(event: Any) -> bool:
    return event.name.startswith("aten::")


def is_reached(parent: Any) -> bool:
    """True if no operator that computes is around the event."""
    while parent is not None:
        if is_operator(parent) and not calls_others(parent):
            return False
        parent = parent.cpu_parent
    return True


def calls_others(event: Any) -> bool:
    """True if an operator consists of others, or calls itself: under `torch.vmap` with the shapes
    of one sample, then with those of the batch."""
    below = [child.name for child in event.cpu_children]
    return only_calls_others(event.name) or event.name in below


def computes(event: Any) -> bool:
    without_work = event.name.startswith(WITHOUT_WORK) or is_view(event.name)
    return not (without_work or calls_others(event))


@functools.cache
def only_calls_others(name: str) -> bool:
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")
        for overload, _ in overloads_of(name)
    )


@functools.cache
def is_view(name: str) -> bool:
    """True if an overload returns memory of its input and writes nothing."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for _, schema in overloads_of(name)
        for result in schema.returns
    )


def overloads_of(name: str) -> list[tuple[str, Any]]:
    """Name and schema of each overload for tensors."""
    schemas = torch._C._jit_get_schemas_for_operator(name)
    named = [(f"{name}.{schema.overload_name}".rstrip("."), schema) for schema in schemas]
    return [(full, schema) for full, schema in named if torch._C._dispatch_has_kernel(full)]


def described(event: Any) -> str:
    """An operator and the shapes of its inputs. Whether it writes its result into an input makes no
    difference here."""
    return f"{event.name.removeprefix('aten::').rstrip('_')} {event.input_shapes}"
