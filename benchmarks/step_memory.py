"""Compare the memory curve of a captured training step with PyTorch's allocator in an unobserved
step.

    python benchmarks/step_memory.py                  # ten models on the CPU
    python benchmarks/step_memory.py resnet18:sgd:8   # MODEL:OPTIMIZER:BATCH, with the suffix
    :bfloat16 for autocast python benchmarks/step_memory.py --cuda           # four models on the
    first GPU

The capture runs on the meta device, with a GPU's operators if there is one. The allocator's side
is, on a CPU, what PyTorch's profiler records of it, above the memory before the step; on a GPU, the
requested bytes. Workspaces of libraries are in the allocator's figure but not an operator's tensor;
those of cuBLAS are listed separately."""

from __future__ import annotations

import sys

import torch
from torch.profiler import ProfilerActivity, profile

from farm.models import catalog
from farm.training.extract import build_step, extract_step
from farm.types.variant import Variant

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


ON_CARD = (
    "resnet50:sgd:32",
    "vit_b_16:adamw-fused:32:bfloat16",
    "bert-base:adamw-fused:16",
    "gpt2:adamw-fused:8",
)


def allocator_peak_bytes(variant: Variant) -> int:
    """Return the allocator's peak of an unobserved step, including model, optimizer and inputs."""
    with torch.enable_grad():
        step = build_step(variant, CPU)
    step.optimizer.zero_grad()
    model, inputs = step.model, step.inputs
    held = [
        *model.parameters(),
        *model.buffers(),
        *inputs,
        *(step.loss.targets if step.loss else ()),
    ]
    held += [
        value
        for state in step.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    storages = {
        one.data_ptr(): one.untyped_storage().nbytes() for one in held if torch.is_tensor(one)
    }
    current = peak = sum(storages.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step.run()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def card_peak_bytes(variant: Variant) -> tuple[int, int]:
    """Return the requested bytes at the peak of an unobserved step on a GPU, and those of cuBLAS's
    workspaces.
    """
    with torch.enable_grad():
        step = build_step(variant, torch.device("cuda"))
        step.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step.run()
        torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch._C._cuda_clearCublasWorkspaces()
    after_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
    return before["requested_bytes.all.peak"], before["requested_bytes.all.current"] - after_bytes


def main() -> None:
    on_card = "--cuda" in sys.argv
    if on_card:
        torch.cuda.init()
    chosen = [text for text in sys.argv[1:] if not text.startswith("-")]
    print(f"{'step':60} {'allocator':>11} {'curve':>11} {'workspaces':>11} {'both by':>9}")
    for text in chosen or (ON_CARD if on_card else MODELS):
        name, optimizer, batch, *amp = text.split(":")
        variant = catalog.variant(
            name, int(batch), step="training", optimizer=optimizer, amp="".join(amp)
        )
        captured = extract_step(variant, device_type="cuda" if on_card else "cpu")
        curve, workspaces = max(captured.memory_bytes), 0
        if on_card:
            peak, workspaces = card_peak_bytes(variant)
            torch.cuda.empty_cache()
        else:
            peak = allocator_peak_bytes(variant)
        told = "".join(f" {size / 1e6:8.1f} MB" for size in (peak, curve, workspaces))
        print(
            f"{variant!s:52} {optimizer:11}{told} {(curve + workspaces) / peak - 1:+9.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
