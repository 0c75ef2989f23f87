"""Send forged tuples of allowed operators to a benchmark process, and check that nothing breaks.

Each forged tuple is valid JSON of a tuple, and names an operator of the list. Half of them have random arguments;
the others are tuples of training steps of layers, with some numbers, shapes, strides, dtypes or offsets changed. All
operators, and all tuples of layers, come equally often. The process may refuse a tuple, fail to run it, or run it. It must not end, write a file, or take more memory than the
bound.

    python benchmarks/forged_tuples.py                          # 10,000 tuples
    python benchmarks/forged_tuples.py --count 300 --seed 7
    FARM_LIBRARIES='{"torchvision": ""}' python benchmarks/forged_tuples.py --libraries
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import farm
from benchmarks.layer_table import EXAMPLES
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.errors import FarmError, TupleRejected, Unmeasurable
from farm.models import own
from farm.subjects import libraries
from farm.subjects.allow_list import ALLOWED_OPERATORS, ATEN_OVERLOADS, overload_of
from farm.subjects.parsing import parse
from farm.training.extract import extract
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.tuple import OperatorTuple, TensorSpec

SIZES = (0, 1, 1, 2, 2, 3, 4, 4, 7, 8, 16, 33)
NUMBERS = (
    -(2**62),
    -(2**31) - 1,
    -7,
    -2,
    -1,
    0,
    0,
    1,
    1,
    2,
    2,
    3,
    5,
    16,
    1000,
    2**36 + 1,
    2**40,
    2**62,
)
FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, -1e300)
#: Most tensors have the dtypes of models.
TENSOR_DTYPES = ("float32",) * 6 + (
    "float64",
    "bfloat16",
    "int64",
    "int64",
    "int32",
    "bool",
    "complex64",
    "uint8",
)
TEXTS = (
    "none",
    "tanh",
    "sum",
    "mean",
    "amax",
    "floor",
    "trunc",
    "left",
    "right",
    "gesvd",
    "U",
    "L",
    "x" * 200,
)
#: Operator of aten -> the public function with its name.
FUNCTIONS_OF_ATEN = {
    name.rpartition(".")[2]: name
    for name in sorted(ALLOWED_OPERATORS)
    if not name.startswith("torch.nn.") and "__" not in name
}
#: Layers whose training steps give the tuples that are changed.
SEED_LAYERS = (
    "AdaptiveMaxPool2d AvgPool3d BatchNorm2d Bilinear CTCLoss ConvTranspose2d CrossEntropyLoss Embedding EmbeddingBag "
    "FractionalMaxPool2d GRU GroupNorm InstanceNorm1d LayerNorm MaxPool2d MaxPool3d MaxUnpool2d MultiLabelMarginLoss "
    "MultiMarginLoss MultiheadAttention NLLLoss2d PReLU ReflectionPad3d ReplicationPad2d RMSNorm Softplus Unfold "
    "affine_grid grid_sample pdist scaled_dot_product_attention interpolate rrelu glu lp_pool2d fold"
)


#: Operator of torchvision -> the shapes of its tensors, and its other arguments.
REGIONS: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[Any, ...]]] = {
    "torchvision.nms.default": (((16, 4), (16,)), (0.5,)),
    "torchvision.roi_align.default": (((2, 4, 16, 16), (6, 5)), (0.5, 7, 7, 2, True)),
    "torchvision.roi_pool.default": (((2, 4, 16, 16), (6, 5)), (0.5, 7, 7)),
    "torchvision.ps_roi_align.default": (((2, 8, 16, 16), (6, 5)), (0.5, 2, 2, 2)),
    "torchvision.ps_roi_pool.default": (((2, 8, 16, 16), (6, 5)), (0.5, 2, 2)),
    "torchvision._roi_align_backward.default": (
        ((6, 4, 7, 7), (6, 5)),
        (0.5, 7, 7, 2, 4, 16, 16, 2, True),
    ),
    "torchvision.deform_conv2d.default": (
        ((2, 3, 8, 8), (4, 3, 3, 3), (2, 18, 8, 8), (2, 9, 8, 8), (4,)),
        (1, 1, 1, 1, 1, 1, 1, 1, True),
    ),
}


def random_tuple(chance: random.Random, name: str) -> dict[str, Any]:
    """A tuple with random arguments of the types that the schema of an overload names."""
    tensors: list[dict[str, Any]] = []
    shape = random_shape(chance)  # most tensors of a call have equal shapes
    positional, keywords = [], {}
    for argument in overload_of(name)._schema.arguments:
        if argument.has_default_value() and chance.random() < 0.5:
            break
        tree = random_tree(chance, argument.name, str(argument.type), tensors, shape)
        if argument.kwarg_only:
            keywords[argument.name] = tree
        else:
            positional.append(tree)
    call = {"arguments": positional, "keywords": keywords, "tensors": tensors}
    fixed = {"schema": 1, "parameters": {}, "training": False, "direction": "forward"}
    if not name.startswith("aten."):
        version = {"version": libraries.version_of(libraries.listed(name).library)}
        return {"operator": name, "kind": "library", **fixed, "parameters": version, **call}
    function = FUNCTIONS_OF_ATEN.get(name.split(".")[1])
    if function and chance.random() < 0.4:
        return {"operator": function, "kind": "function", **fixed, **call}
    return {"operator": name, "kind": "aten", **fixed, **call}


def random_tree(
    chance: random.Random, name: str, kind: str, tensors: list[dict[str, Any]], shape: list[int]
) -> Any:
    if kind.startswith("Optional[") and chance.random() < 0.4:
        return None
    kind = kind.removeprefix("Optional[").removesuffix("]") if "Optional[" in kind else kind
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        return [
            random_tree(chance, name, inner, tensors, shape)
            for _ in range(chance.choice(SIZES[:8]))
        ]
    if kind == "Tensor":
        if tensors and chance.random() < 0.1:
            return {"tensor": chance.randrange(len(tensors))}
        tensors.append(random_tensor(chance, len(tensors), shape))
        return {"tensor": len(tensors) - 1}
    match kind:
        case "int":
            is_dtype = name in ("dtype", "out_dtype", "input_dtype")
            return {"dtype": chance.choice(TENSOR_DTYPES)} if is_dtype else chance.choice(NUMBERS)
        case "float":
            return chance.choice(FLOATS)
        case "number":
            return chance.choice((*FLOATS, *NUMBERS))
        case "bool":
            return chance.random() < 0.5
        case "str":
            return chance.choice(TEXTS)
        case "Device":
            return {"device": "run"}
    return None


def random_shape(chance: random.Random) -> list[int]:
    return [chance.choice(SIZES) for _ in range(chance.randrange(6))]


def random_tensor(chance: random.Random, storage: int, shape: list[int]) -> dict[str, Any]:
    if chance.random() < 0.3:
        shape = random_shape(chance)
    strided = chance.random() < 0.15
    stride = {"stride": [chance.choice((0, 1, 2, 8)) for _ in shape]} if strided else {}
    return {
        "role": "activation",
        "shape": list(shape),
        "dtype": chance.choice(TENSOR_DTYPES),
        **stride,
        "storage": storage,
        "offset": chance.choice((0, 0, 0, 0, 1, 8)),
    }


def changed(chance: random.Random, spec: dict[str, Any]) -> dict[str, Any]:
    """The tuple with one to three changed numbers, shapes, dtypes or missing arguments."""
    spec = copy.deepcopy(spec)
    for _ in range(chance.randint(1, 3)):
        tensor = chance.choice(spec["tensors"]) if spec["tensors"] else None
        match chance.randrange(6):
            case 0 if tensor and tensor["shape"]:
                place = chance.randrange(len(tensor["shape"]))
                tensor["shape"][place] = chance.choice((*SIZES, tensor["shape"][place] + 1))
            case 1 if tensor:
                tensor["dtype"] = chance.choice(TENSOR_DTYPES)
            case 2 if tensor:
                tensor["shape"] = random_shape(chance)
                tensor.pop("stride", None)
            case 3 if tensor:
                tensor["offset"] = chance.choice((0, 1, 64))
                tensor["stride"] = [chance.choice((0, 1, 3)) for _ in tensor["shape"]]
            case _:
                change_number(chance, spec["arguments"])
    return spec


def change_number(chance: random.Random, tree: list[Any]) -> None:
    """Change one number of a list of arguments, or of a list in it."""
    places = [index for index, entry in enumerate(tree) if isinstance(entry, int | float | list)]
    if not places:
        return
    place = chance.choice(places)
    entry = tree[place]
    if isinstance(entry, list):
        change_number(chance, entry)
    elif isinstance(entry, bool):
        tree[place] = not entry
    else:
        tree[place] = chance.choice((*NUMBERS, entry + 1, -entry))


def seeds(layers: str = SEED_LAYERS) -> list[dict[str, Any]]:
    """The tuples of training steps of layers, as JSON."""
    found = {}
    for name in layers.split():
        registered = own.register(f"{EXAMPLES}:{name}")
        step = extract(farm.variant(registered, 4, step="training", optimizer="sgd"))
        found |= {id_: spec.to_json() for id_, spec in step.capture.tuples.items()}
    return [json.loads(json.dumps(found[id_])) for id_ in sorted(found)]


def library_seeds() -> list[dict[str, Any]]:
    """A valid tuple of each operator of torchvision, as JSON; none without torchvision's list."""
    if not set(REGIONS) <= libraries.allowed():
        return []
    version = {"version": libraries.version_of("torchvision")}
    found = []
    for name, (shapes, rest) in REGIONS.items():
        tensors = tuple(
            TensorSpec("activation", "", shape, "float32", storage=number)
            for number, shape in enumerate(shapes)
        )
        arguments = (*({"tensor": number} for number in range(len(shapes))), *rest)
        found.append(OperatorTuple(name, "library", version, arguments, {}, tensors).to_json())
    return [json.loads(json.dumps(spec)) for spec in found]


