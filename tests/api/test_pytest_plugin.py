"""The pytest plugin: real sessions of pytest in temporary git repositories, which measure on the
CPU.

One comparison, by the step of the GitHub Action, serves most tests: it starts six processes that
import torch, so these tests are slow ones."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from farm.api.queries import open_database
from farm.report.history import history
from farm.types.revision import revision_of
from tests import slow

ROOT = Path(__file__).parents[2]
PLUGIN = "farm.api.pytest_plugin"
NET = """
import torch

def work(values, times=1):
    for _ in range(times):
        values = torch.mm(values, values)
    return values

def half(values):
    return values / 2

def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
"""
TESTS = """
import net
import torch

def test_work(farm_benchmark):
    found = farm_benchmark(net.work, torch.eye(64))
    assert found.time_us > 0 and found.time_half_width_us >= 0
    print(found)

def test_model(farm_benchmark):
    farm_benchmark(net.model(), torch.ones(8, 64))

def test_twice(farm_benchmark):
    for size in (100, 1000):
        farm_benchmark(sorted, list(range(size)))

def test_busy(farm_benchmark, monkeypatch):
    monkeypatch.setattr("farm.benchmark.window.BUSY", -1.0)
    farm_benchmark(net.model(), torch.ones(8, 64))

def test_half(farm_benchmark):
    farm_benchmark(net.half, torch.ones(64))

def test_without_it():
    pass
"""
# Asks for a measurement and imports nothing: enough where no test runs.
ASKS_ONLY = "def test_it(farm_benchmark):\n    pass\n"
# The machine that runs these tests may be busy; test_busy alone is always on a busy host. Few turns
# save time.
CONFTEST = """
import pytest

@pytest.fixture(autouse=True)
def never_busy(monkeypatch):
    monkeypatch.setattr("farm.benchmark.window.BUSY", 2.0)
    for name in ("TURNS", "LEAST_TURNS"):
        monkeypatch.setattr(f"farm.benchmark.host_clock.{name}", 3)
"""


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def make_repository(folder: Path) -> Path:
    for name, text in {
        "src/net.py": NET,
        "tests/test_net.py": TESTS,
        "tests/conftest.py": CONFTEST,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n',
        ".gitignore": "__pycache__\n.pytest_cache\nfarm-*\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The environment of a session: no other plugins, which take a second to load; everything under
    one folder.
    """
    (folder / "temporary").mkdir(exist_ok=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FARM_", "PYTEST_", "GITHUB_"))
    }
    return {
        **kept,
        "FARM_STATE_DIR": str(folder / "state"),
        "FARM_LOCK_DIR": str(folder / "locks"),
        "FARM_DATABASE_URL": f"sqlite:///{folder / 'farm.db'}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(folder / "temporary"),
    }


def run_pytest(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "--farm-quick", *arguments]
    return subprocess.run(
        command,
        cwd=repository,
        env=environment(repository.parent),
        stdout=-1,
        stderr=-2,
        text=True,
        timeout=280,
    )


