"""Count the arrows between the rooms of the project, and list the names that cross them.

A room is a package: `cli`, `tasks`, `farm/<package>`, `farm/addons/<package>`, and each single module
directly under `farm`. An arrow A -> B means that some file of A imports a name of B, at load time or
inside a function. Imports for type checking only do not count. The arrows show how much a reader has to
know before reading a room; `tests/test_imports.py` limits their number.

    python benchmarks/arrows.py              # number of arrows; how many rooms each room imports
    python benchmarks/arrows.py cli          # each arrow out of a room, with its names and files
    python benchmarks/arrows.py --cheap 2    # arrows that at most two names cross
"""

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("farm", "tasks", "cli")


@dataclass(frozen=True)
class Crossing:
    """One name that a file imports from another room."""

    source: str  # the room that imports
    target: str  # the room of the name
    name: str  # such as `types.format.percent`
    file: str  # such as `cli/jobs.py`


def room_of(module: str) -> str:
    """Return the room of a module: `farm.addons.memory.plan` -> `addons.memory`, `cli.main` -> `cli`."""
    parts = module.split(".")
    if parts[0] != "farm":
        return parts[0]
    if len(parts) == 1:
        return "farm"
    if parts[1] == "addons" and len(parts) > 2:
        return f"addons.{parts[2]}"
    return parts[1]


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the full name of each import below a node, except those for type checking only."""
    for statement in ast.iter_child_nodes(node):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield f"{statement.module}.{alias.name}"
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        elif isinstance(statement, ast.stmt | ast.excepthandler | ast.match_case):
            yield from imported_names(statement)


def names_used(tree: ast.Module, module: str) -> set[str]:
    """Return the attributes that a file uses of a module that it imports as a whole."""
    last = module.rpartition(".")[2]
    used = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id == last:
            used.add(node.attr)
    return used


def files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def crossings() -> list[Crossing]:
    """Return every name that crosses from one room into another."""
    paths = files()
    modules = {module_of(path) for path in paths}
    rows = []
    for path in paths:
        source = room_of(module_of(path))
        tree = ast.parse(path.read_text())
        for name in imported_names(tree):
            if name.partition(".")[0] not in PACKAGES:
                continue
            target = room_of(name) if name in modules else room_of(name.rpartition(".")[0])
            if target == source:
                continue
            file = str(path.relative_to(ROOT))
            short = name.removeprefix("farm.")
            if name not in modules:
                rows.append(Crossing(source, target, short, file))
                continue
            for attribute in sorted(names_used(tree, name)) or ["*"]:
                rows.append(Crossing(source, target, f"{short}.{attribute}", file))
    return rows


def by_arrow(rows: list[Crossing]) -> dict[tuple[str, str], list[Crossing]]:
    arrows = defaultdict(list)
    for row in rows:
        arrows[row.source, row.target].append(row)
    return dict(arrows)


def print_totals(arrows: dict[tuple[str, str], list[Crossing]]) -> None:
    rooms = {room_of(module_of(path)) for path in files()} - {"addons"}
    possible = len(rooms) * (len(rooms) - 1) // 2
    print(f"{len(arrows)} arrows between {len(rooms)} rooms ({possible} possible in one direction)")
    outgoing = Counter(source for source, _ in arrows)
    incoming = Counter(target for _, target in arrows)
    for room in sorted(rooms, key=lambda name: -outgoing[name]):
        print(f"  {room:20} imports {outgoing[room]:2}, imported by {incoming[room]:2}")


def print_arrow(source: str, target: str, rows: list[Crossing]) -> None:
    files = {row.file for row in rows}
    print(f"{source} -> {target}: {len({row.name for row in rows})} names, {len(files)} files")
    users = defaultdict(set)
    for row in rows:
        users[row.name].add(row.file.rpartition("/")[2])
    for name, names in sorted(users.items()):
        print(f"    {name}  ({', '.join(sorted(names))})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("room", nargs="?", help="list the arrows out of this room")
    parser.add_argument("--cheap", type=int, help="list arrows that at most so many names cross")
    options = parser.parse_args()
    arrows = by_arrow(crossings())
    if options.room is None and options.cheap is None:
        print_totals(arrows)
        return
    for (source, target), rows in sorted(arrows.items()):
        names = {row.name for row in rows}
        if options.room not in (None, source):
            continue
        if options.cheap is not None and len(names) > options.cheap:
            continue
        print_arrow(source, target, rows)


if __name__ == "__main__":
    main()
