"""The predictor that comes with the package answers as when it was packaged, and needs NumPy
alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from farm.addons.predict import stored_predictor
from farm.addons.predict.query import _not_learned
from farm.exchange.packaged import packaged_database
from farm.operators.cost import cost
from farm.subjects.parsing import parse
from farm.types.tuple import NeededTuple

ROOT = Path(__file__).parents[3]
#: A tuple of each operator family in float32 and in half precision, with predictions of the code
#: that fitted the predictor.
GOLDEN_FILE = Path(__file__).with_name("packaged_predictor.json")
GOLDEN = json.loads(GOLDEN_FILE.read_text())


def packaged():
    return stored_predictor.find([stored_predictor.PACKAGED], "NVIDIA H200", "2.11")


def values(found):
    return [found.value, found.low, found.high]


def test_it_answers_as_when_it_was_packaged(request):
    wanted = [
        NeededTuple(
            one["id"],
            one["short_name"],
            "",
            one["flops"],
            one["bytes_moved"],
            {"": 2},
            one["spec"],
            cost(parse(one["spec"])).output_shapes,
        )
        for one in GOLDEN["tuples"]
    ]
    found = packaged().predict(wanted, wanted)
    if request.config.getoption("--regenerate-golden"):
        write_golden(found)
        return
    for call, entry in zip(found.calls, GOLDEN["tuples"], strict=True):
        assert values(call.time_us) == pytest.approx(entry["time_us"], rel=1e-6), entry[
            "short_name"
        ]
        assert values(call.energy_mj) == pytest.approx(entry["energy_mj"], rel=1e-6), entry[
            "short_name"
        ]
    assert values(found.total.time_us) == pytest.approx(GOLDEN["sum_time_us"], rel=1e-6)
    assert values(found.total.energy_mj) == pytest.approx(GOLDEN["sum_energy_mj"], rel=1e-6)
    assert list(found.narrowing) == GOLDEN["narrowing"]


def write_golden(found):
    tuples = []
    for call, entry in zip(found.calls, GOLDEN["tuples"], strict=True):
        figures = {"time_us": values(call.time_us), "energy_mj": values(call.energy_mj)}
        tuples.append(json.dumps({**entry, **figures}))
    rest = {
        "sum_time_us": values(found.total.time_us),
        "sum_energy_mj": values(found.total.energy_mj),
        "narrowing": list(found.narrowing),
    }
    lines = ['"tuples": [\n' + ",\n".join(tuples) + "\n]"]
    lines += [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in rest.items()]
    GOLDEN_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def test_it_has_learned_from_the_packaged_readings():
    """Else every estimate of its card would say that the predictor should be fitted again."""
    with packaged_database().read() as session:
        assert _not_learned(session, packaged()) == []


def test_it_is_small_and_needs_numpy_alone():
    assert sum(file.stat().st_size for file in stored_predictor.PACKAGED.iterdir()) <= 4_500_000
    code = """
import sys

sys.modules["sklearn"] = sys.modules["scipy"] = None
from farm.addons.predict import stored_predictor
from farm.types.tuple import NeededTuple

predictor = stored_predictor.find([stored_predictor.PACKAGED], "NVIDIA H200", "2.11")
tensor = {"role": "activation", "shape": [32, 64, 56, 56], "dtype": "float32", "storage": 0}
spec = {"kind": "module", "arguments": [{"tensor": 0}], "tensors": [tensor]}
wanted = [NeededTuple("x", "ReLU", "", 0, 51380224, {"": 1}, spec)]
found = predictor.predict(wanted, wanted)
(call,) = found.calls
assert call.known
assert 5 < call.time_us.low < call.time_us.value < call.time_us.high < 40, found
assert 1 < found.total.energy_mj.low < found.total.energy_mj.high < 20, found
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
