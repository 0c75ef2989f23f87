"""A training step with tensors in pinned host memory on a real NVIDIA card. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from farm.addons.memory import planned_step
from farm.addons.memory.memory_tier import PinnedMemory
from farm.addons.memory.planned_step import (
    PlannedStep,
    compare,
    extract_step,
    measure_wire,
    run_planned,
)
from farm.addons.memory.transfers import Run
from farm.benchmark.call_context import Player
from farm.benchmark.passes import numeric_flags
from farm.models import catalog
from farm.operators.captured import CapturedPass
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from tests.addons.memory.test_planned_step import Wiping, every_long_wait, gradients_of
from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD
CARD = torch.device("cuda", 0)
VARIANT = catalog.variant("resnet18", 8, step="training")
SUBJECT = Subject("variant", VARIANT.id, VARIANT.to_json())


@pytest.fixture(autouse=True)
def on_one_stream() -> Iterator[None]:
    with torch.no_grad(), numeric_flags(Protocol()), torch.cuda.stream(torch.cuda.Stream(CARD)):
        yield
    torch.cuda.synchronize()


@pytest.fixture(scope="module")
def step() -> CapturedPass:
    with torch.cuda.stream(torch.cuda.Stream(CARD)):
        return extract_step(SUBJECT, Protocol(), CARD)


def memory() -> PinnedMemory:
    return PinnedMemory(CARD)


def half_of(step: CapturedPass) -> frozenset[int]:
    """Every other tensor, and all that a convolution's backward makes: these need pools of their
    own.
    """
    backward = [
        call for call in step.calls if "convolution_backward" in step.tuples[call.tuple_id].operator
    ]
    assert len(backward) == 20
    made = {number for call in backward for number in call.writes if number not in call.reads}
    return frozenset(
        one.number
        for one in step.tensors
        if one.size_bytes and (one.number % 2 or one.number in made)
    )


def test_a_step_computes_the_same_with_tensors_in_slow_memory(step: CapturedPass) -> None:
    capture, slow = step, half_of(step)
    fast = PlannedStep(Player(capture, CARD), frozenset(), memory)
    wanted = gradients_of(step, fast)
    assert len(fast.graphs) == 1
    planned = PlannedStep(Player(capture, CARD), slow, memory)
    found = gradients_of(step, planned)
    sizes = {one.number: one.size_bytes for one in step.tensors}
    stayed = sum(sizes[number] for number in planned.stayed_fast)
    print(
        len(planned.graphs),
        "graphs;",
        len(slow),
        "slow;",
        len(planned.stayed_fast),
        "stayed fast:",
        stayed,
    )
    assert len(planned.graphs) > 2
    assert len(planned.stayed_fast) < len(slow) / 2
    assert any(float(one.abs().max()) > 0 for one in wanted)
    for one, other in zip(wanted, found, strict=True):
        largest = float(one.abs().max())
        torch.testing.assert_close(other, one, rtol=0, atol=1e-2 * largest, equal_nan=True)


def test_a_step_takes_longer_with_tensors_in_slow_memory(step: CapturedPass) -> None:
    found = run_planned(step, [half_of(step), []], memory, CARD, window_s=0.2)
    slow, fast_again = found.plans
    assert isinstance(slow, Run), slow
    assert isinstance(fast_again, Run), fast_again
    print(found)
    assert (found.slow_memory, found.fast.graphs, fast_again.graphs) == ("pinned host memory", 1, 1)
    assert slow.graphs > 1
    assert slow.time_us.value > 1.5 * found.fast.time_us.value
    assert fast_again.time_us.value == pytest.approx(found.fast.time_us.value, rel=0.1)


def test_a_step_computes_the_same_with_tensors_moved_while_they_wait(
    step: CapturedPass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_step, "Mover", Wiping)
    capture, moves = step, every_long_wait(step)
    assert any(move.used <= move.out for move in moves)
    fast = PlannedStep(Player(capture, CARD), frozenset(), memory)
    wanted = gradients_of(step, fast)
    moved = PlannedStep(Player(capture, CARD), frozenset(), memory, moves)
    found = gradients_of(step, moved)
    there = [mover for mover in moved.movers if mover.room is not None]
    print(len(moved.graphs), "graphs;", len(there), "of", len(moves), "moves")
    assert len(there) > 0.9 * len(moves)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(
            other, one, rtol=0, atol=1e-2 * float(one.abs().max()), equal_nan=True
        )
    monkeypatch.setattr(Wiping, "come", lambda mover: None)
    lost = PlannedStep(Player(capture, CARD), frozenset(), memory, moves)
    assert sum(int(one.isnan().sum()) for one in gradients_of(step, lost)) > sum(
        int(one.isnan().sum()) for one in found
    )


def test_slow_tensors_and_moves_go_together_and_moves_run_beside_the_step(
    step: CapturedPass,
) -> None:
    slow = half_of(step)
    sizes = {one.number: one.size_bytes for one in step.tensors}
    moves = [
        move
        for move in every_long_wait(step)
        if move.tensor not in slow and sizes[move.tensor] > 10**6
    ]
    few = sorted(moves, key=lambda move: move.used - move.out)[-5:]
    found = run_planned(step, [[], slow, []], memory, CARD, moves=[few, moves], window_s=0.2)
    print(found)
    moved, both, still = found.plans
    assert isinstance(moved, Run), moved
    assert isinstance(both, Run), both
    assert isinstance(still, Run), still
    assert (moved.moves, still.moves) == (5, 0)
    assert 0.9 * len(moves) < both.moves <= len(moves)
    assert moved.moved_bytes == sum(sizes[move.tensor] for move in few)
    assert 1 < moved.graphs <= 1 + 4 * 5
    assert moved.time_us.value > 0.9 * found.fast.time_us.value


def test_the_wire_is_measured_alone_and_beside_the_step() -> None:
    step = extract_step(SUBJECT, Protocol(), CARD)
    found = measure_wire(step, Protocol(), CARD)
    print(found)
    assert [len(one.rates) for one in (*found.alone, *found.beside)] == [1, 1, 2, 1, 1, 2]
    for alone, beside in zip(found.alone, found.beside, strict=True):
        assert all(rate > 1e9 for rate in alone.rates)
        # Two directions at once share the wire in changing parts, so their sum is compared.
        assert sum(beside.rates) < 1.1 * sum(alone.rates)
        assert beside.step_us is not None
        assert beside.step_us > 0.95 * found.step_us


def test_a_step_is_run_as_the_benchmark_process_is_asked_to(step: CapturedPass) -> None:
    parameters = [one.number for one in step.tensors if one.role == "parameter"]
    apart = extract_step(SUBJECT, Protocol(), CARD)
    assert [call.tuple_id for call in apart.calls] == [call.tuple_id for call in step.calls]
    found = compare(apart, Protocol(), CARD, [call.tuple_id for call in apart.calls], [parameters])
    (slow,) = found.plans
    assert isinstance(slow, Run), slow
    assert slow.stayed_fast == ()
    assert slow.time_us.value > found.fast.time_us.value
