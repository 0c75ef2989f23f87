"""What a text costs that a model writes: the prompt, and then token by token beside a cache that grows.

A sum over phases, from readings of a prefill and of decodes at a few lengths of the cache. What a decode costs between these
lengths is taken from the line between them, as attention reads the cache once and all else does not know of it; beyond them,
from the nearest line, or with one length alone as there. Nothing between the phases is counted: sampling, tokenizing, the host.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, select

from farm.errors import UsageError
from farm.estimate.estimate import Estimate, estimate
from farm.store import tables
from farm.types.protocol import Protocol, Variant
from farm.verdict.figures import Figure


@dataclass(frozen=True)
class Generation:
    """`time` and `energy` are of a prompt and `tokens` tokens after the first, of the whole batch; half-widths of the 95 %
    interval, as if all of them were wrong in the same way."""

    prefill: Estimate
    decodes: tuple[Estimate, ...]  # by the length of the cache, rising
    tokens: int  # of each sequence
    time: Figure
    energy: Figure | None
    notes: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """That are written, of all sequences in the batch."""
        return self.prefill.variant.batch * self.tokens / self.time.value * 1e6

    @property
    def energy_per_token_mj(self) -> float | None:
        return self.energy.value / (self.prefill.variant.batch * self.tokens) if self.energy else None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "time_us": self.time.value,
            "time_half_width_us": self.time.half_width,
            "energy_mj": self.energy.value if self.energy else None,
            "energy_half_width_mj": self.energy.half_width if self.energy else None,
            "tokens_per_s": self.tokens_per_s,
            "energy_per_token_mj": self.energy_per_token_mj,
            "prefill": self.prefill.to_json(),
            "decodes": [found.to_json() for found in self.decodes],
            "notes": list(self.notes),
        }


def generation(
    session: Session, prompt: Variant, tokens: int, card: str = "", *, protocol: Protocol | None = None, torch: str = ""
) -> Generation:
    """
    Args:
        prompt: the variant of the prefill.
        tokens: that each sequence goes on with after the first, which the prefill gives.
        card, protocol, torch: as of `farm.estimate.estimate.estimate`.

    Raises:
        UsageError: no tokens; no reading of the prefill, or of any decode of that model, batch and dtype.
    """
    if tokens < 1 or prompt.phase != "prefill":
        raise UsageError(
            f"{prompt} does not go on with a text of {tokens} tokens.",
            "Give --generate 100, say, of a model that decodes.",
        )
    prefill = estimate(session, prompt, card, protocol=protocol, torch=torch)
    decodes = []
    for variant in _decodes_of(session, prompt):
        try:
            decodes.append(estimate(session, variant, prefill.card_model, protocol=protocol, torch=torch))
        except UsageError:  # that one was never read on this card
            continue
    first, last = prompt.length + 1, prompt.length + tokens
    if not decodes:
        raise UsageError(
            f"No reading of {prefill.card_model} is of a decode of {prompt.model} with a batch of {prompt.batch} in "
            f"{prompt.dtype}.",
            f"Measure some: farm run {prompt.model} --phase decode -b {prompt.batch} --cache {first},{last}",
        )
    caches = [found.variant.cache for found in decodes]
    notes = ["Each decode is interpolated over the length of its cache, between those that were read."]
    if first < caches[0] or last > caches[-1] or len(caches) == 1:
        notes.append(
            f"Caches of {first} to {last} tokens are needed, and {_listed(caches)} were read: beyond is a guess."
        )
    if short := [found for found in (prefill, *decodes) if found.whole_time is None and found.coverage < 1]:
        notes.append(
            f"Readings do not cover all of {_listed([str(found.variant) for found in short])}: the sum is too low."
        )
    energies = [_energy(found) for found in (prefill, *decodes)]
    time = _summed(prefill, decodes, first, last, lambda found: found.whole_time or found.time)
    energy = _summed(prefill, decodes, first, last, _energy) if all(energies) else None
    assert time is not None
    return Generation(prefill, tuple(decodes), tokens, time, energy, tuple(notes))


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _energy(found: Estimate) -> Figure | None:
    return found.whole_energy or found.energy


def _decodes_of(session: Session, prompt: Variant) -> list[Variant]:
    """What the database has of the same model, by the length of the cache."""
    row = tables.ModelVariant
    found = session.exec(select(row).where(row.model == prompt.model, row.phase == "decode", row.batch == prompt.batch))
    names = [one.name for one in dataclasses.fields(Variant)]
    variants = [Variant(**{name: getattr(one, name) for name in names}) for one in found]
    # Its text is a token each, whatever that of the prompt.
    alike = dataclasses.replace(prompt, phase="decode", length=1, padded=False, text="")
    return sorted(
        (one for one in variants if dataclasses.replace(one, cache=0, text="") == alike), key=lambda one: one.cache
    )


def _summed(
    prefill: Estimate, decodes: Sequence[Estimate], first: int, last: int, figure: Callable[[Estimate], Figure | None]
) -> Figure | None:
    caches = [found.variant.cache for found in decodes]
    figures = [figure(found) for found in (prefill, *decodes)]
    known = [one for one in figures if one is not None]
    if len(known) < len(figures):
        return None
    of_prompt, *of_decodes = known
    values = [one.value for one in of_decodes]
    half_widths = [one.half_width for one in of_decodes]
    lengths = range(first, last + 1)
    return Figure(
        of_prompt.value + math.fsum(_between(caches, values, length) for length in lengths),
        of_prompt.half_width + math.fsum(max(0.0, _between(caches, half_widths, length)) for length in lengths),
    )


def _between(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """On the line through the two places around, or the nearest two."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect.bisect_left(places, at), 1), len(places) - 1)
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
