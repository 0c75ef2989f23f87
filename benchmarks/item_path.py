"""Count what one item of `farm run` and one report of it pass through between command and table.

    python benchmarks/item_path.py                 # the numbers
    python benchmarks/item_path.py --list          # also the modules, dataclasses and hand-overs
    python benchmarks/item_path.py --tree FOLDER   # of another checkout, to compare two versions

The script runs `farm run` for a single operator tuple on the CPU, then `farm report` of the job, and
records every Python call in all processes of these commands. Imports do not count.

- A *module* passes the item on if one of its functions takes part in a hand-over. Others only ran:
  sensors, broker, settings, logs. The first figure is the aim: how many a reader has to follow.
- A *dataclass* of the project counts if at least one object of it was made.
- A *representation* is a dataclass whose constructor got the item: an argument held the operator
  tuple or its id, directly or up to three levels deep in a list, dictionary or object.
- A *hand-over* is a pair of functions in two different modules: the first called the second and
  passed the item on, in the same sense.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

MODEL = ("squeezenet1_0", "-b", "1", "--input-size", "64")
OPERATOR = "AdaptiveAvgPool2d"  # one tuple of the model
RUN = ("run", *MODEL, "--operators", OPERATOR, "--card", "cpu", "--quick")

#: Runs at the start of each Python process of the run; writes its counts when the process ends.
RECORDER = """
import atexit, json, os, sys, threading
ROOT, OUT, TUPLE = (os.environ[f"ITEM_PATH_{name}"] for name in ("ROOT", "OUT", "TUPLE"))
names, modules, calls = {}, set(), set()
classes, representations = set(), set()

def name_of(code):
    found = names.get(code, "")
    if found == "":
        path = code.co_filename
        inside = path.startswith(ROOT) and path[len(ROOT):].split("/")[0] in ("farm", "tasks", "cli")
        function = code.co_flags & 1  # neither a module nor the body of a class
        found = names[code] = (path[len(ROOT):], code.co_qualname) if inside and function else None
    return found

def importing(frame):
    while frame is not None:
        if frame.f_code.co_name == "_call_with_frames_removed":
            return True
        frame = frame.f_back
    return False

def carries(value, depth=3):
    if isinstance(value, str):
        return TUPLE in value and len(value) < 10_000
    if depth == 0 or value is None or isinstance(value, (int, float, bytes, type)):
        return False
    if isinstance(value, dict):
        return any(carries(one, depth - 1) for pair in list(value.items())[:50] for one in pair)
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(carries(one, depth - 1) for one in list(value)[:50])
    if type(value).__name__ == "OperatorTuple":
        return value.id == TUPLE
    if type(value).__module__.partition(".")[0] in ("farm", "tasks", "cli"):
        return carries(dict(vars(value)) if hasattr(value, "__dict__") else None, depth)
    return False

def of_the_item(frame):
    code = frame.f_code
    passed = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(carries(frame.f_locals.get(name)) for name in passed if name != "self")

def note_dataclass(frame):
    made = type(frame.f_locals["self"])
    if made.__module__.partition(".")[0] not in ("farm", "tasks", "cli"):
        return
    name = f"{made.__module__}.{made.__qualname__}"
    if name not in classes:
        if importing(frame):
            return
        classes.add(name)
    if name not in representations and of_the_item(frame):
        representations.add(name)

