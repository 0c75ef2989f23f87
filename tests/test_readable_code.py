"""Rules for code that reads easily, and the exceptions that each file still has.

The exceptions are in `readable_code.json`: file -> rule -> number. A number may only shrink, and a file that is not
listed has no exceptions. `--regenerate-golden` writes the present numbers; it fails if the total of a rule has grown.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).parent / "readable_code.json"
PACKAGES = ("farm", "tasks", "cli")
COLUMNS = 100
#: Words that say nothing about what they name. Use the noun of the field: reading, card, matches.
PRONOUNS = frozenset(
    "one found its there about own known given wanted taken held which".split()  # noqa: SIM905
)
#: The codec modules: they convert records from and to JSON, field by field.
CODECS = ("farm/types/fields.py",)

LONG_LINE = f"lines with more than {COLUMNS} columns"
NESTED = "comprehensions with two loops"
PRONOUN = "pronouns as names"
PARAMETER = "pronouns as parameters"
BROKEN = "expressions that a comment breaks into lines"
GETATTR = "getattr with a variable"
CONDITIONS = "statements with two conditional expressions"

#: A closing bracket with a comment. Above the expression, the comment leaves it on one line.
ENDS_BROKEN = re.compile(r"\s*[\])}]+[,:]?  #(?! type:| noqa)")

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def exceptions(path: Path) -> Counter[str]:
    """Count the exceptions of a file by rule."""
    text = path.read_text()
    counts: Counter[str] = Counter()
    lines = text.splitlines()
    counts[LONG_LINE] = sum(len(line) > COLUMNS for line in lines)
    counts[BROKEN] = sum(ENDS_BROKEN.match(line) is not None for line in lines)

    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            counts[NESTED] += len(node.generators) > 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counts[PRONOUN] += node.id in PRONOUNS
        elif isinstance(node, ast.arg):
            counts[PARAMETER] += node.arg in PRONOUNS
        elif isinstance(node, ast.Call) and name_of(path) not in CODECS:
            counts[GETATTR] += reads_a_variable_field(node)

    for expressions in expressions_of_statements(tree):
        counts[CONDITIONS] += expressions > 1
    return +counts


def reads_a_variable_field(call: ast.Call) -> bool:
    """True for `getattr(record, name)`, which no search and no type checker finds."""
    if not isinstance(call.func, ast.Name) or call.func.id != "getattr" or len(call.args) < 2:
        return False
    return not isinstance(call.args[1], ast.Constant)


def expressions_of_statements(tree: ast.AST) -> Iterator[int]:
    """Yield the number of conditional expressions of each statement, without those of its body."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.stmt):
            yield conditional_expressions(statement)


def conditional_expressions(node: ast.AST) -> int:
    total = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        total += isinstance(child, ast.IfExp) + conditional_expressions(child)
    return total


def totals(stored: dict[str, dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for counts in stored.values():
        total.update(counts)
    return total


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest) -> dict[str, dict[str, int]]:
    listed: dict[str, dict[str, int]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    if not request.config.getoption("--regenerate-golden"):
        return listed

    present = {name_of(path): dict(sorted(exceptions(path).items())) for path in files()}
    present = {name: counts for name, counts in present.items() if counts}
    if listed:
        grown = totals(present) - totals(listed)
        assert not grown, "the exceptions may only shrink"
    FILE.write_text(json.dumps(present, indent=1) + "\n")
    return present


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_has_no_more_exceptions_than_are_listed(package, stored):
    grown = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        more = exceptions(path) - Counter(stored.get(name_of(path), {}))
        if more:
            grown[name_of(path)] = dict(more)
    assert not grown


def test_the_list_names_no_file_that_is_gone(stored):
    present = {name_of(path) for path in files()}
    assert set(stored) <= present


def test_a_name_stands_for_one_class():
    """Who searches for a class of another file finds one. Private classes (`_Point`) are of one file."""
    files_of_class = defaultdict(list)
    for path in files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files_of_class[node.name].append(name_of(path))
    assert not {name: paths for name, paths in files_of_class.items() if len(paths) > 1}
