"""The cost of a text that a model generates: the prompt, and then token by token with a growing cache.

The cost is a sum over phases, from readings of a prefill and of decodes at a few lengths of the cache. The cost of a
decode is linear in the length of the cache, because attention reads the cache once and nothing else depends on it. So
it is interpolated between the measured lengths and extrapolated beyond them; a single measured length gives a constant
cost. Sampling, tokenizing and other work of the host are not counted.
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
from farm.verdict.figures import Figure, figure_json


@dataclass(frozen=True)
class Generation:
    """The cost of a prompt and of `tokens` more tokens after the first, of the whole batch.

    Half-widths of the 95 % intervals are added, as if all parts were wrong in the same way.
    """

    prefill: Estimate
    decodes: tuple[Estimate, ...]  # by increasing length of the cache
    tokens: int  # of each sequence
    time: Figure
    energy: Figure | None
    notes: tuple[str, ...]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all sequences in the batch."""
        return self.prefill.variant.batch * self.tokens / self.time.value * 1e6

    @property
    def energy_per_token_mj(self) -> float | None:
        return self.energy.value / (self.prefill.variant.batch * self.tokens) if self.energy else None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            **figure_json("time", "us", self.time),
            **figure_json("energy", "mj", self.energy),
            "tokens_per_s": self.tokens_per_s,
            "energy_per_token_mj": self.energy_per_token_mj,
            "prefill": self.prefill.to_json(),
            "decodes": [found.to_json() for found in self.decodes],
            "notes": list(self.notes),
        }


def generation(
    session: Session, prompt: Variant, tokens: int, card: str = "", *, protocol: Protocol | None = None, torch: str = ""
) -> Generation:
    """Estimate the cost of a text from the readings of a prefill and of decodes.

    Args:
        prompt: the variant of the prefill.
        tokens: tokens of each sequence after the first one, which the prefill gives.
        card, protocol, torch: see `farm.estimate.estimate.estimate`.

    Raises:
        UsageError: no tokens; no reading of the prefill, or of any decode of that model, batch and dtype.
    """
    if tokens < 1 or prompt.phase != "prefill":
        raise UsageError(
            f"{prompt} cannot generate {tokens} tokens.",
            "Give for instance --generate 100, with a model that decodes.",
        )
    prefill = estimate(session, prompt, card, protocol=protocol, torch=torch)
    decodes = []
    for variant in _decodes_of(session, prompt):
        try:
            decodes.append(estimate(session, variant, prefill.card_model, protocol=protocol, torch=torch))
        except UsageError:  # no reading on this card
            continue
    first, last = prompt.length + 1, prompt.length + tokens
    if not decodes:
        of_model = f"{prompt.model} with a batch of {prompt.batch} in {prompt.dtype}"
        raise UsageError(
            f"No reading of {prefill.card_model} covers a decode of {of_model}.",
            f"Measure some: farm run {prompt.model} --phase decode -b {prompt.batch} --cache {first},{last}",
        )
    caches = [found.variant.cache for found in decodes]
    notes = ["The cost of each decode is interpolated between the measured lengths of the cache."]
    if first < caches[0] or last > caches[-1] or len(caches) == 1:
        needed = f"Caches of {first} to {last} tokens are needed"
        notes.append(f"{needed}, and {', '.join(map(str, caches))} were measured; the rest is extrapolated.")
    if short := [str(found.variant) for found in (prefill, *decodes) if not found.whole_time and found.coverage < 1]:
        notes.append(f"Readings do not cover all of {', '.join(short)}: the sum is too low.")
    time = _summed(prefill, decodes, first, last, lambda found: found.whole_time or found.time)
    energy = _summed(prefill, decodes, first, last, lambda found: found.whole_energy or found.energy)
    assert time is not None
    return Generation(prefill, tuple(decodes), tokens, time, energy, tuple(notes))


def _decodes_of(session: Session, prompt: Variant) -> list[Variant]:
    """The decodes of the same model in the database, by the length of the cache."""
    row = tables.ModelVariant
    found = session.exec(select(row).where(row.model == prompt.model, row.phase == "decode", row.batch == prompt.batch))
    names = [one.name for one in dataclasses.fields(Variant)]
    variants = [Variant(**{name: getattr(one, name) for name in names}) for one in found]
    # A decode has one token of each sequence.
    alike = dataclasses.replace(prompt, phase="decode", length=1, padded=False, text="")
    decodes = [one for one in variants if dataclasses.replace(one, cache=0, text="") == alike]
    return sorted(decodes, key=lambda one: one.cache)


def _summed(
    prefill: Estimate, decodes: Sequence[Estimate], first: int, last: int, figure: Callable[[Estimate], Figure | None]
) -> Figure | None:
    caches = [found.variant.cache for found in decodes]
    figures = [found for one in (prefill, *decodes) if (found := figure(one)) is not None]
    if len(figures) <= len(decodes):
        return None
    of_prompt, *of_decodes = figures
    values, half_widths = [one.value for one in of_decodes], [one.half_width for one in of_decodes]
    lengths = range(first, last + 1)
    return Figure(
        of_prompt.value + math.fsum(_between(caches, values, length) for length in lengths),
        of_prompt.half_width + math.fsum(max(0.0, _between(caches, half_widths, length)) for length in lengths),
    )


def _between(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """The value on the line through the two nearest places."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect.bisect_left(places, at), 1), len(places) - 1)
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
