"""The time and energy of any code on a card: ``with farm.window() as w:``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from farm.benchmark.block import Window, measured_block
from farm.jobs.in_process import own_card


@contextlib.contextmanager
def window(card: str = "") -> Iterator[Window]:
    """Measure the time and energy of a block of code, once. The GPU is synchronized at the begin
    and the end.

    This is not a reading: nothing is repeated or stored, and no other process is kept off the card.

    Args:
        card: as in ``--card``. Default: the first GPU of this host, or the CPU if there is no GPU.

    Raises:
        NoSuchCard, UsageError: there is no such card.

    Example:
        >>> with farm.window() as w:
        ...     train_one_epoch()
        >>> w.time_s, w.energy_mj
    """
    with measured_block(own_card(card)) as measured:
        yield measured
