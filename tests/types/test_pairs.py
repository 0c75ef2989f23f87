"""A value and its half-width are one `Figure`, except in tables and records of files."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fields_of(node: ast.ClassDef) -> set[str]:
    return {
        entry.target.id
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    }


def pairs_in(fields: set[str]) -> list[tuple[str, str]]:
    """Pairs such as ``time_us`` and ``time_half_width_us``, or ``effect_us`` and
    ``half_width_us``.
    """
    pairs = []
    for name in fields:
        before, found, unit = name.partition("half_width")
        if not found:
            continue
        values = {field for field in fields if "half_width" not in field}
        if before:
            values &= {f"{before.rstrip('_')}{unit}"}
        elif unit:
            values = {field for field in values if field.endswith(unit)}
        else:
            values &= {"value"}
        pairs += [(value, name) for value in values]
    return pairs


def test_pairs_are_recognized():
    assert pairs_in({"time_us", "time_half_width_us"}) == [("time_us", "time_half_width_us")]
    assert pairs_in({"effect_us", "half_width_us"}) == [("effect_us", "half_width_us")]
    assert pairs_in({"layouts_half_width_us", "looped_us"}) == []


def test_no_class_has_a_value_and_its_half_width_apart():
    allowed = {
        "Figure",  # the pair itself
        "MeasuredConstant",  # a row of measured_constants.toml
    }
    found = []
    for room in ("farm", "tasks", "cli"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and node.name not in allowed:
                    found += [(path.name, node.name, pair) for pair in pairs_in(fields_of(node))]
    assert found == []
