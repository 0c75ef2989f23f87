"""A CPU times a compiled model as it was compiled."""

import torch
from torch._dynamo.utils import counters

from farm.benchmark.host_clock import HostTimer
from farm.benchmark.subjects import kind_of_subject
from farm.benchmark.workload import Workload
from farm.operators.compiler import CompiledModel
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant

EAGER = Protocol(launch="eager")
CPU = torch.device("cpu")


class Layer(torch.nn.Linear):
    """Has a call of its own, as the layers of transformers have."""

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().__call__(*inputs)


def test_the_timer_of_a_compiled_model_does_not_compile_it_again() -> None:
    variant = Variant("resnet18", 1, 224, compile="default")
    kind = kind_of_subject(Subject("variant", variant.id, variant.to_json()), EAGER)
    assert not kind.marks_modules
    model, hidden = torch.nn.Sequential(Layer(4, 4), Layer(4, 4)).eval(), torch.randn(2, 4)
    with torch.no_grad():
        compiled = CompiledModel(model, "default", CPU)
        with compiled.compiling():
            compiled(hidden)
        before = dict(counters["frames"])
        workload = Workload([], CPU, 0.0, calls=[lambda: compiled(hidden)])
        timer = HostTimer(
            workload, EAGER, Stopping(maximum_s=0.2), marks_modules=kind.marks_modules
        )
        timer.visit(0)
    assert dict(counters["frames"]) == before
