"""Output in every terminal: encodings, closed and full streams, and results that nothing else is
mixed with.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli import output, streams
from cli.tables import Text, facts, ruled
from farm.errors import Unwritable
from tests import slow

ROOT = Path(__file__).parents[2]
NOISY = """
import ctypes, os, sys
from torch import nn, ones

class Net(nn.Linear):
    def forward(self, x):
        os.write(1, b"noise of an extension")
        ctypes.CDLL(None).puts(b"noise that the C library keeps until the end")
        return super().forward(x)

def net():
    print("noise of the module")
    sys.__stdout__.write("noise of the first stdout")
    os.system("echo noise of a child")
    return Net(4, 4), ones(2, 4)
"""


@pytest.fixture
def shown(monkeypatch):
    """What the output writes to a stdout with an encoding."""

    def of(encoding, write):
        written = io.BytesIO()
        stream = io.TextIOWrapper(written, encoding=encoding, errors=streams._REPLACED)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            write()
            stream.flush()
        return written.getvalue().decode(encoding)

    return of


def table():
    table = ruled(
        ["operator", ">µs", "gap"],
        [["Conv2d → é", "1.5 µs", "+0.4 ± 1.7 %"], ["日本", "2 µs", "× 3 …"]],
    )
    output.show(table)
    output.show(facts([("note", Text("a sum Σ of 3 · 4 °C"))]))


def test_a_terminal_with_ascii_gets_aligned_tables_of_ascii(shown):
    lines = shown("ascii", table).splitlines()
    assert lines == [
        "operator           us   gap          ",
        "-------------------------------------",
        "Conv2d -> e    1.5 us   +0.4 +- 1.7 %",
        "\\u65e5\\u672c     2 us   x 3 ...      ",
        "  note a sum S of 3 . 4 degC",
    ]


def test_a_terminal_with_latin_1_gets_the_characters_that_it_has(shown):
    lines = shown("latin-1", table).splitlines()
    assert lines[1].startswith("-----")
    assert "Conv2d -> é" in lines[2]
    assert "+0.4 ± 1.7 %" in lines[2]


def test_a_terminal_with_unicode_gets_all_characters(shown):
    text = shown("utf-8", table)
    assert all(
        part in text for part in ("───", "Conv2d → é", "±", "日本", "× 3 …", "Σ of 3 · 4 °C")
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_keeps_its_values_in_every_encoding(shown, encoding):
    data = {"title": "µ → 日本 \ud800 \x1b", "time_us": 1.5}
    assert json.loads(shown(encoding, lambda: output.emit_json(data))) == data


def test_a_plain_line_is_shown_in_every_encoding(shown):
    assert shown("ascii", lambda: output.emit("± µ → \ud800")) == "+- u -> \\ud800\n"
    assert shown("utf-8", lambda: output.emit("± µ → \ud800")) == "± µ → \\ud800\n"


def run(*arguments, shell="{}", **environment):
    """Run the program as a shell does, with redirections."""
    command = shell.format(f"{sys.executable} -m cli " + " ".join(arguments))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(["bash", "-c", command], env=variables, capture_output=True, timeout=120)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_the_program_writes_in_the_encoding_of_its_terminal(encoding):
    done = run("--quiet", "help", "interval", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding)
    wrong = run("nonsense", PYTHONIOENCODING=encoding)
    assert wrong.stderr.decode("ascii").splitlines()[1].startswith("-> `python -m cli -h`")


@pytest.mark.parametrize(
    "arguments", [("--quiet", "help", "interval"), ("run", "-h"), ("--quiet", "models", "--json")]
)
def test_a_stdout_that_cannot_be_written_is_an_error_in_two_lines(arguments):
    for shell, reason in (
        ("{} >&-", "stdout is closed"),
        ("{} >/dev/full", "No space left on device"),
    ):
        done = run(*arguments, shell=shell)
        problem, step = done.stderr.decode().splitlines()
        assert done.returncode == 1
        assert problem == f"error: The output cannot be written: {reason}."
        assert step.startswith("→ ")


def test_closed_streams_and_readers_that_ended_are_harmless(tmp_path):
    for shell in ("{} 2>&-", "{} <&-", "{} <&- 2>&-"):
        done = run("--quiet", "help", "interval", shell=shell)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"interval" in done.stdout
    done = run("--quiet", "models", shell="{} 2>&1 >&- | cat; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, b"Traceback" in done.stdout) == (1, False)
    done = run("--quiet", "models", shell="{} | true")
    assert b"Traceback" not in done.stderr


def test_a_name_of_5000_characters_is_an_error_in_two_lines(farm):
    name = "a" * 5000
    for arguments in (("export", name), ("run", "-f", name), ("run", name)):
        said = farm("--quiet", *arguments)
        assert said.code in (1, 2, 3)
        assert len(said.stderr.splitlines()) == 2
        assert "bug in farm" not in said.stderr
    done = run("jobs", FARM_STATE_DIR=f"/tmp/{name}")
    assert done.returncode == 2
    assert b"'state_dir'" in done.stderr
    assert b"a name may have at most 255 bytes" in done.stderr


@slow.PROCESS
def test_json_alone_is_on_stdout_whatever_the_code_of_the_user_writes(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISY)
    done = run(
        "--quiet", "operators", f"{tmp_path}/noisy.py:net", "--json", FARM_STATE_DIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["operators"][0]["operator"] == "linear"
    for noise in (
        b"an extension",
        b"the C library",
        b"the module",
        b"the first stdout",
        b"a child",
    ):
        assert noise in done.stderr


@slow.PROCESS
def test_a_thread_of_the_users_code_that_ends_the_process_is_an_error(tmp_path):
    (tmp_path / "thread.py").write_text(
        "import os, threading\ndef net():\n"
        "    thread = threading.Thread(target=os._exit, args=(0,))\n    thread.start()\n    "
        "thread.join()\n"
    )
    done = run("operators", f"{tmp_path}/thread.py:net", FARM_STATE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert b"error: The code of the model called os._exit in a thread." in done.stderr


def test_a_write_error_is_told_once(monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it raises
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(Unwritable, match="No space left"):
        output.emit("a line")
    full.close()  # nothing is left in its buffer


def test_an_exception_without_a_text_is_told(monkeypatch, farm):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fail(*_, **__):
        raise Mute

    monkeypatch.setattr("farm.models.catalog.names", fail)
    said = farm("models")
    assert said.code == 1
    assert "an unexpected Mute: " in said.stderr


def test_an_error_of_the_operating_system_is_no_bug(monkeypatch, farm):
    def fail(*_, **__):
        raise PermissionError(13, "Permission denied", "/dev/shm/file")

    monkeypatch.setattr("farm.models.catalog.names", fail)
    said = farm("models")
    assert said.code == 1
    first = said.stderr.splitlines()[0]
    assert first.startswith("error: The operating system refused")
    assert "(Permission denied): '/dev/shm/file'" in first
    assert "bug in farm" not in said.stderr