def compare(repository: Path, base: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script of CI systems."""
    command = [ROOT / "deploy/ci/compare-revisions", base, "--farm-quick", *arguments]
    variables = environment(repository.parent)
    return subprocess.run(
        command, cwd=repository, env=variables, stdout=-1, stderr=-2, text=True, timeout=280
    )


@pytest.fixture
def repository(tmp_path):
    return make_repository(tmp_path / "repository")


@pytest.fixture
def light(repository):
    """A repository whose fixtures do not import torch."""
    (repository / "tests/conftest.py").write_text("")
    git(repository, "commit", "-q", "-am", "without fixtures")
    return repository


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A pull request that makes one function slower, breaks one and adds a test, compared by the
    GitHub Action.
    """
    folder = tmp_path_factory.mktemp("compared")
    repository = make_repository(folder / "repository")
    base = git(repository, "rev-parse", "HEAD").strip()
    slower = NET.replace("times=1", "times=30")
    (repository / "src/net.py").write_text(slower.replace("values / 2", "valeus / 2"))
    with (repository / "tests/test_net.py").open("a") as file:
        file.write("\ndef test_new(farm_benchmark):\n    farm_benchmark(net.work, torch.eye(8))\n")
    git(repository, "commit", "-q", "-am", "slower")
    (step,) = yaml.safe_load((ROOT / "deploy/github/action.yml").read_text())["runs"]["steps"]
    assert (step["shell"], set(step["env"])) == ("bash", {"BASE", "TESTS", "FAIL_ABOVE", "ROUNDS"})
    given = {"BASE": base, "TESTS": "tests --farm-quick -rs", "FAIL_ABOVE": "50%", "ROUNDS": "3"}
    runner = {
        "GITHUB_ACTION_PATH": str(ROOT / "deploy/github"),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    shell = [
        "bash",
        "--noprofile",
        "--norc",
        "-eo",
        "pipefail",
        "-c",
        step["run"],
    ]  # as a runner calls it
    variables = {**environment(folder), **given, **runner}
    done = subprocess.run(
        shell, cwd=repository, env=variables, stdout=-1, stderr=-2, text=True, timeout=280
    )
    return repository, done


@slow.PROCESS
def test_a_test_whose_code_became_slower_fails_with_both_times_and_what_to_do(compared):
    repository, done = compared
    assert done.returncode == 1, done.stdout
    base = git(repository, "rev-parse", "HEAD~1").strip()
    assert f"farm: round 3 of 3, {base} ({base[:12]}) and head" in done.stdout
    report = ElementTree.parse(repository / "farm-junit.xml").getroot()
    told, _ = (failure.text or "" for failure in report.iter("failure"))
    assert "_ test_work _" in done.stdout
    assert f"more than at {base} ({base[:12]}), by over --farm-fail-above 50%:" in told
    number = r"[\d.]+"
    change = rf"  time: {number} \S+ -> {number} \S+, \+{number} % \(\+{number} % to \+{number} %, 3 rounds\)"
    assert re.search(change, told), told
    assert "→ Make it cheaper, or allow more." in told


@slow.PROCESS
def test_a_new_test_and_one_on_a_busy_host_are_skipped_with_the_reason_and_the_others_pass(
    compared,
):
    _, done = compared
    assert "2 failed, 3 passed, 2 skipped" in done.stdout, done.stdout
    assert "does not have this test" in done.stdout
    assert "too few rounds count: Other programs" in done.stdout


@slow.PROCESS
def test_a_test_that_breaks_at_the_head_is_told_after_the_first_round_and_the_others_are_measured(
    compared,
):
    repository, done = compared
    first_round, second_round = done.stdout.split("farm: round 2 of 3", 1)
    told = "farm: tests/test_net.py::test_half fails at the head and is not measured again:"
    assert told in first_round
    assert told not in second_round
    reason = "NameError: name 'valeus' is not defined"
    assert reason in first_round
    _, failure = ElementTree.parse(repository / "farm-junit.xml").getroot().iter("failure")
    for text in (failure.text, (repository / "farm-summary.md").read_text()):
        assert reason in text
        assert "return valeus / 2" in text


@slow.PROCESS
def test_a_new_test_that_is_broken_ends_the_comparison_after_the_first_round(light):
    git(light, "rm", "-q", "tests/test_net.py")
    git(light, "commit", "-q", "-m", "without tests")
    (light / "tests/test_new.py").write_text(
        "def broken(values):\n    return lenght(values)\n\n"
        "def test_it(farm_benchmark):\n    farm_benchmark(broken, [1, 2])\n"
    )
    done = compare(light, "main")
    assert done.returncode == 1, done.stdout
    assert "farm: round 1 of 6" in done.stdout
    assert "farm: round 2 of 6" not in done.stdout
    reason = "NameError: name 'lenght' is not defined"
    (failure,) = ElementTree.parse(light / "farm-junit.xml").getroot().iter("failure")
    assert reason in done.stdout
    assert reason in failure.text
    assert reason in (light / "farm-summary.md").read_text()


@slow.PROCESS
def test_a_comparison_that_judged_nothing_has_an_exit_code_and_says_why_each_test_was_skipped(
    light,
):
    (light / "tests/test_net.py").write_text(
        "import sys, pytest\ndef test_it(farm_benchmark):\n"
        "    if '--farm-record' in ' '.join(sys.argv):  # in the process of a side\n"
        "        pytest.skip('the host is busy: another program measures')\n"
        "    farm_benchmark(sorted, [1])\n"
        "def test_that(farm_benchmark):\n    pytest.skip('the card is away')\n"
    )
    git(light, "commit", "-q", "-am", "skips")
    done = compare(light, "main")
    assert (done.returncode, "2 skipped" in done.stdout) == (6, True), done.stdout
    assert "no test was judged, so --farm-require-verdict" in done.stdout
    assert "the card is away" in done.stdout
    assert "skipped at the head: " in done.stdout


@pytest.mark.parametrize(
    "base", ["--upload-pack=touch evil; true", "--output=evil", "+main:main", "a b", "x^{/y}"]
)
def test_a_base_is_never_an_option(light, base):
    done = compare(light, base)
    assert done.returncode == 2, done.stdout
    assert f"The base '{base}'" in done.stdout
    assert "→ Name a" in done.stdout
    assert not list(light.parent.rglob("evil"))


def test_a_base_of_pytest_is_never_an_option_of_git(light):
    (light / "tests/test_net.py").write_text(ASKS_ONLY)
    done = run_pytest(light, "--farm-base=--output=evil")
    assert done.returncode == 4, done.stdout
    assert "the repository has no revision '--output=evil'" in done.stdout
    assert not list(light.parent.rglob("evil"))


@slow.PROCESS
def test_the_name_of_a_test_file_is_never_an_option(light):
    (light / "pyproject.toml").write_text('[tool.pytest.ini_options]\npython_files = ["*.py"]\n')
    (light / "--collect-only.py").write_text(ASKS_ONLY)
    git(light, "add", "--all", "--", ".")
    git(light, "commit", "-q", "-m", "a strange name")
    done = run_pytest(light, "--farm-base", "main", "-rA", "--", "./--collect-only.py")
    assert "1 passed" in done.stdout, done.stdout


@slow.PROCESS
def test_the_summary_of_the_action_has_the_rows_of_the_comparison(compared):
    repository, _ = compared
    summary = (repository.parent / "summary").read_text()
    assert "**1 row failed** (limit 50.0 %)" in summary
    assert summary == (repository / "farm-summary.md").read_text()
    rows = re.findall(r"^\| time of (.+?) \|.*?(fail)?(?:\*\*)? \|$", summary, re.MULTILINE)
    assert dict(rows) == {
        "tests/test_net.py::test_work": "fail",
        "tests/test_net.py::test_model": "",
        "tests/test_net.py::test_twice": "",
        "tests/test_net.py::test_twice 2": "",
    }


@slow.PROCESS
def test_base_and_head_were_measured_alternately_with_their_revisions(compared, monkeypatch):
    repository, _ = compared
    base, head = (git(repository, "rev-parse", one).strip() for one in ("HEAD~1", "HEAD"))
    with open_database(repository.parent / "farm.db").read() as session:
        rows = history(session, "tests/test_net.py::test_work")
        order = session.connection().exec_driver_sql(
            "SELECT version FROM reading JOIN model_variant ON subject_id = model_variant.id"
            " WHERE model = 'tests/test_net.py::test_work' ORDER BY reading.created_at_s"
        )
        assert [base, head, head, base, base, head] == [
            {base[:12]: base, head[:12]: head}[version] for (version,) in order
        ]
    assert [(row.revision, row.dirty, row.readings) for row in rows] == [
        (base, False, 3),
        (head, False, 3),
    ]
    assert rows[0].time_change is None
    assert rows[1].time_change.value > 1


@slow.PROCESS
def test_nothing_of_the_base_is_left(compared):
    repository, _ = compared
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not list((repository.parent / "temporary").glob("farm-*"))
    assert git(repository, "status", "--porcelain") == ""


def test_a_measurement_is_stored_with_the_name_of_its_test_and_the_revision_also_on_a_busy_host(
    repository,
):
    (repository / "src/net.py").write_text(NET + "\n# edited\n")
    tests = (f"tests/test_net.py::{name}" for name in ("test_work", "test_busy"))
    done = run_pytest(repository, "-s", "-rs", *tests)
    assert "1 passed, 1 skipped" in done.stdout, done.stdout
    assert "host is busy: Other programs" in done.stdout
    assert re.search(
        r"<Benchmark tests/test_net\.py::test_work: [\d.]+ ± [\d.]+ µs.*>", done.stdout
    )
    with open_database(repository.parent / "farm.db").read() as session:
        (row,) = history(session, "tests/test_net.py::test_work")
    commit, committed_at_s = git(repository, "log", "-1", "--format=%H %ct").split()
    assert (row.revision, row.committed_at_s, row.dirty) == (
        commit,
        float(committed_at_s),
        True,
    )


@slow.PROCESS
def test_an_interruption_removes_the_worktree(repository):
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "--farm-base", "main", "tests"]
    with subprocess.Popen(
        command,
        cwd=repository,
        env=environment(repository.parent),
        stdout=-1,
        stderr=-2,
        text=True,
        # A test run in the background of a script ignores this signal, and so would its children.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as session:
        while not session.stdout.readline().startswith("farm: round 1"):
            assert session.poll() is None
        while not list((repository.parent / "temporary").glob("farm-round-*/record")):
            assert session.poll() is None
            time.sleep(0.01)
        assert len(git(repository, "worktree", "list").splitlines()) == 2
        session.send_signal(signal.SIGINT)
        said, _ = session.communicate(timeout=120)
    assert session.returncode in (2, -signal.SIGINT), said
    assert "KeyboardInterrupt" in said
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not list((repository.parent / "temporary").glob("farm-*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--farm-base", "v9"), "the repository has no revision 'v9'"),
        (("--farm-base", "main", "--farm-rounds", "2"), "--farm-rounds is 2"),
    ],
)
def test_a_wrong_option_ends_the_session_with_its_reason(repository, arguments, told):
    (repository / "tests/test_net.py").write_text(ASKS_ONLY)
    done = run_pytest(repository, *arguments)
    assert (done.returncode, "Traceback" in done.stdout) == (4, False), done.stdout
    assert told in done.stdout


