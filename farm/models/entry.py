"""A model of the catalog (`ModelEntry`): what it accepts, and its defaults. No torch."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.types.variant import Variant

LARGEST_OF_ALL = 4096
CACHE = 1024  # tokens in the cache of a decode pass, by default
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Variant)}


@dataclass(frozen=True)
class ModelEntry:
    """A model of the catalog. A user's model with its own example inputs ignores the sizes."""

    name: str
    task: str
    input_size: int  # the default side of the square input, in pixels; 0 for a model without images
    smallest_size: int = 32  # that the model accepts
    fixed_size: bool = False  # True if the model accepts the default size only
    origin: str = "torchvision"  # the name of its source
    parameters: int | None = None  # their number; None if not counted
    flops: int | None = None  # of one pass at batch 1 and the default size; None if not counted
    # by default, in tokens, or in values of a sound; 0 for a model without sequences
    length: int = 0
    shortest: int = 1  # the least length
    longest: int = 0  # the greatest length; 0 for any
    fixed_length: bool = False  # True if the model accepts the default length only
    phases: tuple[str, ...] = ()  # the default first
    masked: bool = False  # True if the model accepts padded sequences
    depth: int = 0  # the number of its layers, which a variant may cut; 0 if they cannot be cut

    @property
    def own_name(self) -> str:
        """Its name in its source."""
        return self.name.rpartition("/")[2]

    @property
    def generates(self) -> bool:
        """True if the model generates text: the default phase is prefill."""
        return self.phases[:1] == ("prefill",)

    def check_size(self, input_size: int | None) -> int:
        """Returns an input size that the model accepts; None means the default. Raises `UsageError`
        for other sizes.
        """
        if input_size is None or input_size == self.input_size:
            return self.input_size
        if not self.input_size:
            problem = f"takes no images, so --input-size {input_size} has no meaning."
            step = "Omit --input-size."
            if not self.fixed_length:
                step += f" --length changes the length of the sequences (default {self.length})."
        elif self.fixed_size:
            problem = f"takes images of {self.input_size} px only, not {input_size} px."
            step = f"Omit --input-size, or give {self.input_size}."
        elif not self.smallest_size <= input_size <= LARGEST_OF_ALL:
            problem = (
                f"takes images from {self.smallest_size} to {LARGEST_OF_ALL} px, not {input_size} "
                "px."
            )
            step = f"Give a size in this range, or omit --input-size to use {self.input_size} px."
        else:
            return input_size
        raise UsageError(f"{self.name} {problem}", step)

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a variant of this model: the given ones, with the model's defaults for the
        others. Raises `UsageError` if the model does not accept or use a field."""
        phase = self._phase(given.get("phase"))
        fields = dict(given)
        fields["input_size"] = self.check_size(given.get("input_size"))
        fields["phase"] = phase
        fields |= self._lengths(phase, given)
        if given.get("padded") and (not self.masked or phase == "decode"):
            where = f" in {phase}" if phase else ""
            raise UsageError(f"{self.name} takes no padded sequences{where}.", "Omit --padded.")
        if (given.get("distributed") or 1) > 1 and self.origin != "user":
            raise UsageError(
                f"--cards is for a model of your own that is distributed, not for {self.name}.",
                "Give --tensor-parallel, or --data-parallel for training.",
            )
        if given.get("text") and not phase:
            raise UsageError(f"{self.name} takes no text.", "Omit --text and --tokenizer.")
        if given.get("layers"):
            fields["layers"] = self._cut_to(given["layers"])
        if given.get("step"):
            fields["mode"] = "train"
            fields["optimizer"] = self._optimizer(phase, given)
            return fields
        for name in ("optimizer", "amp", "recompute", "accumulate"):
            if given.get(name) not in (_DEFAULTS[name], None):
                raise UsageError(
                    f"--{name} is for a training step only.",
                    f"Give --step training, or omit --{name}.",
                )
        return fields

    def _phase(self, phase: str | None) -> str:
        """A phase that the model has; None means the default, "" for a model without phases."""
        if not phase:
            return self.phases[0] if self.phases else ""
        if phase in self.phases:
            return phase
        step = "Omit --phase: the model has no phases."
        if self.phases:
            step = f"Choose {' or '.join(self.phases)}."
        raise UsageError(f"{self.name} has no phase '{phase}'.", step)

    def _cut_to(self, layers: int) -> int:
        """The field ``layers`` of a variant with so many layers; 0 for all."""
        if not self.depth:
            raise UsageError(f"{self.name} cannot be cut to {layers} layers.", "Omit --layers.")
        if layers > self.depth:
            step = f"Give --layers {self.depth} or less."
            raise UsageError(f"{self.name} has {self.depth} layers, not {layers}.", step)
        return layers if layers < self.depth else 0

    def _optimizer(self, phase: str, given: Mapping[str, Any]) -> str:
        """The optimizer of a training step; raises `UsageError` if it is compiled and the model is
        not, or if it does not work with a gradient scaler in a CUDA graph."""
        if phase == "decode":
            raise UsageError(f"{self.name} cannot be trained in the phase decode.", "Omit --phase.")
        name: str = given.get("optimizer") or "sgd"
        if name.endswith("-compiled") and not given.get("compile"):
            plain = name.removesuffix("-compiled")
            problem = f"The optimizer {name} is compiled together with the model."
            raise UsageError(problem, f"Add --compile, or give --optimizer {plain}.")
        if given.get("amp") != "float16" or name.endswith("-fused"):
            return name
        if "-" in name:
            raise UsageError(
                f"With --amp float16 the optimizer {name} checks on the host whether a gradient is "
                "infinite. A CUDA graph cannot contain that check.",
                f"Give --optimizer {name.partition('-')[0]}-fused, which checks on the card, or "
                "--amp bfloat16.",
            )
        return f"{name}-fused"

    def _lengths(self, phase: str, given: Mapping[str, Any]) -> dict[str, int]:
        length, cache = given.get("length"), given.get("cache")
        if phase == "decode":
            if length not in (None, 0, 1):
                problem = (
                    "In decode the input is one token per sequence, so --length has no meaning."
                )
                raise UsageError(
                    problem, "Omit --length. --cache sets the number of tokens in the cache."
                )
            cache = cache or min(CACHE, self.longest or CACHE)
            self._check_positions(cache, "cache")
            if cache < self.depth:
                step = f"Give --cache {self.depth} or more."
                raise UsageError(f"A cache of {cache} tokens is too short for {self.name}.", step)
            return {"length": 1, "cache": cache}
        if cache:
            why = f" in {phase}" if phase else ", because it takes no tokens"
            step = (
                "Give --phase decode, or omit --cache."
                if "decode" in self.phases
                else "Omit --cache."
            )
            raise UsageError(f"{self.name} has no cache of tokens{why}.", step)
        if not length or length == self.length:
            return {"length": self.length}
        if not self.length:
            problem = f"{self.name} takes no sequences, so --length {length} has no meaning."
            raise UsageError(problem, "Omit --length. --input-size changes the size of the images.")
        if self.fixed_length:
            raise UsageError(
                f"{self.name} takes a length of {self.length} only, not {length}.", "Omit --length."
            )
        if length < self.shortest:
            step = f"Give --length {self.shortest} or more."
            raise UsageError(
                f"--length {length} is too short for a text with the special tokens of "
                f"{self.name}.",
                step,
            )
        self._check_positions(length, "length")
        return {"length": length}

    def _check_positions(self, tokens: int, what: str) -> None:
        if self.longest and tokens > self.longest:
            problem = f"{self.name} takes at most {self.longest} tokens; --{what} is {tokens}."
            raise UsageError(problem, f"Give --{what} {self.longest} or less.")


@functools.cache
def costs_of(source: str) -> Mapping[str, Mapping[str, Any]]:
    """Name -> parameters, and if known FLOPs at batch 1 and the default size; see
    benchmarks/model_costs.py.
    """
    return json.loads(Path(__file__).with_name("costs.json").read_text())[source]
