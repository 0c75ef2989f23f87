"""A pytest plugin: the fixture `farm_benchmark`, and with --farm-base a comparison with another git revision.

A session with --farm-base measures nothing itself. Before its tests it runs them in other processes of pytest
(--farm-record), alternately in a git worktree of the base and in this checkout, the head. Then each test of the session
fails or passes by the rule of `farm compare --run` (`farm.report.gate.judge_rounds`).

The name of this module is also that of the entry point, so that `-p` and the entry point load it once. torch and the
database are imported when something is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import CardBusy, FarmError, UsageError

if TYPE_CHECKING:
    from farm.api.benchmark import Benchmark
    from farm.report.gate import Judgement, Rows

_OPTIONS: dict[str, dict[str, Any]] = {
    "--farm-base": {"metavar": "REF", "help": "Fail tests whose code costs surely more than at a git revision."},
    "--farm-fail-above": {"metavar": "X%", "default": "5%", "help": "The allowed change. Default: 5%%."},
    "--farm-rounds": {"metavar": "N", "default": 6, "type": int, "help": "How often to measure both. Default: 6."},
    "--farm-card": {"metavar": "CARD", "default": "", "help": "The card. Default: the first GPU, else the CPU."},
    "--farm-quick": {"action": "store_true", "help": "Measure for a shorter time, with wider intervals."},
    "--farm-summary": {"metavar": "FILE", "help": "Append the comparison to a file, in Markdown."},
    "--farm-record": {"help": argparse.SUPPRESS},  # a file: first what to measure, then what was found
}
_INSTALLED = {"site-packages", "dist-packages"}  # folders of other code, also inside of a repository


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("farm", "time and energy of code (the fixture farm_benchmark)")
    for name, how in _OPTIONS.items():
        group.addoption(name, **how)


def pytest_configure(config: Any) -> None:
    import pytest

    class Fixtures(_Session):
        @pytest.fixture
        def farm_benchmark(self, request: Any) -> Callable[..., Benchmark]:
            """Measure a module or function and store the reading: farm_benchmark(target, *inputs)."""
            return lambda target, *inputs: self.measured(request.node, target, inputs)

    with _usage_errors():
        config.pluginmanager.register(Fixtures(config), "farm-session")


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    import pytest

    try:
        yield
    except FarmError as error:
        raise pytest.UsageError(str(error)) from error


class _Session:
    """One session of pytest."""

    def __init__(self, config: Any) -> None:
        self.config, self.option = config, config.option
        self.record = Path(self.option.farm_record) if self.option.farm_record else None
        self.wanted = json.loads(self.record.read_text()) if self.record else {}
        self.comparison = _Comparison(config) if self.option.farm_base and not self.record else None
        self.names = Counter[str]()  # measurements of each test

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if not self.record or item.nodeid in self.wanted["tests"]]

    def pytest_runtestloop(self, session: Any) -> None:
        tests = [item.nodeid for item in session.items if "farm_benchmark" in getattr(item, "fixturenames", ())]
        if self.comparison and tests and not (session.testsfailed or self.option.collectonly):
            with _usage_errors():
                self.comparison.run(tests)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if self.record and report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            self._note(report.nodeid, reason=f"{report.outcome}, {' '.join(said.split())[:300]}")

    def _note(self, name: str, **found: Any) -> None:
        assert self.record is not None
        with self.record.open("a") as file:
            file.write("\n" + json.dumps({"name": name, **found}))

    def measured(self, test: Any, target: Any, inputs: tuple[Any, ...]) -> Benchmark:
        """Measure; or with a base, judge what was measured before the tests."""
        import pytest

        self.names[test.nodeid] += 1
        name = f"{test.nodeid} {self.names[test.nodeid]}".removesuffix(" 1")
        if hasattr(self.config, "workerinput"):
            pytest.skip("tests in parallel disturb each other's measurements: run them with -n 0")
        if self.comparison:
            return self.comparison.judged(name)
        from farm.api.benchmark import measure_benchmark
        from farm.api.queries import open_database
        from farm.models.revision import revision_of

        how: Any = {"card": self.option.farm_card, "quick": self.option.farm_quick, "database": open_database()}
        try:
            found = measure_benchmark(target, inputs, name=name, revision=revision_of(test.path), **how)
        except CardBusy as error:
            pytest.skip(f"the host is busy: {error.message}")
        if self.record:
            self._note(name, found=vars(found), foreign=_imported_from(self.wanted["not_from"]))
        elif found.disturbed:
            pytest.skip(f"the host is busy: {found.disturbed}")
        return found


def _imported_from(folder: str) -> str:
    """A file of a folder from which this process has imported a module; "" if there is none."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    own = (Path(file) for file in files if folder and file and not _INSTALLED.intersection(Path(file).parts))
    return next((str(file) for file in own if file.is_relative_to(folder)), "")


