"""Runs on the CPU under PyTorch's counter and profiler: a model without the farm, and the rebuilt
tuples of its capture.

Both are counted in the same way, so a model and its tuples can be compared. Counted are the
innermost operators of aten with the shapes of their inputs. Left out are views and operators that
only make memory, because they compute nothing."""

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
    """FLOPs and operators of the second training step: the state of the optimizer exists."""
    from farm.models.user_modules import MODULES
    from farm.training.step import TrainingStep, loss_of

    del MODULES
    model, positional, named = example(name)
    model.train()
    step = TrainingStep(
        Called(model, named),
        positional,
        optimizer="sgd",
        make_loss=lambda output: loss_of(
            output, causal=False, masked=False, device=torch.device("cpu")
        ),
    )
    step.run()
    operators = operators_of(step.run)
    return {"flops": flops_of(step.run), "operators": operators}


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


def grouped_product(left: Any, right: Any, *others: Any, out_shape: Any, **named: Any) -> int:
    """A grouped product, which PyTorch's counter does not know: each row meets one matrix."""
    return 2 * left[-2] * left[-1] * right[-1]


MORE_OPERATORS = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._grouped_mm: grouped_product,
}


def flops_of(run: Callable[[], object]) -> int | None:
    """FLOPs of one run by PyTorch's counter; None if the counter raises."""
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
    return dict(Counter(map(described, innermost(profile.events() or ()))))


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


def innermost(events: Iterable[Any]) -> Iterable[Any]:
    """The operators of aten that compute and call no other operator of aten."""
    for event in events:
        if not event.name.startswith("aten::") or event.name.startswith(WITHOUT_WORK):
            continue
        if computes(event.name) and not has_operator_below(event):
            yield event


def has_operator_below(event: Any) -> bool:
    return any(
        child.name.startswith("aten::") or has_operator_below(child) for child in event.cpu_children
    )


@functools.cache
def computes(name: str) -> bool:
    """False for views, and for operators that only call others: if such an operator calls none, it
    returns its input, as dropout does in eval mode."""
    packet = aten.__getattr__(name.removeprefix("aten::"))
    for overload in map(packet.__getattr__, packet.overloads()):
        if not torch._C._dispatch_has_kernel(overload.name()):  # of TorchScript only
            continue
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(
            overload.name(), "CompositeImplicitAutograd"
        )
        if overload.is_view or is_composite:
            return False
    return True


def described(event: Any) -> str:
    """An operator and the shapes of its inputs. Whether it writes its result into an input makes no
    difference here."""
    return f"{event.name.removeprefix('aten::').rstrip('_')} {event.input_shapes}"
