"""Workers of pytest-xdist that are forks of one process, the template, which has imported torch and
all tests.

Without it each worker would import them: ten seconds of a core, and a gigabyte. pytest-xdist starts
this file in place of an interpreter (the hook `pytest_xdist_setupnodes` sets the interpreter of
each worker, as `--tx popen//python=...` does). It passes its standard streams to the template,
which forks a worker for them, and ends with the worker.

Nothing of it is used without ``-n``."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from typing import Any

_CAN_FORK = sys.platform == "linux"  # elsewhere libraries of the system may not work in a fork
#: Modules that tests import late, in several workers: two seconds each. They are imported here if
#: many files are run.
_LATE = ("torch._dynamo", "torchvision", "transformers")
_MANY_FILES = 50


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
