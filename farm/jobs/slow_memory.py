"""Tuples with tensors in slow memory, which a request asks for with `--placements`: the cards that
can measure them, and the protocols of their items.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from sqlmodel import Session

from farm.devices.cpu import no_slow_memory
from farm.devices.device import Card
from farm.errors import UsageError
from farm.store.content import tuples_with_ids
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.tuple import OperatorTuple


def check_cards(request: Request, cards: Iterable[Card]) -> None:
    """Raise `UsageError` if a request measures tensors in slow memory and a card has none."""
    if not request.measures_slow_memory:
        return
    for card in cards:
        why = no_slow_memory(card)
        if why:
            raise UsageError(why, "Leave --placements out, or choose another card with --card.")


def remember_outputs(specs: Iterable[OperatorTuple]) -> None:
    """Fill the cache of `offloadable` before the transaction that plans the items: computing the
    outputs of tuples imports torch and takes long.
    """
    from farm.operators.rebuild import offloadable

    for spec in specs:
        offloadable(spec)


def slow_protocols(
    session: Session, request: Request, data_of: Mapping[str, str]
) -> Iterator[tuple[str, Protocol]]:
    """Yield (tuple id, protocol) of the items with tensors in slow memory.

    Args:
        data_of: tuple id -> data of its first call. The values of other calls do not affect
            transfers, so they are not measured.
    """
    from farm.operators.rebuild import placements_of

    specs = tuples_with_ids(session, data_of)
    for operator_id, data in data_of.items():
        if operator_id not in specs:
            continue
        protocol = request.protocol.with_data(data)
        for placement in placements_of(specs[operator_id], request.placements):
            yield operator_id, protocol.with_placement(placement)
