"""The import rules: cli -> tasks -> farm, one direction through the rooms of `farm`, and torch only
in files that compute."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import farm
from benchmarks.arrows import by_arrow, crossings
from tests import slow

ROOT = Path(__file__).parent.parent
ROOMS = ("farm", "tasks", "cli")
FORBIDDEN = {
    "farm": ("tasks", "cli", "celery", "kombu", "typer", "click", "rich", "flower"),
    "tasks": ("cli", "typer", "click", "rich"),
    "cli": (),
}
#: The rooms of `farm` by layer, top to bottom: each imports only from rooms below it.
LAYERS = {
    "add-ons": ("addons",),  # products beside the core
    "programs": ("api",),  # what a program asks
    "answers": ("report", "exchange"),  # stored results as plain values, and their exchange
    "jobs": ("jobs",),  # what is measured next, where, and by which process
    "judgement": ("verdict", "requests"),  # sum against whole; from an input to a request
    "store": ("store",),
    "measurement": ("benchmark_process", "benchmark"),
    "models": ("training", "operators", "subjects", "models"),  # from a name to operator tuples
    "host": ("devices", "extensions"),  # its cards and its add-ons
    "values": ("types",),
    "base": ("settings", "errors"),
}
ORDER = tuple(room for rooms in LAYERS.values() for room in rooms)
#: Arrows between rooms (`benchmarks/arrows.py` lists them with their names). The number may only
#: shrink, and so may the number of rooms that the two topmost rooms import.
MOST_ARROWS = 139
MOST_ROOMS_IMPORTED = {"cli": 10, "api": 6}
#: The files of add-ons that belong to the command line: they may import `cli` and what it imports.
COMMAND_FILES = ("commands.py", "estimate_command.py", "tables.py")
MOST_AT_THE_ROOT = 26
MOST_LOOSE_FILES = 2
#: The only files that may import torch at load time.
TORCH_ROOMS = (
    "farm/operators/",
    "farm/subjects/allow_list.py",
    "farm/subjects/aten_values.py",
    "farm/subjects/collective_calls.py",
    "farm/subjects/encoding.py",
    "farm/subjects/leaf.py",
    "farm/subjects/shapes.py",
    "farm/training/capture.py",
    "farm/training/card_functions.py",
    "farm/training/step.py",
    "farm/training/extract.py",
    "farm/training/module_memory.py",
    "farm/training/observed_values.py",
    "farm/training/fake_compilation.py",
    "farm/training/foreseen_kernels.py",
    "farm/training/split.py",
    "farm/training/streams.py",
    "farm/benchmark/bench.py",
    "farm/benchmark/cache.py",
    "farm/benchmark/call_context.py",
    "farm/benchmark/checks.py",
    "farm/benchmark/clock.py",
    "farm/benchmark/torch_device.py",
    "farm/benchmark/cpu_runner.py",
    "farm/benchmark/fingerprinting.py",
    "farm/benchmark/host_clock.py",
    "farm/benchmark/host_places.py",
    "farm/benchmark/host_steps.py",
    "farm/benchmark/passes.py",
    "farm/benchmark/phases/base.py",
    "farm/benchmark/ranks.py",
    "farm/benchmark/sampler.py",
    "farm/benchmark/steady.py",
    "farm/benchmark/verification.py",
    "farm/benchmark/subjects/",
    "farm/benchmark/workload.py",
    "farm/addons/memory/memory_tier.py",
    "farm/addons/memory/offload.py",
    "farm/addons/memory/planned_step.py",
    "farm/models/as_built.py",
    "farm/models/building.py",
    "farm/types/tensor_kinds.py",
    "farm/types/program_state.py",
    "farm/types/torch_settings.py",
)
TORCH_FREE_AT_IMPORT = (
    "cli.main",
    "farm.verdict.aggregate",
    "farm.types.protocol",
    "farm.types.intervals",
    "farm.benchmark_process.client",
    "farm.models.catalog",
    "farm.models.texts.user_text",
    "farm.devices.host",
    "farm.jobs.in_process",
    "farm.training.captured_model",
    "farm.api.measure",
    "farm.jobs.jobs",
    "farm.jobs.listing",
    "farm.requests.measurement_file",
    "farm.subjects.label",
    "farm.subjects.parsing",
    "farm.types.tuple",
    "farm.report.report",
    "farm.store.database",
    "farm.subjects.sweep",
    "tasks.app",
    "tasks.embedded",
    "tasks.submissions",
    "tasks.supervisor",
    "tasks.worker",
)
IMPORTS = (ast.Import, ast.ImportFrom)
HEAVY = ("torch", "celery", "sqlalchemy", "pydantic", "rich.console")


def files(room):
    return sorted((ROOT / room).rglob("*.py"))


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path):
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, IMPORTS)]


@functools.cache
def imported(path):
    """Return (module, line, at the top level of the file?) of every import except those for type
    checking only.
    """
    return list(_imported(tree_of(path)))


def _imported(node, top=True):
    """Only statements can contain an import: do not look at expressions, which are most of a
    file.
    """
    for statement in ast.iter_child_nodes(node):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield alias.name, statement.lineno, top
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"relative import in line {statement.lineno}"
            yield statement.module or "", statement.lineno, top
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        elif isinstance(statement, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _imported(
                statement, top and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            )


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_stands_below_it(room):
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(room)
        if not is_command_file(path)
        for name, line, _ in imported(path)
        if name.partition(".")[0] in FORBIDDEN[room]
    ]
    assert not found


def is_command_file(path):
    return path.parent.parent == ROOT / "farm" / "addons" and path.name in COMMAND_FILES


def test_the_core_never_imports_an_add_on():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for room in ROOMS
        for path in files(room)
        if ROOT / "farm" / "addons" not in path.parents
        for name, line, _ in imported(path)
        if name.startswith("farm.addons")
    ]
    assert not found


def test_the_rest_of_an_add_on_imports_no_file_of_its_commands():
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files("farm/addons")
        if not is_command_file(path)
        for node in imports(path)
        for name in modules(node)
        if f"{name.rpartition('.')[2]}.py" in COMMAND_FILES and name.startswith("farm.addons")
    ]
    assert not found


def parts_of_farm():
    return {
        path.stem
        for path in (ROOT / "farm").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }


def test_every_room_of_farm_has_its_place_in_the_order():
    assert parts_of_farm() - {"__init__"} == set(ORDER)


def test_the_layers_stay_loosely_coupled():
    """A reader of a room needs to know the rooms that it imports."""
    pairs = by_arrow(crossings())
    outgoing = Counter(source for source, _ in pairs)
    assert len(pairs) <= MOST_ARROWS
    assert {
        room: outgoing[room] for room, most in MOST_ROOMS_IMPORTED.items() if outgoing[room] > most
    } == {}


def test_the_root_of_farm_stays_small():
    entries = [path for path in (ROOT / "farm").iterdir() if path.name != "__pycache__"]
    loose = [path for path in entries if path.is_file() and path.name != "__init__.py"]
    assert len(entries) <= MOST_AT_THE_ROOT
    assert len(loose) <= MOST_LOOSE_FILES


def modules(node):
    """Return the modules that an import names: for `from farm.store import tables`,
    `farm.store.tables`.
    """
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def arrows():
    """Return (module, imported module) of every import inside the project, including imports in
    functions.
    """
    for path in (path for room in ROOMS for path in files(room)):
        for node in imports(path):
            for name in modules(node):
                if name.partition(".")[0] in ROOMS:
                    yield dotted(path), name


def test_inside_farm_imports_go_one_way():
    found = []
    for here, name in arrows():
        if not (here.startswith("farm.") and name.startswith("farm.")):
            continue
        mine, other = here.split(".")[1:2], name.split(".")[1]
        if (
            mine
            and mine[0] != other
            and other in ORDER
            and ORDER.index(mine[0]) > ORDER.index(other)
        ):
            found.append(f"{here} imports {name}")
    assert not found


def test_no_module_imports_itself_in_a_circle():
    there = {dotted(path) for room in ROOMS for path in files(room)}
    graph = {}
    for here, name in arrows():
        target = name if name in there else name.rpartition(".")[0]
        if (
            target in there and target != here and here != "farm"
        ):  # farm/__init__.py loads its names lazily, see below
            graph.setdefault(here, set()).add(target)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_farm_loads_a_name_when_it_is_asked_for_and_nothing_before():
    code = (
        "import sys, farm\n"
        "assert not [name for name in sys.modules if name.startswith('farm.')]\n"
        "assert farm.Variant.__module__ == 'farm.types.variant'\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    homes = {name: getattr(farm, name).__module__ for name in farm.__all__ if name != "__version__"}
    assert homes["Variant"] == "farm.types.variant"
    assert set(homes) <= set(dir(farm))
    assert all(home.startswith("farm.") for home in homes.values()), homes
    assert not hasattr(farm, "Anything")


def test_torch_is_imported_at_the_top_only_where_arithmetic_is_done():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for room in ROOMS
        for path in files(room)
        for name, line, top in imported(path)
        if top
        and name.partition(".")[0] in ("torch", "torchvision")
        and not str(path.relative_to(ROOT)).startswith(TORCH_ROOMS)
    ]
    assert not found


def test_these_rooms_import_without_torch():
    code = (
        "import importlib, sys\n"
        f"for name in {TORCH_FREE_AT_IMPORT!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
        "from farm.requests.partial_request import check_operator_names\n"
        "check_operator_names(['Conv2d', 'Linear'])\n"  # of the usual operators
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_line_loads_nothing_heavy_before_a_verb_runs():
    code = f"import sys, cli.main\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_look_ups_and_reports_load_no_arithmetic():
    """To load numpy takes a sixth of the time of a short command."""
    code = (
        "import sys, farm.report.gate, farm.report.lookup, farm.report.report; sys.exit('numpy' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_list_of_commands_loads_no_database():
    listed = "from cli import main; main.app(['--help'], standalone_mode=False)"
    code = (
        f"import sys; {listed}; sys.exit('sqlalchemy' in sys.modules or 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_help_loads_no_parsers_of_what_it_never_shows():
    code = (
        "import sys; from cli import main; main.load_help(); sys.exit('markdown_it' in "
        "sys.modules or 'pygments' "
        "in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_file_is_a_drawer():
    names = {path.name for room in ROOMS for path in files(room)}
    assert not names & {"utils.py", "helpers.py", "misc.py", "common.py"}


@slow.PROCESS
def test_everything_can_be_imported_with_the_declared_dependencies_alone():
    """Hide the packages that only the tests install, which a user's machine does not have."""
    code = """
import importlib, importlib.metadata, pkgutil, re, sys
from packaging.requirements import Requirement

seen, open_ = set(), [Requirement("operator-farm")]
while open_:
    wanted = open_.pop()
    name = re.sub(r"[-_.]+", "-", wanted.name).lower()
    for extra in {"", *wanted.extras}:
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found = [Requirement(text) for text in needed]
        open_ += [one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})]
declared = {name for name, _ in seen}
hidden = {
    module
    for module, names in importlib.metadata.packages_distributions().items()
    if not declared & {re.sub(r"[-_.]+", "-", name).lower() for name in names}
}
assert "pytest" in hidden and "celery" not in hidden
for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
    del sys.modules[name]

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

sys.meta_path.insert(0, Hide())
for package in ("farm", "tasks", "cli"):
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if "migrations" not in found.name and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
