"""``farm run``: the whole job on this host, with nothing installed beforehand."""

from __future__ import annotations

import signal
from types import FrameType
from typing import TYPE_CHECKING

from cli import following, opening
from cli.asking import Asked, asks
from cli.output import Interrupted, say

if TYPE_CHECKING:
    from farm.devices.device import Card

INTERRUPTED_HINT = "Every reading taken so far is kept: the same command continues where it stopped."


@asks
def run(asked: Asked) -> None:
    """Measure models on this host's cards: starts its own broker and workers, shows the report, leaves nothing behind."""
    from farm.defaults import choose_cards
    from farm.settings import settings
    from farm.store.database import Database
    from tasks.embedded import EmbeddedFarm

    wishes = asked.wishes()
    cards: list[Card] = choose_cards(opening.own_cards(), asked.card or [])
    planned = following.plan(wishes, cards, target=settings().target)

    database = Database(settings().database)
    database.upgrade()
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with EmbeddedFarm(settings(), cards) as farm:
            outcome = following.submit_all(database, planned, ready=farm.wait_ready)
            following.follow(database, outcome.job_ids, tend=farm.tend)
        following.conclude(database, outcome, asked)
    except KeyboardInterrupt as interruption:
        say("")
        raise Interrupted(INTERRUPTED_HINT) from interruption
    finally:
        signal.signal(signal.SIGTERM, before)
        database.close()


def _end(signum: int, frame: FrameType | None) -> None:
    # As Ctrl-C, so that the servers and workers are stopped on the way out.
    raise KeyboardInterrupt
