"""Values that decide how much work a call does are recorded from the model, and made again for a
rebuilt operator.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from farm.errors import TupleRejected
from farm.operators.capture import FunctionAsModel, capture, predict
from farm.operators.cost import cost
from farm.operators.deciding_values import with_values
from farm.operators.profiler import verify_on_device
from farm.operators.rebuild import rebuild
from farm.subjects.parsing import parse
from farm.types.deciding import lacks_values
from farm.types.distribution import Distribution, segments_of
from tests.operators.routed import routed

CPU = torch.device("cpu")
TABLE = torch.zeros(4096, 512)  # a gather of its rows is large


def product_of(captured):
    (spec,) = (spec for spec in captured.tuples.values() if spec.short_name == "_grouped_mm")
    return spec


def only(function, *inputs):
    (spec,) = capture(FunctionAsModel(function), inputs).tuples.values()
    return spec


def values_of(spec):
    return [tensor.values for tensor in spec.tensors if tensor.values is not None]


def rows_of(ends):
    return sorted(torch.diff(ends, prepend=ends.new_zeros(1)).tolist())


def test_the_rows_of_each_expert_are_those_of_the_models_router():
    model, x = routed(skew=1.0)
    spec = product_of(capture(model, (x,)))
    best = model.router(x).topk(2).indices.reshape(-1)
    rows = torch.bincount(best, minlength=8)
    ends = rebuild(parse(spec.to_json()), CPU).tensors[-1]
    assert ends[-1] == 2 * len(x)
    assert [-(-number // 64) for number in rows_of(ends)] == [
        -(-number // 64) for number in sorted(rows.tolist())
    ]
    assert rebuild(spec, CPU).run().shape == (2 * len(x), 16)
    assert rows_of(rebuild(spec.without_values, CPU).tensors[-1]) == [64] * 8


def test_equal_routings_are_one_tuple_and_others_are_others():
    model, x = routed(skew=1.0)
    twin, _ = routed(skew=1.0)
    mirrored, _ = routed(skew=1.0)
    with torch.no_grad():  # the same experts under other numbers: the last tiles run at other times
        mirrored.router.weight.copy_(model.router.weight.flip(0))
        mirrored.router.bias.copy_(model.router.bias.flip(0))
    even, _ = routed()
    ids = [
        product_of(capture(routed_model, (x,))).id for routed_model in (model, twin, mirrored, even)
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_a_prediction_lacks_the_values_and_gets_them_from_an_eager_pass():
    model, x = routed(skew=1.0)
    predicted, ran = predict(model, (x,)), capture(model, (x,))
    assert lacks_values(product_of(predicted))
    completed = with_values(predicted, lambda: ran)
    assert completed.counts == ran.counts
    assert completed.traces.keys() == ran.traces.keys()
    assert [call.tuple_id for call in completed.calls] == [call.tuple_id for call in ran.calls]


def test_a_pass_without_such_calls_is_not_captured_again():
    captured = predict(nn.Linear(4, 4), (torch.zeros(2, 4),))
    assert with_values(captured, lambda: pytest.fail("it is captured again")) is captured


def test_watching_the_values_changes_nothing_that_runs():
    model, x = routed()
    found = verify_on_device(model, (x,), CPU)
    assert found.differences == []
    assert values_of(product_of(found.capture))


def test_the_bytes_of_experts_without_rows_do_not_count():
    model, x = routed(rows=1)
    spec = product_of(capture(model, (x,)))
    busy = product_of(capture(*routed(rows=256)[:1], (routed(rows=256)[1],)))
    of_experts = spec.tensors[1].numel * spec.tensors[1].itemsize_bytes
    assert cost(spec).bytes < of_experts / 2
    assert cost(spec.without_values).bytes == cost(spec).bytes  # two rows use two experts at most
    assert cost(busy).bytes > of_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_of_other_dtypes_than_bfloat16_are_predicted(dtype):
    def product(x, weights, ends):
        return torch._grouped_mm(x, weights, offs=ends)

    given = (torch.ones(8, 16, dtype=dtype), torch.ones(4, 16, 10, dtype=dtype).mT.contiguous().mT)
    ends = torch.tensor([1, 1, 6, 8], dtype=torch.int32)
    predicted = predict(FunctionAsModel(product), (*given, ends))
    ran = capture(FunctionAsModel(product), (*given, ends))
    assert predicted.traces == ran.traces
    assert cost(product_of(predicted)).flops == 2 * 8 * 16 * 10


def test_the_bags_of_an_embedding_have_the_lengths_of_the_model():
    bags = nn.EmbeddingBag(50, 8)
    words, starts = torch.arange(12), torch.tensor([0, 1, 1, 9])
    for captured in (capture(bags, (words, starts)), predict(bags, (words, starts))):
        (spec,) = captured.tuples.values()
        made = rebuild(spec, CPU).tensors[-1].tolist()
        assert made[0] == 0
        assert sorted(end - start for start, end in zip(made, [*made[1:], 12], strict=True)) == [
            0,
            1,
            3,
            8,
        ]
    assert rebuild(spec.without_values, CPU).tensors[-1].tolist() == [0, 3, 6, 9]


def test_the_last_end_of_the_bags_stays_the_last():
    bags = nn.EmbeddingBag(50, 8, include_last_offset=True)
    spec = next(iter(capture(bags, (torch.arange(12), torch.tensor([0, 1, 12]))).tuples.values()))
    made = rebuild(spec, CPU).tensors[-1].tolist()
    assert (made[0], made[-1], len(made)) == (0, 12, 3)
    assert sorted([made[1], 12 - made[1]]) == [1, 11]


def test_a_large_gather_reads_as_many_different_rows_as_in_the_model():
    def distinct(index):
        return len(rebuild(only(torch.Tensor.__getitem__, TABLE, index), CPU).tensors[1].unique())

    generator = torch.Generator().manual_seed(0)
    permutation = torch.randperm(4096, generator=generator)
    assert distinct(permutation) == 4096
    assert distinct(permutation % 512) == 512
    assert values_of(only(torch.Tensor.__getitem__, TABLE, torch.arange(4096))) == [
        Distribution("places", (16, 2))
    ]
    assert values_of(only(torch.index_select, TABLE, 0, permutation)) == [
        Distribution("places", (16, 0))
    ]


def test_a_small_or_random_gather_is_the_tuple_that_it_was():
    random = torch.randint(0, 4096, (4096,), generator=torch.Generator().manual_seed(0))
    assert not values_of(only(torch.Tensor.__getitem__, TABLE, random))
    assert not values_of(only(torch.Tensor.__getitem__, TABLE[:, :8], torch.arange(4096)))
    assert not values_of(only(torch.Tensor.__getitem__, TABLE, torch.arange(64)))
    assert not values_of(
        next(iter(capture(nn.Embedding(4096, 512), (torch.arange(4096),)).tuples.values()))
    )


def test_a_mask_selects_as_many_entries_as_in_the_model():
    mask = torch.arange(100) % 7 == 0
    for function, inputs in (
        (torch.Tensor.__getitem__, (torch.zeros(100, 4), mask)),
        (torch.masked_select, (torch.zeros(100), mask)),
        (torch.nonzero, (mask,)),
        (torch.where, (mask,)),
    ):
        spec = only(function, *inputs)
        assert values_of(spec) == [Distribution("marks", (15, 0))]
        out = rebuild(spec, CPU).run()
        assert len(out[0] if isinstance(out, tuple) else out) == 15


def test_values_that_a_fake_pass_has_overwritten_are_unknown():
    def overwritten(x, weights, ends):
        ends.copy_(x.sum(1).argsort()[:4])
        return torch._grouped_mm(x, weights, offs=ends)

    given = (
        torch.ones(8, 16).bfloat16(),
        torch.ones(4, 16, 16).bfloat16(),
        torch.arange(4, dtype=torch.int32),
    )
    assert lacks_values(product_of(predict(FunctionAsModel(overwritten), given)))


# ----- values of a message


def with_given(spec, index, values):
    tensors = list(spec.tensors)
    tensors[index] = dataclasses.replace(tensors[index], values=values)
    return dataclasses.replace(spec, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("index", "values"),
    [
        (2, Distribution("segments", (64, 1, 7))),
        (2, Distribution("segments", (64, 2**30, 8))),
        (2, Distribution("places", (4, 0))),
        (1, Distribution("segments", (64, 1, 8))),
    ],
)
def test_values_that_do_not_fit_the_call_are_rejected_before_anything_is_built(index, values):
    spec = product_of(capture(*routed()[:1], (routed()[1],)))
    with pytest.raises(TupleRejected, match="input"):
        rebuild(parse(with_given(spec, index, values).to_json()), CPU)


@functools.cache
def routed_product():
    return product_of(capture(*routed()[:1], (routed()[1],)))


@settings(max_examples=200)
@given(st.lists(st.integers(0, 300), min_size=8, max_size=8), st.sampled_from([1, 64, 2**20]))
def test_all_values_that_are_built_are_valid(lengths, step):
    try:
        built = rebuild(with_given(routed_product(), 2, segments_of(lengths, step)), CPU)
    except TupleRejected:
        return
    ends = built.tensors[2].tolist()
    assert ends == sorted(ends)
    assert ends[0] >= 0
    assert ends[-1] <= 512


@functools.cache
def table_lookup():
    return only(torch.Tensor.__getitem__, TABLE, torch.randperm(4096))


@settings(max_examples=100)
@given(st.integers(1, 16), st.sampled_from([0, 1, 2]))
def test_all_places_that_are_built_are_valid(distinct, order):
    spec = with_given(table_lookup(), 1, Distribution("places", (distinct, order)))
    places = rebuild(spec, CPU).tensors[1]
    assert places.min() >= 0
    assert places.max() < 4096
    assert len(places.unique()) == distinct * 256


ROWS, EDGES, WIDTH = 500, 2000, 3


@pytest.mark.parametrize(
    "call",
    [
        lambda rows, index, new: rows.scatter_add_(0, index[:, None].expand(-1, WIDTH), new),
        lambda rows, index, new: rows.scatter_reduce_(
            0, index[:, None].expand(-1, WIDTH), new, reduce="amax", include_self=False
        ),
        lambda rows, index, new: torch.scatter(rows, 0, index[:, None].expand(-1, WIDTH), new),
        lambda rows, index, new: rows.index_add_(0, index, new),
        lambda rows, index, new: rows.index_add(dim=0, index=index, source=new),
        lambda rows, index, new: rows.index_copy_(-2, index, new),
        lambda rows, index, new: torch.index_select(rows, 0, index),
        lambda rows, index, new: rows.gather(0, index[:, None].expand(-1, WIDTH)),
        lambda rows, index, new: torch.take_along_dim(
            rows, index[:, None].expand(-1, WIDTH), dim=0
        ),
        lambda rows, index, new: rows[index],
    ],
)
def test_indices_cover_the_dimension_that_they_index(call):
    """Not the smallest size of any tensor: sums into 3 of 500 rows wait for each other."""
    captured = capture(
        FunctionAsModel(call),
        (torch.zeros(ROWS, WIDTH), torch.randint(ROWS, (EDGES,)), torch.randn(EDGES, WIDTH)),
    )
    spec = next(spec for spec in captured.tuples.values() if "int64" in str(spec.tensors))
    (index,) = (tensor for tensor in rebuild(spec, CPU).tensors if tensor.dtype == torch.int64)
    assert index.min() >= 0
    assert 0.9 * ROWS < index.max() < ROWS
    assert len(index.unique()) > 0.9 * ROWS


def test_indices_that_share_memory_are_valid_in_each_dimension():
    """`nonzero` returns the indices of all dimensions in one memory."""

    def call(rows, mask):
        first, second = mask.nonzero().unbind(1)
        return rows[first, second, None]

    mask = torch.arange(32).view(32, 1) % 16 == 0
    captured = capture(FunctionAsModel(call), (torch.randn(32, 1), mask))
    spec = next(spec for spec in captured.tuples.values() if spec.short_name == "getitem")
    assert rebuild(spec, CPU).run().shape == (2, 1)
