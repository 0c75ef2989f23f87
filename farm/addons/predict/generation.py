"""Estimate the cost of generating a text: one prefill of the prompt, then one decode per token with
a growing cache.

The input is an estimate of the prefill and estimates of decodes at a few cache lengths. The cost of
a decode is linear in the cache length, because attention reads the cache once and nothing else
depends on its length. So the cost is interpolated between the measured lengths and extrapolated
beyond them. With fewer than two measured lengths, the first and last decode are predicted; without
a predictor, one measured length gives a constant cost. Sampling, tokenizing and other work of the
host are not counted."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session, select

from farm.addons.predict.estimate import Estimate, cost_json
from farm.addons.predict.stored_predictor import PredictedCost, PredictedValue
from farm.errors import FarmError, UsageError
from farm.requests.partial_request import title_of
from farm.store import tables
from farm.store.content import stored_variant
from farm.types.variant import Variant

MEASURED = 0.5  # if there is a predictor, stored decodes with less coverage are not used


@dataclass(frozen=True)
class Generation:
    """The cost of a prompt and of `tokens` more tokens after the first one, for the whole batch.
    Half-widths add linearly, because all parts may be wrong in the same direction."""

    prefill: Estimate
    decodes: tuple[Estimate, ...]  # in the order of cache length
    tokens: int  # generated tokens of each sequence after the first one
    cost: PredictedCost
    level: float  # level of the intervals, 0 to 1
    incomplete_reason: str  # see `Estimate`
    notes: tuple[str, ...]

    @property
    def time(self) -> PredictedValue:
        """Unit: µs."""
        return self.cost.time_us

    @property
    def energy(self) -> PredictedValue | None:
        """Unit: mJ."""
        return self.cost.energy_mj

    @property
    def phases(self) -> tuple[Estimate, ...]:
        return self.prefill, *self.decodes

    @property
    def is_lower_bound(self) -> bool:
        """True if parts are missing, and no token counts with the cost of a longer cache than its
        own.
        """
        first = self.prefill.variant.length + 1
        return bool(self.incomplete_reason) and not (
            len(self.decodes) == 1 and self.decodes[0].variant.cache > first
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second, for all sequences in the batch together; None if the sum is
        incomplete.
        """
        batch = self.prefill.variant.batch
        return None if self.incomplete_reason else batch * self.tokens / self.time.value * 1e6

    @property
    def energy_per_token_mj(self) -> float | None:
        energy = None if self.incomplete_reason else self.energy
        return energy.value / (self.prefill.variant.batch * self.tokens) if energy else None

    def to_json(self) -> dict[str, Any]:
        return {
            **cost_json(self.time, self.energy, self.level),
            "complete": not self.incomplete_reason,
            "incomplete_reason": self.incomplete_reason,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "energy_per_token_mj": self.energy_per_token_mj,
            "prefill": self.prefill.to_json(),
            "decodes": [decode.to_json() for decode in self.decodes],
            "notes": list(self.notes),
        }


def generation(
    session: Session, prompt: Variant, tokens: int, estimate_of: Callable[[Variant], Estimate]
) -> Generation:
    """Estimate the cost of a text: the prefill of `prompt`, which generates the first token, and a
    decode for each of `tokens` more tokens per sequence. `estimate_of` estimates a variant on the
    card; it raises `UsageError` if it has no reading and no prediction. Raises `UsageError` if
    `tokens` is 0, or without an estimate for the prefill or any decode."""
    if tokens < 1 or prompt.phase != "prefill":
        raise UsageError(
            f"{title_of(prompt)} cannot generate {tokens} tokens: the number must be at least 1, "
            "and the model must decode.",
            "Give for instance --generate 100, with a language model such as gpt2.",
        )
    prefill = estimate_of(prompt)
    first, last = prompt.length + 1, prompt.length + tokens
    alike = dataclasses.replace(prompt, phase="decode", length=1, padded=False, text="")
    decodes = _measured_decodes(session, alike, estimate_of)
    refused: FarmError | None = None
    for cache in _lengths_to_predict(decodes, first, last):
        try:
            decode = estimate_of(dataclasses.replace(alike, cache=cache))
        except FarmError as error:
            refused = error
        else:
            if decode.complete:
                decodes[cache] = decode
    if not decodes:
        of_model = f"{prompt.model} with a batch of {prompt.batch} in {prompt.dtype}"
        raise UsageError(
            f"No reading on {prefill.card_model} covers a decode of {of_model}, and there is no "
            "predictor for it.",
            f"Measure two: farm run {prompt.model} --phase decode -b {prompt.batch} --cache "
            f"{first},{last}",
        ) from refused

    caches = sorted(decodes)
    phases = (prefill, *(decodes[cache] for cache in caches))
    level = min(phase.level for phase in phases)
    reasons = [
        f"{phase.title}: {phase.incomplete_reason}" for phase in phases if not phase.complete
    ]
    time = _summed(caches, [phase.time_at(level) for phase in phases], first, last)
    energy = _summed(caches, [phase.energy_at(level) for phase in phases], first, last)
    assert time is not None
    return Generation(
        prefill=prefill,
        decodes=phases[1:],
        tokens=tokens,
        cost=PredictedCost(time, energy),
        level=level,
        incomplete_reason=" ".join(reasons),
        notes=tuple(_notes(caches, first, last)),
    )