def on_event(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    if code.co_name == "__init__" and code.co_filename == "<string>" and "self" in frame.f_locals:
        note_dataclass(frame)
        return
    callee = name_of(frame.f_code)
    if callee is None:
        return
    if callee[0] not in modules and not importing(frame):
        modules.add(callee[0])
    caller = frame.f_back
    while caller is not None and name_of(caller.f_code) is None and not caller.f_code.co_filename.startswith(ROOT):
        caller = caller.f_back  # through a library, such as Celery or Typer
    source = caller and name_of(caller.f_code)
    if source and source[0] != callee[0] and (source, callee) not in calls:
        if of_the_item(frame):
            calls.add((source, callee))

def save():
    noted = {"modules": modules, "classes": classes, "representations": representations, "calls": calls}
    text = json.dumps({name: sorted(set(values)) for name, values in noted.items()})
    with open(os.path.join(OUT, f"{os.getpid()}.json"), "w") as file:
        file.write(text)

def write():
    sys.setprofile(None)
    save()

def periodically():
    while True:
        stop.wait(1.0)
        try:
            save()
        except RuntimeError:
            pass  # a set grew meanwhile; the next second writes it

stop = threading.Event()
threading.Thread(target=periodically, daemon=True).start()
atexit.register(write)
threading.setprofile(on_event)
sys.setprofile(on_event)
"""


@dataclass
class Passed:
    """What one command passed through, in all its processes."""

    modules: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    representations: set[str] = field(default_factory=set)
    calls: set[tuple[tuple[str, str], tuple[str, str]]] = field(default_factory=set)

    def add(self, noted: dict[str, list]) -> None:
        self.modules.update(noted["modules"])
        self.classes.update(noted["classes"])
        self.representations.update(noted["representations"])
        self.calls.update((tuple(source), tuple(target)) for source, target in noted["calls"])

    def print_totals(self, title: str) -> None:
        pairs = {(source[0], target[0]) for source, target in self.calls}
        passed = {module for pair in pairs for module in pair}
        print(
            f"{title}: {len(passed)} modules passed the item on, of {len(self.modules)} that ran; "
            f"{len(self.classes)} dataclasses, {len(self.representations)} representations of the "
            f"item; {len(self.calls)} hand-overs between functions, {len(pairs)} pairs of modules"
        )

    def print_list(self) -> None:
        for title in ("modules", "classes", "representations"):
            print(f"\n{title}:")
            for name in sorted(vars(self)[title]):
                print(f"  {name}")
        print("\nhand-overs:")
        for source, target in sorted(self.calls):
            print(f"  {source[0]}:{source[1]} -> {target[0]}:{target[1]}")


class Checkout:
    """Runs commands of one checkout on a farm of its own in a temporary folder."""

    def __init__(self, tree: Path, folder: Path) -> None:
        venv = tree / ".venv" / "bin" / "python"
        self.tree = tree
        self.folder = folder
        self.python = str(venv if venv.exists() else sys.executable)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "FARM_STATE_DIR": str(folder),
            "FARM_DATABASE_URL": f"sqlite:///{folder}/farm.db",
        }

    def output(self, command: tuple[str, ...], environment: dict[str, str]) -> str:
        done = subprocess.run(
            [self.python, "-m", "cli", *command],
            cwd=self.tree,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"farm {' '.join(command)} failed in {self.tree}:\n{done.stderr}")
        return done.stdout

    def operator_id(self) -> str:
        rows = json.loads(self.output(("operators", *MODEL, "--json"), {}))["operators"]
        return next(row["operator_id"] for row in rows if row["operator"] == OPERATOR)

    def job_id(self) -> str:
        (job,) = json.loads(self.output(("jobs", "--json"), {}))["jobs"]
        return job["id"]

    def passed(self, command: tuple[str, ...], operator_id: str) -> Passed:
        """Run a command with the recorder in each of its processes."""
        hook = self.folder / f"hook-{command[0]}"
        out = self.folder / f"out-{command[0]}"
        hook.mkdir()
        out.mkdir()
        (hook / "sitecustomize.py").write_text(RECORDER)
        self.output(
            command,
            {
                "PYTHONPATH": f"{hook}{os.pathsep}{self.tree}",
                "ITEM_PATH_ROOT": f"{self.tree}/",
                "ITEM_PATH_OUT": str(out),
                "ITEM_PATH_TUPLE": operator_id,
            },
        )
        passed = Passed()
        for file in out.glob("*.json"):
            passed.add(json.loads(file.read_text()))
        return passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tree",
        type=Path,
        default=Path(__file__).parent.parent,
        help="checkout to run (default: this one)",
    )
    parser.add_argument("--list", action="store_true", help="list what is counted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(options.tree.resolve(), Path(folder))
        operator_id = checkout.operator_id()
        run = checkout.passed(RUN, operator_id)
        report = checkout.passed(("report", checkout.job_id()), operator_id)
    for title, passed in (("farm run", run), ("farm report", report)):
        passed.print_totals(title)
        if options.list:
            passed.print_list()


if __name__ == "__main__":
    main()
