"""A damaged file in the compiler's cache is removed, so that the compiler makes it again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from farm.operators.compiled import CompiledPass
from farm.operators.compiler_cache import LIST, YOUNG_S, remove_damaged
from farm.settings import settings
from tests import slow
from tests.operators.compiled_models import Two, needs_compiler


@pytest.fixture
def folder(tmp_path):
    """A cache folder with a file of each kind."""
    folder = tmp_path / "cache"
    kernel = folder / "triton" / "hash"
    (folder / "ab").mkdir(parents=True)
    kernel.mkdir(parents=True)
    library = importlib.util.find_spec("numpy._core._multiarray_umath").origin
    shutil.copy(library, folder / "ab" / "code.so")
    shutil.copy(library, kernel / "kernel.cubin")
    (kernel / "kernel.json").write_text('{"name": "kernel"}')
    (folder / "ab" / "code.py").write_text("def call():\n    return 1\n")
    (folder / "ab" / "times.json").write_text('{"first": 1.0}')
    (folder / "ab" / "pickled").write_bytes(b"\x80\x04")
    (folder / "ab" / "code.lock").touch()
    remove_damaged(folder)
    return folder


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {
        LIST
    }


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(10))


@pytest.mark.parametrize("damage", [truncate, overwrite])
@pytest.mark.parametrize("name", ["ab/code.so", "ab/code.py"])
def test_code_that_has_changed_since_it_was_written_is_removed(folder, name, damage):
    before = names(folder)
    assert len(before) == 7
    damage(folder / name)
    remove_damaged(folder)
    assert names(folder) == before - {name}
    assert name not in json.loads((folder / LIST).read_text())
    remove_damaged(folder)
    assert names(folder) == before - {name}


def test_a_damaged_kernel_is_removed_with_all_its_files(folder):
    truncate(folder / "triton" / "hash" / "kernel.cubin")
    remove_damaged(folder)
    assert not (folder / "triton" / "hash").exists()
    assert "ab/code.so" in names(folder)


def test_data_that_the_compiler_rewrites_are_removed_only_if_they_are_damaged(folder):
    times = folder / "ab" / "times.json"
    times.write_text('{"first": 1.0, "second": 2.0}')
    remove_damaged(folder)
    assert times.exists()
    times.write_text('{"first": 1.0, "sec')
    remove_damaged(folder)
    assert not times.exists()


@pytest.mark.parametrize("name", ["ab/code.so", "ab/code.py", "triton/hash/kernel.cubin"])
def test_an_incomplete_file_that_is_not_listed_is_removed_unless_it_may_be_in_work(folder, name):
    (folder / LIST).write_text("{")
    truncate(folder / name)
    if name.endswith(".py"):
        (folder / name).write_text("def call(:")
    remove_damaged(folder)
    assert name in names(folder)
    long_ago_s = time.time() - YOUNG_S - 1
    os.utime(folder / name, (long_ago_s, long_ago_s))
    remove_damaged(folder)
    assert name not in names(folder)
    assert "ab/pickled" in names(folder)


@needs_compiler
@slow.COMPILER
def test_a_model_compiles_again_after_its_code_was_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("FARM_COMPILER_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    values = torch.randn(4, 16)

    def compiled():
        return CompiledPass(Two().eval(), (values,), torch.device("cpu"), mode="default").capture()

    with torch.no_grad():
        calls = len(compiled().calls)
        code = [path for path in (tmp_path / "cache").rglob("*.py") if path.is_file()]
        assert code
        for path in code:
            truncate(path)
        torch._dynamo.reset()
        assert len(compiled().calls) == calls
    torch._dynamo.reset()


def test_the_list_of_a_folder_that_cannot_be_written_is_left_out(folder):
    shutil.rmtree(folder)
    Path(folder).mkdir(mode=0o500)
    remove_damaged(folder)
