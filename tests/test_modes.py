"""The files that know a mode, by their code, are those of docs/design/modes.md, which gives the reasons."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.modes import files_that_know

PAGE = Path(__file__).parent.parent / "docs/design/modes.md"
#: Files that know each mode. The numbers may only shrink. Of placements, one is the file of their
#: words, which was a part of the file of protocols.
MOST = {"compiled": 49, "several cards": 38, "placement": 18, "rough": 6, "step": 19}


def patterns_of(mode: str) -> list[str]:
    """The patterns of files in the rows of a mode."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [
        name for row in rows if row[0] == f"| {mode}" for name in re.findall(r"`([^`]+)`", row[1])
    ]


@pytest.mark.parametrize("mode", MOST)
def test_each_file_that_knows_a_mode_has_its_reason(mode):
    files, patterns = files_that_know(mode), patterns_of(mode)
    assert not [file for file in files if not any(fnmatch(file, name) for name in patterns)]
    assert not [name for name in patterns if not any(fnmatch(file, name) for file in files)]
    assert len(files) <= MOST[mode]
