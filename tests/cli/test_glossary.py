"""What the words of reports mean can be asked for."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.glossary import entries, find
from farm.errors import Unmeasurable
from farm.store.tables import CardState

ROOT = Path(__file__).parent.parent.parent


def test_every_flag_reason_state_and_label_of_a_report_has_an_entry():
    flags = re.search(
        r"^## Flags\n(.*?)^## ", (ROOT / "docs" / "method.md").read_text(), re.MULTILINE | re.DOTALL
    )
    wanted = {
        *re.findall(r"^\| `(\w+)`", flags[1], re.MULTILINE),
        *Unmeasurable.REASONS,
        *CardState,
    }
    report = (ROOT / "tests" / "report" / "golden" / "model.txt").read_text()
    wanted |= set(re.findall(r"^  ([a-z][a-z ]*?) {2,}", report, re.MULTILINE))
    remarks = (ROOT / "farm" / "report" / "remarks.txt").read_text()
    topics = re.findall(r"{% block ([a-z_]+) %}", remarks)  # the golden report has not all of them
    wanted |= {topic.replace("_", " ") for topic in topics}
    assert {"coverage", "in model", "eagerly", "flags", "unsettled"} <= wanted
    assert not wanted - set(entries())


def heads_of_tables(module: Path) -> Iterator[str]:
    """The heads of columns and the labels of rows in a module with tables, as far as they are
    constants.
    """
    for node in ast.walk(ast.parse(module.read_text())):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if name in ("filled", "ruled"):
            yield from texts(node.args[name == "filled"], columns=name == "filled")
        elif name == "row" and len(node.args) > 2:
            yield from texts(node.args[1])
        elif isinstance(node, ast.Assign) and re.fullmatch(
            r"heads|columns|lines", ast.unparse(node.targets[0])
        ):
            yield from texts(
                node.value, columns=not ast.unparse(node.targets[0]).startswith("heads")
            )


def texts(node, *, columns=False) -> Iterator[str]:
    """The constant texts of a list of heads, also those in an f-string; of `columns` the first one
    of each tuple.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Dict):
        yield from (text for key in node.keys for text in texts(key))
    else:
        several = [*getattr(node, "values", ()), *getattr(node, "elts", ())]
        several = several[:1] if columns and isinstance(node, ast.Tuple) else several
        for one in [
            *several,
            *(getattr(node, name) for name in ("value", "body", "orelse") if hasattr(node, name)),
        ]:
            if isinstance(one, ast.AST):
                yield from texts(one, columns=columns)


def heads_of_pages() -> Iterator[str]:
    for template in (ROOT / "farm" / "addons" / "pages" / "templates").glob("*.html"):
        text = template.read_text()
        yield from re.findall(r"""(?:head|line)\("([^"]+)\"""", text)
        found = re.findall(r"<(?:th|dt)\b[^>]*>(.*?)</(?:th|dt)>", text)
        yield from (re.sub(r"{{.*?}}|{%.*?%}|<.*?>", "", one) for one in found)


TABLES = (
    "cli/report_tables.py",
    "cli/lists.py",
    "farm/addons/memory/tables.py",
    "farm/addons/predict/tables.py",
)


@pytest.mark.parametrize("name", [*TABLES, "pages"])
def test_every_head_of_a_table_is_explained(name):
    heads = list(heads_of_pages() if name == "pages" else heads_of_tables(ROOT / name))
    assert len(heads) > 20
    unexplained = {text: words for text in heads if (words := find(text)[1])}
    assert not unexplained


def test_a_word_is_explained_and_one_that_is_not_there_is_answered_with_the_nearest(farm):
    said = farm("help", "in", "model")
    assert said.stdout.splitlines()[0] == "in model"
    assert "the calls inside the running model" in said.stdout
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
