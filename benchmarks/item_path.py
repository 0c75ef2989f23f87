"""Count the modules and hand-overs on the path of one item of ``farm run``: ``python
benchmarks/item_path.py``.

The script runs ``farm run`` for a single operator tuple on the CPU and records every Python call in
all processes of that run. A *module* counts if at least one of its functions ran. A *hand-over* is
a pair of functions in two different modules of ``farm/``, ``tasks/`` and ``cli/``: the first called
the second and passed the item on, that is, an argument held the id of the operator tuple, directly
or up to three levels deep in a list, dictionary or object. Imports do not count. ``--tree`` names
another checkout, so that one script compares two versions."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ("squeezenet1_0", "-b", "1", "--input-size", "64")
OPERATOR = "AdaptiveAvgPool2d"  # one tuple of the model
COMMAND = ("run", *MODEL, "--operators", OPERATOR, "--card", "cpu", "--quick")
ROOMS = ("farm", "tasks", "cli")

#: Runs at the start of each Python process of the run; writes its counts when the process ends.
RECORDER = """
import atexit, json, os, sys, threading
ROOT, OUT, TUPLE = (os.environ[f"ITEM_PATH_{name}"] for name in ("ROOT", "OUT", "TUPLE"))
names, modules, calls = {}, set(), set()

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
    if type(value).__module__.partition(".")[0] in ("farm", "tasks", "cli"):
        return carries(dict(vars(value)) if hasattr(value, "__dict__") else None, depth)
    return False

def on_event(frame, event, _):
    if event != "call":
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
        code = frame.f_code
        passed = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(carries(frame.f_locals.get(name)) for name in passed if name != "self"):
            calls.add((source, callee))

def write():
    sys.setprofile(None)
    with open(os.path.join(OUT, f"{os.getpid()}.json"), "w") as file:
        json.dump({"modules": sorted(modules), "calls": sorted(calls)}, file)

def periodically():
    while True:
        stop.wait(1.0)
        try:
            with open(os.path.join(OUT, f"{os.getpid()}.json"), "w") as file:
                json.dump({"modules": sorted(set(modules)), "calls": sorted(set(calls))}, file)
        except RuntimeError:
            pass  # a set grew meanwhile; the next second writes it

stop = threading.Event()
threading.Thread(target=periodically, daemon=True).start()
atexit.register(write)
threading.setprofile(on_event)
sys.setprofile(on_event)
"""


def counted(tree: Path) -> tuple[set[str], set[tuple[tuple[str, str], tuple[str, str]]]]:
    """Modules that ran, and hand-overs, of one run of the checkout in ``tree``."""
    with tempfile.TemporaryDirectory() as made:
        hook, out, state = (Path(made) / name for name in ("hook", "out", "state"))
        for folder in (hook, out, state):
            folder.mkdir()
        (hook / "sitecustomize.py").write_text(RECORDER)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{hook}{os.pathsep}{tree}",
            "ITEM_PATH_ROOT": f"{tree}/",
            "ITEM_PATH_OUT": str(out),
            "FARM_STATE_DIR": str(state),
            "FARM_DATABASE_URL": f"sqlite:///{state}/farm.db",
        }
        venv = tree / ".venv" / "bin" / "python"
        python = str(venv if venv.exists() else sys.executable)
        plain = {**environment, "PYTHONPATH": str(tree)}
        listed = subprocess.run(
            [python, "-m", "cli", "operators", *MODEL, "--json"],
            cwd=tree,
            env=plain,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        rows = json.loads(listed.stdout)["operators"]
        environment["ITEM_PATH_TUPLE"] = next(
            row["operator_id"] for row in rows if row["operator"] == OPERATOR
        )
        done = subprocess.run(
            [python, "-m", "cli", *COMMAND],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"farm run failed in {tree}:\n{done.stderr}")
        modules: set[str] = set()
        calls = set()
        for file in out.glob("*.json"):
            found = json.loads(file.read_text())
            modules.update(found["modules"])
            calls.update((tuple(source), tuple(target)) for source, target in found["calls"])
    return modules, calls


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
    parser.add_argument("--list", action="store_true", help="list the modules and the hand-overs")
    options = parser.parse_args()
    modules, calls = counted(options.tree.resolve())
    between = {(source[0], target[0]) for source, target in calls}
    print(
        f"{len(modules)} modules, {len(calls)} hand-overs between functions, {len(between)} pairs "
        "of modules"
    )
    if options.list:
        print(*sorted(modules), sep="\n")
        for source, target in sorted(calls):
            print(f"{source[0]}:{source[1]} -> {target[0]}:{target[1]}")


if __name__ == "__main__":
    main()