def test_a_base_needs_a_git_repository(tmp_path):
    repository = make_repository(tmp_path / "repository")
    (repository / "tests/test_net.py").write_text(ASKS_ONLY)
    (repository / ".git").rename(tmp_path / "git")
    done = run_pytest(repository, "--farm-base", "main")
    assert (done.returncode, "Traceback" in done.stdout) == (4, False), done.stdout
    assert "not a git repository" in done.stdout


@slow.PROCESS
def test_a_base_that_imports_the_code_of_the_head_is_refused(repository):
    """For example if a test puts a fixed folder of its author before the repository's own."""
    conftest = f"import sys\nsys.path.insert(0, {str(repository / 'src')!r})\n{CONFTEST}"
    (repository / "tests/conftest.py").write_text(conftest)
    git(repository, "commit", "-q", "-am", "fixed folder")
    done = run_pytest(repository, "--farm-base", "main", "tests/test_net.py::test_model")
    assert done.returncode == 4, done.stdout
    assert f"The base imports {repository / 'src/net.py'} of the head" in done.stdout


def test_the_plugin_loads_by_its_entry_point_and_imports_nothing_heavy(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugins = project["entry-points"]["pytest11"]
    metadata = tmp_path / "installed/plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    lines = ["[pytest11]", *(f"{name} = {target}" for name, target in plugins.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it(request):\n"
        "    assert request.config.pluginmanager.hasplugin('farm.api.pytest_plugin')\n"
        "    heavy = {'torch', 'sqlalchemy', 'sqlmodel', 'celery', 'pydantic', 'numpy'}\n"
        "    assert not heavy.intersection(sys.modules)\n"
    )
    variables = {
        **environment(tmp_path),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'installed'}",
    }
    command = [sys.executable, "-m", "pytest", "test_it.py", "-p", PLUGIN, "-p", "no:cacheprovider"]
    for autoload in ("1", ""):  # by -p, and by the entry point and -p
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = autoload
        options = (
            command
            if autoload
            else [*command[:4], *command[6:], "-p", "no:hypothesispytest", "-p", "no:anyio"]
        )
        done = subprocess.run(
            options, cwd=tmp_path, env=variables, stdout=-1, stderr=-2, text=True, timeout=120
        )
        assert "1 passed" in done.stdout, done.stdout


def test_the_revision_is_that_of_the_repository_unless_git_ignores_the_file(repository):
    commit, committed_at_s = git(repository, "log", "-1", "--format=%H %ct").split()
    file = repository / "src/net.py"
    assert revision_of(file) == f"{commit} {committed_at_s} clean"
    (repository / "untracked.py").write_text("")
    assert revision_of(repository / "untracked.py") == f"{commit} {committed_at_s} clean"
    file.write_text("")
    assert revision_of(file) == f"{commit} {committed_at_s} dirty"
    (repository / "farm-cache").mkdir()
    (repository / "farm-cache/it.py").write_text("")
    assert revision_of(repository / "farm-cache/it.py") is None
    assert revision_of(Path("/proc/self/status")) is None
