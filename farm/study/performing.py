"""Performing a study: the card held, the question's own measurement, the findings with all that they rest on."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

from farm.devices.device import Card
from farm.store.database import Database
from farm.study import STUDIES, Study
from farm.study.laboratory import Laboratory, Plan
from farm.study.performed import Performed, keep


def perform(
    study: Study, database: Database, card: Card, plan: Plan, say: Callable[[str], None] = lambda line: None
) -> Performed:
    """Measure what the study asks; every reading is in the database when it was taken, the findings in a file at last.

    Raises:
        CardBusy: a worker serves the card.
        FarmError: nothing could be read.
    """
    # One of a fixed list, not a name from outside.
    module = importlib.import_module(f"farm.study.{STUDIES[STUDIES.index(study)].name}")
    with Laboratory(database, card, study.name, say) as laboratory:
        findings = module.run(laboratory, plan)
        made = Performed(
            study,
            laboratory.id,
            time.time(),
            findings.variant or plan.variant,
            card,
            laboratory.software.to_json(),
            plan.quick,
            findings,
            tuple(laboratory.readings),
            dict(laboratory.failures),
            laboratory.card_time_s,
        )
    try:
        keep(made)
    except OSError as error:  # no reason to lose what was measured
        say(f"These findings are not kept: {error}")
    return made
