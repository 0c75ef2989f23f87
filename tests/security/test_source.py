"""Nothing that travels or is stored is unpickled, evaluated or imported by name: the source has no
means to.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("farm", "tasks", "cli") for path in (ROOT / room).rglob("*.py"))
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
    "code",
    "imp",
}
CALLS = {"eval", "exec", "compile", "__import__"}
#: module.function: why it is dangerous here
FUNCTIONS = {
    "torch.load": "unpickles",
    "torch.jit.load": "runs a stored program",
    "torch.hub.load": "runs code from elsewhere",
    "yaml.load": "makes any object",
    "yaml.unsafe_load": "makes any object",
    "os.system": "a shell",
    "os.popen": "a shell",
    "importlib.import_module": "imports by name",
    "importlib.__import__": "imports by name",
}
#: What is allowed where, and why it is no way in.
ALLOWED = {
    ("farm/__init__.py", "importlib.import_module"),  # rooms of a fixed list
    # The one door: a user's own models, and it opens by the settings of the host alone.
    ("farm/models/user_modules.py", "importlib.import_module"),
    # Libraries that the host's settings name, at the start of a process that measures.
    ("farm/subjects/libraries.py", "importlib.import_module"),
    # Entry points of the farm's own distribution, and of those that the host's settings name.
    ("farm/extensions.py", "importlib.import_module"),
    ("farm/models/building.py", "torch"),  # dtypes of a fixed list
    ("farm/subjects/allow_list.py", "torch"),  # overloads of a fixed list
    ("farm/subjects/encoding.py", "torch"),  # dtypes and memory formats of a fixed list
    ("farm/operators/profiler.py", "torch"),  # operators that the profiler named
    ("cli/main.py", "importlib.import_module"),  # commands of a fixed list
    ("farm/models/torchvision.py", "importlib.import_module"),  # the package of a source
    # Rows that were checked wait in a temporary file without a name, which only this process can
    # read or write.
    ("farm/exchange/importer.py", "pickle"),
}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def findings(path):
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if (name, alias.name) not in ALLOWED]
            yield from (
                f"{name}:{node.lineno} imports {one}"
                for one in modules
                if one.split(".")[0] in MODULES
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"{name}:{node.lineno} imports {node.module}"
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            if called in CALLS or (called in FUNCTIONS and (name, called) not in ALLOWED):
                yield f"{name}:{node.lineno} calls {called}: {FUNCTIONS.get(called, 'runs text')}"
            if any(
                word.arg == "shell" and getattr(word.value, "value", None) is True
                for word in node.keywords
            ):
                yield f"{name}:{node.lineno} runs a shell"
            if called == "getattr" and dotted(node.args[0]).split(".")[0] == "torch":
                constant = isinstance(node.args[1], ast.Constant)
                if not constant and (name, "torch") not in ALLOWED:
                    yield f"{name}:{node.lineno} looks a name up in torch"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_source_runs_no_text(path):
    assert list(findings(path)) == []


def test_the_search_finds_what_it_is_for(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\nfrom marshal import loads\neval('1')\nimport torch\ntorch.load('x')\n"
        "getattr(torch, name)\nimport subprocess\nsubprocess.run('x', shell=True)\n"
    )
    assert len(list(findings(path))) == 6


def test_celery_takes_and_gives_json_alone():
    from tasks.app import app

    assert app.conf.accept_content == app.conf.result_accept_content == ["json"]
    assert {app.conf.task_serializer, app.conf.result_serializer, app.conf.event_serializer} == {
        "json"
    }
