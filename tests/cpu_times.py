"""CPU time of each file and of the most expensive tests, at the end of a run of pytest.

    python -m pytest -p tests.cpu_times tests/jobs -n 2

The wall time of a test depends on what else the machine does; its CPU time hardly does. A test has
the time of its process and of the child processes that ended while it ran, in seconds. Missing are
processes that were killed together with their parent, such as those of a farm."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator

import pytest

#: Number of files and of tests that are listed.
LISTED = 40


class _Sums:
    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.tests: Counter[str] = Counter()
        self.last_s = _used_s()

    def pytest_collection_finish(self) -> None:
        self.last_s = _used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the CPU time since the last report, of this process, to the report of a phase."""
        report = yield
        now_s = _used_s()
        report.user_properties.append(("cpu_s", now_s - self.last_s))
        self.last_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cpu_s = dict(report.user_properties).get("cpu_s", 0.0)
        self.files[report.nodeid.partition("::")[0]] += cpu_s
        self.tests[report.nodeid] += cpu_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total_s = sum(self.files.values())
        terminalreporter.section(f"CPU time of the tests: {total_s:.1f} s")
        for sums in (self.files, self.tests):
            for name, cpu_s in sums.most_common(LISTED):
                terminalreporter.write_line(f"{cpu_s:8.2f}  {name}")
            terminalreporter.write_line("")


def _used_s() -> float:
    return sum(os.times()[:4])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Sums())
