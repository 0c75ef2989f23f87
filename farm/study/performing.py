"""Performing a study: the card held, the question's own measurement, the findings with all that they rest on."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farm.benchmark.protocol import Variant
from farm.devices.device import Card
from farm.store.database import Database
from farm.study import STUDIES, Study
from farm.study.findings import Findings
from farm.study.laboratory import Laboratory, Plan


@dataclass(frozen=True)
class Performed:
    """A study that was made: findings and provenance."""

    study: Study
    id: str
    variant: Variant
    card: Card
    software: dict[str, Any]
    quick: bool
    findings: Findings
    readings: tuple[str, ...]
    failures: dict[str, str]
    card_time_s: float

    @property
    def title(self) -> str:
        return f"{self.study.name}: {self.variant} on {self.card.model}{' (quick)' if self.quick else ''}"

    def to_json(self) -> dict[str, Any]:
        return {
            "study": self.study.name,
            "question": self.study.question,
            "id": self.id,
            "variant": self.variant.to_json(),
            "card": self.card.to_json(),
            "software": self.software,
            "quick": self.quick,
            **self.findings.to_json(),
            "unmeasured": self.failures,
            "card_time_s": round(self.card_time_s, 2),
            "readings": list(self.readings),
        }


def perform(
    study: Study, database: Database, card: Card, plan: Plan, say: Callable[[str], None] = lambda line: None
) -> Performed:
    """Measure what the study asks; every reading is in the database when it was taken.

    Raises:
        CardBusy: a worker serves the card.
        FarmError: nothing could be read.
    """
    # One of a fixed list, not a name from outside.
    module = importlib.import_module(f"farm.study.{STUDIES[STUDIES.index(study)].name}")
    with Laboratory(database, card, study.name, say) as laboratory:
        findings = module.run(laboratory, plan)
        return Performed(
            study,
            laboratory.id,
            plan.variant,
            card,
            laboratory.software.to_json(),
            plan.quick,
            findings,
            tuple(laboratory.readings),
            dict(laboratory.failures),
            laboratory.card_time_s,
        )
