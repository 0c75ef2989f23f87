"""`farm.fits` against a card: predicted and measured peaks of inference and of training steps.

    python -m benchmarks.module_memory predict FILE.jsonl      # no card needed
    python -m benchmarks.module_memory measure FILE.jsonl      # on a card: about 20 s
    python -m benchmarks.module_memory table PREDICTED.jsonl MEASURED.jsonl

Measured is `torch.cuda.max_memory_allocated` above what was allocated before the model was moved to
the card: of five forward passes without gradients, and of 20 training steps with AdamW and the mean
of the output as loss. Weights and inputs are random."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

PHASES = ("inference", "training")
PASSES, STEPS = 5, 20
CARD = "H200"


@dataclass(frozen=True)
class Case:
    """A module and its input."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]


def image(batch: int, size: int = 224) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length))


def cases() -> dict[str, Case]:
    from farm.models.torchvision import torchvision_models

    vision = torchvision_models()
    import transformers

    llama = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    return {
        "resnet50": Case(vision.resnet50, lambda: image(32)),
        "mobilenet_v3_large": Case(vision.mobilenet_v3_large, lambda: image(64)),
        "vit_b_16": Case(vision.vit_b_16, lambda: image(32)),
        "densenet121": Case(vision.densenet121, lambda: image(32)),
        "convnext_tiny": Case(vision.convnext_tiny, lambda: image(32)),
        "regnet_y_400mf": Case(vision.regnet_y_400mf, lambda: image(128)),
        "bert, 6 layers": Case(
            lambda: transformers.BertModel(transformers.BertConfig(num_hidden_layers=6)),
            lambda: tokens(16, 128, 30000),
        ),
        "gpt2, 6 layers": Case(
            lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)),
            lambda: tokens(8, 512, 50000),
        ),
        "llama, 6 layers": Case(
            lambda: transformers.LlamaForCausalLM(llama), lambda: tokens(4, 512, 32000)
        ),
        "two linear layers": Case(two_linear_layers, lambda: torch.randn(512, 4096)),
        "convolutions": Case(convolutions, lambda: image(8, 256)),
        "TransformerEncoder": Case(encoder, lambda: torch.randn(16, 256, 512)),
    }


def two_linear_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 2, 2),
        nn.ReLU(),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def loss_of(output: Any) -> torch.Tensor:
    """The mean of the first tensor of an output."""
    if not isinstance(output, torch.Tensor):
        output = output["logits"] if "logits" in output else output["last_hidden_state"]
    return output.float().mean()


def predicted() -> Iterator[dict[str, Any]]:
    import farm

    for name, case in cases().items():
        fits = farm.fits(case.make(), case.inputs(), card=CARD, loss=loss_of)
        needs = {"inference": fits.inference, "training": fits.training}
        yield {
            "model": name,
            **{
                phase: {"tensors_bytes": need.tensors_bytes, "most_bytes": need.most_bytes}
                for phase, need in needs.items()
            },
        }


def measured() -> Iterator[dict[str, Any]]:
    for name, case in cases().items():
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        before_bytes = torch.cuda.memory_allocated()
        model, values = case.make().cuda(), case.inputs().cuda()

        model.eval()
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            for _ in range(PASSES):
                model(values)
        inference = peak(before_bytes)

        model.train()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model(values)).backward()
            optimizer.step()
        yield {"model": name, "inference": inference, "training": peak(before_bytes)}


def peak(before_bytes: int) -> dict[str, int]:
    torch.cuda.synchronize()
    return {
        "measured_bytes": torch.cuda.max_memory_allocated() - before_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def table(predictions: Path, measurements: Path) -> Iterator[str]:
    """Lines of a Markdown table: each prediction divided by the measured peak."""
    needs = {row["model"]: row for row in rows_of(predictions)}
    yield "| module | phase | measured | tensors / measured | most / measured | reserved / measured |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in rows_of(measurements):
        for phase in PHASES:
            need, seen = needs[row["model"]][phase], row[phase]
            bytes_ = seen["measured_bytes"]
            ratios = (need["tensors_bytes"], need["most_bytes"], seen["reserved_bytes"])
            cells = [f"{value / bytes_:.3f}" for value in ratios]
            yield f"| {row['model']} | {phase} | {bytes_ / 1e6:,.0f} MB | {' | '.join(cells)} |"


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["predict", "measure", "table"])
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    if options.action == "table":
        print("\n".join(table(*options.files)))
        return
    rows = predicted() if options.action == "predict" else measured()
    with options.files[0].open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
