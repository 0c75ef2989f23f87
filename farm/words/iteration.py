"""What one iteration of training is, beside the model and what goes in. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from farm.errors import UsageError
from farm.words.protocol import LARGEST_NUMBER, Plain

#: SGD has momentum. Without an implementation behind it, PyTorch's own choice on that kind of device.
OPTIMIZERS = tuple(f"{kind}{how}" for kind in ("sgd", "adam", "adamw") for how in ("", "-foreach", "-fused"))
AMP = ("", "bfloat16")


@dataclass(frozen=True)
class Iteration(Plain):
    """
    Attributes:
        amp: what autocast computes in; "" no autocast.
        accumulate: passes before the optimizer.
        recompute: modules that are run anew in the backward instead of keeping what they computed: paths with commas between,
            or blocks.
    """

    optimizer: str = "sgd"
    amp: str = ""
    accumulate: int = 1
    recompute: str = ""

    def __post_init__(self) -> None:
        for what, value, choices in (("optimizer", self.optimizer, OPTIMIZERS), ("autocast", self.amp, AMP)):
            if value not in choices:
                raise UsageError(f"{what} '{value}' is unknown.", f"Choose one of {', '.join(filter(None, choices))}.")
        if not 1 <= self.accumulate <= LARGEST_NUMBER:
            raise UsageError(
                f"The number of accumulated passes is {self.accumulate}; it must be from 1 to {LARGEST_NUMBER}.",
                "Give --accumulate 4, say, or leave it out.",
            )

    def __str__(self) -> str:
        parts = [f"training with {self.optimizer}"]
        parts += [f"autocast {self.amp}"] if self.amp else []
        parts += [f"{self.accumulate} passes"] if self.accumulate > 1 else []
        parts += [f"recomputing {self.recompute}"] if self.recompute else []
        return ", ".join(parts)
