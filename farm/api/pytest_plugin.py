"""A pytest plugin: the fixture `farm_benchmark`, and with --farm-base a comparison with another git revision.

A session with --farm-base first runs its tests in other processes of pytest (--farm-record), alternately in a worktree
of the base and in this checkout, the head. Then each test passes or fails by the rule of `farm compare --run`.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farm.errors import CardBusy, FarmError, UsageError
from farm.models.revision import git, revision_of

_OPTIONS: dict[str, dict[str, Any]] = {
    "--farm-base": {"metavar": "REF", "help": "Fail tests whose code costs surely more than at a git revision."},
    "--farm-fail-above": {"metavar": "X%", "default": "5%", "help": "The allowed change. Default: 5%%."},
    "--farm-rounds": {"metavar": "N", "default": 6, "type": int, "help": "How often to measure both. Default: 6."},
    "--farm-card": {"metavar": "CARD", "default": "", "help": "The card. Default: the first GPU, else the CPU."},
    "--farm-quick": {"action": "store_true", "help": "Measure for a shorter time, with wider intervals."},
    "--farm-summary": {"metavar": "FILE", "help": "Append the comparison to a file, in Markdown."},
    "--farm-record": {"help": argparse.SUPPRESS},  # a file: what to measure, then what was measured
}
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages, also inside of a repository


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("farm", "time and energy of code (the fixture farm_benchmark)")
    for name, how in _OPTIONS.items():
        group.addoption(name, **how)


def pytest_configure(config: Any) -> None:
    import pytest  # late: farm does not depend on it

    class Fixtures(_Session):
        @pytest.fixture
        def farm_benchmark(self, request: Any) -> Any:
            """Measure a module or function and store the reading: farm_benchmark(target, *inputs)."""
            return lambda target, *inputs: self.measured(request.node, target, inputs)

    config.pluginmanager.register(Fixtures(config), "farm-session")


class _Session:
    """One session of pytest."""

    def __init__(self, config: Any) -> None:
        self.config, self.option, self.root = config, config.option, Path(config.rootpath).resolve()
        self.record = Path(self.option.farm_record) if self.option.farm_record else None
        self.wanted = json.loads(self.record.read_text()) if self.record else {}
        self.names = Counter[str]()  # measurements of each test
        self.base = ""  # the revision, if it was compared
        self.judgement: Any = None
        self.head: dict[str, Any] = {}  # name -> its newest measurement
        self.disturbed: dict[str, str] = {}  # name -> why a round does not count

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if not self.record or item.nodeid in self.wanted["tests"]]

    def pytest_runtestloop(self, session: Any) -> None:
        import pytest

        tests = [item.nodeid for item in session.items if "farm_benchmark" in getattr(item, "fixturenames", ())]
        if self.option.farm_base and tests and not (self.record or session.testsfailed or self.option.collectonly):
            try:
                self.compare(tests)
            except FarmError as error:
                raise pytest.UsageError(str(error)) from error

    def measured(self, test: Any, target: Any, inputs: tuple[Any, ...]) -> Any:
        """Measure; or with a base, judge what was measured before the tests."""
        import pytest

        self.names[test.nodeid] += 1
        name = f"{test.nodeid} {self.names[test.nodeid]}".removesuffix(" 1")
        if hasattr(self.config, "workerinput"):
            pytest.skip("tests in parallel disturb each other's measurements: run them with -n 0")
        if self.base:
            return self.judged(name)
        from farm.api.benchmark import measure_benchmark

        how = {"card": self.option.farm_card, "quick": self.option.farm_quick}
        try:
            found = measure_benchmark(target, inputs, name=name, revision=revision_of(test.path), **how)
        except CardBusy as error:
            pytest.skip(f"the host is busy: {error.message}")
        if self.record:
            if file := _imported_from(self.wanted["not_from"]):
                pytest.exit(f"The base imports {file} of the head. Install the package with -e, from this checkout.", 4)
            with self.record.open("a") as record:
                record.write(f"\n{json.dumps(vars(found))}")
        elif found.disturbed:
            pytest.skip(f"the host is busy: {found.disturbed}")
        return found

    def compare(self, tests: list[str]) -> None:
        """Measure base and head alternately and judge the changes. Raises `UsageError` if git does not know the base,
        an option is wrong, or the tests of a side cannot run."""
        top = Path(git(self.root, "rev-parse", "--show-toplevel"))
        try:
            commit = git(top, "rev-parse", "--verify", f"{self.option.farm_base}^{{commit}}")
        except UsageError:
            step = "In a shallow clone, `git fetch --depth=1 origin REF` fetches a revision."
            raise UsageError(f"--farm-base: the repository has no revision '{self.option.farm_base}'.", step) from None
        from farm.report.gate import LEAST_ROUNDS, Gate, judge_rounds

        gate, count = Gate.parse(self.option.farm_fail_above, "time:whole,energy:whole"), self.option.farm_rounds
        if count < LEAST_ROUNDS:
            raise UsageError(f"--farm-rounds is {count}.", f"Give {LEAST_ROUNDS} or more.")
        self.base, rounds = f"{self.option.farm_base} ({commit[:12]})", []
        with _worktree(top, commit) as worktree:
            for number in range(1, count + 1):
                if reporter := self.config.pluginmanager.get_plugin("terminalreporter"):
                    reporter.write_line(f"farm: round {number} of {count}, {self.base} and head")
                order = (worktree, top)[:: 1 if number % 2 else -1]
                found = {where: self.side(where, top, tests) for where in order}
                rounds.append(self.rows_of(found[worktree], found[top]))
                self.head |= found[top]
                tests = [test for test in tests if all(test in side for side in found.values())]
        self.judgement = judge_rounds(rounds, gate)
        if self.option.farm_summary:
            with Path(self.option.farm_summary).open("a") as file:
                file.write(self.judgement.markdown(self.base, "head") + "\n")

    def side(self, where: Path, top: Path, tests: list[str]) -> dict[str, Any]:
        """Run tests in the checkout `where`, in a new process; return what it measured by name."""
        from farm.api.benchmark import Benchmark

        root = where / self.root.relative_to(top)
        files = [file for file in dict.fromkeys(test.partition("::")[0] for test in tests) if (root / file).exists()]
        if not files:
            return {}
        # The folders of the head on the path of imports become those of the checkout.
        own = [Path(path).resolve() for path in sys.path if not _INSTALLED.intersection(Path(path).parts)]
        paths = [root / "src", *(where / one.relative_to(top) if one.is_relative_to(top) else one for one in own)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        with tempfile.TemporaryDirectory(prefix="farm-round-") as folder:
            record = Path(folder, "record")
            record.write_text(json.dumps({"tests": tests, "not_from": "" if where == top else str(top)}))
            options = [f"--farm-record={record}", f"--rootdir={root}", "-o", f"cache_dir={folder}/cache"]
            options += [f"--farm-card={self.option.farm_card}", *["--farm-quick"] * self.option.farm_quick]
            options += ["-n0"] * self.config.pluginmanager.hasplugin("xdist")
            command = [sys.executable, "-m", "pytest", "-p", __name__, *files, *options]
            done = subprocess.run(command, cwd=root, env=environment, stdout=-1, stderr=-2, text=True)
            found = [Benchmark(**json.loads(line)) for line in record.read_text().splitlines()[1:]]
        if done.returncode not in (0, 1, 5):  # passed, failed, no tests
            last = "\n".join(done.stdout.strip().splitlines()[-15:])
            raise UsageError(f"The tests cannot run in {root}:\n{last}", "Correct this error first.")
        return {one.name: one for one in found}

    def rows_of(self, base: dict[str, Any], head: dict[str, Any]) -> dict[Any, Any]:
        """The rows of one round, without disturbed measurements."""
        from farm.report.gate import RowValue
        from farm.verdict.figures import Figure

        found = [one for side in (base, head) for one in side.values()]
        disturbed = {one.name: one.disturbed for one in found if one.disturbed}
        self.disturbed |= disturbed
        return {
            (quantity, "whole", name): RowValue(Figure(a), Figure(b), 1.0)
            for name in (base.keys() & head.keys()) - disturbed.keys()
            for quantity, figure in (("time", "time_us"), ("energy", "energy_mj"))
            if (a := getattr(base[name], figure)) and (b := getattr(head[name], figure))
        }

    def judged(self, name: str) -> Any:
        """Return the newest measurement of the head; fail or skip the present test if the comparison says so."""
        import pytest

        if name not in self.head:
            pytest.fail("the test measured nothing in its own process. Run it without --farm-base.", pytrace=False)
        rows = [row for row in self.judgement.rows if row.name == name]
        if not rows:
            busy, lacks = self.disturbed.get(name), f"{self.base} does not have this test, or it fails there"
            pytest.skip(f"the host is busy, too few rounds count: {busy}" if busy else f"nothing to compare: {lacks}")
        told = "  {}: {} -> {}, {} ({} to {}, {} rounds)"
        if failed := [told.format(row.quantity, *row.cells, row.rounds) for row in rows if row.fails]:
            head = f"costs surely more than at {self.base}, by over --farm-fail-above {self.option.farm_fail_above}:"
            step = "→ Make it cheaper, or allow more. More --farm-rounds make the interval narrower."
            pytest.fail("\n".join([head, *failed, step]), pytrace=False)
        return self.head[name]


@contextlib.contextmanager
def _worktree(top: Path, commit: str) -> Iterator[Path]:
    """Check out a commit in a new folder, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="farm-base-") as folder:
        where = Path(folder).resolve() / "base"
        try:
            git(top, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(where), commit)
            yield where
        finally:
            with contextlib.suppress(UsageError):
                git(top, "worktree", "remove", "--force", str(where))


def _imported_from(folder: str) -> str:
    """A file of a folder from which this process has imported a module; "" if there is none."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    own = (Path(file) for file in files if folder and file and not _INSTALLED.intersection(Path(file).parts))
    return next((str(file) for file in own if file.is_relative_to(folder)), "")
