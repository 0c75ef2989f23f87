"""Every operator of a training step can be run again on made-up values: alike, finite, and never
outside its memory.
"""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from torch import nn

from farm.benchmark.subjects.operator_tuple import set_values
from farm.errors import TupleRejected, UsageError
from farm.models import catalog
from farm.operators.cost import cost
from farm.operators.rebuild import needed_bytes, rebuild, written_inputs
from farm.subjects.allow_list import ATEN_OVERLOADS, overload_of
from farm.subjects.encoding import tensors_in
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.training import capture as capturing
from farm.training.extract import loss_for
from farm.training.step import TrainingStep, loss_of
from farm.types.protocol import Protocol
from farm.types.request import Request
from farm.types.tuple import OperatorTuple, TensorSpec
from tests import slow
from tests.training.test_capture import extract_from_catalog

TOKENS = {"length": 16, "layers": 2}
STEPS = [
    pytest.param(
        "mobilenet_v3_small",
        {"input_size": 64, "optimizer": "adam", "memory_format": "channels_last"},
        marks=slow.ALIKE,
    ),
    ("resnet18", {"input_size": 32, "optimizer": "sgd-fused", "amp": "float16"}),
    pytest.param("googlenet", {}, marks=slow.ALIKE),
    pytest.param(
        "bert-base",
        {**TOKENS, "optimizer": "adamw-fused", "amp": "bfloat16"},
        marks=slow.ALIKE,
    ),
    ("gpt2", {**TOKENS, "optimizer": "adamw-foreach"}),
    ("t5-small", {**TOKENS, "phase": "encode"}),
]
ONLY_ON_A_CARD = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "cudnn_batch_norm",
)
MOST_BYTES, MOST_BYTES_SLOW = 2**26, 2**29  # of memory, for one operator


@pytest.fixture
def given_back(monkeypatch) -> dict[str, list]:
    """What each call gave while it was captured, by the id of its tuple: sizes, strides and
    types.
    """
    found: dict[str, list] = {}
    record = capturing.StepRecorder._record

    def recorded(recorder, func, args, kwargs, out):
        before = len(recorder.calls)
        record(recorder, func, args, kwargs, out)
        if len(recorder.calls) > before:
            found.setdefault(recorder.calls[-1].tuple_id, laid_out(out))

    monkeypatch.setattr(capturing.StepRecorder, "_record", recorded)
    return found


def laid_out(out):
    def strides(tensor):  # those of a dimension of one element address nothing
        return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]

    return [(tuple(tensor.shape), strides(tensor), tensor.dtype) for tensor in tensors_in(out)]


def finite(tensor):
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def runs_as_captured(captured, given_back, most_bytes=MOST_BYTES):
    for spec in captured.tuples.values():
        same = parse(json.loads(json.dumps(spec.to_json())))
        assert same.id == spec.id
        assert len(label_of(spec)) < 200
        cost(spec)
        if needed_bytes(spec) > most_bytes or spec.short_name.startswith(ONLY_ON_A_CARD):
            continue
        rebuilt = rebuild(same, "cpu")
        for _ in range(2):
            out = rebuilt.run()
        assert laid_out(out) == given_back[spec.id], spec
        if spec.short_name != "scalar_tensor":  # makes the number that hides the end of a text
            assert all(map(finite, (*rebuilt.tensors, *tensors_in(out)))), spec


