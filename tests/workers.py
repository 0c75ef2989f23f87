"""Which test goes to which worker of pytest-xdist, and when: so that two cores are busy from the first second to the last.

A test that starts a farm waits for most of its time, for leases and heartbeats; one in process keeps a core busy. So
there are more workers than cores, and a few of them, never all, are at farms until there are none left: cores are busy
beside them. What shares a farm is one row and goes to one worker: another would start a farm of its own. (The marker
`xdist_group` is for that, but pytest-xdist 3.8 does not see the groups of pytest 9.2: its issue 1386.) All others follow
file by file, so that what a file makes once, and what it imports, is made and imported by one worker.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

#: Files whose tests start whole farms, the longest row first. One that is missing here is only done later.
ROWS = (
    ("faults/test_soak.py",),
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
#: So many workers are at rows at once.
WAITING = 3
#: Files that keep a core busy for long: begun last, one would be what all wait for. Those that stand together import
#: transformers, which takes three seconds, and is done once for them; or DuckDB, with which a worker takes long to end.
BUSY = (
    ("operators/test_partition.py",),
    ("training/test_rebuild.py", "training/test_capture.py", "cli/test_memory.py"),
    (
        "operators/test_families.py",
        "operators/test_architectures.py",
        "models/test_transformers.py",
        "models/test_own.py",
        "models/test_given_text.py",
        "interface/test_own_text.py",
        "asking/test_fits.py",
        "report/test_estimate.py",
        "cli/test_documented_commands.py",
        "exchange/test_export.py",
    ),
    ("test_tutorial.py",),
    ("jobs/test_moving.py",),
    ("jobs/test_items.py",),
)
_TESTS = Path(__file__).parent.name
_ROW_OF = {f"{_TESTS}/{file}": row for row in (*ROWS, *BUSY) for file in row}


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The rows, the busy files, and then all others as they come."""
    rows = (*ROWS, *BUSY)
    place = {f"{_TESTS}/{file}": number for number, row in enumerate(rows) for file in row}
    return sorted(items, key=lambda item: place.get(_file_of(item.nodeid), len(rows)))


def starts_farms(item: pytest.Item) -> bool:
    return _ROW_OF.get(_file_of(item.nodeid)) in ROWS


def number_of_workers(*, waiting: bool) -> int:
    """As many as cores, and more where half of the tests wait: each imports torch, and collects all tests."""
    return len(os.sched_getaffinity(0)) + 3 * waiting


class InRows(LoadScopeScheduling):
    """Gives a worker a row, or a file, whenever it has no more than two tests left."""

    def _split_scope(self, nodeid: str) -> str:
        row = _ROW_OF.get(_file_of(nodeid))
        return _file_of(nodeid) if row is None else row[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        rows = [scope for scope in self.workqueue if _is_row(scope)]
        if rows and self._at_rows() >= WAITING:
            scope = next((scope for scope in self.workqueue if not _is_row(scope)), rows[0])
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _at_rows(self) -> int:
        """How many workers have a test of a row before them."""
        return sum(
            any(_is_row(scope) and not all(tests.values()) for scope, tests in work.items())
            for work in self.assigned_work.values()
        )


def _is_row(scope: str) -> bool:
    return any(scope == row[0] for row in ROWS)


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
