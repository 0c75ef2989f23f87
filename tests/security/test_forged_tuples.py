"""Forged tuples of allowed operators reach a real benchmark process: it refuses them or runs them,
and nothing else happens.
"""

from __future__ import annotations

import psutil

from benchmarks.forged_tuples import SEED_LAYERS, forged, seeds, send
from farm.benchmark_process.server import MEMORY_LIMIT_SHARE
from farm.devices.cpu import cpu_card
from farm.settings import settings
from tests import slow


def check(count, layers, seed, most_bytes):
    outcome = send(forged(seed, count, seeds(layers)), cpu_card(settings()).id)
    assert not outcome.crashes
    assert not outcome.files
    assert outcome.most_bytes < most_bytes
    assert outcome.reasons["measured"] > count * 0.3
    assert outcome.reasons["rejected"] > count * 0.03


def test_three_hundred_forged_tuples():
    # This seed draws no tuple that needs more memory. Others may use what a process is allowed: the
    # test of all layers checks that.
    check(300, "EmbeddingBag BatchNorm2d MaxPool2d CTCLoss", seed=5, most_bytes=3 * 2**30)


@slow.SOAK
def test_each_operator_and_each_tuple_of_a_layer_is_forged_several_times():
    most_bytes = MEMORY_LIMIT_SHARE * psutil.virtual_memory().total
    check(4000, SEED_LAYERS, seed=2, most_bytes=most_bytes)
