"""A pytest plugin: the fixture `farm_benchmark`, and with --farm-base a comparison with another git
revision.

A session with --farm-base first runs its tests in other processes of pytest (--farm-record),
alternately in a worktree of the base and in this checkout, the head. Then each test passes or fails
by the rule of `farm compare --run`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import CardBusy, FarmError, UsageError, writing_to
from farm.types.revision import git, revision_of

NO_VERDICT = 6  # exit code: with --farm-require-verdict, no test was judged
MOST_CHARACTERS = 20_000  # of a traceback in a report

_OPTIONS: dict[str, dict[str, Any]] = {
    "--farm-base": {
        "metavar": "REF",
        "help": "Fail tests whose code costs surely more than at a git revision.",
    },
    "--farm-fail-above": {
        "metavar": "X%",
        "default": "5%",
        "help": "The allowed change. Default: 5%%.",
    },
    "--farm-rounds": {
        "metavar": "N",
        "default": 6,
        "type": int,
        "help": "How often to measure both. Default: 6.",
    },
    "--farm-card": {
        "metavar": "CARD",
        "default": "",
        "help": "The card. Default: the first GPU, else the CPU.",
    },
    "--farm-quick": {
        "action": "store_true",
        "help": "Measure for a shorter time, with wider intervals.",
    },
    "--farm-summary": {"metavar": "FILE", "help": "Append the comparison to a file, in Markdown."},
    "--farm-require-verdict": {
        "action": "store_true",
        "help": f"With --farm-base: end with exit code {NO_VERDICT} if no test was judged.",
    },
    "--farm-record": {"help": argparse.SUPPRESS},  # a file: what to measure, then what was measured
}
#: Folders of installed packages, also inside of a repository.
_INSTALLED = {"site-packages", "dist-packages"}


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("farm", "time and energy of code (the fixture farm_benchmark)")
    for name, how in _OPTIONS.items():
        group.addoption(name, **how)


def pytest_configure(config: Any) -> None:
    import pytest  # late: farm does not depend on it

    class Fixtures(_Session):
        @pytest.fixture
        def farm_benchmark(self, request: Any) -> Any:
            """Measure a module or function and store the reading: farm_benchmark(target,
            *inputs).
            """
            return lambda target, *inputs: self.measured(request.node, target, inputs)

    config.pluginmanager.register(Fixtures(config), "farm-session")


@dataclass(frozen=True)
class _Outcome:
    """What the tests of one checkout did in one round, in a process of their own."""

    measured: Mapping[str, Any]  # name -> measurement
    failed: Mapping[str, str]  # test -> its traceback
    skipped: Mapping[str, str]  # test -> the reason


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
        self.broken: dict[str, str] = {}  # test -> its traceback at the head
        self.broken_at_base: dict[str, str] = {}  # test -> its traceback at the base
        self.skipped: dict[str, str] = {}  # test -> why it was skipped at the head

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            item for item in items if not self.record or item.nodeid in self.wanted["tests"]
        ]

    def pytest_runtestloop(self, session: Any) -> None:
        import pytest

        tests = [
            item.nodeid
            for item in session.items
            if "farm_benchmark" in getattr(item, "fixturenames", ())
        ]
        if self.option.farm_require_verdict and not self.option.farm_base:
            raise pytest.UsageError(
                "--farm-require-verdict needs --farm-base: without it nothing is compared."
            )
        parallel = hasattr(self.config, "workerinput")
        unwanted = self.record or parallel or session.testsfailed or self.option.collectonly
        if self.option.farm_base and tests and not unwanted:
            try:
                self.compare(tests)
            except FarmError as error:
                raise pytest.UsageError(str(error)) from error

    def pytest_runtest_logreport(self, report: Any) -> None:
        """In a process of one side: record why a test failed or was skipped."""
        if not self.record or hasattr(report, "wasxfail"):
            return
        if report.failed:
            self.append({"failed": report.nodeid, "text": report.longreprtext[-MOST_CHARACTERS:]})
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.append(
                {"skipped": report.nodeid, "text": report.longrepr[2].removeprefix("Skipped: ")}
            )

    def pytest_sessionfinish(self, session: Any) -> None:
        if self.record:
            self.append({"finished": True})
        elif self.judged_nothing and session.exitstatus == 0:
            session.exitstatus = NO_VERDICT

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        if exitstatus in (0, NO_VERDICT) and self.judged_nothing:
            line = (
                "farm: no test was judged, so --farm-require-verdict ends with exit code "
                f"{NO_VERDICT}."
            )
            terminalreporter.write_line(line, red=True)
            terminalreporter.write_line(
                "→ `-rs` shows why tests were skipped. Let nothing else run on this machine."
            )

    @property
    def judged_nothing(self) -> bool:
        """True if a verdict is required and there is none."""
        required = self.option.farm_require_verdict and not self.option.collectonly
        if not required or hasattr(self.config, "workerinput"):
            return False
        return self.judgement is None or not self.judgement.rows

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the record of this process."""
        assert self.record is not None, "only a process of one side records"
        with self.record.open("a") as record:
            record.write(f"\n{json.dumps(entry)}")

    def measured(self, test: Any, target: Any, inputs: tuple[Any, ...]) -> Any:
        """Measure; or with a base, judge what was measured before the tests."""
        import pytest

        self.names[test.nodeid] += 1
        name = f"{test.nodeid} {self.names[test.nodeid]}".removesuffix(" 1")
        if hasattr(self.config, "workerinput"):
            pytest.skip("tests in parallel disturb each other's measurements: run them with -n 0")
        if self.base:
            return self.judged(test.nodeid, name)
        from farm.jobs.named_benchmark import measure_benchmark

        how = {"card": self.option.farm_card, "quick": self.option.farm_quick}
        try:
            measured = measure_benchmark(
                target, inputs, name=name, revision=revision_of(test.path), **how
            )
        except CardBusy as error:
            pytest.skip(f"the host is busy: {error.message}")
        if self.record:
            if file := _imported_from(self.wanted["not_from"]):
                pytest.exit(
                    f"The base imports {file} of the head. Install the package with -e, from this "
                    "checkout.",
                    4,
                )
            self.append({"benchmark": measured.to_json()})
        elif measured.disturbed:
            pytest.skip(f"the host is busy: {measured.disturbed}")
        return measured

    def compare(self, tests: list[str]) -> None:
        """Measure base and head alternately and judge the changes.

        A test that fails at the head is not measured again. Raises `UsageError` if git does not
        know the base, an option is wrong, or the tests of a side cannot run."""
        top = Path(git(self.root, "rev-parse", "--show-toplevel"))
        commit = self.commit_of_base(top)
        from farm.report.gate import LEAST_ROUNDS, Gate, judge_rounds

        gate = Gate.parse(self.option.farm_fail_above, "time:whole,energy:whole")
        count = self.option.farm_rounds
        if count < LEAST_ROUNDS:
            raise UsageError(f"--farm-rounds is {count}.", f"Give {LEAST_ROUNDS} or more.")
        self.base = f"{self.option.farm_base} ({commit[:12]})"
        rounds = []
        with _worktree(top, commit) as worktree:
            for number in range(1, count + 1):
                if not tests:
                    break
                self.tell(f"farm: round {number} of {count}, {self.base} and head")
                order = (worktree, top) if number % 2 else (top, worktree)
                outcomes = {where: self.side(where, top, tests) for where in order}
                base, head = outcomes[worktree], outcomes[top]
                self.keep(base, head)
                rounds.append(self.rows_of(base.measured, head.measured))
                both = base.measured.keys() & head.measured.keys()
                tests = [test for test in tests if test in both and test not in self.broken]
        self.judgement = judge_rounds(rounds, gate)
        if self.option.farm_summary:
            path = Path(self.option.farm_summary)
            with writing_to(path), path.open("a", encoding="utf-8") as file:
                file.write(self.summary())

    def commit_of_base(self, top: Path) -> str:
        """The commit of --farm-base. Raises `UsageError` if the repository does not have it."""
        base = self.option.farm_base
        try:
            return git(top, "rev-parse", "--verify", "--end-of-options", f"{base}^{{commit}}")
        except UsageError:
            step = "In a shallow clone, `git fetch --depth=1 origin REF` fetches a revision."
            raise UsageError(
                f"--farm-base: the repository has no revision '{base}'.", step
            ) from None

    def tell(self, text: str) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter:
            reporter.write_line(text)
            reporter.flush()

    def keep(self, base: _Outcome, head: _Outcome) -> None:
        """Keep what one round has shown. A test that fails at the head is told at once."""
        self.head |= head.measured
        self.skipped |= head.skipped
        self.broken_at_base |= base.failed
        for test, text in head.failed.items():
            if test not in self.broken:
                self.broken[test] = text
                self.tell(f"farm: {test} fails at the head and is not measured again:\n{text}")

    def summary(self) -> str:
        """The comparison in Markdown: the tests that fail at the head, and the judged rows."""
        lines = []
        for test, text in self.broken.items():
            lines += [f"**`{test}` fails at the head.**", ""]
            lines += [f"    {line}" for line in text.splitlines()]
            lines.append("")
        lines += [self.judgement.markdown(self.base, "head"), ""]
        return "\n".join(lines)

    def side(self, where: Path, top: Path, tests: list[str]) -> _Outcome:
        """Run tests in the checkout `where`, in a new process; return what they did."""
        root = where / self.root.relative_to(top)
        names = dict.fromkeys(test.partition("::")[0] for test in tests)
        # With "./", a name is never an option.
        files = [f"./{name}" for name in names if (root / name).exists()]
        if not files:
            return _Outcome({}, {}, {})
        environment = {**os.environ, "PYTHONPATH": _import_path(root, where, top)}
        with tempfile.TemporaryDirectory(prefix="farm-round-") as folder:
            record = Path(folder, "record")
            head = "" if where == top else str(top)
            record.write_text(json.dumps({"tests": tests, "not_from": head}))
            options = self._options_of_side(root, record)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-p", __name__, *files, *options],
                cwd=root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            entries = [json.loads(line) for line in record.read_text().splitlines()[1:]]
        finished = any("finished" in entry for entry in entries)
        if done.returncode not in (0, 1, 5) or not finished:  # passed, failed, no tests
            last = "\n".join(done.stdout.strip().splitlines()[-15:])
            problem = f"The tests cannot run in {root} (exit code {done.returncode}):\n{last}"
            raise UsageError(problem, "Correct this error first.")
        return _outcome(entries)

    def _options_of_side(self, root: Path, record: Path) -> list[str]:
        options = [
            f"--farm-record={record}",
            f"--rootdir={root}",
            "-o",
            f"cache_dir={record.parent}/cache",
            f"--farm-card={self.option.farm_card}",
        ]
        if self.option.farm_quick:
            options.append("--farm-quick")
        if self.config.pluginmanager.hasplugin("xdist"):
            options.append("-n0")
        return options

    def rows_of(self, base: Mapping[str, Any], head: Mapping[str, Any]) -> dict[Any, Any]:
        """The rows of one round, without disturbed measurements."""
        from farm.report.gate import RowValue
        from farm.types.figure import Figure

        disturbed = {
            measurement.name: measurement.disturbed
            for measurement in (*base.values(), *head.values())
            if measurement.disturbed
        }
        self.disturbed |= disturbed
        rows = {}
        for name in (base.keys() & head.keys()) - disturbed.keys():
            before, after = base[name], head[name]
            for quantity, a, b in (
                ("time", before.time_us, after.time_us),
                ("energy", before.energy_mj, after.energy_mj),
            ):
                if a and b:
                    rows[quantity, "whole", name] = RowValue(Figure(a), Figure(b), 1.0)
        return rows

    def judged(self, test: str, name: str) -> Any:
        """Return the newest measurement of the head; fail or skip the present test if the
        comparison says so.
        """
        import pytest

        if test in self.broken:
            pytest.fail(
                f"the test fails at the head, in its own process:\n{self.broken[test]}",
                pytrace=False,
            )
        if name not in self.head and test in self.skipped:
            pytest.skip(f"skipped at the head: {self.skipped[test]}")
        if name not in self.head:
            pytest.fail(
                "the test measured nothing in its own process. Run it without --farm-base.",
                pytrace=False,
            )
        rows = [row for row in self.judgement.rows if row.name == name]
        if not rows:
            pytest.skip(self.why_not_judged(test, name))
        line = "  {}: {} -> {}, {} ({} to {}, {} rounds)"
        failed = [line.format(row.quantity, *row.cells, row.rounds) for row in rows if row.fails]
        if failed:
            head = (
                f"costs surely more than at {self.base}, by over --farm-fail-above "
                f"{self.option.farm_fail_above}:"
            )
            step = (
                "→ Make it cheaper, or allow more. More --farm-rounds make the interval narrower."
            )
            pytest.fail("\n".join([head, *failed, step]), pytrace=False)
        return self.head[name]

    def why_not_judged(self, test: str, name: str) -> str:
        """Why a measured test has no row."""
        if busy := self.disturbed.get(name):
            return f"the host is busy, too few rounds count: {busy}"
        if text := self.broken_at_base.get(test):
            return (
                f"nothing to compare: the test fails at {self.base}: "
                f"{text.strip().splitlines()[-1]}"
            )
        return f"nothing to compare: {self.base} does not have this test, or it fails there"