class _Comparison:
    """Paired rounds of base and head."""

    judgement: Judgement

    def __init__(self, config: Any) -> None:
        from farm.models.revision import git

        self.config, self.option, self.root = config, config.option, Path(config.rootpath).resolve()
        self.top = Path(git(self.root, "rev-parse", "--show-toplevel"))
        try:
            self.commit = git(self.top, "rev-parse", "--verify", f"{self.option.farm_base}^{{commit}}")
        except UsageError:
            step = "In a shallow clone, `git fetch --depth=1 origin REF` fetches a revision."
            raise UsageError(f"--farm-base: the repository has no revision '{self.option.farm_base}'.", step) from None
        self.base = f"{self.option.farm_base} ({self.commit[:12]})"
        self.newest: dict[str, Benchmark] = {}  # of the head
        self.reasons: dict[str, str] = {}  # why there is nothing to compare
        self.failed: dict[str, str] = {}  # why the head has no measurement

    def run(self, tests: list[str]) -> None:
        """Measure base and head alternately and judge the changes.

        Raises:
            UsageError: an option is wrong, or the tests of a side cannot run.
        """
        from farm.report.gate import LEAST_ROUNDS, Gate, judge_rounds

        gate = Gate.parse(self.option.farm_fail_above, "time:whole,energy:whole")
        if (count := self.option.farm_rounds) < LEAST_ROUNDS:
            raise UsageError(f"--farm-rounds is {count}.", f"Give {LEAST_ROUNDS} or more.")
        rounds, reporter = list[Any](), self.config.pluginmanager.get_plugin("terminalreporter")
        with self._worktree() as worktree:
            for number in range(1, count + 1):
                if reporter:
                    reporter.write_line(f"farm: round {number} of {count}, {self.base} and head")
                sides = [("base", worktree), ("head", self.top)][:: 1 if number % 2 else -1]
                found = {side: self._side(side, top, tests) for side, top in sides}
                rounds.append(self._rows(found["base"], found["head"]))
                self.newest |= found["head"]
                tests = [test for test in tests if test in found["base"] and test in found["head"]]
        self.judgement = judge_rounds(rounds, gate)
        if self.option.farm_summary:
            with Path(self.option.farm_summary).open("a") as file:
                file.write(self.judgement.markdown(self.base, "head") + "\n")

    @contextlib.contextmanager
    def _worktree(self) -> Iterator[Path]:
        """A checkout of the base, until the block ends."""
        from farm.models.revision import git

        with tempfile.TemporaryDirectory(prefix="farm-base-") as folder:
            where = Path(folder).resolve() / "base"
            try:
                git(self.top, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(where), self.commit)
                yield where
            finally:
                with contextlib.suppress(UsageError):
                    git(self.top, "worktree", "remove", "--force", str(where))

    def _side(self, side: str, top: Path, tests: list[str]) -> dict[str, Benchmark]:
        """Run tests in a checkout, in a new process, and return what they measured."""
        from farm.api.benchmark import Benchmark

        root, found = top / self.root.relative_to(self.top), dict[str, Benchmark]()
        files = [file for file in dict.fromkeys(test.partition("::")[0] for test in tests) if (root / file).exists()]
        if not files:
            return {}
        with tempfile.TemporaryDirectory(prefix="farm-round-") as folder:
            record = Path(folder, "record")
            record.write_text(json.dumps({"tests": tests, "not_from": str(self.top) if side == "base" else ""}))
            arguments = [*files, f"--farm-record={record}", f"--rootdir={root}", "-o", f"cache_dir={folder}/cache"]
            done = self._pytest(root, top, arguments)
            entries = [json.loads(line) for line in record.read_text().splitlines()[1:]]
        if done.returncode not in (0, 1, 5):  # passed, failed, no tests
            last = "\n".join(done.stdout.strip().splitlines()[-15:])
            raise UsageError(f"The tests of the {side} cannot run in {root}:\n{last}", "Correct this error first.")
        for entry in entries:
            if "found" in entry:
                found[entry["name"]] = Benchmark(**entry["found"])
            else:
                reasons = self.failed if side == "head" else self.reasons
                reasons[entry["name"]] = f"the test has no measurement at the {side}: {entry['reason']}"
            if entry.get("foreign"):
                problem = f"The base imports {entry['foreign']} of the head: it would be compared with itself."
                raise UsageError(
                    problem, "Import the package from the repository's root or `src`, or install it with -e."
                )
        return found

    def _pytest(self, root: Path, top: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        """Run pytest in a checkout. The folders of the head on the path of imports become those of the checkout."""
        own = [Path(path).resolve() for path in sys.path if not _INSTALLED.intersection(Path(path).parts)]
        paths = [top / path.relative_to(self.top) if path.is_relative_to(self.top) else path for path in own]
        command = [sys.executable, "-m", "pytest", "-p", __name__, *arguments, f"--farm-card={self.option.farm_card}"]
        command += ["--farm-quick"] * self.option.farm_quick
        command += ["-n0"] * self.config.pluginmanager.hasplugin("xdist")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [root / "src", *paths]))}
        return subprocess.run(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def _rows(self, base: dict[str, Benchmark], head: dict[str, Benchmark]) -> Rows:
        """The rows of one round, without disturbed readings."""
        from farm.report.gate import RowValue
        from farm.verdict.figures import Figure

        rows: Rows = {}
        for name in base.keys() & head.keys():
            a, b = base[name], head[name]
            if disturbed := a.disturbed or b.disturbed:
                self.reasons[name] = f"the host is busy: {disturbed}"
                continue
            rows["time", "whole", name] = RowValue(Figure(a.time_us), Figure(b.time_us), 1.0)
            if a.energy_mj and b.energy_mj:
                rows["energy", "whole", name] = RowValue(Figure(a.energy_mj), Figure(b.energy_mj), 1.0)
        return rows

    def judged(self, name: str) -> Benchmark:
        """Return the newest measurement of the head; fail or skip the present test if the comparison says so."""
        import pytest

        from farm.types.format import ENERGY, TIME, quantity

        if name in self.failed:
            pytest.fail(self.failed[name], pytrace=False)
        rows = [row for row in self.judgement.rows if row.name == name]
        if not rows:
            pytest.skip(self.reasons.get(name, f"nothing to compare: {self.base} does not have this test"))
        lines = []
        for row in (row for row in rows if row.fails):
            a, b = (quantity(value, TIME if row.quantity == "time" else ENERGY) for value in (row.a, row.b))
            bounds = f"{row.low * 100:+.1f} to {row.high * 100:+.1f} %, {row.rounds} rounds"
            lines.append(f"  {row.quantity}: {a} -> {b}, {row.change * 100:+.1f} % ({bounds})")
        if lines:
            allowed = self.option.farm_fail_above
            step = f"→ Make it cheaper, or allow more than --farm-fail-above {allowed}. More --farm-rounds tell more."
            pytest.fail("\n".join([f"costs over {allowed} more than at {self.base}:", *lines, step]), pytrace=False)
        return self.newest[name]
