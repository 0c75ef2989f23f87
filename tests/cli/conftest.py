"""Running the command line inside the test's process."""

import json
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from cli import output
from cli.main import app
from farm.settings import settings


@dataclass
class Said:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def farm(monkeypatch):
    """Run ``farm ...``; returns its exit code and what it said."""
    monkeypatch.setattr(output, "PATIENCE_S", 60.0)  # a loaded machine says nothing more

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return Said(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def examined(farm):
    """Run ``farm doctor``; returns its checks. The exit code must match them."""

    def examine():
        settings.cache_clear()
        said = farm("doctor", "--json")
        found = json.loads(said.stdout)
        assert said.code == (1 if found["counts"]["problem"] else 0)
        return found["checks"]

    return examine
