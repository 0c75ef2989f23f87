"""The peak of a training step's memory: the curve of a capture against PyTorch's allocator in a step that nobody observes.

    python benchmarks/step_memory.py                      # ten models on the CPU
    python benchmarks/step_memory.py resnet18:sgd:8       # MODEL:OPTIMIZER:BATCH

The capture is made on meta. What the allocator gives and takes back is what PyTorch's profiler hears of it, above what is there
before the step. Workspaces of libraries are in the allocator's and in no operator's.
"""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from farm.models import catalog
from farm.operators.taking_apart import example_inputs
from farm.training.step import TrainingStep
from farm.training.taking_apart import loss_for, take_step_apart
from farm.words.protocol import Variant

CPU = torch.device("cpu")
MODELS = (
    "resnet18:sgd:4",
    "resnet50:adam:4",
    "mobilenet_v3_small:sgd:8",
    "squeezenet1_1:adam:8",
    "efficientnet_b0:adamw:4",
    "swin_t:adamw:2",
    "vit_b_16:adam:2",
    "bert-base:adamw:2",
    "gpt2:adamw:1",
    "t5-small:adamw:2",
)


def allocator_peak_bytes(variant: Variant, optimizer: str) -> int:
    """Of an unobserved step, with what the model, its optimizer and its inputs hold anyway."""
    model, inputs = catalog.build(variant, device="cpu"), example_inputs(variant, "cpu")
    step = TrainingStep(model, inputs, optimizer=optimizer, make_loss=lambda output: loss_for(variant, output, CPU))
    step.run()
    step.optimizer.zero_grad()
    held = [*model.parameters(), *model.buffers(), *inputs, *(step.loss.targets if step.loss else ())]
    held += [value for state in step.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    storages = {one.data_ptr(): one.untyped_storage().nbytes() for one in held if torch.is_tensor(one)}
    current = peak = sum(storages.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step.run()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def main() -> None:
    print(f"{'step':46} {'allocator':>11} {'curve':>11} {'curve by':>9}")
    for text in sys.argv[1:] or MODELS:
        name, optimizer, batch = text.split(":")
        variant = catalog.variant(name, int(batch), step="training", optimizer=optimizer)
        curve = max(take_step_apart(variant).memory_bytes)
        peak = allocator_peak_bytes(variant, optimizer)
        print(
            f"{variant!s:38} {optimizer:7} {peak / 1e6:8.1f} MB {curve / 1e6:8.1f} MB {curve / peak - 1:+9.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
