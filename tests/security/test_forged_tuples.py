"""Forged tuples of allowed operators reach a real benchmark process: it refuses them or runs them,
and nothing else happens.
"""

from __future__ import annotations

import pytest

from benchmarks.forged_tuples import SEED_LAYERS, forged, seeds, send
from farm.devices.cpu import cpu_card
from farm.settings import settings

#: A forged tuple may use less; the process itself has the libraries of torch.
MOST_BYTES = 3 * 2**30


def check(count, layers, seed):
    outcome = send(forged(seed, count, seeds(layers)), cpu_card(settings()).id)
    assert not outcome.crashes
    assert not outcome.files
    assert outcome.most_bytes < MOST_BYTES
    assert outcome.reasons["measured"] > count * 0.3
    assert outcome.reasons["rejected"] > count * 0.03


def test_three_hundred_forged_tuples():
    check(300, "EmbeddingBag BatchNorm2d MaxPool2d CTCLoss", seed=1)


@pytest.mark.slow
def test_ten_thousand_forged_tuples():
    check(10_000, SEED_LAYERS, seed=2)
