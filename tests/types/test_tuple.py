"""A tuple is plain JSON with a stable id, and nothing but a tuple is accepted as one."""

import copy
import dataclasses
import json
import os
import random
import subprocess
import sys

import pytest

from farm.errors import TupleRejected
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.tuple import OperatorTuple, TensorSpec, canonical_stride, contiguous_stride
from tests import slow


def convolution(**changes) -> OperatorTuple:
    fields = {
        "operator": "torch.nn.Conv2d",
        "kind": "module",
        "parameters": {
            "in_channels": 64,
            "out_channels": 128,
            "kernel_size": {"tuple": [3, 3]},
            "stride": {"tuple": [2, 2]},
            "padding": {"tuple": [1, 1]},
            "dilation": {"tuple": [1, 1]},
            "groups": 1,
            "bias": False,
            "padding_mode": "zeros",
        },
        "arguments": ({"tensor": 1},),
        "tensors": (
            TensorSpec("parameter", "weight", (128, 64, 3, 3), "float32", storage=0),
            TensorSpec("activation", "", (32, 64, 56, 56), "float32", storage=1),
        ),
    }
    return OperatorTuple(**(fields | changes))


def addition() -> OperatorTuple:
    image = TensorSpec("activation", "", (32, 64, 56, 56), "float32")
    return OperatorTuple(
        "torch.Tensor.add_", "function", {}, ({"tensor": 0}, {"tensor": 0}), {}, (image,)
    )


def test_the_id_is_known_beforehand():
    # A changed id orphans every reading in every database: change it only with the schema's
    # version.
    assert convolution().id == "16d2fc4ce11f2786a62f4d14a76cbdb7"


def test_the_id_does_not_depend_on_process_or_hash_seed():
    code = (
        "import json, sys; from farm.subjects.parsing import parse;"
        "print(parse(json.load(sys.stdin)).id); assert 'torch' not in sys.modules"
    )
    ids = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(convolution().to_json()),
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert ids == {convolution().id}


def test_json_and_back_is_the_same_tuple():
    for spec in (convolution(), addition()):
        again = parse(json.loads(json.dumps(spec.to_json())))
        assert again == spec
        assert hash(again) == hash(spec)


def test_what_decides_the_kernels_decides_the_id():
    weight, image = convolution().tensors
    channels_last = TensorSpec("activation", "", image.shape, "float32", (200704, 1, 3584, 64), 1)
    half = TensorSpec("activation", "", image.shape, "float16", None, 1)
    shifted = TensorSpec("activation", "", image.shape, "float32", None, 1, offset=1)
    sparse = TensorSpec("activation", "", image.shape, "float32", None, 1, zeros=0.5)
    specs = [
        convolution(tensors=(weight, other))
        for other in (image, channels_last, half, shifted, sparse)
    ]
    specs.append(convolution(training=True))
    assert len({spec.id for spec in specs}) == len(specs)


def test_one_tensor_passed_twice_is_one_entry_with_two_references():
    assert addition().input_shapes == ((32, 64, 56, 56),) * 2
    assert len(addition().tensors) == 1


def test_parameters_are_flat_for_queries():
    assert convolution().parameters_for_query()["kernel_size"] == [3, 3]
    assert convolution().parameters_for_query()["in_channels"] == 64


def test_strides_of_single_elements_do_not_count_unless_they_mean_channels_last():
    assert canonical_stride((2, 1, 16, 49, 49), (38416, 49, 2401, 49, 1)) is None
    assert canonical_stride((8, 64, 1, 1), (64, 1, 64, 64)) == (64, 1, 64, 64)
    assert canonical_stride((8, 64, 1, 1), (64, 1, 1, 1)) is None
    assert TensorSpec("activation", "", (4, 3), "float32", (3, 1)).stride is None


def test_an_expanded_tensor_touches_its_elements_once():
    assert (
        TensorSpec("activation", "", (8, 16, 4), "float32", (0, 4, 1)).distinct_bytes == 16 * 4 * 4
    )
    assert contiguous_stride((2, 3, 4)) == (12, 4, 1)


