"""Running the command line inside the test's process."""

from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from cli.main import app


@dataclass
class Said:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def farm():
    """Run ``farm ...``; returns its exit code and what it said."""

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Said(result.exit_code, result.stdout, result.stderr)

    return run
