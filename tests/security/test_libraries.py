"""Operators of libraries: a list and the settings of the host allow them, and a message imports
nothing. A small library is defined here, listed by the script, captured, and measured by a real
benchmark process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import farm
from benchmarks.forged_tuples import forged, send
from benchmarks.library_operators import reason_of, text_of
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.cpu import cpu_card
from farm.errors import SettingsError, TupleRejected, Unmeasurable
from farm.models import own
from farm.operators.input_values import fill
from farm.operators.output_sizes import trial
from farm.operators.rebuild import rebuild
from farm.settings import settings
from farm.subjects import allow_list, libraries
from farm.subjects.allow_list import overload_of
from farm.subjects.library import Library
from farm.subjects.parsing import parse
from farm.training.extract import extract
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.tuple import OperatorTuple, TensorSpec
from tests import slow

ROOT = Path(__file__).parents[2]
ONE, TWO = {"tensor": 0}, {"tensor": 1}
LIBRARY = """
import typing
import torch

@torch.library.custom_op("small_library::scaled", mutates_args=())
def scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values * factor

@scaled.register_fake
def _(values, factor):
    return torch.empty_like(values)

def _save(ctx, inputs, output):
    ctx.factor = inputs[1]

scaled.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_save)

@torch.library.custom_op("small_library::picked", mutates_args=())
def picked(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return values.index_select(0, rows)

@picked.register_fake
def _(values, rows):
    return values.new_empty(rows.shape[0], values.shape[1])

@torch.library.custom_op("small_library::kept", mutates_args=())
def kept(values: torch.Tensor) -> torch.Tensor:
    return values[values[:, 0] > 0].clone()

@torch.library.custom_op("small_library::lost", mutates_args=())
def lost(values: torch.Tensor) -> torch.Tensor:
    return values[values[:, 0] > 0].clone()

@torch.library.custom_op("small_library::repeated", mutates_args=())
def repeated(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_ones(count)

@repeated.register_fake
def _(values, count):
    return values.new_empty(count)

@torch.library.custom_op("small_library::sized", mutates_args=())
def sized(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.new_ones(count)

@torch.library.custom_op("small_library::padded", mutates_args=())
def padded(values: torch.Tensor, sizes: typing.Sequence[int]) -> torch.Tensor:
    return values.clone()

@torch.library.custom_op("small_library::written", mutates_args={"rows"})
def written(rows: torch.Tensor) -> None:
    rows.add_(1)

schemas = torch.library.Library("small_library", "FRAGMENT")
schemas.define("kernelless(Tensor values) -> Tensor")

@torch.library.custom_op("small_library::unruled", mutates_args=())
def unruled(rows: torch.Tensor) -> torch.Tensor:
    return rows + 1

@torch.library.custom_op("small_library::_hidden", mutates_args=())
def _hidden(values: torch.Tensor) -> torch.Tensor:
    return values.clone()

@torch.library.custom_op("small_library::opens", mutates_args=())
def opens(values: torch.Tensor, path: str) -> torch.Tensor:
    return values.clone()

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, values):
        values = torch.ops.small_library.scaled(self.layer(values), 0.5)
        rows = torch.arange(2)
        return torch.ops.small_library.picked(values, rows)

class Scaled(Net):
    def forward(self, values):
        return scaled(self.layer(values), 2.0)

class Kept(Net):
    def forward(self, values):
        return kept(self.layer(values)) * 2

def net(): return Net().eval(), torch.randn(4, 8)
def scaled_net(): return Scaled().eval(), torch.randn(4, 8)
def kept_net(): return Kept().eval(), torch.randn(4, 8)
"""
RULES = {
    "values": {
        "small_library.picked.default": {"rows": "below values 0"},
        "small_library.written.default": {"rows": "below rows 0"},
    },
    "limits": {
        "small_library.scaled.default": {"factor": [0, 100]},
        "small_library.padded.default": {"sizes": [0, 8]},
        "small_library.repeated.default": {"count": [0, 2**40]},
    },
    "selects_from": {"small_library.kept.default": "values"},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of a module with operators, and the list that the script makes of it."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "small_library.py").write_text(LIBRARY)
    script = (
        "import json; from benchmarks.library_operators import registered_by; "
        "print(json.dumps(registered_by('small_library', ['small_library'])))"
    )
    made = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    signatures = json.loads(made.stdout.splitlines()[-1])
    (folder / "small_library.toml").write_text(text_of("small_library", "1", signatures, RULES))
    return folder


@pytest.fixture
def allowed(library, monkeypatch):
    """The settings of a host that names the library."""
    environment = {"FARM_LIBRARIES": json.dumps({"small_library": f"{library}/small_library.toml"})}
    monkeypatch.syspath_prepend(library)
    monkeypatch.setenv("FARM_LIBRARIES", environment["FARM_LIBRARIES"])
    settings.cache_clear()
    yield environment | {"PYTHONPATH": str(library)}
    settings.cache_clear()


def variant(library, name, **fields):
    return farm.variant(own.register(f"{library}/small_library.py:{name}"), 4, **fields)


def version():
    """The version of the library: a hash of its file."""
    sys.path_importer_cache.clear()
    libraries.load()
    return {"version": libraries.version_of("small_library")}


def picked(bound=4):
    tensors = (
        TensorSpec("activation", "", (bound, 8), "float32"),
        TensorSpec("activation", "", (16,), "int64", storage=1),
    )
    return OperatorTuple(
        "small_library.picked.default", "library", version(), (ONE, TWO), {}, tuple(tensors)
    )


def test_what_a_library_defines_is_allowed_or_denied_by_a_property(allowed):
    reasons = {
        name: libraries.listed(f"small_library.{name}.default").reason
        for name in ("scaled", "picked", "kept", "_hidden", "opens")
    }
    assert [name for name, reason in reasons.items() if not reason] == ["scaled", "picked", "kept"]
    assert "nobody has read" in reasons["_hidden"]
    assert "cannot contain" in reasons["opens"]


def test_a_call_of_a_library_is_a_tuple_of_its_module(library, allowed):
    captured = extract(variant(library, "net")).capture
    assert (captured.gaps, captured.mismatches) == ((), {})
    names = [captured.tuples[call.tuple_id].operator for call in captured.calls]
    assert [name for name in names if not name.startswith("torch")] == [
        "small_library.scaled.default",
        "small_library.picked.default",
    ]
    for spec in captured.tuples.values():
        assert parse(json.loads(json.dumps(spec.to_json()))).id == spec.id


def test_an_output_whose_size_depends_on_values_is_captured_with_values(library, allowed):
    captured = extract(variant(library, "kept_net")).capture
    assert captured.with_values
    assert "small_library.kept.default" in {spec.operator for spec in captured.tuples.values()}


def test_without_the_setting_a_forward_pass_is_refused(library, monkeypatch):
    monkeypatch.syspath_prepend(library)
    refusal = extract(variant(library, "scaled_net")).refusal("net")
    assert "'small_library.scaled.default' is not in" in refusal.message


def test_without_the_setting_a_training_step_is_refused(library, monkeypatch):
    monkeypatch.syspath_prepend(library)
    step = variant(library, "scaled_net", step="training", optimizer="sgd")
    with pytest.raises(TupleRejected, match=r"'small_library\.scaled\.default' is not in"):
        extract(step)


def test_a_training_step_of_a_library(library, allowed):
    found = extract(variant(library, "scaled_net", step="training", optimizer="sgd"))
    assert "small_library.scaled.default" in {
        spec.operator for spec in found.capture.tuples.values()
    }
    assert not found.capture.gaps


def test_indices_come_from_the_rule_of_the_list(library, allowed):
    libraries.load()
    rebuilt = rebuild(picked(bound=3), "cpu")
    assert set(rebuilt.tensors[1].tolist()) == {0, 1, 2}
    rebuilt.run()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"operator": "small_library.unruled.default"}, "has no rule for its valid values"),
        ({"operator": "small_library.opens.default"}, "cannot contain"),
        ({"operator": "small_library.other.default"}, "is not in this version's allow-list"),
        ({"operator": "other_library.scaled.default"}, "is not in this version's allow-list"),
        ({"operator": "aten.add.Tensor"}, "not the name of an overload of a library"),
        ({"operator": "torch.ops.aten"}, "not the name of an overload of a library"),
        ({"arguments": [ONE, 101.0]}, "is measured for factor from 0 to 100"),
        ({"arguments": [ONE, None]}, "is measured for factor from 0 to 100"),
        ({"arguments": [ONE, 2.0, 3.0]}, "do not fit"),
        ({"parameters": {}}, "must be the version of the library"),
        ({"parameters": {"version": "other"}}, "is of version 'other' of small_library"),
        ({"operator": "small_library.sized.default"}, "takes whole numbers 'count'"),
        ({"operator": "small_library.padded.default"}, "of any length"),
        ({"operator": "small_library.kernelless.default", "arguments": [ONE]}, "has no operator"),
    ],
)
def test_forged_tuples_are_refused(library, allowed, change, why):
    libraries.load()
    dtype = "int64" if "unruled" in change.get("operator", "") else "float32"
    tensor = TensorSpec("activation", "", (4, 8), dtype)
    scaled = OperatorTuple(
        "small_library.scaled.default", "library", version(), (ONE, 2.0), {}, (tensor,)
    )
    forged = scaled.to_json() | change
    if "unruled" in forged["operator"]:
        forged["arguments"] = [ONE]
    with pytest.raises(TupleRejected, match=why):
        rebuild(parse(json.loads(json.dumps(forged))), "cpu")


def test_an_index_that_the_operator_writes_is_refused(library, allowed):
    rows = TensorSpec("activation", "", (4,), "int64")
    spec = OperatorTuple("small_library.written.default", "library", version(), (ONE,), {}, (rows,))
    with pytest.raises(TupleRejected, match="the operator writes it"):
        rebuild(spec, "cpu")


def test_a_tensor_of_fewer_elements_than_its_shape_is_refused(library, allowed):
    """A kernel may expect that a tensor is contiguous."""
    tensor = TensorSpec("activation", "", (1000, 1000), "float32", (0, 0))
    spec = OperatorTuple(
        "small_library.scaled.default", "library", version(), (ONE, 2.0), {}, (tensor,)
    )
    with pytest.raises(TupleRejected, match="share memory"):
        rebuild(spec, "cpu")


def test_an_output_of_unknown_size_is_refused(library, allowed):
    tensor = TensorSpec("activation", "", (4, 8), "float32")
    spec = OperatorTuple("small_library.lost.default", "library", version(), (ONE,), {}, (tensor,))
    with pytest.raises(TupleRejected, match="does not run on meta") as refused:
        trial(spec)
    assert "selects_from" in refused.value.next_step


def test_a_message_imports_no_library(library, allowed):
    script = (
        "import sys, json; from farm.errors import TupleRejected\n"
        "from farm.operators.rebuild import rebuild; from farm.subjects.parsing import parse\n"
        "try: rebuild(parse(json.load(sys.stdin)), 'cpu')\n"
        "except TupleRejected as error: print(error.message, 'small_library' in sys.modules)"
    )
    environment = allowed | {"PYTHONPATH": f"{library}:{ROOT}"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(picked().to_json()),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no operator 'small_library.picked.default'" in ran.stdout
    assert ran.stdout.endswith("False\n")


def test_another_signature_on_the_host_is_refused(library, allowed, monkeypatch, tmp_path):
    libraries.load()
    text = (library / "small_library.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("float factor", "int factor"))
    monkeypatch.setenv("FARM_LIBRARIES", json.dumps({"small_library": f"{tmp_path}/other.toml"}))
    settings.cache_clear()
    with pytest.raises(TupleRejected, match="another signature in the installed version"):
        overload_of("small_library.scaled.default")


def test_a_list_that_cannot_be_read_is_one_line(monkeypatch):
    monkeypatch.setenv("FARM_LIBRARIES", '{"small_library": "/no/such/file.toml"}')
    settings.cache_clear()
    with pytest.raises(SettingsError, match="cannot be read"):
        libraries.listed("small_library.scaled.default")
    settings.cache_clear()


# ----- in a benchmark process


def measured(spec, environment):
    stopping = Stopping(warm_up_s=0.0, minimum_s=0.0005, maximum_s=0.001)
    with BenchmarkProcess(cpu_card(settings()).id, environment) as process:
        process.wait_ready()
        subject = Subject("operator", spec.id, spec.to_json())
        return process.measure(MeasureRequest(subject, Protocol(), stopping), timeout_s=60.0)


@slow.PROCESS
def test_a_worker_that_names_the_library_measures_its_operator(allowed):
    assert measured(picked(), allowed).reading.time_us.value > 0


@slow.PROCESS
def test_a_worker_bounds_the_memory_of_an_operator(allowed):
    tensor = TensorSpec("activation", "", (4, 8), "float32")
    spec = OperatorTuple(
        "small_library.repeated.default", "library", version(), (ONE, 2**39), {}, (tensor,)
    )
    with pytest.raises(Unmeasurable) as refused:
        measured(spec, allowed)
    assert refused.value.reason == "out_of_memory"


def test_a_worker_that_does_not_name_it_refuses_the_item_and_imports_nothing(library):
    with pytest.raises(Unmeasurable) as refused:
        measured(picked(), {"FARM_LIBRARIES": "{}", "PYTHONPATH": str(library)})
    assert refused.value.reason == "rejected"
    assert "FARM_LIBRARIES" in refused.value.message


def test_a_worker_without_the_library_refuses_the_item(allowed):
    environment = {"FARM_LIBRARIES": allowed["FARM_LIBRARIES"], "PYTHONPATH": ""}
    with pytest.raises(Unmeasurable, match="has no operator 'small_library") as refused:
        measured(picked(), environment)
    assert refused.value.reason == "rejected"
    assert "Install a build of small_library" in refused.value.next_step


@slow.PROCESS
def test_forged_tuples_of_a_library_break_nothing(library, allowed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(library))
    version()
    outcome = send(forged(3, 300, [], libraries.allowed()), cpu_card(settings()).id)
    assert not outcome.crashes
    # PyTorch's compiler makes its folder when the first operator of a library in Python runs
    assert [name for name in outcome.files if not name.startswith("torchinductor_")] == []
    assert outcome.reasons["measured"] > 10
    assert outcome.reasons["rejected"] > 100


# ----- torchvision's list

REGIONS = TensorSpec("activation", "", (6, 5), "float32", storage=1)
IMAGES = TensorSpec("activation", "", (2, 3, 32, 64), "float32")


@pytest.fixture
def torchvision_list(monkeypatch):
    monkeypatch.setenv("FARM_LIBRARIES", '{"torchvision": ""}')
    settings.cache_clear()
    yield
    settings.cache_clear()


def test_the_list_of_torchvision_says_what_may_be_called(torchvision_list):
    names = {name: libraries.listed(f"torchvision.{name}.default").reason for name in OPERATORS}
    assert names["nms"] == names["roi_align"] == names["deform_conv2d"] == ""
    assert "nobody has read" in names["_roi_pool_backward"]
    assert "quantised" in names["qnms"]


OPERATORS = ("nms", "roi_align", "deform_conv2d", "_roi_pool_backward", "qnms")


def test_regions_name_images_that_there_are_and_boxes_in_them(torchvision_list):
    arguments = (ONE, TWO, 0.25, 7, 7, 2, True)
    spec = OperatorTuple(
        "torchvision.roi_align.default",
        "library",
        {"version": "0.28.0"},
        arguments,
        {},
        (IMAGES, REGIONS),
    )
    names = ("input", "rois", "spatial_scale", "pooled_height", "pooled_width", "sampling_ratio")
    passed = dict(zip(names, arguments, strict=False))
    with pytest.MonkeyPatch.context() as patched:  # torchvision may lack its operators here
        patched.setattr(allow_list, "arguments_of", lambda _: passed)
        patched.setattr(allow_list, "tensor_arguments", lambda _: ((("input", 0),), (("rois", 0),)))
        how = Library().values(spec, 1, frozenset())
    rows = torch.empty(6, 5)
    fill(rows, REGIONS, how, torch.Generator().manual_seed(0))
    assert set(rows[:, 0].tolist()) <= {0.0, 1.0}
    assert (rows[:, 3:] >= rows[:, 1:3]).all()
    assert (rows[:, 1:] * 0.25 <= 32).all()


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        ("(Tensor x, float scale=1., *, ScalarType? dtype=None) -> Tensor", ""),
        ("(Tensor(a!) x) -> ()", ""),
        ("(Tensor x, int[2] size=[1, 1], int? n=None) -> Tensor", ""),
        ("(Tensor x, int[2] size=[1, 1], int other=1) -> Tensor", "numbers 'other'"),
        ("(Tensor x, Scalar other) -> Tensor", "numbers 'other'"),
        ("(Tensor x, int[] size) -> Tensor", "any length"),
        ("(Tensor x, str path) -> Tensor", "cannot contain"),
        ("(__torch__.torch.classes.A x) -> Tensor", "cannot contain"),
        ("(Tensor x) -> int", "returns no tensor"),
    ],
)
def test_a_signature_decides(signature, reason):
    limits = {"size": [0, 8], "n": [0, 8]}
    found = reason_of("a.b.default", signature, (), limits)
    assert reason in found if reason else not found
