"""A spec read from the database is validated again before anything is built: mangled ones are
refused, never run.
"""

from __future__ import annotations

import copy
import json
import random

import pytest

from farm.errors import TupleRejected
from farm.subjects.parsing import parse

SPECS = 10_000


def captured():
    from farm.models.catalog import build, example_inputs
    from farm.operators.capture import predict

    model, inputs = build("resnet18"), example_inputs("resnet18")
    return [
        spec.to_json()
        for spec in predict(model, inputs, device_type="cpu", grad_enabled=False).tuples.values()
    ]


def places(tree, path=()):
    """The paths to everything inside a JSON tree."""
    entries = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in entries:
        yield (*path, key)
        yield from places(value, (*path, key))


def mangle(spec, chance, junk):
    spec = copy.deepcopy(spec)
    for _ in range(chance.randint(1, 3)):
        *path, last = chance.choice(list(places(spec)) or [("schema",)])
        parent = spec
        for key in path:
            parent = parent[key]
        if chance.random() < 0.2 and isinstance(parent, dict):
            del parent[last]
        elif chance.random() < 0.1 and isinstance(parent, dict):
            parent[chance.choice(["__class__", "x", "operator", "tensors"])] = copy.deepcopy(
                chance.choice(junk)
            )
        else:
            parent[last] = copy.deepcopy(chance.choice(junk))
    return spec


def test_ten_thousand_mangled_specs_are_refused_or_harmless(tmp_path, monkeypatch):
    from farm.operators.rebuild import rebuild
    from farm.subjects.allow_list import ALLOWED_OPERATORS

    chance = random.Random(11)
    trap = tmp_path / "trap"
    junk = [
        None,
        True,
        -1,
        0,
        2**63,
        2**70,
        1e308,
        float("nan"),
        "",
        "os.system",
        "builtins.eval",
        "torch.load",
    ]
    junk += [
        "torch.nn.Module.__init__",
        f"open({str(trap)!r}, 'w')",
        [],
        [[[]]],
        {},
        {"tensor": 99},
        {"tensor": -1},
    ]
    junk += [{"dtype": "os"}, {"slice": [1]}, {"dict": 3}, "float32", "x" * 3000, ["torch", "ops"]]
    good = captured()
    refused = 0
    for _ in range(SPECS):
        mangled = mangle(chance.choice(good), chance, junk)
        try:
            spec = parse(mangled)
        except TupleRejected:
            refused += 1
            continue
        # What passes is a tuple all the same, plain JSON; and one with a foreign operator is never
        # built.
        json.dumps(spec.to_json(), allow_nan=False)
        if spec.operator not in ALLOWED_OPERATORS:
            refused += 1
            with pytest.raises(TupleRejected):
                rebuild(spec, "cpu")
    assert refused > SPECS * 0.5
    assert not trap.exists()


@pytest.mark.parametrize("operator", ["aten.special_laguerre_polynomial_l.n_scalar", "function"])
def test_a_polynomial_of_a_huge_order_is_refused_before_it_runs(operator):
    """Its kernel computes one term after the other, so nothing else bounds its time."""
    from farm.operators.rebuild import rebuild

    is_aten = operator.startswith("aten")
    tensor = {"role": "activation", "shape": [4], "dtype": "float32", "storage": 0}
    spec = {
        "schema": 1,
        "operator": operator if is_aten else "torch.special.laguerre_polynomial_l",
        "kind": "aten" if is_aten else "function",
        "parameters": {},
        "keywords": {},
        "tensors": [tensor],
        "training": False,
        "direction": "forward",
    }
    rebuild(parse({**spec, "arguments": [{"tensor": 0}, 20]}), "cpu").run()
    with pytest.raises(TupleRejected, match="the limit is"):
        rebuild(parse({**spec, "arguments": [{"tensor": 0}, 2**40]}), "cpu")


@pytest.mark.parametrize(
    "keywords", [{"layout": 1000}, {"dtype": 99}, {"dtype": {"dtype": "bool"}, "layout": -1}]
)
def test_a_number_is_no_layout_and_no_dtype(keywords):
    """PyTorch looks such numbers up without a check, and the process ends."""
    from farm.operators.rebuild import rebuild

    spec = {
        "schema": 1,
        "operator": "aten.full.default",
        "kind": "aten",
        "parameters": {},
        "arguments": [[2], 1],
        "keywords": keywords,
        "tensors": [],
        "training": False,
        "direction": "forward",
    }
    with pytest.raises(TupleRejected, match="is a number"):
        rebuild(parse(spec), "cpu")
