"""The questions that the method rests on, as measurements that anyone can repeat on a card (`farm study`).

Only names and questions here, so that the command line can list them without loading anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from farm.errors import UsageError


@dataclass(frozen=True)
class Study:
    """One question. Its measurement is the function `run` of the module ``farm.study.<name>``."""

    name: str
    question: str


STUDIES = (
    Study("windows", "How long must a window be? Shorter ones against the longest."),
    Study("averaging", "Which average to trust: mean, median or 3-sigma-trimmed mean?"),
    Study("residency", "What must lie in the cache so that the tuples add up to the model?"),
    Study("launch", "What does launching cost? The model and its tuples by CUDA graph and eagerly."),
    Study("data", "How much do the values in the tensors matter for power and energy?"),
    Study("placement", "Do many calls with tensors in slow memory, changed in one run, take what each takes alone?"),
    Study("peer", "What do tensors in another GPU's memory cost, against the host's?"),
    Study("simultaneous", "Do the readings of one card change while its neighbours measure too?"),
)


def find(name: str) -> Study:
    """Raises:
    UsageError: there is no such study.
    """
    for study in STUDIES:
        if study.name == name:
            return study
    raise UsageError(f"There is no study '{name}'.", f"Choose one of {', '.join(study.name for study in STUDIES)}.")