@pytest.mark.parametrize(
    ("model", "said"), STEPS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_every_operator_of_a_step_runs_as_it_was_captured(model, said, given_back):
    captured = extract_from_catalog(model, **said, device_type="cuda")
    assert not captured.gaps
    runs_as_captured(captured, given_back)


# Operators of the others are all among theirs and those of `STEPS`.
OTHER_FAMILIES = ["efficientnet_b0", "maxvit_t", "swin_t", "convnext_tiny"]


@slow.ALIKE
@pytest.mark.parametrize("model", OTHER_FAMILIES)
def test_every_operator_of_other_families_runs_as_it_was_captured(model, given_back):
    entry = catalog.find(model)
    sized = {} if entry.fixed_size else {"input_size": entry.smallest_size}
    runs_as_captured(
        extract_from_catalog(model, **sized, optimizer="adamw-fused"), given_back, MOST_BYTES_SLOW
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("model", ["resnet18", "vit_b_32", "bert-base", "gpt2"])
def test_on_the_card_every_operator_of_a_step_runs_as_it_did(model, amp, given_back):
    sized = TOKENS if model in ("bert-base", "gpt2") else {}
    variant = dataclasses.replace(catalog.variant(model, 2, dtype="float32", **sized), mode="train")
    card = torch.device("cuda")
    resolved = catalog.resolve(variant.model)
    step = TrainingStep(
        resolved.build(variant, device="cuda").train(),
        resolved.example_inputs(variant, device="cuda"),
        optimizer="adamw-fused",
        make_loss=lambda output: loss_for(resolved, variant, output, card),
        amp=amp,
    )
    captured = capturing.capture_step(step, device_type="cuda")
    for spec in captured.tuples.values():
        rebuilt = rebuild(spec, "cuda")
        for _ in range(2):
            out = rebuilt.run()
        assert laid_out(out) == given_back[spec.id], spec
        # Efficient attention rounds its log-sum-exps up to 32 rows, and fills what is more with
        # infinity.
        if spec.short_name not in ("scalar_tensor", "_scaled_dot_product_efficient_attention"):
            assert all(map(finite, (*rebuilt.tensors, *tensors_in(out)))), spec


def small_step(optimizer, amp=None):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.SiLU(inplace=True),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(144, 5),
    )
    cpu = torch.device("cpu")
    return TrainingStep(
        model.train(),
        (torch.randn(2, 3, 8, 8),),
        optimizer=optimizer,
        make_loss=lambda output: loss_of(output, causal=False, masked=False, device=cpu),
        amp=amp,
    )


@pytest.mark.parametrize(
    ("optimizer", "amp"),
    [
        ("sgd-foreach", None),
        ("sgd-fused", torch.float16),
        ("adam-foreach", None),
        ("adam-fused", torch.float16),
        ("adamw-foreach", None),
    ],
)
def test_what_is_written_over_and_over_stays_finite(optimizer, amp):
    captured = capturing.capture_step(small_step(optimizer, amp))
    written = [spec for spec in captured.tuples.values() if written_inputs(spec)]
    assert any(spec.operator.startswith(("aten._foreach", "aten._fused")) for spec in written)
    for spec in written:
        rebuilt = rebuild(spec, "cpu")
        assert rebuilt.written
        for _ in range(2000):
            rebuilt.run()
        assert all(map(finite, rebuilt.tensors)), spec


def aten(name, *arguments, tensors, **keywords):
    return OperatorTuple(f"aten.{name}", "aten", {}, arguments, keywords, tensors)


def floats(*shape, storage=0):
    return TensorSpec("activation", "", shape, "float32", storage=storage)


def integers(*shape, storage=1, dtype="int64"):
    return TensorSpec("activation", "", shape, dtype, storage=storage)


@pytest.mark.parametrize("data", ["zeros", "zeros-50+"])
def test_a_class_of_data_holds_for_the_parts_of_a_step(data):
    captured = capturing.capture_step(small_step("adamw-fused"))
    for spec in captured.tuples.values():
        plain, classed = rebuild(spec, "cpu"), rebuild(spec, "cpu")
        set_values(classed, data)
        for one, other in zip(plain.tensors, classed.tensors, strict=True):
            assert one.is_floating_point() or torch.equal(one, other)  # indices stay valid
        assert all(map(finite, (*classed.tensors, *tensors_in(classed.run())))), spec
        if spec.short_name == "convolution_backward":
            gradient = classed.tensors[0]
            assert (gradient == 0).float().mean() == pytest.approx(
                1 if data == "zeros" else 0.5, abs=0.1
            )
            assert (plain.tensors[0] != 0).all()


def test_what_a_step_sees_is_not_looked_at():
    step = catalog.variant("resnet18", step="training")
    with pytest.raises(UsageError, match="recorded in a forward pass only"):
        Request(variant=step, protocol=Protocol(data="seen"))


ONE, TWO, THREE = {"tensor": 0}, {"tensor": 1}, {"tensor": 2}
POOL = [[2, 2], [2, 2], [0, 0], [1, 1], False]


@pytest.mark.parametrize(
    ("spec", "bound"),
    [
        (
            aten(
                "embedding_dense_backward.default",
                ONE,
                TWO,
                7,
                -1,
                False,
                tensors=(floats(50, 3), integers(50)),
            ),
            7,
        ),
        (
            aten(
                "max_pool2d_with_indices_backward.default",
                ONE,
                TWO,
                *POOL,
                THREE,
                tensors=(
                    floats(2, 3, 2, 2),
                    floats(2, 3, 4, 4, storage=1),
                    integers(2, 3, 2, 2, storage=2),
                ),
            ),
            16,
        ),
        (aten("gather.default", ONE, -1, TWO, tensors=(floats(40, 3), integers(40, 9))), 3),
        (aten("index.Tensor", ONE, [None, TWO], tensors=(floats(40, 5), integers(60))), 5),
        (
            aten(
                "nll_loss_forward.default",
                ONE,
                TWO,
                None,
                1,
                -100,
                tensors=(floats(60, 4), integers(60)),
            ),
            4,
        ),
    ],
    ids=lambda one: one.short_name if isinstance(one, OperatorTuple) else "",
)
def test_indices_are_valid(spec, bound):
    rebuilt = rebuild(parse(spec.to_json()), "cpu")
    indices = next(tensor for tensor in rebuilt.tensors if tensor.dtype == torch.int64)
    assert 0 <= int(indices.min()) <= int(indices.max()) == bound - 1
    assert all(map(finite, tensors_in(rebuilt.run())))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (aten("set_.source_Tensor", ONE, ONE, tensors=(floats(2),)), "allow-list"),
        (aten("resize_.default", ONE, [3], tensors=(floats(2),)), "allow-list"),
        (
            OperatorTuple("aten.relu.default", "function", {}, (ONE,), {}, (floats(2),)),
            "allow-list",
        ),
        (OperatorTuple("torch.relu", "aten", {}, (ONE,), {}, (floats(2),)), "allow-list"),
        (aten("relu.default", ONE, 1, 2, tensors=(floats(2),)), "The stored arguments do not fit"),
        (aten("mm.default", ONE, ONE, tensors=(integers(2, 2, storage=0),)), "has no rule"),
        (
            aten(
                "native_dropout_backward.default", ONE, TWO, 2.0, tensors=(floats(2), integers(2))
            ),
            "has no rule",
        ),
        (
            aten(
                "embedding_dense_backward.default",
                ONE,
                TWO,
                0,
                -1,
                False,
                tensors=(floats(2, 3), integers(2)),
            ),
            "no valid value",
        ),
        (
            aten("gather.default", ONE, 0, TWO, tensors=(floats(8), integers(4, storage=0))),
            "shares its memory",
        ),
        (
            aten("index_add_.default", ONE, 0, ONE, ONE, tensors=(integers(4, storage=0),)),
            "an index that the operator also writes",
        ),
        (
            aten("index.Tensor", ONE, [TWO], tensors=(floats(8), integers(8, dtype="uint8"))),
            "may be an index or a mask",
        ),
    ],
    ids=lambda one: one.short_name if isinstance(one, OperatorTuple) else "",
)
def test_what_could_reach_beyond_its_memory_is_refused(spec, why):
    with pytest.raises(TupleRejected, match=why):
        rebuild(spec, "meta")


