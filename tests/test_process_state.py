"""The state of a process: global objects of modules that change while the program runs.

A global name of a module changes if a function of the project binds it anew, or changes the object
behind it: assigns to an item or an attribute, deletes one, or calls a method that changes a
container. So does a class whose attributes a function assigns. An object of a class of the project
that is made at load time, and is not frozen, is counted like a container.

Not counted are

- results of `functools.cache` and `functools.lru_cache`, and the caches of `CACHES`: the program
  does the same if they are empty;
- what changes only while its module is loaded (`FILLED_AT_LOAD`);
- locks, and objects of other packages (`os.environ`, `sys.modules`).

All others are in the table of docs/design/process-state.md, with the reason."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("farm", "tasks", "cli")
#: The number of changing objects may only shrink.
MOST = 5
#: Caches of pure functions that have a key of their own, or forget old entries by a rule.
CACHES = {
    "farm.benchmark.subjects.compiled_model._compiled",  # the compiled variant of the last item
    # the built variant of the last verification: the same seed builds it again
    "farm.benchmark.subjects.model_variant._handed_over",
    "farm.models.catalog.SOURCES",  # how a user's model arrives, for its present function
    "farm.operators.self_check._traces",
    "farm.training.extract._kept",
}
FILLED_AT_LOAD = {"farm.subjects.registry._KINDS"}
#: Methods that change a container.
CHANGING = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "set",
        "setdefault",
        "sort",
        "update",
    ]
)
#: Makers of objects of the standard library that change.
STATEFUL = frozenset(("count", "cycle", "local", "ContextVar", "Event", "Queue", "SimpleQueue"))


def names_of_modules():
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    for path in paths:
        dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield dotted.removesuffix(".__init__"), ast.parse(path.read_text())


MODULES = dict(names_of_modules())


def statements(body):
    """Yield the statements that run while a module is loaded, also those in `if` and `try`."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                yield from statements(getattr(statement, part, []))


def global_values(tree):
    """Name -> the expression of each name that a module assigns."""
    values = {}
    for statement in statements(tree.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            values[statement.target.id] = statement.value
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        values[node.id] = statement.value
    return values


VALUES = {module: global_values(tree) for module, tree in MODULES.items()}


def homes(module):
    """Local name of a module -> the full name of the object or class of the project that it
    means."""
    names = {name: f"{module}.{name}" for name in VALUES[module]}
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.ClassDef):
            names[node.name] = f"{module}.{node.name}"
    return names


OBJECTS = {f"{module}.{name}" for module, values in VALUES.items() for name in values}
CLASSES = {
    f"{module}.{node.name}": node
    for module, tree in MODULES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]


def own_names(function):
    """The parameters and the local variables of a function and of those inside it."""
    declared, local = set(), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            declared.update(node.names)
        elif isinstance(node, ast.arg):
            local.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
    return local - declared


def changed_names(function):
    """Yield the name at the root of each object that a function changes."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield root_of(node)
        elif isinstance(node, ast.Call) and calls_a_change(node.func):
            yield root_of(node.func)


def calls_a_change(called):
    return isinstance(called, ast.Attribute) and called.attr in CHANGING


def root_of(node):
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def changed_by_functions():
    changed = set()
    for module, tree in MODULES.items():
        meaning = homes(module)
        for function in functions(tree):
            names = set(changed_names(function)) - own_names(function)
            changed |= {meaning[name] for name in names if name in meaning}
    return changed & (OBJECTS | CLASSES.keys())


def changes_itself(node):
    methods = [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]
    later = [method for method in methods if method.name not in ("__init__", "__new__")]
    return any("self" in set(changed_names(method)) for method in later)


def made_at_load():
    """The global objects of classes that change, and those of the standard library."""
    changing = {name for name, node in CLASSES.items() if changes_itself(node)}
    found = set()
    for module, values in VALUES.items():
        meaning = homes(module)
        for name, value in values.items():
            makers = called(value) if value is not None else set()
            if makers & STATEFUL or changing & {meaning.get(maker) for maker in makers}:
                found.add(f"{module}.{name}")
    return found


def called(expression):
    """The last names of what an expression calls while it is evaluated."""
    names = set()
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            names.add(node.func.id if isinstance(node.func, ast.Name) else node.func.attr)
    return names


@pytest.fixture(scope="module")
def changing():
    return (changed_by_functions() | made_at_load()) - CACHES - FILLED_AT_LOAD


def described():
    """The names of the first column of the table."""
    text = (ROOT / "docs" / "design" / "process-state.md").read_text()
    section = text.partition("# State of a process")[2]
    return {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in quoted(row)}


def quoted(text):
    return re.findall(r"`([\w.]+)`", text)


def test_every_object_that_changes_is_described_with_its_reason(changing):
    assert changing - described() == set()


def test_the_table_describes_no_object_that_is_gone(changing):
    assert described() - changing == set()


def test_few_objects_change(changing):
    assert len(changing) <= MOST


def test_a_name_that_is_bound_anew_and_a_container_that_is_filled_are_found():
    tree = ast.parse("def note(key):\n    global last\n    last = key\n    seen[key].append(1)\n")
    assert set(changed_names(tree.body[0])) == {"last", "seen"}
    assert own_names(tree.body[0]) == {"key"}
