"""The tuples of six models, kept as files: a reviewer reads what a change does to them.

Regenerate with ``pytest tests/operators/test_golden.py --regenerate-golden``.
"""

import json
from pathlib import Path

import pytest

from farm.models import catalog
from farm.operators.capture import predict
from farm.operators.cost import cost
from farm.subjects.label import label_of
from tests import slow

FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "mobilenet_v2",
        "vit_b_16",
        "swin_t",
        pytest.param("densenet121", marks=slow.ALIKE),
        pytest.param("googlenet", marks=slow.ALIKE),
    ],
)
def test_the_tuples_of_a_model_are_those_on_file(name, request):
    found = predict(catalog.build(name), catalog.example_inputs(catalog.variant(name, 2)))
    lines = []
    for tuple_id, count in found.counts.items():
        spec = found.tuples[tuple_id]
        lines.append([count, label_of(spec), cost(spec).flops, cost(spec).bytes, tuple_id])
    file = FOLDER / f"{name}.json"
    if request.config.getoption("--regenerate-golden"):
        rows = ",\n".join("  " + json.dumps(line) for line in lines)
        file.write_text(f'{{"batch": 2, "calls": {len(found.calls)}, "tuples": [\n{rows}\n]}}\n')
    kept = json.loads(file.read_text())
    assert kept["calls"] == len(found.calls)
    assert kept["tuples"] == lines
