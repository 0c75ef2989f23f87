"""Studies: measurements that justify the farm's method. Anyone can repeat them on a card on this
host:

    python -m benchmarks.studies windows resnet18 --quick
    python -m benchmarks.studies show                       # the studies of this host

This file has only their names and questions, so that the command line can list them without loading
other modules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Study:
    """A study with its question. The function `name` of ``benchmarks.studies.<module>`` measures
    the answer.
    """

    name: str
    question: str
    module: str


#: Module -> its studies with their questions.
_QUESTIONS = {
    "method": {
        "windows": "How long must a window be? Compares short windows with the longest window.",
        "averaging": "Which average is most accurate: mean, median or 3-sigma-trimmed mean?",
        "residency": (
            "Which data must be in the cache so that the sum of the tuples matches the model?"
        ),
        "launch": (
            "What does launching cost? Measures the model and its tuples with CUDA graphs and "
            "eagerly."
        ),
    },
    "conditions": {
        "data": "How much do the values in the tensors change power and energy?",
        "placement": (
            "Is the time of a call with tensors in slow memory the same if a run changes many "
            "calls or only this one?"
        ),
        "peer": (
            "How much time do tensors in another GPU's memory cost, compared with tensors in the "
            "host's memory?"
        ),
        "simultaneous": (
            "Do the readings of a card change while other cards of the host measure, too?"
        ),
    },
}
STUDIES = {
    name: Study(name, question, module)
    for module, questions in _QUESTIONS.items()
    for name, question in questions.items()
}
