"""The distribution of the tests over the workers of pytest-xdist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import slow, workers
from tests.workers import BUSY, ROWS

TESTS = Path(__file__).parent


def test_every_file_whose_tests_start_farms_is_in_a_row():
    def starts_farms(file):
        return re.search(
            r"\b(one_card|two_cards)\.whole\(|tests\.farms import .*\b(running|Farm)\b",
            file.read_text(),
        )

    named = [file for row in (*ROWS, *BUSY) for file in row]
    assert len(named) == len(set(named))
    assert [file for file in named if not (TESTS / file).is_file()] == []
    assert {
        str(file.relative_to(TESTS)) for file in TESTS.glob("*/test_*.py") if starts_farms(file)
    } <= {file for row in ROWS for file in row}


def test_the_reasons_of_slow_tests_stand_in_one_file():
    pattern = re.compile(r"\bmark\.slow\b")
    marking = [file.name for file in TESTS.rglob("*.py") if pattern.search(file.read_text())]
    assert marking == ["slow.py"]


@pytest.mark.parametrize(
    ("marks", "runs"),
    [
        ((), ["", "ci", "1"]),
        ((slow.FAULT,), ["ci", "1"]),
        ((slow.ALIKE,), ["1"]),
        ((slow.FAULT, slow.ALIKE), ["1"]),
    ],
)
def test_slow_tests_run_before_a_release_and_some_for_each_change(request, marks, runs):
    for mark in marks:
        request.node.add_marker(mark)
    assert [one for one in ("", "ci", "1") if not slow.is_left_out(request.node, one)] == runs


def test_a_worker_is_a_fork_of_the_process_that_imported_the_tests():
    if sys.platform != "linux" or "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("workers are forked on Linux")
    assert workers.__file__ in psutil.Process().parent().cmdline()


@slow.PROCESS
def test_a_file_that_cannot_be_imported_is_an_error(tmp_path):
    package = tmp_path / "some_tests"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "test_broken.py").write_text("import a_module_that_is_not_there\n")
    (package / "test_sound.py").write_text("def test_sound(): pass\n")
    options = ["-p", "tests.conftest", "-c", "pyproject.toml", "-n", "1"]
    command = [sys.executable, "-m", "pytest", *options, str(package)]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    ended = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "a_module_that_is_not_there" in ended.stdout
