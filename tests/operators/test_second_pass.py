"""A capture describes the passes that run again and again, and leaves the model as it was."""

import collections
import functools
import random

import pytest
import torch
from torch import nn
from transformers.utils import import_utils

import farm
from farm.errors import UnseenOperators
from farm.operators import self_check
from farm.operators.capture import capture, predict, settled
from farm.operators.fake_pass import held_tensors
from farm.training.capture import capture_step
from farm.training.step import TrainingStep, loss_of
from farm.types.program_state import tensors_restored


class Positions(nn.Module):
    """Adds positions that it computes in its first pass and keeps."""

    def __init__(self, keeps):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.keeps, self.kept, self.table = keeps, {}, None
        self.register_buffer("buffer", None, persistent=False)

    def positions(self, length):
        if self.keeps == "in a dictionary":
            if length not in self.kept:
                self.kept[length] = torch.arange(length).float().sin()
            return self.kept[length]
        if self.keeps == "as a buffer":
            if self.buffer is None:
                self.register_buffer("buffer", torch.arange(length).float().sin())
            return self.buffer
        if self.table is None:
            self.table = torch.arange(length).float().sin()
        return self.table

    def forward(self, x):
        return self.layer(x) + self.positions(x.shape[-1])


KEEPS = ["in a dictionary", "as a buffer", "as an attribute"]


def names(captured):
    return [captured.tuples[call.tuple_id].short_name for call in captured.calls]


def test_what_a_model_computes_only_in_its_first_pass_is_not_counted():
    for keeps in KEEPS:
        model = Positions(keeps).eval()
        assert names(predict(model, (torch.randn(2, 4),))) == ["Linear", "add"]


def test_a_capture_with_values_is_that_of_the_second_pass():
    for keeps in KEEPS:
        model = Positions(keeps).eval()
        inputs = (torch.randn(2, 4),)
        ran = settled(model, lambda model=model, inputs=inputs: capture(model, inputs))
        assert names(ran) == ["Linear", "add"]


def test_a_prediction_leaves_nothing_on_the_model():
    for keeps in KEEPS:
        model = Positions(keeps).eval()
        x, before = torch.randn(2, 4), held_tensors(model)
        predict(model, (x,))
        assert held_tensors(model) == before
        assert type(model(x)) is torch.Tensor


def test_a_model_that_fails_in_its_second_pass_is_captured_in_its_first():
    class Once(Positions):
        def forward(self, x):
            assert self.table is None
            return super().forward(x)

    assert "sin" in names(predict(Once("as an attribute").eval(), (torch.randn(2, 4),)))


class Rows(nn.Module):
    """A batch norm of rows that are not in order, as in PatchTST."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Mixed(nn.Module):
    """A layer norm that gets half precision and has weights in single precision."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x)


def test_layouts_and_dtypes_after_a_norm_are_those_of_the_cpu():
    for model in (Rows().eval(), Mixed().eval()):
        inputs = (torch.randn(2, 6, 4),)
        predicted = self_check.checked(predict(model, inputs), "cpu")
        assert list(predicted.counts) == list(capture(model, inputs).counts)


class _Table:
    """A part of a model that is no module."""

    def __init__(self):
        self.sines = None


class _Kept(nn.Module):
    """Computes a table of 4 MB, which a fake pass does not compute, from an activation."""

    table = None
    kept = _Table()

    def __init__(self, place):
        super().__init__()
        self.place, self.options = place, {"length": 1024, "table": None}

    def forward(self, x):
        if self.place == "function":
            return x @ _sines(x.shape[-1])
        if self.place == "class":
            if _Kept.table is None:
                _Kept.table = _sines.__wrapped__(x.shape[-1])
            return x @ _Kept.table
        if self.place == "object":
            if self.kept.sines is None:
                self.kept.sines = _sines.__wrapped__(x.shape[-1])
            return x @ self.kept.sines
        if self.options["table"] is None:
            self.options["table"] = _sines.__wrapped__(x.shape[-1])
        return x @ self.options["table"]


@functools.lru_cache
def _sines(length):
    return torch.arange(float(length)).outer(torch.ones(length)).sin()


@pytest.mark.parametrize("place", ["function", "class", "object", "options"])
def test_a_table_outside_the_model_is_computed_once_and_no_fake_tensor_stays(place):
    model, x = _Kept(place), torch.randn(2, 1024)
    assert names(predict(model, (x,))) == ["matmul"]
    assert names(predict(model, (x,))) == ["matmul"]
    assert type(model(x)) is torch.Tensor
    _sines.cache_clear()
    _Kept.table = _Kept.kept.sines = None


