"""The order of the tests, and what goes to the same worker of pytest-xdist (``pytest -n 4``).

Without ``-n`` the same tests run in the same order in one process, with the same results.

A test with a farm mostly waits for leases and heartbeats; a test in process keeps a core busy. So
there are more workers than cores, and the order mixes files of both sorts.
Tests that share a farm form one row and go to one worker, because another worker would start a
separate farm. (The marker `xdist_group` is for that, but pytest-xdist 3.8 does not see the groups
of pytest 9.2: its issue 1386.) All other tests go to the workers file by file, so that one worker
runs the fixtures and imports of a file."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Files whose tests start complete farms or wait as long for servers, the longest row first. A file
#: that is missing here only runs later.
ROWS = (
    ("faults/test_soak.py",),
    ("faults/test_half_open.py",),
    ("faults/test_processes.py", "tasks/test_flower.py", "cli/test_doctor_of_a_farm.py"),
    ("faults/test_databases.py",),
    ("faults/test_cards.py", "security/test_messages.py", "cli/test_whole_path.py"),
    ("faults/test_messages.py",),
    ("faults/test_hosts.py",),
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
#: Number of rows at the beginning of the order, and of other files before each later row: so about
#: half of the workers run rows.
FIRST_ROWS, BETWEEN_ROWS = 3, 6
_TESTS = Path(__file__).parent.name
_ROW_OF = {f"{_TESTS}/{file}": row for row in (*ROWS, *BUSY) for file in row}


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Order the tests: rows among the other files, busy files before others."""
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        scopes.setdefault(_scope_of(item.nodeid), []).append(item)
    rows = [scopes.pop(row[0], []) for row in ROWS]
    others = [scopes.pop(row[0], []) for row in BUSY] + list(scopes.values())
    order = rows[:FIRST_ROWS]
    for row in rows[FIRST_ROWS:]:
        order += [*others[:BETWEEN_ROWS], row]
        del others[:BETWEEN_ROWS]
    return list(itertools.chain.from_iterable(order + others))


def starts_farms(item: pytest.Item) -> bool:
    return _ROW_OF.get(_file_of(item.nodeid)) in ROWS


def number_of_workers(*, waiting: bool) -> int:
    """Return the number of cores, and more if half of the tests wait. Each worker collects all
    tests.
    """
    return len(os.sched_getaffinity(0)) + 4 * waiting


class Rows(LoadScopeScheduling):
    """Distributes rows, and all other tests file by file, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(nodeid)


def _scope_of(nodeid: str) -> str:
    """The first file of a test's row, or its own file."""
    row = _ROW_OF.get(_file_of(nodeid))
    return _file_of(nodeid) if row is None else row[0]


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]