def test_the_list_holds_nothing_that_is_other_operators():
    missing = [name for name in ATEN_OVERLOADS if not _there(name)]
    assert not missing
    composite = Counter(
        name
        for name in ATEN_OVERLOADS
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            overload_of(name).name(), "CompositeImplicitAutograd"
        )
    )
    # On a card these are kernels of their own.
    assert set(composite) <= {
        "aten._fused_rms_norm.default",
        "aten._pack_padded_sequence_backward.default",  # views, and a copy
        "aten.mish_backward.default",
        "aten.native_channel_shuffle.default",
        "aten.silu_backward.default",
    }


def _there(name):
    try:
        return overload_of(name) is not None
    except TupleRejected:
        return False


def test_the_cost_of_a_backward():
    image, weight, gradient = (
        floats(2, 8, 6, 6),
        floats(4, 8, 3, 3, storage=1),
        floats(2, 4, 4, 4, storage=2),
    )
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    forward = cost(aten("convolution.default", ONE, TWO, None, *how, tensors=(image, weight)))
    backward = cost(
        aten(
            "convolution_backward.default",
            THREE,
            ONE,
            TWO,
            [0],
            *how,
            [True, True, False],
            tensors=(image, weight, gradient),
        )
    )
    assert backward.flops == 2 * forward.flops > 0
    moved = 4 * (image.numel + weight.numel)
    assert backward.bytes == 2 * moved + 4 * gradient.numel


def test_what_is_only_written_is_not_read():
    two = (floats(100), floats(100, storage=1))
    assert cost(aten("copy_.default", ONE, TWO, tensors=two)).bytes == 800
    assert cost(aten("add_.Tensor", ONE, TWO, tensors=two)).bytes == 1200
    assert cost(aten("zeros_like.default", ONE, tensors=two[:1])).bytes == 400
    assert cost(aten("_foreach_add_.List", [ONE], [TWO], tensors=two)).bytes == 1200
    assert cost(aten("_foreach_mul_.Scalar", [ONE, TWO], 0.9, tensors=two)).bytes == 1600
