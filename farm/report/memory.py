"""What memory a training step needs and when, as plain values: from a capture alone, with times by a card's roofline."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from farm.errors import TupleRejected, UsageError, did_you_mean
from farm.models import catalog
from farm.prediction.roofline import KNOWN_CARDS, Roofline, roofline_of
from farm.training.life import Inactive, Interval, Life, allocated_peak_bytes
from farm.training.planning import Fit, Offload, Recomputed, largest_batch, offload, recomputed
from farm.training.recorded import StepCall, StepCapture, TensorLife
from farm.words.protocol import Variant
from farm.words.tuple import DTYPES, OperatorTuple

if TYPE_CHECKING:
    from farm.operators.cost import Cost

LENGTHS_US = (10.0, 100.0, 1e3, 1e4, 1e5)
SIZES_BYTES = (1e5, 1e6, 1e7, 1e8, 1e9)
LONGEST = 10  # tensors that are named


@dataclass(frozen=True)
class Memory:
    """One training step of a variant.

    Attributes:
        card: by whose roofline times are estimated.
        costs: of each tuple.
    """

    variant: Variant
    card: str
    life: Life
    costs: Mapping[str, Cost]
    fit: Fit | None = None
    offload: Offload | None = None
    recomputed: tuple[Recomputed, ...] = field(default=())

    @property
    def capture(self) -> StepCapture:
        return self.life.capture

    @property
    def title(self) -> str:
        return catalog.title_of(self.variant)

    @property
    def peak_bytes(self) -> int:
        return self.life.held_bytes[self.life.peak]

    @property
    def predicted(self) -> str:
        """What the operators are where no card was asked; empty where one was."""
        told = "The operators are the CPU's: a capture without a card is a prediction for a card."
        return told if self.capture.device_type == "cpu" else ""

    @functools.cached_property
    def allocated_peak_bytes(self) -> int:
        return allocated_peak_bytes(self.capture)

    def at_peak(self) -> dict[str, int]:
        """Bytes at the peak by role, the most first."""
        rows = {role: row[self.life.peak] for role, row in self.life.held_by_role.items()}
        return {role: rows[role] for role in sorted(rows, key=lambda role: -rows[role]) if rows[role]}

    def most_inactive(self) -> list[TensorLife]:
        """The tensors with the most inactive byte-seconds."""
        ranked = sorted(self.life.tensors, key=lambda tensor: -self.life.inactive_byte_s[tensor.number])
        return [tensor for tensor in ranked[:LONGEST] if self.life.inactive_byte_s[tensor.number] > 0]

    def where(self, call: StepCall) -> str:
        """``backward of layer1.0.conv1 (Conv2d)``"""
        if call.owner is None:
            return call.part
        owner = self.capture.owners[call.owner]
        path = owner.path.removeprefix("model.")
        return f"{call.part} of {path} ({owner.what})" if path else f"{call.part} of {owner.what}"

    def to_json(self) -> dict[str, Any]:
        life, capture, peak = self.life, self.capture, self.life.peak
        found: dict[str, Any] = {
            "title": self.title,
            "variant": self.variant.to_json(),
            "loss": capture.loss,
            "operators_of": capture.device_type,
            "times": {"from": "roofline", "card": self.card},
            "calls": len(capture.calls),
            "tuples": len(capture.tuples),
            "owners": len(capture.owners),
            "step_us": life.step_us,
            "base_bytes": life.base_bytes,
            "peak": {
                "bytes": self.peak_bytes,
                "allocated_bytes": self.allocated_peak_bytes,
                "active_bytes": life.active_bytes[peak],
                "call": peak,
                "stage": capture.calls[peak].stage,
                "at": self.where(capture.calls[peak]),
                "bytes_by_role": self.at_peak(),
            },
            "inactive_periods_by_length": _intervals("least_us", life.by_length(LENGTHS_US)),
            "inactive_periods_by_size": _intervals("least_bytes", life.by_size(SIZES_BYTES)),
            "kernels": [self._kernel(call) for call in capture.calls],
            "tensors": [self._tensor(tensor) for tensor in life.tensors],
        }
        if self.fit is not None:
            found["fit"] = {
                "limit_bytes": self.fit.limit_bytes,
                "batch": self.fit.batch,
                "allocated_peak_bytes": self.fit.peak_bytes,
                "exact": self.fit.exact,
                "captured": [
                    {"batch": batch, "allocated_peak_bytes": size}
                    for batch, size in sorted(self.fit.peaks_bytes.items())
                ],
            }
        if self.offload is not None:
            found["offload"] = {
                "bytes_per_s": self.offload.bytes_per_s,
                "periods": self.offload.periods,
                "long_enough": self.offload.long_enough,
                "hidden": [_period(period, with_tensor=True) for period in self.offload.hidden],
                "moved_bytes": self.offload.moved_bytes,
                "link_share": self.offload.link_share,
                "peak_bytes": self.offload.peak_bytes,
                "held_bytes": list(self.offload.held_bytes),
            }
        if self.recomputed:
            found["recomputed"] = [
                {
                    "modules": row.what,
                    "peak_bytes": row.peak_bytes,
                    "freed_bytes": row.freed_bytes,
                    "calls": row.calls,
                    "time_us": row.time_us,
                }
                for row in self.recomputed
            ]
        return found

    def _kernel(self, call: StepCall) -> dict[str, Any]:
        owner = self.capture.owners[call.owner] if call.owner is not None else None
        cost = self.costs[call.tuple_id]
        return {
            "index": call.index,
            "operator": self.capture.tuples[call.tuple_id].operator,
            "tuple": call.tuple_id,
            "stage": call.stage,
            "part": call.part,
            "owner": owner and {"path": owner.path, "operator": owner.what, "index": owner.index},
            "begin_us": self.life.begins_us[call.index],
            "time_us": self.life.times_us[call.index],
            "flops": cost.flops,
            "moved_bytes": cost.bytes,
            "reads": list(call.reads),
            "writes": list(call.writes),
            "held_bytes": self.life.held_bytes[call.index],
            "active_bytes": self.life.active_bytes[call.index],
        }

    def _tensor(self, tensor: TensorLife) -> dict[str, Any]:
        return {
            "number": tensor.number,
            "name": tensor.name,
            "role": tensor.role,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype,
            "size_bytes": tensor.size_bytes,
            "global": tensor.outlives,
            "birth": tensor.born if tensor.born >= 0 else None,
            "first_use": tensor.uses[0] if tensor.uses else None,
            "last_use": tensor.uses[-1] if tensor.uses else None,
            "release": tensor.released,
            "inactive_byte_s": self.life.inactive_byte_s[tensor.number],
            "inactive_periods": [_period(period) for period in self.life.periods[tensor.number]],
        }


def _period(period: Inactive, *, with_tensor: bool = False) -> dict[str, Any]:
    told = {
        "begin": period.begin,
        "end": period.end,
        "begin_us": period.begin_us,
        "time_us": period.time_us,
        "over_the_end": period.over_the_end,
    }
    return {"tensor": period.tensor, **told} if with_tensor else told


def _intervals(least: str, rows: list[Interval]) -> list[dict[str, Any]]:
    return [
        {least: row.least, "periods": row.periods, "size_bytes": row.size_bytes, "inactive_byte_s": row.byte_s}
        for row in rows
    ]


# ------------------------------------------------------------------------------------------------ asking


def memory(variant: Variant, card: str) -> Memory:
    """A step taken apart without a card.

    Args:
        card: the name of a card with a data sheet, or part of it.

    Raises:
        UsageError: there is no data sheet for that card; and what `farm.training.taking_apart.take_step_apart` raises.
    """
    card = card_named(card)
    life, costs = _life(variant, card)
    return Memory(variant, card, life, costs)


def card_named(word: str) -> str:
    """Raises:
    UsageError: no card with a data sheet has that name.
    """
    names = [name for name in KNOWN_CARDS if name.lower() in word.lower() or word.lower() == name.lower()]
    if not names:
        near = did_you_mean(word, KNOWN_CARDS)
        raise UsageError(f"There is no data sheet for '{word}'.", near or f"Choose one of {', '.join(KNOWN_CARDS)}.")
    return names[0]


def with_fit(found: Memory, limit_bytes: int) -> Memory:
    """Raises:
    UsageError: not even the smallest batch fits.
    """

    def peak_of(batch: int) -> int:
        if batch == found.variant.batch:
            return found.allocated_peak_bytes
        return allocated_peak_bytes(_captured(replace(found.variant, batch=batch)))

    return replace(found, fit=largest_batch(peak_of, limit_bytes, found.variant.batch))


def with_offload(found: Memory, bytes_per_s: float) -> Memory:
    return replace(found, offload=offload(found.life, bytes_per_s))


def with_recomputed(found: Memory) -> Memory:
    """Each block alone, and all of them.

    Raises:
        UsageError: the model has no list of equal blocks.
    """
    from farm.training.step import blocks_of

    paths = blocks_of(catalog.build(found.variant))

    def again(what: str) -> Life:
        return _life(replace(found.variant, recompute=what), found.card)[0]

    return replace(found, recomputed=tuple(recomputed(found.life, again, paths)))


def _captured(variant: Variant) -> StepCapture:
    from farm.training.taking_apart import take_step_apart

    return take_step_apart(variant, device_type="cuda")


def _cost_of(spec: OperatorTuple) -> Cost:
    """An operator that is on no list is measured nowhere; what it is given it moves."""
    from farm.operators.cost import Cost, cost

    try:
        return cost(spec)
    except TupleRejected:
        return Cost(0, sum(tensor.distinct_bytes for tensor in spec.tensors))


def _life(variant: Variant, card: str) -> tuple[Life, Mapping[str, Cost]]:
    capture = _captured(variant)
    costs = {tuple_id: _cost_of(spec) for tuple_id, spec in capture.tuples.items()}

    @functools.cache
    def roofline(dtype: str) -> Roofline:
        return roofline_of("cuda", card, dtype=dtype)

    def time_us(tuple_id: str) -> float:
        floating = [
            one.dtype for one in capture.tuples[tuple_id].tensors if DTYPES[one.dtype][1].startswith(("fp", "bf"))
        ]
        return roofline(floating[0] if floating else "float32").estimate_us(
            costs[tuple_id].flops, costs[tuple_id].bytes
        )

    times = {tuple_id: time_us(tuple_id) for tuple_id in capture.tuples}
    return Life(capture, tuple(times[call.tuple_id] for call in capture.calls)), costs
