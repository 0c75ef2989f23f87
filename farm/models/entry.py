"""A model that can be asked for by name, whatever source it comes from. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from farm.errors import UsageError

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
    origin: str = "torchvision"
    parameters: int | None = None
    flops: int | None = None

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