def _measured_decodes(
    session: Session, alike: Variant, estimate_of: Callable[[Variant], Estimate]
) -> dict[int, Estimate]:
    """Return the estimates of stored decodes by cache length; if any is complete, only these."""
    decodes: dict[int, Estimate] = {}
    for variant in _stored_decodes(session, alike):
        with contextlib.suppress(UsageError):  # no reading on this card
            decode = estimate_of(variant)
            if decode.whole or decode.coverage > MEASURED or not decode.predictor:
                decodes[variant.cache] = decode
    complete = {cache: decode for cache, decode in decodes.items() if decode.complete}
    return complete or decodes


def _lengths_to_predict(decodes: Mapping[int, Estimate], first: int, last: int) -> set[int]:
    """Return the cache lengths that are estimated beside the measured ones, so that there are
    two.
    """
    if not decodes:
        return {first, last}
    if len(decodes) > 1:
        return set()
    (stored,) = decodes
    return {max(first, last, key=lambda cache: abs(cache - stored))}


def _notes(caches: Sequence[int], first: int, last: int) -> Iterator[str]:
    """Say how the costs of all cache lengths follow from those of `caches`, in ascending order."""
    grows = f"The cache grows from {first} to {last} tokens"
    if len(caches) > 1:
        yield "The cost of decoding one token is interpolated between these cache lengths."
    elif not first == last == caches[0]:
        yield (
            f"{grows}, but every token counts with the cost at {caches[0]} tokens: there is no "
            "other figure."
        )
        return
    if first < caches[0] or last > caches[-1]:
        figures = f"figures exist for {', '.join(map(str, caches))} tokens"
        yield f"{grows}, but {figures}; the rest is extrapolated."


def _stored_decodes(session: Session, alike: Variant) -> list[Variant]:
    """Return the decode variants in the database that differ from `alike` only in the cache
    length.
    """
    row = tables.ModelVariant
    rows = session.exec(
        select(row).where(row.model == alike.model, row.phase == "decode", row.batch == alike.batch)
    )
    variants = [stored_variant(row.model_dump()) for row in rows]
    # A decode has one token of each sequence.
    return [
        variant
        for variant in variants
        if dataclasses.replace(variant, cache=alike.cache, text="") == alike
    ]


def _summed(
    caches: Sequence[int], found: Sequence[PredictedValue | None], first: int, last: int
) -> PredictedValue | None:
    """Sum the cost of the prompt and of one decode at each cache length from `first` to `last`."""

    def total(values: Sequence[float]) -> float:
        of_prompt, *of_decodes = values
        each = (_between(caches, of_decodes, length) for length in range(first, last + 1))
        return of_prompt + math.fsum(max(0.0, cost) for cost in each)

    present = [value for value in found if value is not None]
    if len(present) < len(found):
        return None
    value = total([value.value for value in present])
    spreads = [
        (value.value - value.low, value.high - value.value)
        for value in present
        if value.low is not None and value.high is not None
    ]
    if len(spreads) < len(present):
        return PredictedValue(value)
    below, above = map(total, zip(*spreads, strict=True))
    return PredictedValue(value, value - below, value + above)


def _between(positions: Sequence[int], values: Sequence[float], at: int) -> float:
    """Interpolate linearly: the value at `at` on the line through the two nearest of `places`."""
    if len(positions) == 1:
        return values[0]
    right = min(max(bisect.bisect_left(positions, at), 1), len(positions) - 1)
    share = (at - positions[right - 1]) / (positions[right] - positions[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
