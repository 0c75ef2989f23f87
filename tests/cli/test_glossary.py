"""What the words of reports mean can be asked for."""

import re
from pathlib import Path

from cli.glossary import entries
from farm.errors import Unmeasurable
from farm.store.tables import CardState

ROOT = Path(__file__).parent.parent.parent


def test_every_flag_reason_state_and_label_of_a_report_has_an_entry():
    flags = re.search(r"^## Flags\n(.*?)^## ", (ROOT / "docs" / "method.md").read_text(), re.MULTILINE | re.DOTALL)
    wanted = {*re.findall(r"^\| `(\w+)`", flags[1], re.MULTILINE), *Unmeasurable.REASONS, *CardState}
    report = (ROOT / "tests" / "report" / "golden" / "model.txt").read_text()
    wanted |= set(re.findall(r"^  ([a-z][a-z ]*?) {2,}", report, re.MULTILINE))
    remarks = (ROOT / "farm" / "report" / "report.py").read_text()
    wanted |= set(re.findall(r'yield "([a-z ]+)"', remarks))  # the golden report has not all of them
    assert {"coverage", "in model", "eagerly", "flags", "unsettled"} <= wanted
    assert not wanted - set(entries())


def test_a_word_is_explained_and_one_that_is_not_there_is_answered_with_the_nearest(farm):
    said = farm("help", "in", "model")
    assert said.stdout.splitlines()[0] == "in model"
    assert "the time of the calls inside the running model" in said.stdout
    assert "a 95 % interval" in farm("help", "INTERVALS").stdout
    assert len(farm("help", "pass").stdout.splitlines()) == 4, "it means two things"
    assert "accuracy" in farm("help").stdout
    assert farm("help", "zeros-50+c90").stdout.splitlines()[0] == "class of data"
    said = farm("help", "acuracy")
    assert (said.code, said.stdout) == (2, "")
    assert "Did you mean accuracy?" in said.stderr
    assert "`farm run -h` describes the command" in farm("help", "run").stderr


def test_a_report_names_the_glossary():
    assert "`farm help WORD`" in (ROOT / "tests" / "report" / "golden" / "model.txt").read_text()
