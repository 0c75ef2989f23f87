"""Scans written as loops: the CPU time and the memory of a capture with about 100,000 calls.

    python -m benchmarks.scan selective 20000
    python -m benchmarks.scan recurrent 33334
    python -m benchmarks.scan selective 4000 --step training

Each step of the selective scan makes five calls and four views of other places of its inputs; each
step of the recurrent one makes three calls. The time includes the start of Python and the FLOPs."""

from __future__ import annotations

import argparse
import os
import resource
import sys

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(values[0])
        for _ in range(values.shape[0]):
            state = torch.tanh(state @ self.weight + values[0])
        return state


class Selective(nn.Module):
    """As in Mamba: what a step keeps, reads and writes follows from its input."""

    def __init__(self, channels: int = 16, states: int = 8) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(channels, states))
        self.project = nn.Linear(channels, 2 * states)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        written, read = self.project(values).chunk(2, -1)
        state = torch.zeros(values.shape[0], values.shape[2], written.shape[-1])
        outputs = []
        for step in range(values.shape[1]):
            new = values[:, step, :, None] * written[:, step, None]
            state = state * self.decay + new
            outputs.append((state * read[:, step, None]).sum(-1))
        return torch.stack(outputs, 1)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    return Recurrent(), torch.randn(steps(), 4, 64)


def selective() -> tuple[nn.Module, torch.Tensor]:
    return Selective(), torch.randn(2, steps(), 16)


def steps() -> int:
    return int(os.environ["SCAN_STEPS"])


def main() -> None:
    import farm
    from farm.models import own
    from farm.training.extract import extract

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scan", choices=["recurrent", "selective"])
    parser.add_argument("steps", type=int)
    parser.add_argument("--step", choices=["forward", "training"], default="forward")
    options = parser.parse_args()

    os.environ["SCAN_STEPS"] = str(options.steps)
    name = own.register(f"{__file__}:{options.scan}")
    batch = options.steps if options.scan == "recurrent" else 2
    if options.step == "training":
        variant = farm.variant(name, batch, step="training", optimizer="sgd")
    else:
        variant = farm.variant(name, batch)
    extraction = extract(variant)

    usage = resource.getrusage(resource.RUSAGE_SELF)
    refusal = extraction.refusal(name)
    print(f"{len(extraction.capture.calls):,} calls, {len(extraction.capture.tuples)} tuples")
    print(f"{usage.ru_utime + usage.ru_stime:.1f} s of CPU, {usage.ru_maxrss / 2**10:,.0f} MiB")
    sys.exit(str(refusal) if refusal else 0)


if __name__ == "__main__":
    main()
