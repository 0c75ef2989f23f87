"""Passes with host steps become graphs that compute what an eager pass computes, on a card that is
only pretended.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from farm.benchmark.host_steps import HostSteps
from farm.errors import Unmeasurable
from farm.models import catalog
from farm.operators import grouped_products
from farm.operators.capture import FunctionAsModel, predict
from farm.operators.capture import capture as capture_calls
from farm.operators.captured import CapturedPass
from farm.operators.cost import cost
from farm.operators.fake_pass import STANDS_FOR_A_CARD, fake_pass
from farm.operators.rebuild import rebuild
from farm.training.capture import capture_step
from farm.training.extract import extract
from farm.training.step import Loss, TrainingStep
from farm.types.details import Details
from tests.benchmark import pretend_card
from tests.benchmark.pretend_card import CARD, capture, on_card, present
from tests.operators.routed import routed


class Waiting(nn.Module):
    """Waits for the card in every way that models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        x = torch.where(x > 0, x, torch.tensor(-2.0, device=x.device) * x.new_tensor(0.5))
        if x.sum().item() > 0:
            x = x * 2
        rows = torch.nonzero(x[:, 0] > 0)[:, 0]
        x[x[:, 1] < 0] = x.mean(0)[None].expand(int((x[:, 1] < 0).sum()), 8)
        x[:, [1, 3]] = x[:, [3, 1]] + x[[0, 1]].sum() + x[:, [True, False] * 4].sum()
        on_host = x.cpu().mean()
        some = x[x[:, 0] > 0.1].sum(0) + x.masked_select(x > 0.5).sum() + x[rows].sum(0)
        return some + on_host.to(x.device) + x[torch.arange(2)].sum()


class Trained(nn.Module):
    """A model and its loss that wait for the card in a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) * torch.tensor(-2.0, device=x.device)
        some = x[x[:, 0] > 0.1].sum() + x.masked_select(x > 0.5).sum() + x[:, [0, 2]].sum()
        return some + x.sin().cpu().mean().to(x.device) * x.sum().item()


@torch.jit.script
def rectified(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


class OnBoth(Trained):
    """Its scale is computed on the host, its positions on the card, and the rest in a scripted
    function.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.arange(4).sum().sqrt()
        x = self.linear(x) + torch.arange(8, device=x.device)
        return rectified(x / scale).sum()


