"""Measurements that answer the questions behind the method; anyone can repeat them on a card (`farm study`).

This file has only names and questions, so that the command line lists them without loading anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Study:
    """One question. Its measurement is the function `name` of ``farm.study.<module>``."""

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