def forged(
    seed: int,
    count: int,
    known: list[dict[str, Any]],
    operators: Collection[str] = ATEN_OVERLOADS,
) -> Iterator[dict[str, Any]]:
    """So many forged tuples that pass validation; each operator and each known tuple in turn."""
    chance = random.Random(seed)
    names = itertools.cycle(chance.sample(sorted(operators), len(operators)))
    originals = itertools.cycle(chance.sample(known, len(known)))
    made = 0
    while made < count:
        if known and chance.random() < 0.5:
            spec = changed(chance, next(originals))
        else:
            spec = random_tuple(chance, next(names))
        try:
            parse(spec)
        except TupleRejected:
            continue
        made += 1
        yield spec


@dataclass
class Outcome:
    """What a benchmark process did with the forged tuples."""

    reasons: Counter[str] = field(default_factory=Counter)
    crashes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    most_bytes: int = 0  # resident memory of the process


def send(specs: Iterator[dict[str, Any]], card_id: str, timeout_s: float = 60.0) -> Outcome:
    """Let a benchmark process of a card measure each tuple, with windows as short as possible."""
    outcome = Outcome()
    stopping = Stopping(warm_up_s=0.0, minimum_s=0.0005, maximum_s=0.001)
    with (
        tempfile.TemporaryDirectory() as folder,
        BenchmarkProcess(card_id, {"TMPDIR": folder}) as process,
    ):
        process.wait_ready()
        before = set(os.listdir(folder))
        for number, spec in enumerate(specs):
            subject = Subject("operator", f"forged-{number}", spec)
            try:
                process.measure(MeasureRequest(subject, Protocol(), stopping), timeout_s=timeout_s)
                outcome.reasons["measured"] += 1
            except Unmeasurable as error:
                outcome.reasons[error.reason] += 1
                if error.reason in ("crashed", "hung") or not process.alive:
                    outcome.crashes.append((f"{error.reason}: {error.message}", spec))
                    process.wait_ready()
            except FarmError as error:
                outcome.reasons[type(error).__name__] += 1
            if process.alive and process.pid:
                resident = psutil.Process(process.pid).memory_info().rss
                outcome.most_bytes = max(outcome.most_bytes, resident)
        outcome.files = sorted(set(os.listdir(folder)) - before)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--crashes", type=Path, help="write the tuples that ended the process")
    parser.add_argument(
        "--libraries", action="store_true", help="the operators of the setting 'libraries' only"
    )
    given = parser.parse_args()
    from farm.devices.cpu import cpu_card
    from farm.settings import settings

    begin_s = time.monotonic()
    if given.libraries:
        libraries.load()
        specs = forged(given.seed, given.count, library_seeds(), libraries.allowed())
    else:
        specs = forged(given.seed, given.count, seeds())
    outcome = send(specs, cpu_card(settings()).id)
    print(f"{given.count} tuples in {time.monotonic() - begin_s:.0f} s: {dict(outcome.reasons)}")
    print(
        f"{outcome.most_bytes / 2**30:.2f} GiB at most, {len(outcome.crashes)} crashes, files: {outcome.files}"
    )
    for reason, spec in outcome.crashes:
        print(reason[:200], json.dumps(spec)[:400])
    if given.crashes:
        given.crashes.write_text(json.dumps(outcome.crashes))


if __name__ == "__main__":
    main()
