"""``farm calibrate``: measure the packaged list of operator tuples, so that `farm estimate` can
predict a card.
"""

from __future__ import annotations

from pathlib import Path

from cli.options import AsJson, Cards, CliOptions
from cli.output import chosen_own_cards, say
from cli.run import run
from farm.errors import UsageError

FILE = Path(__file__).parent.parent / "farm" / "data" / "calibration.yml"


def calibrate(card: Cards = None, dry_run: bool = False, as_json: AsJson = False) -> None:
    """Measure a short list of operators on this host's GPUs: `farm estimate` then predicts models
    on these cards.

    It takes about two minutes per card. If it is interrupted, the same command continues it. On a
    running farm, use `farm submit -f` with a file that contains `- sweep: calibration`."""
    if any(chosen.is_cpu for chosen in chosen_own_cards(card or [])):
        raise UsageError(
            "Only predictions for GPUs can be calibrated, and this card is a CPU.", "Choose a GPU."
        )
    run(CliOptions(files=[FILE], card=card, dry_run=dry_run, as_json=as_json))
    if not dry_run and not as_json:
        say("→ `farm estimate MODEL --card NAME` predicts these cards from now on.")
