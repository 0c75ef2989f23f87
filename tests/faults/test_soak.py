"""All kinds of faults one after the other, and a few at random over three hosts, as `benchmarks/soak.py` and
`benchmarks/soak_hosts.py` do for longer: nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.farms import ROOT


def soaked(tmp_path, name, *words):
    """What the benchmark of that name found; it says itself whether anything was lost."""
    found = tmp_path / "found.json"
    command = [sys.executable, f"benchmarks/{name}.py", *map(str, words), "--seed", "1", "--json", str(found)]
    said = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=400)
    assert said.returncode == 0, said.stdout + said.stderr[-3000:]
    return json.loads(found.read_text())


pytestmark = pytest.mark.slow


def test_a_farm_that_is_hurt_all_the_time_loses_nothing(tmp_path):
    words = ["--items", 40, "--cards", 2, "--every", 0.5, "--faults", 16, "--limit", 40]
    told = soaked(tmp_path, "soak", *words)
    assert told["faults"] >= 6
    assert len(told["by_kind"]) >= 5
    assert told["bad_items"] > 0


def test_three_hosts_that_are_hurt_at_random_lose_nothing(tmp_path):
    told = soaked(tmp_path, "soak_hosts", "--items", 100, "--cards", 1, "--faults", 8, "--minutes", 0.4)
    assert (told["hosts"], told["items"]) == (3, 100)
    assert told["faults"] >= 6
    assert len({kind.partition(":")[0] for kind in told["by_kind"]}) >= 2