@pytest.fixture
def waiting() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The model, its input and its output."""
    torch.manual_seed(0)
    model, x = Waiting(), torch.randn(6, 8)
    with torch.no_grad():
        return model, x, model(x)


def test_no_graph_can_record_a_pass_with_host_steps(waiting):
    model, x, _ = waiting
    with present():
        moved, given = pretend_card.moved(model), on_card(x)
        with pytest.raises(RuntimeError, match="not permitted"):
            capture([lambda: moved(given)])


def test_a_graph_with_recorded_values_computes_the_same_in_each_replay(waiting):
    model, x, expected = waiting
    found: list[Any] = []
    with present():
        moved, given = pretend_card.moved(model), on_card(x)
        steps = HostSteps.of(lambda: moved(given), CARD)
        replay = capture([steps.around(lambda: found.append(moved(given)))] * 2)
    details = steps.noted(Details())
    assert details.launching.host_copies == {
        "aten._local_scalar_dense.default": 2,
        "aten._to_copy.default": 1,
    }
    left_out = {
        "torch.tensor",
        "aten.nonzero.default",
        "aten.masked_select.default",
        "aten._to_copy.default",
    }
    assert set(details.timing.left_out_us) == left_out
    for _ in range(2):
        for out in found:
            out.inner.zero_()
        replay()
        assert all(torch.equal(out.inner, expected) for out in found)


def test_a_graph_multiplies_groups_whose_ends_the_host_reads():
    model, x = routed(skew=1.0)
    with torch.no_grad():
        expected = model(x)
    found: list[Any] = []
    with present():
        moved, given = pretend_card.moved(model), on_card(x)
        steps = HostSteps.of(lambda: moved(given), CARD)
        replay = capture([steps.around(lambda: found.append(moved(given)))])
    assert steps.noted(Details()).launching.host_copies == {"aten._grouped_mm.default": 1}
    found[0].inner.zero_()
    replay()
    assert torch.equal(found[0].inner, expected)


@pytest.mark.parametrize("dimensions", [(2, 3), (3, 2), (2, 2)])
def test_groups_are_multiplied_as_pytorch_multiplies_them(dimensions):
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 8], dtype=torch.int32)
    shapes = {(2, 3): ((8, 4), (3, 4, 12)), (3, 2): ((3, 8, 4), (4, 8)), (2, 2): ((4, 8), (8, 4))}
    left, right = map(torch.randn, shapes[dimensions])
    expected = torch._grouped_mm(left, right, offs=ends)
    made = grouped_products.multiply(left, right, ends, ends.tolist())
    assert torch.equal(made, expected)
    assert made.stride() == expected.stride()


def test_a_training_step_with_host_steps_computes_the_same_gradients_in_each_replay():
    torch.manual_seed(0)
    x, expected = torch.randn(6, 8), Trained()
    found = copy.deepcopy(expected)
    about: dict[str, Any] = {
        "optimizer": "sgd-foreach",
        "make_loss": lambda _: Loss("sum", (), lambda out, _: out),
    }
    TrainingStep(expected, (x,), **about).run()
    with present():
        pretend_card.moved(found).requires_grad_()
        step = TrainingStep(found, (on_card(x),), **about)
        step.run()
        steps = HostSteps.of(step.run, CARD)
        replay = capture([steps.around(step.run)] * 2)
        gradients = [parameter.grad.inner for parameter in found.parameters()]
        observed: list[CapturedPass] = []
        observe = functools.partial(capture_step, step, device_type="cuda", warmed_up=True)
        capture([steps.around(lambda: observed.append(observe()))])
    details = steps.noted(Details())
    # Also in the backward: the gradient on the host is copied to it.
    assert details.launching.host_copies == {
        "aten._local_scalar_dense.default": 1,
        "aten._to_copy.default": 2,
    }
    assert {"aten.nonzero.default", "aten.masked_select.default"} <= set(details.timing.left_out_us)
    assert not observed[0].gaps
    for gradient in gradients:
        gradient.zero_()
    replay()
    for gradient, parameter in zip(gradients, expected.parameters(), strict=True):
        assert torch.equal(gradient, parameter.grad)


def test_a_pass_without_host_steps_is_not_changed():
    with present():
        x = on_card(torch.randn(3))
        steps = HostSteps.of(lambda: x + 1, CARD)
    run = lambda: x + 1  # noqa: E731
    assert steps.around(run) is run
    assert steps.noted(Details()) == Details()


def test_a_pass_of_which_everything_is_left_out_is_refused():
    with present():
        x = on_card(torch.randn(3))
        with pytest.raises(Unmeasurable, match="nothing else runs on the card") as caught:
            HostSteps.of(lambda: torch.nonzero(x), CARD)
    assert caught.value.reason == "not_capturable"


@pytest.mark.parametrize("other", ["more", "less", "in place"])
def test_a_pass_that_takes_other_steps_in_the_graph_is_refused(other):
    def run() -> torch.Tensor:
        out = torch.nonzero(x + 1)
        if later and other == "more":
            x.sum().item()
        if other == "in place":
            out.add_(1)
        if not later or other != "less":
            torch.tensor(1.0, device=CARD)
        return out

    with present():
        x, later = on_card(torch.randn(3)), False
        steps = HostSteps.of(run, CARD)
        later = True
        with pytest.raises(Unmeasurable, match="cannot be captured in a CUDA graph"):
            capture([steps.around(run)])


def test_what_runs_on_the_host_costs_a_card_nothing():
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.div(x, torch.sqrt(torch.tensor(64.0)))

    with present():
        found = capture_calls(Scaled(), (on_card(torch.randn(3)),), device_type="cuda")
    (spec,) = found.tuples.values()
    assert spec.operator == "torch.div"
    assert spec.arguments[1:] == (8.0,), (
        "a card multiplies by the reciprocal of a number, but divides by its own tensors"
    )
    assert predict(Scaled(), (torch.randn(3),), device_type="cuda").tuples == found.tuples
    assert not found.gaps


def test_a_list_in_an_index_is_part_of_the_tuple():
    class Listed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[0, [1]] = 2.0
            return x[:, [0, 2]] + x[[1, 0]].sum()

    x = torch.randn(2, 3)
    predicted = predict(Listed(), (x,), device_type="cuda")
    found: list[Any] = []
    with present():
        given = on_card(x)
        steps = HostSteps.of(lambda: Listed()(given), CARD)
        capture(
            [
                steps.around(
                    lambda: found.append(capture_calls(Listed(), (given,), device_type="cuda"))
                )
            ]
        )
    assert Counter(found[0].counts) == Counter(predicted.counts)
    assert not found[0].gaps
    assert set(steps.noted(Details()).timing.left_out_us) == {"torch.tensor"}


def test_a_tuple_with_a_list_in_its_index_is_a_graph():
    (spec,) = predict(FunctionAsModel(lambda x: x[:, [0, 2]]), (torch.randn(2, 3),)).tuples.values()
    with present():
        one, given = rebuild(spec, "cpu"), on_card(torch.randn(2, 3))
        steps = HostSteps.of(lambda: one.run_on(given), CARD)
        replay = capture([steps.around(lambda: one.run_on(given))])
    replay()
    assert set(steps.noted(Details()).timing.left_out_us) == {"torch.tensor"}


def test_a_training_step_on_a_card_leaves_out_what_the_host_computes():
    about: dict[str, Any] = {
        "optimizer": "sgd-foreach",
        "make_loss": lambda _: Loss("sum", (), lambda out, _: out),
    }
    x = torch.randn(3, 8)
    with fake_pass(model := OnBoth(), (x,), None, STANDS_FOR_A_CARD) as (fakes, inputs, _):
        predicted = capture_step(TrainingStep(model, inputs, **about), fakes=fakes)
    with present():
        moved = pretend_card.moved(OnBoth()).requires_grad_()
        ran = capture_step(TrainingStep(moved, (on_card(x),), **about), device_type="cuda")
    for found in (predicted, ran):
        assert not found.gaps
        names = [
            found.tuples[call.tuple_id].short_name
            for call in found.calls
            if call.stage == "forward"
        ]
        assert [one for one in names if one not in ("t", "view", "detach")] == [
            "addmm",
            "arange",
            "add",
            "div",
            "relu",
            "sum",
        ]


def test_a_number_that_is_read_on_the_host_is_part_of_the_tuple():
    class Clamped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.clamp(x, 0, torch.tensor(2) * 2 - 1)

    with present():
        found = capture_calls(Clamped(), (on_card(torch.randn(3)),), device_type="cuda")
    (spec,) = found.tuples.values()
    assert spec.arguments[1:] == (0, 3)
    assert cost(spec).bytes == 24


#: Views of tensors of the pretended card have storages of their own, so each view is a call.
VIEWS = {
    "chunk",
    "contiguous",
    "expand",
    "getitem",
    "permute",
    "reshape",
    "squeeze",
    "transpose",
    "unsqueeze",
    "view",
}


@pytest.mark.parametrize("name", ["deberta-base", "mpnet-base", "t5-small"])
def test_the_prediction_is_what_a_card_runs(name):
    phase = {"phase": "encode"} if name == "t5-small" else {}
    variant = catalog.variant(f"transformers/{name}", layers=1, length=16, **phase)
    predicted = extract(variant, device_type="cuda").capture
    with present():
        model = pretend_card.moved(catalog.build(variant, device="cpu"))
        ran = capture_calls(
            model, on_card(catalog.example_inputs(variant, device="cpu")), device_type="cuda"
        )
    ours, theirs = (
        Counter(one.tuples[call.tuple_id].short_name for call in one.calls)
        for one in (predicted, ran)
    )
    assert not ours - theirs
    assert set(theirs - ours) <= VIEWS
