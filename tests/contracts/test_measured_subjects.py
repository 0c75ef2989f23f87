"""The contract of `farm.benchmark.subjects.base`: every kind of measured subjects keeps it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from farm.benchmark.passes import applied
from farm.benchmark.phases.base import Phase, with_added
from farm.benchmark.phases.bursts import Bursts
from farm.benchmark.phases.context import Context
from farm.benchmark.phases.eager import EagerLaunch
from farm.benchmark.phases.restoring import Restoring
from farm.benchmark.policies import POLICIES
from farm.benchmark.subjects import (
    COMPILED,
    COMPILED_TUPLE,
    MODEL,
    STEP,
    TUPLE,
    kind_of_subject,
    passes_of,
)
from farm.benchmark.subjects.base import SubjectKind
from farm.errors import Unmeasurable
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests.benchmark.operators import linear

CPU = torch.device("cpu")
EAGERLY = Protocol(launch="eager")
SMALL = Variant("squeezenet1_1", 1, 32)


def variant(**fields: object) -> Subject:
    changed = Variant.from_json({**SMALL.to_json(), **fields})
    return Subject("variant", changed.id, changed.to_json())


#: A subject of each kind.
EXAMPLES = {
    TUPLE: linear(8, 16, 4),
    MODEL: variant(),
    STEP: variant(step="training", optimizer="sgd", mode="train"),
    COMPILED: variant(compile="default"),
}

every_kind = pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: type(kind).__name__)


@every_kind
def test_a_subject_has_its_kind(kind: SubjectKind) -> None:
    assert kind_of_subject(EXAMPLES[kind], EAGERLY) is kind


def test_a_compiled_step_is_compiled() -> None:
    assert kind_of_subject(variant(step="training", compile="default"), EAGERLY) is COMPILED


@every_kind
def test_windows_follow_a_policy_of_the_table_and_keep_the_wanted_interval(
    kind: SubjectKind,
) -> None:
    wanted = Stopping(time_half_width=0.02, energy_half_width=0.05)
    assert kind.policy(EAGERLY, Stopping()) in POLICIES.values()
    for ranks in (1, 2):
        rule = kind.stopping(wanted, ranks)
        assert (rule.time_half_width, rule.energy_half_width) == (0.02, 0.05)
        assert rule.minimum_s <= rule.maximum_s


def test_a_tuple_with_slow_tensors_is_only_timed() -> None:
    slow = EAGERLY.with_placement("in0")
    assert not kind_of_subject(linear(8, 16, 4), slow).policy(slow, Stopping()).energy


def test_a_tuple_of_a_compiled_model_has_its_kind_and_the_windows_of_a_tuple() -> None:
    subject = dataclasses.replace(linear(8, 16, 4), compiled={"variant": SMALL.to_json()})
    assert kind_of_subject(subject, EAGERLY) is COMPILED_TUPLE
    assert COMPILED_TUPLE.policy(EAGERLY, Stopping()) == TUPLE.policy(EAGERLY, Stopping())


def test_only_tuples_are_measured_roughly_and_have_a_canary() -> None:
    rough = Stopping().allowing(0.05)
    flagged = {kind for kind in EXAMPLES if "rough" in kind.policy(EAGERLY, rough).flags}
    assert flagged == {TUPLE}
    assert {kind for kind in EXAMPLES if kind.has_canary(Stopping())} == {TUPLE}
    assert not TUPLE.has_canary(rough)


@pytest.mark.parametrize("kind", [TUPLE, MODEL, STEP], ids=lambda kind: type(kind).__name__)
def test_a_pass_runs(kind: SubjectKind) -> None:
    with applied(EAGERLY):
        passes = passes_of(EXAMPLES[kind], EAGERLY, CPU)
        passes.first()
    assert (passes.order is not None) == EXAMPLES[kind].whole


def test_copied_values_are_for_tuples_of_compiled_models() -> None:
    copied = EAGERLY.with_data("copied")
    with applied(copied), pytest.raises(Unmeasurable, match="needs a compiled model") as refused:
        passes_of(EXAMPLES[TUPLE], copied, CPU)
    assert refused.value.reason == "not_available"


@every_kind
def test_a_kind_lists_its_phases_in_their_order(kind: SubjectKind) -> None:
    names = [phase.name for phase in kind.phases(EXAMPLES[kind])]
    of_whole_models = ["eager", "places", "added", "in_order"]
    of_tuples = ["burst", "context", "restoring", "overlap"]
    assert names == (of_tuples if kind is TUPLE else of_whole_models)


def test_a_phase_is_added_after_the_window_or_after_another_phase() -> None:
    usual = (Bursts(), Context())

    def names(added: dict[str, Phase]) -> list[str]:
        return [phase.name for phase in with_added(usual, added)]

    assert names({}) == ["burst", "context"]
    assert names({"burst": Restoring()}) == ["burst", "restoring", "context"]
    both = {"window": EagerLaunch(), "eager": Restoring()}
    assert names(both) == ["eager", "restoring", "burst", "context"]
    with pytest.raises(ValueError, match="'restoring' follows 'places', which is none of"):
        names({"places": Restoring()})
