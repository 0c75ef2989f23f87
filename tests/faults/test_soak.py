"""All kinds of faults one after the other, as `benchmarks/soak.py` does for longer: nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.farms import ROOT


@pytest.mark.parametrize(("faults", "within_s"), [(8, 8), pytest.param(40, 40, marks=pytest.mark.slow)])
def test_a_farm_that_is_hurt_all_the_time_loses_nothing(tmp_path, faults, within_s):
    found = tmp_path / "found.json"
    words = ["--items", "40", "--cards", "2", "--every", "0.5", "--faults", faults, "--limit", within_s]
    command = [sys.executable, "benchmarks/soak.py", *map(str, words), "--seed", "1", "--json", str(found)]
    said = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280)
    assert said.returncode == 0, said.stdout + said.stderr[-3000:]
    told = json.loads(found.read_text())
    assert told["faults"] >= 6
    assert len(told["by_kind"]) >= 5
    assert told["bad_items"] > 0
