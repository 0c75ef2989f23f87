"""Pages show what commands print: the commands run in their order, and their output is compared.

A page shows it as a fence `console` with one command, and a fence `text` after it. A line `...` at
the end stands for the rest of the output. FARM_SLOW_TESTS=1 runs the test, `--regenerate-golden`
then writes the output into the pages.
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
from tests import slow
from tests.cli.test_documented_commands import PAGES, Block, blocks, name_of, write_module

SHOWING = [page for page in PAGES if any(block.shown for block in blocks(page))]
_TIME = re.compile(r"<?\d+(?:\.\d+)? (?:years?|months?|weeks?|days?|d|h|min|s)\b")
_COUNT = re.compile(r"\d+ more: -n \d+")  # every package has more readings
_PROGRESS = re.compile(r"^farm .+ is (?:\w+ing)\b.*\n", re.MULTILINE)
_REST = "...\n"  # the end of an output that is shown in part
_OWN = "alexnet"  # measured by the reader: different figures on every machine


@pytest.fixture(autouse=True)
def terminal(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def words(printed: str) -> Counter[str]:
    """Count the words of an output, without ages and numbers of further rows; whatever the line
    breaks.
    """
    text = _COUNT.sub("", _TIME.sub("", shown(printed)))
    return Counter(word for word in text.split() if word.strip("─"))


def shown(printed: str) -> str:
    """The output without notes of progress, which depend on the machine's speed, and without this
    machine's paths.
    """
    return _PROGRESS.sub("", printed).replace(str(FOLDER), "farm/data").rstrip()


def farm(command: str, *, precise: bool) -> tuple[str, str]:
    """Run a command. Measure like a reader if `precise`, otherwise for a short time.

    Returns:
        the result, and what a page shows: with notes, unless they are those of a measurement.
    """
    measures = command.startswith("run ")
    quickly = ["--quick", "--window", "0.1"] if measures and not precise else []
    said = CliRunner().invoke(app, [*shlex.split(command), *quickly])
    assert said.exit_code == 0, said.output
    return said.stdout, said.stdout if measures or "--json" in command else said.output


def own_job() -> str:
    (job,) = [
        job["id"]
        for job in json.loads(farm("jobs --json", precise=False)[0])["jobs"]
        if job["title"].startswith(_OWN)
    ]
    return job


def rewritten(page: str, block: Block, printed: str) -> str:
    """The page with the present output of a block, of which it shows as many lines as before."""
    lines = [line.rstrip() for line in shown(printed).splitlines()]
    if block.shown.endswith(_REST):
        lines = [*lines[: block.shown.count("\n") - 1], _REST.rstrip()]
    head = f"```console\n{block.text}```\n\n```text\n"
    return page.replace(f"{head}{block.shown}```", head + "\n".join(lines) + "\n```")


@slow.MEASURED
@pytest.mark.parametrize("page", SHOWING, ids=name_of)
def test_commands_print_what_the_page_shows(page: Path, request, tmp_path, monkeypatch):
    anew = request.config.getoption("--regenerate-golden")
    for block in blocks(page):
        if block.file:
            write_module(block, tmp_path, monkeypatch)
        if not block.shown or block.needs:
            continue
        command = block.text.strip().removeprefix("farm ")
        own = _OWN in command or "JOB" in command
        result, printed = farm(
            command.replace("JOB", own_job()) if "JOB" in command else command, precise=anew
        )
        if anew:
            page.write_text(rewritten(page.read_text(), block, printed))
        elif not command.startswith("run ") and not own:
            expected = words(block.shown.removesuffix(_REST))
            assert not expected - words(printed), command
            if not block.shown.endswith(_REST):
                assert not words(result) - expected, f"{command} prints more than the page shows"