class _Counts(nn.Module):
    """Acts by the number of its passes."""

    def __init__(self, act):
        super().__init__()
        self.layer, self.passes, self.act = nn.Linear(4, 4), 0, act

    def forward(self, x):
        self.passes += 1
        return self.act(self, self.layer(x))


def _initializes(model, x):
    if model.passes == 1:
        model.layer.weight.data.mul_(2)
    return x


def _scales(model, x):
    return x * (1 / model.passes)


def _turns(model, x):
    return x.relu() if model.passes % 2 else x


def _grows(model, x):
    return x.repeat(model.passes, 1)


def test_what_a_model_does_only_in_its_first_pass_is_not_counted():
    for run in (predict, lambda *args: settled(args[0], lambda: capture(*args))):
        assert names(run(_Counts(_initializes), (torch.randn(2, 4),))) == ["Linear"]


def test_passes_that_differ_in_numbers_cost_the_same():
    assert names(predict(_Counts(_scales), (torch.randn(2, 4),))) == ["Linear", "mul"]


@pytest.mark.parametrize("act", [_turns, _grows])
def test_a_model_whose_passes_cost_more_each_time_is_refused(act):
    with pytest.raises(UnseenOperators, match="keeps a state") as refused:
        predict(_Counts(act), (torch.randn(2, 4),))
    assert "Reset the state" in refused.value.next_step


class _Draws(nn.Module):
    def forward(self, x):
        return x.relu() if random.random() + torch.rand([]).item() > 1 else x.relu().relu()


def test_each_pass_draws_the_same_numbers_and_the_generators_stay():
    states = random.getstate(), torch.random.get_rng_state()
    found = {tuple(names(predict(_Draws(), (torch.randn(2, 4),)))) for _ in range(4)}
    assert len(found) == 1
    assert random.getstate() == states[0]


class _Doubles(nn.Module):
    """Writes to its input."""

    def forward(self, x):
        x.mul_(2)
        return x[x > 0]


def test_a_capture_with_values_writes_to_no_input_of_the_user():
    x = torch.ones(2, 4)
    assert len(farm.capture_model(_Doubles(), (x,)).extraction.capture.calls) == 3
    assert x.sum() == 8


def _multiplies_once(model, x):
    return x @ model.layer.weight if model.passes == 1 else x


def _multiplies_in_turns(model, x):
    return x @ model.layer.weight if model.passes % 2 else x


def _step(act):
    def make_loss(output):
        return loss_of(output, causal=False, masked=False, device=output.device)

    inputs = (torch.randn(2, 4),)
    return capture_step(TrainingStep(_Counts(act), inputs, make_loss=make_loss, optimizer="sgd"))


def test_the_flops_of_a_training_step_are_those_of_the_step_that_repeats():
    step = _step(_multiplies_once)
    assert step.flops == sum(step.traces[call.tuple_id].flops for call in step.calls) == 128


def test_a_training_step_whose_cost_alternates_is_refused():
    with pytest.raises(UnseenOperators, match="one has 320 FLOP, the next one 128"):
        _step(_multiplies_in_turns)


class _AsksForTracing(nn.Module):
    """As masks of transformers: in a trace, it does not read the mask."""

    def forward(self, x):
        return x.relu() if import_utils.is_tracing(x) else x.sin()


def test_a_prediction_is_no_trace_for_transformers():
    assert names(predict(_AsksForTracing(), (torch.randn(2, 4),))) == ["sin"]


def test_shifts_of_a_transform_are_those_that_a_worker_calls():
    class Unpacks(nn.Module):
        def forward(self, packed):
            return torch.vmap(lambda row: (row >> 4) + (row << 1))(packed)

    packed = torch.randint(0, 255, (4, 8), dtype=torch.uint8)
    found = self_check.checked(predict(Unpacks(), (packed,)), "cpu")
    assert names(found)[:2] == ["bitwise_right_shift", "bitwise_left_shift"]
    assert not found.gaps
    assert not found.mismatches


class _Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = collections.deque(maxlen=1)

    def forward(self, x):
        self.last.append(x.sin())
        return self.last[0] + x


def test_a_queue_of_the_model_is_as_it_was():
    model = _Remembers()
    assert names(predict(model, (torch.randn(2, 4),))) == ["sin", "add"]
    assert not model.last


def test_the_session_of_a_test_runner_stays_as_it_is(request):
    """It refers to the whole process: to search it takes longer than a capture."""
    model = nn.Linear(2, 2)
    model.runner = request.node
    with tensors_restored(model):
        request.node.kept = torch.zeros(1)
    assert hasattr(request.node, "kept")
