"""Decisions by kind stand with the kinds, and in the places that are listed here with a reason.

A decision compares a kind (of a subject, an operator tuple, a card or a job) with a constant: in Python or in
SQL, as ``kind == "kernel"``, ``kind in ("module", "aten")``, ``kind.in_([...])`` or ``match kind``. Ask the
kind instead: `farm.subjects.base.Kind`, `farm.benchmark.subjects.base.SubjectKind`,
`farm.types.card_kind.OfCardKind`, `farm.requests.partial_request.Defaults`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("farm", "tasks", "cli")
NAMES = frozenset({"kind", "subject_kind", "card_kind"})
#: Where the kinds are: decisions stand here. `farm/models/` has the kinds of architectures.
HOMES = (
    "farm/subjects/",
    "farm/benchmark/subjects/",
    "farm/devices/",
    "farm/models/",
    "farm/types/card_kind.py",
)
MOST = 20

#: file -> the number of its decisions, and why they cannot ask the kind.
EXCEPTIONS = {
    "cli/lists.py": (1, "the noun for a row of plain values"),
    "farm/addons/check/card_check.py": (
        1,
        "the conditions of SQL: a check is a job without a model",
    ),
    "farm/addons/memory/slow_costs.py": (1, "only an overload of aten has a schema of its writes"),
    "farm/addons/predict/call_features.py": (1, "reads the JSON of a tuple, which may be foreign"),
    "farm/addons/predict/compiled_predictor.py": (1, "the conditions of SQL: calls of libraries"),
    "farm/addons/predict/kernel_rules.py": (1, "reads the JSON of a tuple, which may be foreign"),
    "farm/exchange/import_rows.py": (2, "checks a foreign row before it is a record"),
    "farm/jobs/card_checks.py": (1, "the conditions of SQL: a check is a job without a model"),
    "farm/jobs/items.py": (1, "a row of SQL: which subject to build"),
    "farm/report/lookup.py": (1, "which table has the name of a reading's subject"),
    "farm/store/columns.py": (4, "the conditions of SQL that others use"),
    "farm/store/query.py": (1, "which subjects a query selects"),
    "farm/types/data_sheets.py": (1, "the sheet of a CPU is not found by its model"),
    "farm/types/subject.py": (1, "`Subject.whole`"),
    "farm/types/request.py": (1, "`OfJobKind.is_sweep`"),
    "farm/types/tuple.py": (1, "`NeededTuple.is_kernel`, of JSON that may be foreign"),
}


def is_kind(node: ast.expr) -> bool:
    """True for ``kind``, ``spec.kind``, ``row["kind"]`` and ``spec.get("kind")``."""
    if isinstance(node, ast.Name):
        return node.id in NAMES
    if isinstance(node, ast.Attribute):
        is_of_numpy = isinstance(node.value, ast.Attribute) and node.value.attr == "dtype"
        return node.attr in NAMES and not is_of_numpy
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in NAMES
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_get = node.func.attr == "get" and bool(node.args)
        return is_get and isinstance(node.args[0], ast.Constant) and node.args[0].value in NAMES
    return False


def has_text(node: ast.expr) -> bool:
    constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return any(isinstance(value, str) for value in constants)


def decisions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            others = [side for side in sides if not is_kind(side)]
            if len(others) < len(sides) and any(map(has_text, others)):
                yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_membership = node.func.attr in ("in_", "not_in") and is_kind(node.func.value)
            if is_membership and any(map(has_text, node.args)):
                yield node
        elif isinstance(node, ast.Match) and is_kind(node.subject):
            yield node


def found() -> Counter[str]:
    numbers: Counter[str] = Counter()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(HOMES) or "/migrations/" in name:
                continue
            numbers[name] = len(list(decisions(ast.parse(path.read_text()))))
    return +numbers


def test_a_decision_by_kind_stands_with_the_kinds_or_has_a_reason() -> None:
    assert dict(found()) == {name: number for name, (number, _) in EXCEPTIONS.items()}
    assert sum(number for number, _ in EXCEPTIONS.values()) <= MOST


def test_each_form_of_a_decision_is_found() -> None:
    text = """
spec.kind == "kernel"
"cpu" != card.kind
kind in ("module", "aten")
row["subject_kind"] == "variant"
spec.get("kind") == "module"
OPERATOR.kind.in_(["collective"])
match kind:
    case "module":
        pass
kind is None
vendor.kind == kind
OPERATOR.kind.in_(kinds_on_several_cards())
"""
    assert len(list(decisions(ast.parse(text)))) == 7
