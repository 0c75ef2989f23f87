"""Which test goes to which worker of pytest-xdist, and when: so that two cores are busy from the first second to the last.

A test that starts a farm waits for half of its time, for leases and heartbeats; one in process keeps a core busy. So
there are more workers than cores, and they begin with the farms. What shares a farm is one row and goes to one worker:
another would start a farm of its own. (The marker `xdist_group` is for that, but pytest-xdist 3.8 does not see the
groups of pytest 9.2: its issue 1386.) All others follow file by file, so that what a file makes once, and what it imports, is
made and imported by one worker.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Files whose tests start whole farms, the longest row first. One that is missing here is only done later.
ROWS = (
    ("faults/test_processes.py", "tasks/test_flower.py", "cli/test_doctor_of_a_farm.py"),
    ("faults/test_databases.py",),
    ("faults/test_cards.py", "security/test_messages.py", "cli/test_whole_path.py"),
    ("faults/test_messages.py",),
    ("faults/test_hosts.py",),
    ("deploy/test_deploy.py",),
    ("cli/test_cpu_path.py",),
    ("security/test_secrets.py",),
    ("tasks/test_logs.py",),
    ("tasks/test_metrics.py",),
    ("gpu/test_measure_gpu.py", "gpu/test_second_opinions_gpu.py"),  # one card for all
)
#: So many rows begin first; what keeps cores busy goes on beside them, and then come the other rows.
BEGINNING = 3
#: Files that keep a core busy for long: begun last, one would be what all wait for.
LONG = ("operators/test_partition.py", "operators/test_architectures.py")
_ROW_OF = {f"{Path(__file__).parent.name}/{file}": number for number, row in enumerate(ROWS) for file in row}


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """A few rows, the long files, the other rows, and then all others as they come."""

    def place(item: pytest.Item) -> int:
        file = _file_of(item.nodeid)
        if file.endswith(LONG):
            return BEGINNING
        row = _ROW_OF.get(file, len(ROWS))
        return row + (row >= BEGINNING)

    return sorted(items, key=place)


def starts_farms(item: pytest.Item) -> bool:
    return _file_of(item.nodeid) in _ROW_OF


def number_of_workers(*, waiting: bool) -> int:
    """As many as cores, and more where half of the tests wait: each imports torch, and collects all tests."""
    return len(os.sched_getaffinity(0)) + 3 * waiting


class InRows(LoadScopeScheduling):
    """Gives a worker a row, or a file, whenever it has no more than two tests left."""

    def _split_scope(self, nodeid: str) -> str:
        row = _ROW_OF.get(_file_of(nodeid))
        return _file_of(nodeid) if row is None else ROWS[row][0]


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
