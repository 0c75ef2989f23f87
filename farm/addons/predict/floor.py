"""The least time and energy that a call can take on a card: no prediction and no end of an
interval lies below them. The least energy is that of an idle card in the same time.

The floor of a time is a true bound, unlike the roofline of an estimate (`farm.types.roofline`),
which weighs calls:

- Weights are cold under residency `resident`, as in a running model: all their bytes come from
  memory. Of the other operands, only the bytes beyond the size of the card's last cache must.
- A generated kernel may read a part of a weight, so its weights count as other operands.
- The rates are those of the data sheet, because a measured rate may be that of a slow kernel.
- A convolution may run with fewer multiplications than its FLOPs say (Winograd, FFT), so only its
  bytes count.
- An operator that gathers reads a part of its operands, so only its FLOPs count.

A test compares the floors with all packaged readings: none is faster, or takes less energy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sqlalchemy
from sqlmodel import Session

from farm.addons.predict.stored_predictor import PredictedCost, PredictedValue, Predictions
from farm.store.columns import CARD
from farm.types.data_sheets import data_sheet, sheet_name_of
from farm.types.fingerprint import median_fingerprint
from farm.types.format import percent
from farm.types.tuple import NeededTuple

#: Operators whose FLOPs are no bound of their arithmetic.
FEWER_MULTIPLICATIONS = ("conv", "Conv")
#: Power of an idle card / its power limit, if it is not measured: 85 H100s and H200s of the package
#: take 0.099 to 0.122.
IDLE_SHARE = 0.09
#: Operators that read or write a part of a large operand, chosen by indices.
GATHERS = frozenset(
    {
        "embedding",
        "Embedding",
        "EmbeddingBag",
        "embedding_bag",
        "embedding_dense_backward",
        "gather",
        "index",
        "index_select",
        "getitem",
        "take",
        "index_copy_",
        "index_copy",
        "index_put",
        "index_put_",
        "index_add",
        "index_add_",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "masked_select",
        "narrow",
        "select",
        "slice",
        "nll_loss",
        "nll_loss_forward",
        "nll_loss_backward",
        "cross_entropy",
        "grouped_mm",
        "_grouped_mm",
    }
)


def floor_us(card_model: str, call: NeededTuple, *, tf32: bool = False) -> float:
    """Return the least time of one call in µs; 0 if the card has no data sheet or the call has no
    bound.

    Args:
        card_model: the whole name of a GPU's model.
        call: the tuple with its FLOPs (2 per multiply-add) and the bytes of its operands.
        tf32: True if float32 products may use TF32.
    """
    if not sheet_name_of(card_model):
        return 0.0
    sheet = data_sheet("cuda", card_model)

    compute_s = 0.0
    if not call.short_name.startswith(FEWER_MULTIPLICATIONS):
        compute_s = call.flops / _rate(call, sheet.half, sheet.tf32 if tf32 else sheet.float32)

    memory_s = 0.0
    if call.short_name not in GATHERS:
        cold_bytes = _cold_bytes(call)
        warm_bytes = call.bytes_moved - cold_bytes
        memory_s = (cold_bytes + max(0, warm_bytes - sheet.l2_bytes)) / sheet.bytes_per_s

    return max(compute_s, memory_s) * 1e6


def _cold_bytes(call: NeededTuple) -> int:
    """Return the bytes of a call's weights, all of which come from memory."""
    if call.is_kernel:
        return 0
    return min(call.bytes_of("parameter"), call.bytes_moved)


def _rate(call: NeededTuple, half: float, single: float) -> float:
    """Return the highest rate of arithmetic with the dtypes of a call, in FLOP/s."""
    dtypes = {tensor["dtype"] for tensor in call.spec.get("tensors") or ()}
    if any(dtype.startswith("float8") or dtype == "int8" for dtype in dtypes):
        return 2 * half  # on every card that multiplies in eight bits
    if dtypes & {"float16", "bfloat16"}:
        return half
    return single


def sum_of_floors_us(card_model: str, calls: Sequence[NeededTuple], *, tf32: bool = False) -> float:
    """Return the least time of all calls of some tuples in µs; see `floor_us`."""
    return math.fsum(floor_us(card_model, call, tf32=tf32) * call.all_calls for call in calls)


@dataclass(frozen=True)
class IdlePower:
    """The power of a card without work, in W.

    Attributes:
        power_w: 0: unknown.
        source: where it comes from, in words.
    """

    power_w: float = 0.0
    source: str = ""


def idle_power(session: Session, card_model: str) -> IdlePower:
    """Return the power of an idle card: the median of the cards of the model in a database, else a
    share of the limit in the data sheet. It is unknown for a card without either.
    """
    query = sqlalchemy.select(CARD.fingerprint).where(CARD.model == card_model)
    measured_w = median_fingerprint(session.scalars(query)).get("idle_power_w", 0.0)
    if measured_w > 0:
        return IdlePower(measured_w, "measured on this card model")
    if not sheet_name_of(card_model):
        return IdlePower()
    limit_w = data_sheet("cuda", card_model).power_limit_w
    return IdlePower(IDLE_SHARE * limit_w, f"{percent(IDLE_SHARE)} of the power limit")


def above_floor(
    predictions: Predictions,
    calls: Sequence[NeededTuple],
    card_model: str,
    *,
    tf32: bool = False,
    idle_power_w: float = 0.0,
) -> Predictions:
    """Return predictions of which no time, no energy and no end of an interval is below the floor
    of its call.

    Args:
        predictions: of the calls, in the same order.
        calls: the tuples that were predicted.
        card_model: the whole name of a GPU's model.
        tf32: see `floor_us`.
        idle_power_w: see `idle_power`; 0: unknown.
    """
    bounded = []
    raised_us = raised_mj = 0.0
    floors_us = [floor_us(card_model, call, tf32=tf32) for call in calls]
    for prediction, call, least_us in zip(predictions.calls, calls, floors_us, strict=True):
        time_us = prediction.time_us.at_least(least_us)
        raised_us += (time_us.value - prediction.time_us.value) * call.all_calls
        energy_mj = prediction.energy_mj
        if energy_mj is not None:
            before_mj = energy_mj.value
            energy_mj = energy_mj.above(idle_energy_mj(time_us, idle_power_w))
            raised_mj += (energy_mj.value - before_mj) * call.all_calls
        bounded.append(replace(prediction, time_us=time_us, energy_mj=energy_mj))

    total = predictions.total
    least = zip(floors_us, calls, strict=True)
    total_floor_us = math.fsum(least_us * call.all_calls for least_us, call in least)
    total_us = _moved(total.time_us, raised_us).at_least(total_floor_us)
    total_mj = total.energy_mj
    if total_mj is not None:
        total_mj = _moved(total_mj, raised_mj).above(idle_energy_mj(total_us, idle_power_w))
    return replace(
        predictions, calls=tuple(bounded), total=PredictedCost(time_us=total_us, energy_mj=total_mj)
    )


def idle_energy_mj(time_us: PredictedValue, idle_power_w: float) -> PredictedValue:
    """Return the energy of an idle card during a time, and during the ends of its interval."""
    return time_us.times(idle_power_w * 1e-3)


def _moved(value: PredictedValue, by: float) -> PredictedValue:
    if value.low is None or value.high is None:
        return PredictedValue(value.value + by)
    return PredictedValue(value.value + by, value.low + by, value.high + by)
