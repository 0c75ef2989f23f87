"""The pages that add a device, a kind of operators or a command are followed, step by step, in a
copy of the source: files are written, changes applied, and the tests and commands of the page run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import slow

ROOT = Path(__file__).parents[1]
COPIED = (
    *("benchmarks", "cli", "deploy", "docs", "examples", "farm", "tasks", "tests"),
    *("pyproject.toml", "mkdocs.yml", "README.md"),
)
_BLOCK = re.compile(
    r'^```(?:(?:python|toml) title="(?P<file>[^"]+)"|(?P<diff>diff))\n(?P<text>.*?)^```',
    re.MULTILINE | re.DOTALL,
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the source with the device and the kind of the pages."""
    folder = tmp_path_factory.mktemp("source")
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)
    for page in ("add-a-device.md", "add-a-kind.md"):
        followed(page, folder)
    return folder


def run(folder, *command, text=None, **variables):
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | variables,
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def followed(page, folder):
    for block in _BLOCK.finditer((ROOT / "docs" / page).read_text()):
        if block["file"]:
            (folder / block["file"]).parent.mkdir(parents=True, exist_ok=True)
            (folder / block["file"]).write_text(block["text"])
        else:
            run(
                folder, "git", "apply", "-", text=block["text"], GIT_CEILING_DIRECTORIES=str(folder)
            )


@slow.PROCESS
@pytest.mark.parametrize(
    "tests", ["tests/devices/test_contract.py", "tests/contracts/test_subjects.py"]
)
def test_the_page_leads_to_a_change_that_passes_its_tests(tests, copy):
    modules = "tests/test_documented.py::test_the_architecture_page_lists_the_modules_of_every_room"
    python = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(copy, *python, tests, "tests/test_imports.py", modules, "--regenerate-golden")


@slow.PROCESS
def test_doctor_finds_the_cards_of_the_device_of_the_page(copy, tmp_path):
    """On a host with two folders of its driver, and the version file of its build of PyTorch."""
    torch = tmp_path / "installed" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.13.0+example'\n")
    for card in ("card0", "card1"):
        (tmp_path / "sensors" / card).mkdir(parents=True)
        (tmp_path / "sensors" / card / "power_mw").write_text("300000")
    text = f"""
from pathlib import Path
from farm.devices import example
example.FOLDER = Path("{tmp_path / "sensors"}")
from cli.main import app
app(["doctor"])
"""
    paths = f"{torch.parent}:{copy}"
    state = {"FARM_STATE_DIR": str(tmp_path / "state"), "FARM_LOCK_DIR": str(tmp_path / "locks")}
    shown = run(copy, sys.executable, "-c", text, PYTHONPATH=paths, **state)
    assert "Example 1 (GPU-example-card0)" in shown
    assert "Example 1 (GPU-example-card1)" in shown


@slow.PROCESS
def test_the_page_leads_to_a_command(copy, tmp_path):
    followed("add-ons.md", tmp_path)
    site = tmp_path / "site"
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target")
    run(tmp_path, sys.executable, *pip, str(site), "./farm-carbon")
    variables = {"PYTHONPATH": f"{copy}:{site}", "FARM_ADDONS": "farm-carbon"}
    farm = (sys.executable, "-m", "cli.main")
    run(tmp_path, *farm, "import", "h100", **variables)
    assert "Emissions" in run(tmp_path, *farm, "carbon", "--help", **variables)
    shown = run(tmp_path, *farm, "carbon", "8wzs4rg5", **variables)
    assert f"```text\n{shown}```" in (ROOT / "docs" / "add-ons.md").read_text()
    assert run(tmp_path, sys.executable, "farm-carbon/show.py", **variables) == shown
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "farm-carbon/tests")
    run(tmp_path, sys.executable, *tests, **variables)
    without_energy(tmp_path, site)


def without_energy(folder, site):
    """The function of the page answers None for a verdict without energy, such as of a CPU."""
    text = """
from types import SimpleNamespace
from farm_carbon import queries
for energy in (None, SimpleNamespace(total=None)):
    verdict = SimpleNamespace(energy=energy)
    queries.find_job = lambda session, job: SimpleNamespace(id=job)
    queries.report = SimpleNamespace(build=lambda *_: SimpleNamespace(verdict=verdict))
    print(queries.carbon_of(None, "job"))
"""
    shown = run(folder, sys.executable, "-c", text, PYTHONPATH=f"{site}:{ROOT}")
    assert shown == "None\nNone\n"


@slow.PROCESS
def test_the_kind_of_the_page_accepts_only_its_own_arguments_and_its_model_is_listed(copy):
    text = """
import itertools
from farm.errors import TupleRejected
from farm.subjects.parsing import parse
from farm.types.tuple import OperatorTuple, TensorSpec
tensors = (TensorSpec("activation", "", (4, 4), "float32"),)
for number, keywords in itertools.product((5, True, 5.0, "5", 0, 101), ({}, {"a": 1})):
    spec = OperatorTuple("example.powers", "powers", {}, ({"tensor": 0}, number), keywords, tensors)
    try:
        parse(spec.to_json())
        print(number, keywords)
    except TupleRejected:
        pass
"""
    assert run(copy, sys.executable, "-c", text) == "5 {}\n"
    farm = (sys.executable, "-m", "cli.main", "operators", "net.py:net")
    shown = run(copy, *farm, FARM_DATABASE_URL=f"sqlite:///{copy}/listed.db")
    page = (ROOT / "docs" / "add-a-kind.md").read_text()
    rows = [line.split() for line in shown.splitlines() if line.startswith(("relu", "powers"))]
    assert len(rows) == 2
    assert all(row in [line.split() for line in page.splitlines()] for row in rows)
