"""From a request back to the command line that asks for it: what a report says to repeat it."""

from __future__ import annotations

import shlex

from farm.requests.defaults import QUICK
from farm.types.protocol import Protocol, Stopping, Variant
from farm.types.request import Request


def command_of(request: Request) -> str:
    """``farm run resnet50 --batch 32 --input-size 224 ... --reuse none``; "" for a sweep, which stands in a measurement file.

    What differs between kinds of cards is named even where it is the default. Readings are taken anew. Where a text of somebody's
    own was read, which nobody keeps, FILE and FOLDER stand for it and its tokenizer.
    """
    if request.variant is None:
        return ""
    variant, protocol, usual = request.variant, request.protocol, Protocol()
    words = ["farm", "run", variant.model, "--batch", str(variant.batch)]
    words += ["--input-size", str(variant.input_size)] if variant.input_size else []
    words += ["--length", str(variant.length)] if variant.length and variant.phase != "decode" else []
    # Of a model that generates text, a CPU's default is another than a card's.
    words += ["--phase", variant.phase, "--dtype", variant.dtype] if variant.phase else []
    for option, value, default in (
        ("--cache", str(variant.cache), "0"),
        ("--layers", str(variant.layers), "0"),
        ("--dtype", "" if variant.phase else variant.dtype, "" if variant.phase else Variant.dtype),
        ("--memory-format", variant.memory_format, Variant.memory_format),
        ("--mode", "" if variant.step else variant.mode, "" if variant.step else Variant.mode),
        ("--step", variant.step, ""),
        ("--optimizer", variant.optimizer, ""),
        ("--amp", variant.amp, ""),
        ("--accumulate", str(variant.accumulate), "1"),
        ("--recompute", variant.recompute, ""),
        ("--operators", ",".join(request.operators), "all"),
        ("--residency", protocol.residency, usual.residency),
        ("--placements", request.placements, "none"),
    ):
        if value != default:
            words += [option, value]
    words += ["--launch", protocol.launch, "--data", protocol.data]
    words += ["--padded"] * variant.padded
    words += ["--text", "FILE", "--tokenizer", "FOLDER"] if variant.text else []
    words += ["--tf32"] * protocol.tf32 + ["--cudnn-benchmark"] * protocol.cudnn_benchmark
    if all(getattr(request.stopping, name) == value for name, value in QUICK.items()):
        words.append("--quick")
    elif request.stopping.maximum_s != Stopping.maximum_s:
        words += ["--window", f"{request.stopping.maximum_s:g}"]
    return shlex.join([*words, "--reuse", "none"])
