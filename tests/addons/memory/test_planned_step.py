"""A training step run with tensors in slow memory: a fake one, behind the same interface."""

import dataclasses
import json

import pytest
import torch

from farm.addons.memory import planned_step
from farm.addons.memory.memory_tier import Mover, cannot_pin
from farm.addons.memory.planned_step import PlannedStep, run_planned
from farm.addons.memory.transfers import AsRun, Run, Wire, moves_of
from farm.benchmark.call_context import Player
from farm.benchmark_process.requests import from_json, to_json
from farm.errors import Unmeasurable
from farm.models import catalog
from farm.operators.captured import CapturedPass
from farm.training.extract import extract_step
from farm.training.tensor_lifetime import Life
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from tests.addons.memory.test_offload import Fake

CPU = torch.device("cpu")
EAGERLY = Protocol(launch="eager")
VARIANT = catalog.variant("squeezenet1_1", 2, input_size=32, step="training")
SUBJECT = Subject("variant", VARIANT.id, VARIANT.to_json())


@pytest.fixture(autouse=True)
def a_fake_slow_memory(monkeypatch):
    monkeypatch.setattr(planned_step, "slow_memory_of", lambda device: Fake())


@pytest.fixture(scope="module")
def step():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planned_step, "slow_memory_of", lambda device: Fake())
        return planned_step.extract_step(SUBJECT, EAGERLY, CPU)


def test_a_step_on_its_card_has_the_calls_and_tensors_of_one_that_was_extracted_without(step):
    apart = extract_step(VARIANT)
    assert step.calls == apart.calls
    assert [dataclasses.replace(one, name="") for one in step.tensors] == [
        dataclasses.replace(one, name="") for one in apart.tensors
    ]


def test_a_step_comes_through_as_json(step):
    assert CapturedPass.from_json(json.loads(json.dumps(step.to_json()))) == step


def gradients_of(step, play):
    """What the optimizer adds to its state, which was nothing, in one more run."""
    with torch.no_grad():
        again = play.replayed()
        held = [
            play.player.given[one.number] for one in step.tensors if one.role == "optimizer state"
        ]
        assert held
        for storage in held:
            storage.fill_(0)
        torch.manual_seed(0)  # of what is dropped
        again()
        for mover in play.movers:  # of what is away over the end of the step
            mover.come()
            mover.wait_back()
    return [torch.empty(0, device=storage.device).set_(storage).clone() for storage in held]


def test_a_step_computes_the_same_with_tensors_in_slow_memory(step):
    capture = step
    slow = frozenset(one.number for one in step.tensors if one.size_bytes and one.number % 2)
    fast = PlannedStep(Player(capture, CPU), frozenset(), Fake)
    planned = PlannedStep(Player(capture, CPU), slow, Fake)
    for wanted, found in zip(gradients_of(step, fast), gradients_of(step, planned), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    made = {number for call in capture.calls for number in call.writes if number not in call.reads}
    assert (
        0 < len(planned.stayed_fast) < len(slow & made)
    )  # a convolution on a CPU writes only where it allocates
    assert planned.stayed_fast <= slow & made
    sizes = {one.number: one.size_bytes for one in step.tensors}
    there = [storage.nbytes() for fake in planned.memories for storage in fake.storages]
    used = {number for call in capture.calls for number in (*call.reads, *call.writes)}
    assert sorted(there) == sorted(sizes[number] for number in (slow & used) - planned.stayed_fast)


class Wiping(Mover):
    """Leaves nothing of a tensor that is away."""

    def wait_gone(self):
        super().wait_gone()
        if self.away:
            self.room.fill_(0xFF)  # of every floating-point type no number


def every_long_wait(step):
    """Moves of all that waits for some calls, the calls all of a length, over a wire that takes no
    time.
    """
    life = Life(step, (1.0,) * len(step.calls))
    used = {number for call in step.calls for number in (*call.reads, *call.writes)}
    periods = [
        (number, index)
        for number, found in life.periods.items()
        for index, period in enumerate(found)
        if period.time_us > 4 and life.sizes_bytes[number] and number in used
    ]
    return moves_of(life, periods, 1e18)


def test_a_step_computes_the_same_with_tensors_moved_while_they_wait(step, monkeypatch):
    monkeypatch.setattr(planned_step, "Mover", Wiping)
    capture, moves = step, every_long_wait(step)
    assert any(move.used <= move.out for move in moves)  # over the end of the step
    fast = PlannedStep(Player(capture, CPU), frozenset(), Fake)
    moved = PlannedStep(Player(capture, CPU), frozenset(), Fake, moves)
    wanted, found = gradients_of(step, fast), gradients_of(step, moved)
    assert all(mover.room is not None for mover in moved.movers)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-4 * float(one.abs().max()))
    monkeypatch.setattr(Wiping, "come", lambda mover: None)
    lost = PlannedStep(Player(capture, CPU), frozenset(), Fake, moves)
    assert any(one.isnan().any() for one in gradients_of(step, lost))


def test_a_run_says_what_was_moved(step):
    moves = every_long_wait(step)[:3]
    sizes = {one.number: one.size_bytes for one in step.tensors}
    found = run_planned(step, [[], []], Fake, CPU, moves=[moves, []], window_s=0.01)
    moved, still = found.plans
    assert (moved.moves, moved.moved_bytes) == (3, sum(sizes[move.tensor] for move in moves))
    assert (still.moves, still.moved_bytes) == (0, 0)
    assert from_json(AsRun, json.loads(json.dumps(to_json(found)))) == found
    old = {name: value for name, value in to_json(still).items() if "move" not in name}
    assert from_json(Run, old) == still


def test_the_wire_is_measured_beside_a_step(step, monkeypatch):
    monkeypatch.setattr(planned_step, "WINDOW_S", 0.01)
    found = planned_step.measure_wire(step, EAGERLY, CPU)
    assert found.bytes_per_s == min(found.alone[0].rates) > 0
    assert found.beside == ()  # a CPU copies between calls
    assert from_json(Wire, json.loads(json.dumps(to_json(found)))) == found


def test_a_step_is_timed_with_all_fast_and_under_each_plan_and_one_that_cannot_be_had_sinks_no_other(
    step,
):
    class Small(Fake):
        def check_room(self, *sizes_bytes):
            if sum(sizes_bytes) > 10**6:
                raise cannot_pin(sum(sizes_bytes))

    parameters = [one.number for one in step.tensors if one.role == "parameter"]
    everything = [one.number for one in step.tensors]
    found = run_planned(step, [parameters[:4], everything], Small, CPU, window_s=0.01)
    few, all_slow = found.plans
    assert (few.stayed_fast, few.graphs, found.slow_memory) == ((), 0, "fake memory")
    for run in (found.fast, few):
        assert min(run.time_us.value, run.time_us.half_width) > 0
    assert "cannot be pinned" in all_slow
    assert from_json(AsRun, json.loads(json.dumps(to_json(found)))) == found


def test_a_plan_of_other_calls_is_refused_in_a_line(step):
    calls = [call.tuple_id for call in step.calls]
    with pytest.raises(Unmeasurable, match="differ from call 1 on"):
        planned_step.compare(step, EAGERLY, CPU, [calls[0], *calls[2:], calls[1]], [])


def test_a_card_without_slow_memory_is_refused_in_a_line(monkeypatch):
    monkeypatch.undo()
    with pytest.raises(Unmeasurable, match="NUMA node"):
        planned_step.extract_step(SUBJECT, EAGERLY, CPU)