def _with(path, value):
    def change(data):
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _with(["schema"], 2),
        _with(["schema"], True),
        _with(["operator"], "os.system('x')"),
        _with(["operator"], "a" * 500),
        _with(["kind"], "lambda"),
        _with(["kind"], []),
        _with(["direction"], "backward"),
        _with(["training"], 1),
        _with(["surprise"], 1),
        _with(["arguments"], {"tensor": 1}),
        _with(["arguments", 0], {"tensor": 7}),
        _with(["arguments", 0], {"tensor": -1}),
        _with(["arguments", 0], {"tensor": True}),
        _with(["arguments", 0], {"pickle": "gASV"}),
        _with(["arguments", 0], {"device": "cuda:1"}),
        _with(["arguments", 0], "x" * 10_000),
        _with(["arguments"], [[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]),
        _with(["arguments"], [0] * 30_000),
        _with(["parameters", "in_channels"], 2**70),
        _with(["parameters", "in_channels"], float("nan")),
        _with(["parameters", "in_channels"], {"tensor": 0}),
        _with(["parameters", "__class__()"], 1),
        _with(["tensors", 0, "shape"], [2**41]),
        _with(["tensors", 0, "shape"], [2**39, 2**39]),
        _with(["tensors", 0, "shape"], [-1]),
        _with(["tensors", 0, "shape"], [1.5]),
        _with(["tensors", 0, "stride"], [1]),
        _with(["tensors", 0, "dtype"], "qint8"),
        _with(["tensors", 0, "role"], "secret"),
        _with(["tensors", 0, "storage"], 1),
        _with(["tensors", 0, "name"], "../weight"),
        _with(["tensors", 1, "name"], "weight"),
        _with(["tensors", 1, "zeros"], 1.5),
        _with(["tensors", 1, "offset"], -4),
        _with(["tensors"], [{}] * 2000),
    ],
)
def test_what_is_not_a_tuple_is_rejected(change):
    data = copy.deepcopy(convolution().to_json())
    change(data)
    with pytest.raises(TupleRejected):
        parse(data)


@pytest.mark.parametrize("data", [None, 1, "x", [], {}, {"schema": 1}])
def test_other_json_is_rejected(data):
    with pytest.raises(TupleRejected):
        parse(data)


_JUNK = [
    None,
    True,
    -1,
    2**80,
    1e308,
    "",
    "x" * 300,
    [],
    {},
    [[]],
    {"tensor": 0},
    {"tuple": 1},
    {"a": 1, "b": 2},
    "\ud800",
]


def mangle(data, chance: random.Random):
    """One random edit somewhere in a JSON tree."""
    places = []

    def walk(tree):
        keys = (
            range(len(tree))
            if isinstance(tree, list)
            else list(tree)
            if isinstance(tree, dict)
            else []
        )
        for key in keys:
            places.append((tree, key))
            walk(tree[key])

    walk(data)
    place, key = chance.choice(places)
    match chance.randrange(4):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[chance.choice(["__reduce__", "x", ""])] = place.pop(key)
        case _:
            place[key] = copy.deepcopy(chance.choice(_JUNK))


@pytest.mark.parametrize("number", [2_000, pytest.param(10_000, marks=slow.ALIKE)])
def test_mangled_tuples_are_accepted_or_rejected_and_nothing_else(number):
    chance = random.Random(0)
    originals = [json.dumps(spec.to_json()) for spec in (convolution(), addition())]
    rejected = 0
    for _ in range(number):
        data = json.loads(chance.choice(originals))
        for _ in range(chance.randint(1, 3)):
            mangle(data, chance)
        try:
            spec = parse(data)
        except TupleRejected:
            rejected += 1
        else:
            assert parse(json.loads(json.dumps(spec.to_json()))).id == spec.id
            assert label_of(spec)
            spec.parameters_for_query()
    assert rejected > number / 2


