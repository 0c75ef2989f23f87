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
    folder = tmp_path_factory.mktemp("source")
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)
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
    ("page", "tests"),
    [
        ("add-a-device.md", "tests/devices/test_contract.py"),
        ("add-a-kind.md", "tests/contracts/test_subjects.py"),
    ],
)
def test_the_page_leads_to_a_change_that_passes_its_tests(page, tests, copy):
    followed(page, copy)
    modules = "tests/test_documented.py::test_the_architecture_page_lists_the_modules_of_every_room"
    python = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(copy, *python, tests, "tests/test_imports.py", modules, "--regenerate-golden")


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
