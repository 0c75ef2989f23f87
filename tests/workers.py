"""The distribution of the tests over processes (``pytest -n 4``): their order, what goes to the same
worker, and workers that are forks.

Nothing of it is needed to debug a test: without ``-n`` the same tests run in the same order in one
process, with the same results (``python -m pytest tests/store``). It makes the suite faster:

- **Order**. A test with a farm mostly waits for leases and heartbeats; a test in process keeps a
  core busy. So there are more workers than cores, and the order mixes files of both sorts.
- **Rows**. Tests that share a farm form one row and go to one worker, because another worker would
  start a separate farm. (The marker `xdist_group` is for that, but pytest-xdist 3.8 does not see
  the groups of pytest 9.2: its issue 1386.) All other tests go to the workers file by file, so that
  one worker runs the fixtures and imports of a file.
- **Forks**. On Linux the workers are forks of one process, the template, which has imported torch
  and all tests. Otherwise each worker would import them: eight seconds of a core, and a gigabyte.
  pytest-xdist starts this file in place of an interpreter. It passes its standard streams to the
  template, which forks a worker for them, and ends with the worker.

It uses these public interfaces of pytest-xdist: the hooks `pytest_xdist_auto_num_workers`,
`pytest_xdist_setupnodes` and `pytest_xdist_make_scheduler` (`conftest.py` has them), the
interpreter of a worker (``spec.python``, as in ``--tx popen//python=...``), and a subclass of
`LoadScopeScheduling` that says which tests belong together."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The interpreter that pytest-xdist starts in place of Python has the standard library alone.
if TYPE_CHECKING:
    import pytest
    from xdist.scheduler import LoadScopeScheduling

#: Files whose tests start complete farms or wait as long for servers, the longest row first. A file
#: that is missing here only runs later.
ROWS = (
    ("faults/test_soak.py",),
    ("faults/test_half_open.py",),
    (
        "faults/test_processes.py",
        "faults/test_messages.py",
        "tasks/test_flower.py",
        "cli/test_doctor_of_a_farm.py",
    ),
    (
        "faults/test_groups.py",
        "faults/test_cards.py",
        "security/test_messages.py",
        "cli/test_whole_path.py",
        "addons/check/test_card_check.py",
    ),
    ("faults/test_databases.py",),
    ("faults/test_hosts.py",),
    ("cli/test_doctor.py", "cli/test_doctor_problems.py"),
    ("deploy/test_deploy.py",),
    ("cli/test_cpu_path.py",),
    ("cli/test_paired_rounds.py",),
    ("security/test_secrets.py",),
    ("tasks/test_logs.py",),
    ("tasks/test_metrics.py", "tasks/test_card_checks.py"),
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
    ("api/test_pytest_plugin.py",),
    ("corpus/test_corpus.py",),
    ("security/test_forged_tuples.py",),
    ("cli/test_compiled.py",),
    ("test_shown_output.py",),
    ("jobs/test_moving.py",),
    ("jobs/test_items.py",),
)
#: Number of rows at the beginning of the order, and of other files before each later row: so about
#: half of the workers run rows.
FIRST_ROWS, BETWEEN_ROWS = 3, 6
_TESTS = Path(__file__).parent.name
_CAN_FORK = sys.platform == "linux"  # elsewhere libraries of the system may not work in a fork
#: Modules that tests import late, in several workers: two seconds each. They are imported here if
#: many files are run.
_LATE = ("torch._dynamo", "torchvision", "torchao.quantization", "transformers")
_MANY_FILES = 50
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


def scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Return the scheduler that distributes rows, and all other tests file by file, in the order of
    the tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Rows(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope_of(nodeid)

    return Rows(config, log)


def _scope_of(nodeid: str) -> str:
    """The first file of a test's row, or its own file."""
    row = _ROW_OF.get(_file_of(nodeid))
    return _file_of(nodeid) if row is None else row[0]


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def fork_workers(config: Any, specs: Sequence[Any]) -> None:
    """Let pytest-xdist start workers with these specifications as forks. It ends the template with
    the tests.
    """
    if not _CAN_FORK or not all(spec.popen and not spec.python for spec in specs):
        return
    folder = tempfile.TemporaryDirectory(prefix="operator-farm-")
    address = os.path.join(folder.name, "template")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(len(specs))
        template = subprocess.Popen(
            [
                sys.executable,
                "-P",
                __file__,
                str(listener.fileno()),
                *map(str, config.invocation_params.args),
            ],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
    for spec in specs:
        spec.python = f"'{sys.executable}' -I -S '{__file__}' '{address}'"

    def end() -> None:
        with template:  # closes its stdin and waits
            folder.cleanup()

    config.add_cleanup(end)


def _use_worker(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"\0"], [0, 1, 2])
        connection.recv(1)  # nothing comes; it returns when the worker has ended


class _Importing:
    def __init__(self) -> None:
        self.failed: set[str] = set()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.add(os.path.basename(report.nodeid))

    def forget_failed(self) -> None:
        """Remove files that cannot be imported from `sys.modules`. Otherwise workers would find
        their modules there, without tests, and would report no error."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file is not None and os.path.basename(file) in self.failed:
                del sys.modules[name]

    def pytest_collection_finish(self, session: Any) -> None:
        if len({item.path for item in session.items}) >= _MANY_FILES:
            for name in _LATE:
                with contextlib.suppress(
                    Exception
                ):  # a test that needs it says why it cannot be imported
                    __import__(name)


def _import_tests(arguments: Sequence[str]) -> None:
    """Import the tests as pytest does, with rewritten assertions. A worker reports the tests that
    fail to import.
    """
    import gc

    import pytest

    importing = _Importing()
    pytest.main([*arguments, "-n0", "--collect-only"], plugins=[importing])
    importing.forget_failed()
    gc.disable()  # until the worker has collected the tests


def _serve(listener: socket.socket) -> list[int]:
    """Fork a worker for each request, until the controller closes stdin. Return the streams of a
    worker in it, and an empty list in the template."""
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        if os.fork() == 0:
            connection.detach()  # stays open as long as the worker
            return streams
        connection.close()
        for stream in streams:
            os.close(stream)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return []


def _work(streams: Sequence[int]) -> None:
    """Do what `python -c` does with the line that execnet passes to it."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    exec(eval(sys.stdin.readline()), main.__dict__)


def _leave() -> None:
    """End the process without the interpreter's finalization, which frees millions of objects one
    by one.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        atexit.register(_leave)  # the first one is called last, in the template and in its forks
        with socket.socket(fileno=int(sys.argv[1])) as listener:
            _import_tests(sys.argv[2:])
            streams = _serve(listener)
        if streams:
            _work(streams)
    else:
        _use_worker(sys.argv[1])
