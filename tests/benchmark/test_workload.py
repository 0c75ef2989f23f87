"""How many copies the residency policies ask for, and what they make of an operator."""

from __future__ import annotations

import pytest
import torch

from farm.benchmark.passes import CHAIN_LAYERS
from farm.benchmark.subjects import prepare
from farm.benchmark.subjects.model_variant import GivenModel, build_variant
from farm.benchmark.workload import MAX_COPIES, copies_wanted
from farm.errors import Unmeasurable
from farm.operators.rebuild import rebuild
from farm.subjects.parsing import parse
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests.benchmark.operators import linear

MIB = 2**20
CACHE = 50 * MIB


def test_small_activations_need_copies_of_the_weights_until_twice_the_cache() -> None:
    copies, reached = copies_wanted("resident", 10 * MIB, 0, 0, CACHE)
    assert (copies, reached) == (11, True)


def test_activations_that_flood_the_cache_need_no_copies() -> None:
    assert copies_wanted("resident", 10 * MIB, 60 * MIB, 60 * MIB, CACHE) == (1, True)


def test_an_operator_without_weights_is_run_on_the_same_input() -> None:
    assert copies_wanted("resident", 0, MIB, MIB, CACHE) == (1, True)


def test_weights_too_small_to_fill_the_cache_are_said_to_be_so() -> None:
    assert copies_wanted("resident", 128 * 1024, 0, 0, CACHE) == (MAX_COPIES, False)
    assert copies_wanted("resident", 1024, 0, 0, CACHE) == (1, False)


def test_a_stream_exceeds_the_cache_four_times() -> None:
    assert copies_wanted("stream", 10 * MIB, 10 * MIB, MIB, CACHE) == (10, True)


def test_reuse_copies_nothing() -> None:
    assert copies_wanted("reuse", 10 * MIB, 10 * MIB, MIB, CACHE) == (1, True)


def test_a_chain_feeds_each_layer_with_the_one_before() -> None:
    protocol = Protocol(launch="eager", residency="chain")
    workload = prepare(linear(4, 16, 16), protocol, torch.device("cpu"))
    assert workload.details.launching.copies == CHAIN_LAYERS
    assert workload.rounds[0].passes % CHAIN_LAYERS == 0
    first_layer, second_layer = workload.keep[0][:2]
    fed = first_layer()
    rebuilt = rebuild(parse(linear(4, 16, 16).spec), "cpu")
    torch.testing.assert_close(second_layer(), fed @ rebuilt.weights[0].T)


def test_what_cannot_feed_itself_is_not_available_as_a_chain() -> None:
    with pytest.raises(Unmeasurable) as caught:
        prepare(linear(4, 16, 32), Protocol(launch="eager", residency="chain"), torch.device("cpu"))
    assert caught.value.reason == "not_available"


def test_a_given_model_is_measured_without_a_model_of_the_catalog() -> None:
    cpu, model = torch.device("cpu"), torch.nn.ReLU()
    mine, other = Variant("mine", 1, 64), Variant("squeezenet1_1", 1, 64)
    built, _ = build_variant(other, cpu, hand_over=True)
    subject = Subject("variant", mine.id, mine.to_json())
    given = GivenModel.of(subject, model, (-torch.ones(1),))
    workload = prepare(given, Protocol(launch="eager"), cpu)
    assert workload.passes is not None
    assert torch.equal(workload.passes.first(), torch.zeros(1))
    assert build_variant(other, cpu)[0] is built, "the model that was handed over still waits"


def test_a_model_that_was_built_for_the_next_measurement_is_built_again_after_another() -> None:
    cpu = torch.device("cpu")
    small, large = Variant("squeezenet1_1", 1, 64), Variant("squeezenet1_1", 2, 64)
    built, _ = build_variant(small, cpu, hand_over=True)
    build_variant(large, cpu)
    again, _ = build_variant(small, cpu)
    assert again is not built
    for before, after in zip(built.parameters(), again.parameters(), strict=True):
        assert torch.equal(before, after)
