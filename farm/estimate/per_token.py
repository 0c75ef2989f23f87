"""Tokens a second and energy a token: a model of tokens as the people who serve one count it."""

from __future__ import annotations

from dataclasses import dataclass

from farm.types.format import ENERGY, count_of, plural, quantity
from farm.types.protocol import Variant
from farm.verdict.figures import Figure


@dataclass(frozen=True)
class PerToken:
    """Of the passes that were read. A pass goes over ``tokens``: those of a prompt or text, or in decode one of each sequence
    in the batch. None: the figure that it is made of is not there."""

    tokens: int
    tokens_per_s: float | None
    energy_per_token_mj: float | None

    def __str__(self) -> str:
        """``8 tokens a pass: 12.3 k tokens/s, 4.2 mJ a token``; "" of a model that takes none."""
        if not self.tokens:
            return ""
        told = [f"{count_of(self.tokens_per_s, '').strip()} tokens/s"] if self.tokens_per_s else []
        told += [f"{quantity(self.energy_per_token_mj, ENERGY)} a token"] if self.energy_per_token_mj else []
        a_pass = f"{self.tokens} {plural('token', self.tokens)} a pass"
        return f"{a_pass}: {', '.join(told)}" if told else a_pass


NONE = PerToken(0, None, None)


def per_token(variant: Variant | None, time: Figure | None, energy: Figure | None) -> PerToken:
    """
    Args:
        time, energy: of one pass, in µs and mJ; None where they are not all of it.
    """
    if variant is None or not variant.tokens:
        return NONE
    return PerToken(
        variant.tokens,
        variant.tokens / time.value * 1e6 if time and time.value else None,
        energy.value / variant.tokens if energy else None,
    )
