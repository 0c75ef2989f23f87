"""The copy of the packaged readings proves itself; a damaged file of the package is named, with
what to do.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlmodel import func, select

from benchmarks.package_readings import checked_files
from farm.errors import DatabaseUnreachable
from farm.exchange.copies import DatabaseCopy
from farm.exchange.export import export
from farm.exchange.packaged import database_of, packaged_files
from farm.settings.package_files import CHECKSUMS, DATA, checksum_of
from farm.store import tables
from farm.store.database import Database
from tests import slow
from tests.disks import SmallDisk, why_not
from tests.report import filled

ROOT = Path(__file__).parents[2]
READ = """
import sys
from pathlib import Path
from sqlmodel import func, select
from farm.exchange.packaged import database_of
from farm.store import tables
sys.stdin.read()
with database_of([Path(sys.argv[1])], Path(sys.argv[2])).read() as session:
    print(session.scalar(select(func.count()).select_from(tables.ReadingRow)))
"""


@pytest.fixture
def exported(database, tmp_path):
    """The file of a small export."""
    filled.fill(database)
    with database.read() as session:
        export(session, tmp_path / "h200.parquet")
    return tmp_path / "h200.parquet"


def readings(database):
    with database.read() as session:
        number = session.scalar(select(func.count()).select_from(tables.ReadingRow))
    database.close()
    return number


def truncate(copy):
    os.truncate(copy, copy.stat().st_size // 2)


def empty(copy):
    copy.write_bytes(b"")


def overwrite(copy):
    with copy.open("r+b") as file:
        file.seek(copy.stat().st_size // 2)
        file.write(bytes(8192))


def remove(copy):
    copy.unlink()


def lose_stamp(copy):
    copy.with_suffix(".json").unlink()


def damage_stamp(copy):
    copy.with_suffix(".json").write_text("{")


def age_stamp(copy):
    stamp = copy.with_suffix(".json")
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "schema": "0016"}))


DAMAGES = [truncate, empty, overwrite, remove, lose_stamp, damage_stamp, age_stamp]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_copy_that_is_not_as_it_was_written_is_made_again(exported, tmp_path, damage):
    number = readings(database_of([exported], tmp_path / "cache"))
    (copy,) = (tmp_path / "cache").glob("*.db")
    before = copy.stat().st_ino
    damage(copy)
    assert readings(database_of([exported], tmp_path / "cache")) == number > 0
    assert copy.stat().st_ino != before or damage is remove
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".db", ".json", ""}, (
        "no rest of a copy"
    )


def test_a_sound_copy_is_used_as_it_is_whatever_its_time(exported, tmp_path):
    readings(database_of([exported], tmp_path / "cache"))
    (copy,) = (tmp_path / "cache").glob("*.db")
    before = copy.stat().st_ino
    os.utime(copy, (1, 1))
    readings(database_of([exported], tmp_path / "cache"))
    assert copy.stat().st_ino == before
    assert not list((tmp_path / "cache").glob("*-wal"))


@slow.PROCESS
def test_two_processes_that_make_a_copy_at_the_same_time_both_get_it(exported, tmp_path):
    words = [sys.executable, "-c", READ, str(exported), str(tmp_path / "cache")]
    both = [
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        process.stdin.close()
    numbers = [process.stdout.read() for process in both]
    assert [process.wait() for process in both] == [0, 0]
    assert numbers[0] == numbers[1] != "0\n"


def test_a_copy_that_is_damaged_while_it_is_open_says_what_to_do(exported, tmp_path):
    database_of([exported], tmp_path / "cache").close()
    (copy,) = (tmp_path / "cache").glob("*.db")
    copy.write_bytes(b"no database" * 1000)
    database = Database(f"sqlite:///{copy}", read_only=True)
    with pytest.raises(DatabaseUnreachable, match="cannot be read") as caught:
        readings(database)
    assert f"Delete the file {copy}" in caught.value.next_step


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_copy_that_finds_no_space_says_what_to_do(tmp_path):
    with SmallDisk(tmp_path / "disk") as disk:
        disk.fill()
        copy = DatabaseCopy(disk.path / "cache.db", lambda path: path.write_bytes(bytes(10_000)))
        with pytest.raises(
            DatabaseUnreachable, match=r"cannot be written: .*No space left"
        ) as caught:
            copy.open()
        assert "FARM_STATE_DIR" in caught.value.next_step


# ---- files of the package


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Another installation of the farm, whose files a test may damage."""
    folder = tmp_path_factory.mktemp("installed")
    for room in ("farm", "cli", "tasks"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(installed, state, *words):
    environment = {**os.environ, "PYTHONPATH": str(installed), "FARM_STATE_DIR": str(state)}
    return subprocess.run(
        [sys.executable, "-P", *words], env=environment, capture_output=True, text=True
    )


@contextlib.contextmanager
def damaged_file(installed, pattern):
    (file,) = (installed / "farm" / "data").glob(pattern)
    before = file.read_bytes()
    truncate(file)
    yield file
    file.write_bytes(before)


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ("h200/readings.parquet", ("lookup", "Conv2d", "--card", "H200")),
        ("packaged-*.db.zst", ("lookup", "Conv2d", "--card", "H200")),
        ("checksums.json", ("lookup", "Conv2d", "--card", "H200")),
        ("h100/verdicts.parquet", ("import", "h100")),
    ],
)
def test_a_damaged_file_of_the_package_is_named(installed, tmp_path, damaged, words):
    with damaged_file(installed, damaged) as file:
        said = run(installed, tmp_path / "state", "-m", "cli", *words)
    told = " ".join(said.stderr.split())
    assert f"The file '{file}' of the installed package" in told
    assert "Install the package again: `pip install --force-reinstall" in told
    assert "bug in farm" not in told
    assert said.returncode == 1


@pytest.mark.parametrize("damaged", ["predictors/*.npz", "predictors/*.json"])
def test_a_damaged_predictor_of_the_package_is_named(installed, tmp_path, damaged):
    code = (
        "from farm.addons.predict import stored_predictor as s; s.find([s.PACKAGED], 'NVIDIA H200')"
    )
    with damaged_file(installed, damaged) as file:
        said = run(installed, tmp_path / "state", "-c", code)
    assert f"UsageError: The file '{file}' of the installed package" in said.stderr
    assert "Install the package again" in said.stderr


def test_the_checksums_are_those_of_the_files():
    """If this fails, run ``python benchmarks/package_readings.py`` and commit the new files."""
    checksums = json.loads(CHECKSUMS.read_text())
    files = {path.relative_to(DATA).as_posix(): path for path in checked_files()}
    assert checksums == {name: checksum_of(path) for name, path in files.items()}
    parquet = [file for folder in packaged_files() for file in folder.glob("*.parquet")]
    assert set(parquet) <= set(files.values())
