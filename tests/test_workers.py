"""The distribution of the tests over the workers of pytest-xdist."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests import forked
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


def test_a_worker_is_a_fork_of_the_process_that_imported_the_tests():
    if sys.platform != "linux" or "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("workers are forked on Linux")
    assert forked.__file__ in psutil.Process().parent().cmdline()
