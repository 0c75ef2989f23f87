"""Distribute the tests over the workers of pytest-xdist, so that two cores are busy from beginning
to end.

A test with a farm mostly waits for leases and heartbeats; a test in process keeps a core busy. So
there are more workers than cores, and some of them, never all, run farm tests until none are left.
Tests that share a farm form one row and go to one worker, because another worker would start a
separate farm. (The marker `xdist_group` is for that, but pytest-xdist 3.8 does not see the groups
of pytest 9.2: its issue 1386.) All other tests follow file by file, so that one worker runs the
fixtures and imports of a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

#: Files whose tests start complete farms or wait as long for servers, the longest row first. A file
#: that is missing here only runs later.
ROWS = (
    ("faults/test_soak.py",),
    ("faults/test_processes.py", "tasks/test_flower.py", "cli/test_doctor_of_a_farm.py"),
    ("faults/test_databases.py",),
    ("faults/test_cards.py", "security/test_messages.py", "cli/test_whole_path.py"),
    ("faults/test_messages.py",),
    ("faults/test_hosts.py",),
    ("faults/test_half_open.py",),
    ("faults/test_groups.py",),
    ("cli/test_doctor.py", "cli/test_doctor_problems.py"),
    ("deploy/test_deploy.py",),
    ("cli/test_cpu_path.py",),
    ("cli/test_paired_rounds.py",),
    ("security/test_secrets.py",),
    ("tasks/test_logs.py",),
    ("tasks/test_metrics.py",),
    ("gpu/test_measure_gpu.py", "gpu/test_second_opinions_gpu.py"),  # all use the same card
)
#: Number of workers that run rows at the same time.
WAITING = 3
#: Files that keep a core busy for long; if one began last, all others would wait for it. Files in
#: one group import transformers, which takes three seconds, once for the group; or DuckDB.
BUSY = (
    ("operators/test_partition.py",),
    ("training/test_rebuild.py", "training/test_capture.py", "addons/memory/test_command.py"),
    (
        "operators/test_families.py",
        "operators/test_architectures.py",
        "models/test_transformers.py",
        "models/test_own.py",
        "models/test_user_text.py",
        "api/test_own_text.py",
        "requests/test_fits.py",
        "addons/predict/test_estimate.py",
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
    """Order the tests: the rows, the busy files, then all others."""
    rows = (*ROWS, *BUSY)
    place = {f"{_TESTS}/{file}": number for number, row in enumerate(rows) for file in row}
    return sorted(items, key=lambda item: place.get(_file_of(item.nodeid), len(rows)))


def starts_farms(item: pytest.Item) -> bool:
    return _ROW_OF.get(_file_of(item.nodeid)) in ROWS


def number_of_workers(*, waiting: bool) -> int:
    """Return the number of cores, and more if half of the tests wait. Each worker collects all
    tests.
    """
    return len(os.sched_getaffinity(0)) + 3 * waiting


class InRows(LoadScopeScheduling):
    """Scheduler that gives a worker a row, or a file, when it has at most two tests left."""

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
        """Return the number of workers with a pending test of a row."""
        return sum(
            any(_is_row(scope) and not all(tests.values()) for scope, tests in work.items())
            for work in self.assigned_work.values()
        )


def _is_row(scope: str) -> bool:
    return any(scope == row[0] for row in ROWS)


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
