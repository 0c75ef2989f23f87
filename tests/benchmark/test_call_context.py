"""The calls of a model played again from its tuples: each on the memory that the calls before it
wrote.
"""

import dataclasses
import math

import pytest
import torch
from torch import nn

from farm.benchmark.call_context import Player, shared_out
from farm.models import catalog
from farm.operators.capture import capture
from farm.operators.captured import CapturedCall, CapturedPass, Launch
from farm.operators.rebuild import rebuild
from farm.subjects.encoding import tensors_in
from farm.training.capture import capture_step
from farm.training.step import Loss, TrainingStep
from farm.types import intervals
from tests.operators.routed import routed

CPU = torch.device("cpu")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        out = torch.relu(self.first(x))
        return self.second(out) + x


def played(seen):
    """What each call was given, as addresses, and where what it made lies."""
    steps = []

    def step(call, operator):
        out = operator.run()
        addresses = [tensor.untyped_storage().data_ptr() for tensor in operator.tensors]
        made = out.untyped_storage().data_ptr() if isinstance(out, torch.Tensor) else None
        steps.append((call, addresses, out, made))
        return out

    with torch.no_grad():
        Player(seen, CPU).play(step)
    return steps


def test_a_call_is_given_what_the_calls_before_it_made_and_weights_of_its_own():
    seen = capture(Residual().eval(), (torch.randn(2, 8, 16, 16),))
    (first, *_), (relu, *_), (second, *_), (add, *_) = steps = played(seen)
    assert [call.tuple_id for call in seen.calls] == [
        one.tuple_id for one in (first, relu, second, add)
    ]
    given = [dict(zip(step[0].reads, dict.fromkeys(step[1]), strict=True)) for step in steps]
    made = {storage: step[3] for step in steps for storage in step[0].writes}
    for call, addresses in zip(seen.calls, given, strict=True):
        assert all(addresses[storage] == made[storage] for storage in call.reads if storage in made)
    assert first.tuple_id == second.tuple_id
    weights = [
        {address for storage, address in one.items() if seen.tensors[storage].role != "activation"}
        for one in given
    ]
    assert not weights[0] & weights[2]
    (image,) = set(first.reads) & set(add.reads)
    assert given[0][image] == given[3][image]


def test_a_product_of_groups_is_played_with_the_rows_of_the_model():
    """The weights of the replay are others, so its router would choose other experts."""
    model, x = routed(skew=3.0)
    seen = capture(model, (x,))
    (spec,) = (one for one in seen.tuples.values() if one.short_name == "_grouped_mm")
    played_ends = []

    def step(call, operator):
        if call.tuple_id == spec.id:
            played_ends.append(operator.tensors[-1].clone())
        return operator.run()

    player = Player(seen, CPU)
    with torch.no_grad():
        player.play(step)
        player.play(step)
    assert torch.equal(played_ends[0], rebuild(spec, CPU).tensors[-1])
    assert torch.equal(played_ends[0], played_ends[1])


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5", "swin_t"])
def test_what_is_played_makes_what_the_model_makes(name):
    model, image = (
        catalog.build(name, device="cpu"),
        catalog.example_inputs(catalog.variant(name, input_size=64), device="cpu"),
    )
    seen = capture(model, image)
    for call, _, out, _ in played(seen):
        shapes = seen.traces[call.tuple_id].outputs
        assert not isinstance(out, torch.Tensor) or shapes[0].startswith(str(tuple(out.shape)))


class Counting(nn.Module):
    """Writes where its counter of tokens says, as a static cache does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 4, 8))
        self.register_buffer("counter", torch.tensor(0))

    def forward(self, token):
        self.counter.fill_(2)
        for _ in range(2):
            place = torch.arange(1, device=token.device) + self.counter
            self.counter.add_(1)
            self.cache.index_copy_(1, place, token)
        return self.cache * 2


def test_a_call_that_is_run_twice_leaves_counters_where_one_run_leaves_them():
    seen = capture(Counting().eval(), (torch.randn(1, 1, 8),))

    def twice(call, operator):
        out = operator.run()
        operator.run()
        return out

    with torch.no_grad():
        Player(seen, CPU).play(twice)  # a place behind the end of the cache would raise


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(500, 8), nn.Embedding(6, 8)
        self.last = nn.Linear(8, 500)
        self.register_buffer("places", torch.arange(6))

    def forward(self, ids):
        return self.last(self.word(ids) + self.place(self.places[: ids.shape[1]]))


@pytest.mark.parametrize("optimizer", ["sgd-foreach", "adamw-fused"])
def test_a_step_is_played_through_its_backward_and_its_optimizer(optimizer):
    step = TrainingStep(
        Tokens(),
        (torch.randint(500, (2, 6)),),
        optimizer=optimizer,
        make_loss=lambda output: Loss(
            "",
            (torch.randint(500, (12,)),),
            lambda out, to: nn.functional.cross_entropy(out.flatten(0, 1), *to),
        ),
    )
    seen = capture_step(step)
    steps = played(seen)  # a row that no table has would raise
    made = {}
    for call, addresses, out, _ in steps:
        given = dict(zip(call.reads, dict.fromkeys(addresses), strict=True))
        assert all(made[storage] == given[storage] for storage in call.reads if storage in made)
        fresh = [tensor.untyped_storage().data_ptr() for tensor in tensors_in(out)]
        new = [storage for storage in call.writes if storage not in call.reads]
        made |= zip(
            new,
            (address for address in dict.fromkeys(fresh) if address not in addresses),
            strict=True,
        )
        assert all(torch.isfinite(tensor).all() for tensor in tensors_in(out))
    assert {call.part for call, *_ in steps} == {"forward", "loss", "backward", "optimizer"}


def test_a_call_on_another_stream_waits_for_what_it_needs_and_for_what_the_model_waited():
    def call(index, reads, writes):
        return CapturedCall(index, "", "", reads, writes)

    seen = CapturedPass(
        tuples={},
        calls=(
            call(0, (), (1,)),
            call(1, (1,), (2,)),
            call(2, (1,), (3,)),
            call(3, (2, 3), (1,)),
            call(4, (), (4,)),
            call(5, (1, 2), ()),
            call(6, (4,), ()),
        ),
        tensors=(),
        launches=(
            Launch(0),
            Launch(7),
            Launch(0),
            Launch(0),
            Launch(7, (2, 1)),
            Launch(7),
            Launch(0),
        ),
    )
    # Call 5 waits for call 3, the last of those that it needs; call 6 only for call 4.
    assert seen.waits == ((), (0,), (), (1,), (2,), (3,), (4,))
    again = dataclasses.replace(seen, launches=(*seen.launches[:6], Launch(7)))
    assert again.waits[6] == (), "the stream has waited for it, or runs it itself"


def test_what_all_collectives_add_is_shared_out_by_what_each_adds():
    shares = shared_out(
        [100.0, 102.0, 98.0, 100.0], {"a": 30.0, "b": 10.0, "c": 0.0}, {"a": 5, "b": 1, "c": 2}
    )
    assert [round(shares[one].effect_us.value, 1) for one in "abc"] == [15.0, 25.0, 0.0]
    half_width_us = intervals.batch_half_width([100.0, 102.0, 98.0, 100.0], intervals.midmean)
    together_us = math.hypot(*(one.calls * one.effect_us.half_width for one in shares.values()))
    assert together_us == pytest.approx(half_width_us, rel=1e-3)