def _import_path(root: Path, where: Path, top: Path) -> str:
    """The path of imports of a side: the folders of the head become those of its checkout."""
    paths = [root / "src"]
    for entry in sys.path:
        if _INSTALLED.intersection(Path(entry).parts):
            continue
        path = Path(entry).resolve()
        paths.append(where / path.relative_to(top) if path.is_relative_to(top) else path)
    return os.pathsep.join(map(str, paths))


def _outcome(entries: list[dict[str, Any]]) -> _Outcome:
    """What the lines of a record say."""
    measured = [_benchmark(entry["benchmark"]) for entry in entries if "benchmark" in entry]
    return _Outcome(
        measured={benchmark.name: benchmark for benchmark in measured},
        failed={entry["failed"]: entry["text"] for entry in entries if "failed" in entry},
        skipped={entry["skipped"]: entry["text"] for entry in entries if "skipped" in entry},
    )


def _benchmark(fields: Mapping[str, Any]) -> Any:
    from farm.jobs.named_benchmark import Benchmark  # late: it imports torch

    return Benchmark.from_json(fields)


@contextlib.contextmanager
def _worktree(top: Path, commit: str) -> Iterator[Path]:
    """Check out a commit in a new folder, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="farm-base-") as folder:
        where = Path(folder).resolve() / "base"
        try:
            git(
                top,
                "-c",
                "core.hooksPath=/dev/null",
                "worktree",
                "add",
                "--detach",
                str(where),
                commit,
            )
            yield where
        finally:
            with contextlib.suppress(UsageError):
                git(top, "worktree", "remove", "--force", str(where))


def _imported_from(folder: str) -> str:
    """A file of a folder from which this process has imported a module; "" if there is none."""
    if not folder:
        return ""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not file or _INSTALLED.intersection(Path(file).parts):
            continue
        if Path(file).is_relative_to(folder):
            return str(Path(file))
    return ""