def optimizer_update(number: int) -> OperatorTuple:
    """Of as many parameters in one call, with five tensors each."""
    tensors = tuple(
        TensorSpec("parameter", "", (64, 64, 3, 3), "float32", storage=index)
        for index in range(5 * number)
    )
    lists = [
        [{"tensor": index} for index in range(begin * number, (begin + 1) * number)]
        for begin in range(5)
    ]
    return OperatorTuple(
        "aten._fused_adamw_.default", "aten", {}, tuple(lists), {"lr": 1e-12}, tensors
    )


def test_an_optimizer_updates_all_parameters_in_one_call():
    spec = optimizer_update(897)
    assert parse(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec.short_name == "_fused_adamw_"
    assert label_of(spec) == "_fused_adamw_ lr 1e-12 | 4485 of 64x64x3x3 (parameter) fp32"
    with pytest.raises(TupleRejected, match="at most 8192 items"):
        parse(optimizer_update(2000).to_json())


def test_an_aten_operator_is_named_with_its_overload():
    image = TensorSpec("activation", "", (2, 3), "float32")
    spec = OperatorTuple(
        "aten.mul.Tensor", "aten", {}, ({"tensor": 0}, {"tensor": 0}), {}, (image,)
    )
    assert (spec.short_name, label_of(spec)) == ("mul", "mul | 2x3 + 2x3 fp32")
    assert spec.id == "704f30c7fe4a34ef1a5c9a05b78d9a26"
    for name in ("torch.mul", "aten.mul", "aten.mul.Tensor.more"):
        with pytest.raises(TupleRejected, match="overload of aten"):
            parse(spec.to_json() | {"operator": name})


def kernel(**changes) -> dict:
    parameters = {
        "source": "0123456789abcdef" * 2,
        "fused": "relu",
        "config": {"dict": []},
        "writes": [0],
    }
    parameters |= {"outputs": []} | changes
    memory = TensorSpec("activation", "", (4, 32), "float32", storage=0)
    return OperatorTuple(
        "cpp.fused", "kernel", parameters, ({"tensor": 0},), {}, (memory,)
    ).to_json()


def test_a_generated_kernel_is_named_by_the_hash_of_its_source():
    spec = parse(kernel())
    assert (spec.kind, spec.short_name) == ("kernel", "fused")
    assert parse(kernel(compiler="3.1")).id != spec.id != parse(kernel(source="f" * 32)).id


@pytest.mark.parametrize(
    "change",
    [
        {"source": "import os"},
        {"source": "0" * 31},
        {"source": "0" * 31 + "\n"},
        {"source": None},
        {"code": "import os"},
        {"writes": [1]},
        {"writes": [-1]},
        {"writes": ["0"]},
        {"outputs": None},
        {"fused": ["relu"]},
        {"config": {"call": "os.system"}},
    ],
)
def test_a_forged_kernel_is_rejected_in_one_line(change):
    with pytest.raises(TupleRejected) as caught:
        parse(kernel(**change))
    assert "\n" not in caught.value.message
    assert "parameters" in caught.value.message


def test_a_kernel_without_its_source_is_rejected():
    data = kernel()
    del data["parameters"]["source"]
    with pytest.raises(TupleRejected):
        parse(data)


def test_the_bits_of_a_tensor_are_part_of_the_description_and_optional():
    tensor = TensorSpec("activation", "", (4,), "complex64")
    conjugated = dataclasses.replace(tensor, bits=("conj",))
    plain, lazy = (
        OperatorTuple("torch.abs", "function", {}, ({"tensor": 0},), {}, (one,))
        for one in (tensor, conjugated)
    )
    assert plain != lazy
    assert parse(lazy.to_json()) == lazy
    assert label_of(lazy) == f"{label_of(plain)} conj"
    for bits in (["other"], "conj", ["conj", "neg", "conj"]):
        changed = lazy.to_json()
        changed["tensors"][0]["bits"] = bits
        with pytest.raises(TupleRejected):
            parse(changed)
    real = lazy.to_json()
    real["tensors"][0]["dtype"] = "float32"
    with pytest.raises(TupleRejected, match="the numbers are real"):
        parse(real)
