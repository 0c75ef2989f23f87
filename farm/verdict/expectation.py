"""The interval of a sum of readings as a statement about a whole model that has no reading.

The interval of a sum contains the errors of its readings. A run of the whole model also differs
from the sum by what differs between two processes, such as the addresses of the data
(`farm.verdict.gap_errors.BETWEEN_JOBS`). So an estimate, which stands for a run of the whole model,
contains both."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from farm.types.figure import Figure
from farm.verdict.gap_errors import BETWEEN_JOBS

Quantity = Literal["time", "energy"]


def expected_whole(total: Figure, quantity: Quantity, gap: Figure | None = None) -> Figure:
    """Return a sum with the 95 % interval of the whole model that it stands for, in the unit of the
    sum.

    Args:
        total: the sum over all calls, with the errors of its readings.
        quantity: what is summed; the difference between processes is known for time and for energy.
        gap: the measured gap of the same operators in a smaller model, if there is one. The sum may
            be wrong by as much, so the interval contains the gap.
    """
    if not total.value:
        return total
    relative = [total.relative, BETWEEN_JOBS[quantity]]
    if gap is not None:
        relative.append(abs(gap.value))

    return replace(total, half_width=math.hypot(*relative) * abs(total.value))
