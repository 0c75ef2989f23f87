"""A model that can be asked for by name, and what a source of models has to answer. No torch."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from farm.errors import UnsupportedModel, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.protocol import Variant

SMALLEST_OF_ALL = 32
LARGEST_OF_ALL = 4096
CACHE = 1024  # tokens that a decode pass is beside by default


@dataclass(frozen=True)
class ModelEntry:
    """A model of the catalog. Sizes are the side of the square input, in pixels; 0: it takes no images.

    ``input_size`` is the default; ``fixed_size`` says that the model takes no other, and ``smallest_size`` is the
    least it takes. They mean nothing for a user's model whose function returns its own example inputs. ``parameters``
    and ``flops`` (of one pass at batch 1, of that size) are None where nobody has counted them.
    """

    name: str
    task: str
    input_size: int
    smallest_size: int = SMALLEST_OF_ALL
    fixed_size: bool = False
    origin: str = "torchvision"  # the source's name
    parameters: int | None = None
    flops: int | None = None
    length: int = (
        0  # of a sequence, by default: tokens, or a sound's values where there are no phases; 0: it takes none
    )
    shortest: int = 1
    longest: int = 0  # that it has positions for; 0 any
    fixed_length: bool = False
    phases: tuple[str, ...] = ()  # that it has, its default first
    masked: bool = False  # whether it takes padded sequences
    depth: int = 0  # layers, of which a variant may keep fewer; 0: it cannot be cut

    @property
    def own_name(self) -> str:
        """Its name in its source."""
        return self.name.rpartition("/")[2]

    @property
    def generates(self) -> bool:
        """Whether it goes on with a text: its default pass is over a prompt."""
        return self.phases[:1] == ("prefill",)

    @property
    def decodes(self) -> bool:
        return "decode" in self.phases

    def check_size(self, input_size: int | None) -> int:
        """The size to use; None is the default.

        Raises:
            UsageError: the model does not take it.
        """
        if input_size is None or input_size == self.input_size:
            return self.input_size
        if not self.input_size:
            raise UsageError(
                f"{self.name} takes no images: --input-size {input_size} means nothing to it.",
                "Leave the input size away"
                + ("." if self.fixed_length else f"; --length changes the sequences' {self.length}."),
            )
        if self.fixed_size:
            raise UsageError(
                f"{self.name} takes images of {self.input_size} px only, not {input_size} px.",
                f"Leave the input size away, or give {self.input_size}.",
            )
        if not self.smallest_size <= input_size <= LARGEST_OF_ALL:
            raise UsageError(
                f"{self.name} takes images from {self.smallest_size} to {LARGEST_OF_ALL} px, not {input_size} px.",
                f"Its default is {self.input_size}.",
            )
        return input_size

    def completed(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """What a variant of this model is made with: fields as they were said, and the model's own defaults.

        Raises:
            UsageError: the model does not take one of them, or has no use for it.
        """
        phase = said.get("phase") or (self.phases[0] if self.phases else "")
        if phase and phase not in self.phases:
            has = f"It has {' and '.join(self.phases)}." if self.phases else "Leave --phase away: it has no phases."
            raise UsageError(f"{self.name} has no phase '{phase}'.", has)
        found = {
            **said,
            "input_size": self.check_size(said.get("input_size")),
            "phase": phase,
            **self._lengths(phase, said),
        }
        if said.get("padded") and (not self.masked or phase == "decode"):
            raise UsageError(
                f"{self.name} takes no padded sequences{' in ' + phase if phase else ''}.", "Leave it out."
            )
        if said.get("text") and not phase:
            raise UsageError(f"{self.name} takes no text.", "Leave it out.")
        if layers := said.get("layers"):
            if not self.depth:
                raise UsageError(f"{self.name} cannot be cut to {layers} layers.", "Leave --layers away.")
            if layers > self.depth:
                raise UsageError(
                    f"{self.name} has {self.depth} layers, not {layers}.", f"Give --layers {self.depth} or less."
                )
            found["layers"] = layers if layers < self.depth else 0
        return found | self._step(phase, said)

    def _step(self, phase: str, said: Mapping[str, Any]) -> dict[str, Any]:
        """A training step is one in train mode, with an optimizer."""
        if not said.get("step"):
            for name in ("optimizer", "amp", "recompute"):
                if said.get(name):
                    raise UsageError(
                        f"--{name} is of a training step.", f"Give --step training, or leave --{name} away."
                    )
            if said.get("accumulate", 1) > 1:
                raise UsageError("--accumulate is of a training step.", "Give --step training, or leave it away.")
            return {}
        if phase == "decode":
            raise UsageError(f"{self.name} is not trained in decode.", "Leave --phase away.")
        return {"mode": "train", "optimizer": _optimizer(said.get("optimizer") or "sgd", said.get("amp") or "")}

    def _lengths(self, phase: str, said: Mapping[str, Any]) -> dict[str, int]:
        length, cache = said.get("length"), said.get("cache")
        if phase == "decode":
            if length not in (None, 0, 1):
                raise UsageError(
                    "In decode one token of each sequence goes in; --length means nothing to it.",
                    "Give --cache, the number of tokens that it is beside.",
                )
            cache = cache or (min(CACHE, self.longest) if self.longest else CACHE)
            self._check_positions(cache, "cache")
            if cache < self.depth:
                raise UsageError(
                    f"A cache of {cache} tokens is too short for {self.name}.", f"Give --cache {self.depth} or more."
                )
            return {"length": 1, "cache": cache}
        if cache:
            what = f"in {phase}" if phase else "it takes no tokens"
            raise UsageError(
                f"{self.name} has no cache of tokens{' ' + what if phase else ': ' + what}.",
                "Give --phase decode with it." if self.decodes else "Leave --cache away.",
            )
        if not length or length == self.length:
            return {"length": self.length}
        if not self.length:
            raise UsageError(
                f"{self.name} takes no sequences: --length {length} means nothing to it.",
                "Leave it out; --input-size changes the images.",
            )
        if self.fixed_length:
            raise UsageError(f"{self.name} takes a length of {self.length} only, not {length}.", "Leave --length away.")
        if length < self.shortest:
            raise UsageError(
                f"A length of {length} leaves no room for a text in {self.name}.",
                f"Give --length {self.shortest} or more.",
            )
        self._check_positions(length, "length")
        return {"length": length}

    def _check_positions(self, tokens: int, what: str) -> None:
        if self.longest and tokens > self.longest:
            raise UsageError(
                f"{self.name} has positions for {self.longest} tokens; a {what} of {tokens} is beyond them.",
                f"Give --{what} {self.longest} or less.",
            )


def _optimizer(name: str, amp: str) -> str:
    """
    Raises:
        UsageError: an implementation was named that no gradient scaler goes with in a graph.
    """
    if amp != "float16" or name.endswith("-fused"):
        return name
    if "-" in name:
        raise UsageError(
            f"With --amp float16 {name} waits on the host for whether a gradient is infinite, which no CUDA graph holds.",
            f"Give --optimizer {name.partition('-')[0]}-fused, which reads that on the card, or --amp bfloat16.",
        )
    return f"{name}-fused"


@functools.cache
def costs_of(source: str) -> Mapping[str, Mapping[str, Any]]:
    """Name -> parameters, and FLOPs of one pass at batch 1 and the default size where they are known; made by
    benchmarks/model_costs.py."""
    return json.loads(Path(__file__).with_name("costs.json").read_text())[source]


class Source(Protocol):
    """Where models come from: a file of this folder each. What it names needs no torch; what it makes does."""

    NAME: str  # what stands before the slash: timm/mobilevit_s
    PACKAGE: str  # that makes its models; "" the farm's own
    EXTRA: str  # of pyproject.toml, that installs it; "" where every farm has it

    def entries(self) -> Mapping[str, ModelEntry]:
        """What can be measured, by name."""

    def refused(self) -> Mapping[str, str]:
        """What cannot, by name: the reason, as it goes on after "NAME is"."""

    def make(self, entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
        """The module in the variant's dtype, with random weights of torch's generator.

        ``device`` is where it is to go: meta, where ``torch.empty`` gives meta tensors meanwhile, or a real one. It may be
        made elsewhere, and is moved.
        """

    def inputs(self, entry: ModelEntry, variant: Variant, device: torch.device, seed: int) -> tuple[Any, ...]:
        """What `make`'s module is called with, by position."""


def check_installed(source: Source, name: str) -> None:
    """
    Raises:
        UnsupportedModel: the package that makes the source's models is not there; names the line that installs it.
    """
    if not is_installed(source):
        raise UnsupportedModel(
            f"{name} is a model of {source.PACKAGE}, which is not installed.", f"Install it: {install_line(source)}"
        )


def is_installed(source: Source) -> bool:
    return not source.EXTRA or importlib.util.find_spec(source.PACKAGE) is not None


def install_line(source: Source) -> str:
    return f"pip install 'operator-farm[{source.EXTRA}]'"
