"""The compiler lists the kernels of a model for a card that this host does not have."""

from __future__ import annotations

import ctypes
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from sqlmodel import select
from torch import nn

from farm.errors import CaptureError
from farm.exchange.packaged import packaged_database
from farm.operators import foreseen_kernels as listing
from farm.operators.captured import CapturedPass
from farm.operators.cost import cost
from farm.store.captures import capture_to_sum, stored_tuples
from farm.store.content import stored_variant
from farm.store.tables import ModelVariant
from farm.training import foreseen_kernels as foreseen
from farm.training.foreseen_kernels import foreseen_kernels, foreseen_pass
from farm.types.variant import Variant
from tests import slow
from tests.operators.compiled_models import Refused

MULTIPROCESSORS = 132  # of an H200


class Small(nn.Module):
    """A convolution, which a card runs in another memory format; attention; a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.last = nn.Linear(16, 8)

    def forward(self, images: torch.Tensor) -> Any:
        images = torch.relu(self.norm(self.layer(images)))
        rows = images.flatten(2).transpose(1, 2)[:, None].contiguous()
        rows = nn.functional.scaled_dot_product_attention(rows, rows, rows)
        return self.last(rows).softmax(-1)


@pytest.fixture(scope="module")
def captured() -> CapturedPass:
    module = Small().eval().bfloat16().to("meta")
    images = torch.empty(4, 8, 16, 16, dtype=torch.bfloat16, device="meta")
    return foreseen_pass(module, (images,), MULTIPROCESSORS)


def test_the_launches_are_generated_kernels_and_library_calls_of_a_card(
    captured: CapturedPass,
) -> None:
    operators = [captured.tuples[call.tuple_id].operator for call in captured.calls]
    assert captured.gaps == ()
    libraries = [name for name in operators if name.startswith("aten.")]
    assert libraries == [
        "aten.convolution.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten.addmm.out",
    ]
    assert {"triton.pointwise", "triton.persistent_reduction"} <= set(operators)
    (convolution,) = (
        spec for spec in captured.tuples.values() if spec.operator == "aten.convolution.default"
    )
    strides = [tensor.stride for tensor in convolution.tensors]
    assert strides == [(2048, 1, 128, 8), (72, 1, 24, 8)], "a card convolves channels last"


def test_a_fused_kernel_counts_the_bytes_that_it_reads_and_writes(captured: CapturedPass) -> None:
    paths = {call.tuple_id: call.module_path for call in captured.calls}
    (fused,) = (
        spec
        for spec in captured.tuples.values()
        if spec.kind == "kernel" and "batch_norm" in spec.parameters["fused"]
    )
    # The bias of the convolution, the normalization and the ReLU are one pass over the images, which
    # writes the three inputs of the attention.
    images_bytes = 2 * 4 * 16 * 16 * 16
    channels_bytes = 5 * 2 * 16
    assert fused.parameters["config"] == {"dict": []}
    assert "compiler" not in fused.parameters
    assert cost(fused).bytes == 4 * images_bytes + channels_bytes
    assert set(paths[fused.id].split(", ")) >= {"norm"}


def test_nothing_stays_replaced(captured: CapturedPass) -> None:
    assert torch._C._dynamo.guards._empty_strided_cuda is not listing._empty_strided
    assert "contiguous" not in vars(torch.Tensor)
    (library,) = (listing.Path(torch.__file__).parent / "lib").glob("libc10.*")
    table = (ctypes.c_void_p * listing._KINDS).in_dll(ctypes.CDLL(str(library)), listing._GUARDS)
    if not torch.version.cuda:
        assert table[listing._CUDA] is None
    attention: Any = torch.ops.aten.scaled_dot_product_attention.default
    assert torch._C.DispatchKey.CompositeImplicitAutograd not in attention.py_kernels


def test_a_model_that_the_compiler_refuses_is_an_error_with_its_reason() -> None:
    with pytest.raises(CaptureError, match="no shape is known"):
        foreseen_pass(Refused().to("meta"), (torch.empty(2, 8, device="meta"),), MULTIPROCESSORS)


def test_a_call_that_no_tuple_describes_is_an_error_and_no_missing_part(
    captured: CapturedPass, monkeypatch: pytest.MonkeyPatch
) -> None:
    incomplete = dataclasses.replace(captured, gaps=("aten._weight_int8pack_mm at 'last': no",))
    monkeypatch.setattr(foreseen, "foreseen_pass", lambda *_: incomplete)
    variant = Variant("resnet18", batch=2, input_size=64, compile="default")
    with pytest.raises(CaptureError, match=r"aten\._weight_int8pack_mm"):
        foreseen_kernels(variant, MULTIPROCESSORS)


class Sums(nn.Module):
    """Few long sums, which the compiler splits by the number of multiprocessors."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(-1)


def test_the_number_of_multiprocessors_decides_in_one_process_as_in_two() -> None:
    rows = torch.empty(8, 100_000, device="meta")
    few, many, again = (foreseen_pass(Sums(), (rows,), number) for number in (40, 132, 40))
    assert few.tuples.keys() == again.tuples.keys()
    assert few.tuples.keys() != many.tuples.keys()


def test_a_training_step_is_refused_before_its_model_is_built() -> None:
    step = Variant("resnet18", batch=2, input_size=64, compile="default", step="training")
    with pytest.raises(CaptureError, match="cannot be listed without a card"):
        foreseen_kernels(step, MULTIPROCESSORS)


@slow.MEASURED
def test_the_list_is_that_of_a_card() -> None:
    with packaged_database().read() as session:
        row = session.exec(
            select(ModelVariant).where(ModelVariant.model == "vgg16", ModelVariant.compile != "")
        ).one()
        variant = stored_variant(row.model_dump())
        on_card = stored_tuples(session, variant, "cuda", "graph", "NVIDIA H200")
        assert capture_to_sum(session, variant, "cuda", "graph", "NVIDIA H200") is not None
    listed = foreseen_kernels(variant, MULTIPROCESSORS).needed()

    def sizes(needed: Any) -> Counter[tuple[Any, ...]]:
        counted: Counter[tuple[Any, ...]] = Counter()
        for entry in needed:
            counted[entry.short_name, entry.flops, entry.bytes_moved] += entry.all_calls
        return counted

    assert sizes(listed) == sizes(on_card)
