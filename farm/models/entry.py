"""A model that can be asked for by name, and what a source of models has to answer. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from farm.errors import UnsupportedModel, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.words.protocol import Variant

SMALLEST_OF_ALL = 32
LARGEST_OF_ALL = 4096


@dataclass(frozen=True)
class ModelEntry:
    """A model of the catalog. Sizes are the side of the square input, in pixels.

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

    @property
    def own_name(self) -> str:
        """Its name in its source."""
        return self.name.rpartition("/")[2]

    def check_size(self, input_size: int | None) -> int:
        """The size to use; None is the default.

        Raises:
            UsageError: the model does not take it.
        """
        if input_size is None:
            return self.input_size
        if self.fixed_size and input_size != self.input_size:
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
        """The module with random weights of torch's generator, of any dtype, on any device.

        ``device`` is where it is to go: meta, where ``torch.empty`` gives meta tensors meanwhile, or a real one.
        """

    def inputs(self, entry: ModelEntry, variant: Variant, device: torch.device, seed: int) -> tuple[Any, ...]:
        """What `make`'s module is called with, by position."""


def check_installed(source: Source, name: str) -> None:
    """
    Raises:
        UnsupportedModel: the package that makes the source's models is not there; names the line that installs it.
    """
    if source.EXTRA and importlib.util.find_spec(source.PACKAGE) is None:
        raise UnsupportedModel(
            f"{name} is a model of {source.PACKAGE}, which is not installed.", f"Install it: {install_line(source)}"
        )


def install_line(source: Source) -> str:
    return f"pip install 'operator-farm[{source.EXTRA}]'"
