"""The tutorial's commands run in their order, and their output is compared with the page.

FARM_SLOW_TESTS=1 runs the test. `--regenerate-golden` then writes the output into the page.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from farm.exchange.packaged import FOLDER

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```console\nfarm (.+)\n```\n\n```text\n((?:.*\n)*?)```$", re.MULTILINE)
_TIME = re.compile(r"<?\d+(?:\.\d+)? (?:years?|months?|weeks?|days?|d|h|min|s)\b")
_COUNT = re.compile(r"\d+ more: -n \d+")  # every package has more readings
_PROGRESS = re.compile(r"^farm .+ is working.*\n", re.MULTILINE)
_HEAD = re.compile(
    r"^ +accuracy +accuracy *$|^job +title .*$", re.MULTILINE
)  # of the table with the reader's own job
_OWN = "alexnet"  # measured by the reader: different figures on every machine


@pytest.fixture(autouse=True)
def terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def words(printed: str) -> Counter[str]:
    """Count the words of an output, without ages, numbers of further rows and the own job; whatever
    the line breaks.
    """
    lines = [line for line in _HEAD.sub("", shown(printed)).splitlines() if _OWN not in line]
    return Counter(
        word for word in _COUNT.sub("", _TIME.sub("", "\n".join(lines))).split() if word.strip("─")
    )


def shown(printed: str) -> str:
    """The output without notes of progress, which depend on the machine's speed, and without this
    machine's paths.
    """
    return _PROGRESS.sub("", printed).replace(str(FOLDER), "farm/data").rstrip()


@pytest.mark.slow(
    reason="it captures and measures models, and publishes the pages of the packaged readings"
)
def test_followed_word_by_word(request):
    anew = request.config.getoption("--regenerate-golden")

    def farm(command: str) -> str:
        measures = command.startswith("run ")
        # Measure like a reader if the page is written; otherwise precision does not matter.
        quickly = ["--quick", "--window", "0.1"] if measures and not anew else []
        said = CliRunner().invoke(app, [*shlex.split(command), *quickly])
        assert said.exit_code == 0, said.output
        return said.stdout if measures or "--json" in command else said.output

    written = PAGE.read_text()
    for command, printed in BLOCK.findall(written):
        if "JOB" in command:
            (job,) = [
                job["id"]
                for job in json.loads(farm("jobs --json"))["jobs"]
                if job["title"].startswith(_OWN)
            ]
            said = farm(command.replace("JOB", job))
        else:
            said = farm(command)
        if anew:
            lines = [line.rstrip() for line in shown(said).splitlines()]
            block = f"```console\nfarm {command}\n```\n\n```text\n"
            written = written.replace(f"{block}{printed}```", block + "\n".join(lines) + "\n```")
        elif command.startswith("operators "):
            assert "Conv2d" in said
        elif _OWN not in command and "JOB" not in command:
            assert not words(printed) - words(said), command
    assert Path("resnet18.html").stat().st_size > 1e6
    assert Path("site/index.html").exists()
    if anew:
        PAGE.write_text(written)
