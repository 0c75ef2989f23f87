"""The least time that a call can take on a card: no prediction and no end of an interval lies below
it.

The floor is a true bound, unlike the roofline of an estimate (`farm.types.roofline`), which
weighs calls:

- Weights are cold under residency `resident`, as in a running model: all their bytes come from
  memory. Of the other operands, only the bytes beyond the size of the card's last cache must.
- A generated kernel may read a part of a weight, so its weights count as other operands.
- The rates are those of the data sheet, because a measured rate may be that of a slow kernel.
- A convolution may run with fewer multiplications than its FLOPs say (Winograd, FFT), so only its
  bytes count.
- An operator that gathers reads a part of its operands, so only its FLOPs count.

A test compares the floor with all packaged readings: none of them is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from farm.addons.predict.stored_predictor import PredictedValue, Predictions
from farm.types.data_sheets import data_sheet, sheet_name_of
from farm.types.tuple import NeededTuple

#: Operators whose FLOPs are no bound of their arithmetic.
FEWER_MULTIPLICATIONS = ("conv", "Conv")
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


def above_floor(
    predictions: Predictions, calls: Sequence[NeededTuple], card_model: str, *, tf32: bool = False
) -> Predictions:
    """Return predictions of which no time and no end of an interval is below the floor of its call.

    Args:
        predictions: of the calls, in the same order.
        calls: the tuples that were predicted.
        card_model: the whole name of a GPU's model.
        tf32: see `floor_us`.
    """
    floors_us = [floor_us(card_model, call, tf32=tf32) for call in calls]
    bounded = [
        replace(prediction, time_us=prediction.time_us.at_least(floor))
        for prediction, floor in zip(predictions.calls, floors_us, strict=True)
    ]
    raised_us = sum(
        (new.time_us.value - old.time_us.value) * call.all_calls
        for new, old, call in zip(bounded, predictions.calls, calls, strict=True)
    )
    total_floor_us = sum_of_floors_us(card_model, calls, tf32=tf32)
    total_us = _moved(predictions.total.time_us, raised_us).at_least(total_floor_us)
    total = replace(predictions.total, time_us=total_us)
    return replace(predictions, calls=tuple(bounded), total=total)


def _moved(value: PredictedValue, by: float) -> PredictedValue:
    if value.low is None or value.high is None:
        return PredictedValue(value.value + by)
    return PredictedValue(value.value + by, value.low + by, value.high + by)
