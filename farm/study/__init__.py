"""Studies: measurements that justify the farm's method. Anyone can repeat them on a card (`farm study`).

This file has only their names and questions, so that the command line can list them without loading other modules.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Study:
    """A study with its question. The function `name` of ``farm.study.<module>`` measures the answer."""

    name: str
    question: str
    module: str


STUDIES = {
    study.name: study
    for study in (
        Study("windows", "How long must a window be? Shorter ones against the longest.", "windows"),
        Study("averaging", "Which average to trust: mean, median or 3-sigma-trimmed mean?", "windows"),
        Study("residency", "What must be in the cache so that the tuples add up to the model?", "sums"),
        Study("launch", "What does launching cost? The model and its tuples by CUDA graph and eagerly.", "sums"),
        Study("data", "How much do the values in the tensors matter for power and energy?", "conditions"),
        Study(
            "placement",
            "Do calls with tensors in slow memory take as long if one run changes many calls as if it changes one?",
            "slow_memory",
        ),
        Study("peer", "What do tensors in another GPU's memory cost, compared with the host's?", "slow_memory"),
        Study("simultaneous", "Do the readings of one card change while its neighbours measure too?", "conditions"),
    )
}
