"""A request finds its model one time. A dry run of a user's model is traced: which functions of the
catalog and of `own` does it enter, and from where?"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch  # noqa: F401 - its import is not traced
from typer.testing import CliRunner

from cli.main import app
from farm.models import catalog, own

MODELS = Path(catalog.__file__).parent
NET = """
import torch

def net():
    return torch.nn.Linear(4, 2), torch.ones(8, 4)
"""


@contextmanager
def traced():
    """Yields a counter of the entries from other rooms, and one of all searches for a model."""
    names = {catalog.__file__: "catalog", own.__file__: "own"}
    entries, searches = Counter(), Counter()

    def profile(frame, event, _):
        module = names.get(frame.f_code.co_filename)
        function = frame.f_code.co_name
        if event != "call" or module is None or function.startswith("<"):
            return
        if function == "resolve":
            searches[frame.f_locals["name"]] += 1
        # `tests.extracted`, which shares captures between tests, looks at the names of the catalog.
        caller = Path(frame.f_back.f_code.co_filename)
        if caller.parent != MODELS and caller.name != "extracted.py":
            entries[f"{module}.{function}"] += 1

    sys.setprofile(profile)
    try:
        yield entries, searches
    finally:
        sys.setprofile(None)


def dry_run(*words):
    with traced() as (entries, searches):
        said = CliRunner().invoke(app, ["run", *words, "--dry-run"])
    assert "net:net 8x4 float32 on" in said.stdout, said.output
    return entries.keys(), searches


def test_a_dry_run_searches_for_each_model_once(tmp_path):
    file = tmp_path / "typed_net.py"
    file.write_text(NET)
    entries, searches = dry_run(f"{file}:net", "-b", "4,8")
    assert searches == {"typed_net:net": 1}
    assert entries == {"catalog.matching", "catalog.resolve"}


def test_an_entry_of_a_file_is_searched_for_once(tmp_path):
    file = tmp_path / "written_net.py"
    file.write_text(NET)
    written = tmp_path / "jobs.yml"
    written.write_text(f"- {{model: '{file}:net', batch: [4, 8]}}\n")
    entries, searches = dry_run("-f", str(written))
    assert searches == {"written_net:net": 1}
    assert entries == {"catalog.resolve_given"}
