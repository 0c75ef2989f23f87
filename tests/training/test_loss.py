"""The loss of a training step is that which the model returns, else one that fits its output."""

import collections
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from farm.errors import UnsupportedModel
from farm.training.capture import capture_step
from farm.training.step import TrainingStep, loss_of


@dataclasses.dataclass
class Fields:
    values: torch.Tensor
    name: str = "a"


@dataclasses.dataclass(slots=True)
class Slots:
    values: torch.Tensor


Named = collections.namedtuple("Named", "values name")
DetOutputs = collections.namedtuple("DetOutputs", "boxes classes")
Heads = collections.namedtuple("Heads", "logits aux_logits2 aux_logits1")
VALUES = torch.ones(2, 3, 4, requires_grad=True)
ONE, TWO = (torch.tensor(number, requires_grad=True) for number in (1.0, 2.0))
OF_A_MODEL = "loss of the model"
SUM = "sum of the losses of the model"
SQUARES = "mean of squares of its outputs"


@pytest.mark.parametrize(
    ("output", "name", "value"),
    [
        (ONE * 2, SUM, 2.0),
        ({"classes": ONE, "boxes": TWO, "number": 3}, SUM, 3.0),
        ([ONE, {"boxes": TWO}], SUM, 3.0),
        ({"loss": TWO, "logits": VALUES[0]}, OF_A_MODEL, 2.0),
        (SimpleNamespace(loss=TWO, logits=VALUES[0]), OF_A_MODEL, 2.0),
        ({"loss": None, "hidden": VALUES}, SQUARES, 1.0),
        (VALUES, SQUARES, 1.0),
        (Fields(VALUES), SQUARES, 1.0),
        (Slots(VALUES), SQUARES, 1.0),
        (Named(VALUES, "a"), SQUARES, 1.0),
        (SimpleNamespace(values=VALUES, more=[VALUES]), SQUARES, 2.0),
        (VALUES[:1, 0, :1], "cross-entropy", 0.0),
        (DetOutputs(VALUES[0], VALUES[1, :2]), SQUARES, 2.0),
        (Heads(VALUES[:1, 0, :1], VALUES[:1, 0, :1], None), "cross-entropy", 0.0),
        (Heads(VALUES[0], VALUES[0, :2], None), SQUARES, 2.0),
    ],
)
def test_the_loss_fits_the_output(output, name, value):
    loss = loss_of(output, causal=False, masked=False, device=torch.device("cpu"))
    assert loss.name == name
    assert loss.of(output, loss.targets).item() == pytest.approx(value)


@pytest.mark.parametrize("output", ["text", 3, None, {"a": torch.ones(2)}, Fields(torch.ones(2))])
def test_an_output_without_gradients_is_refused(output):
    with pytest.raises(UnsupportedModel, match="no tensor that requires a gradient"):
        loss_of(output, causal=False, masked=False, device=torch.device("cpu"))


class Detector(nn.Module):
    """As detection models in train mode: images and targets in, a dictionary of losses out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, batch, targets):
        moved = self.body(batch.values)
        expected = torch.stack([target["boxes"] for target in targets])
        return {"boxes": (moved - expected).abs().mean(), "size": moved.square().mean()}


def test_a_step_of_a_model_with_several_losses_adds_them_up():
    targets = [{"boxes": torch.ones(3, 4), "file": "a.png"}, {"boxes": torch.zeros(3, 4)}]
    inputs = (Fields(torch.ones(2, 3, 4)), targets)
    found = capture_step(
        TrainingStep(
            Detector(),
            inputs,
            optimizer="sgd",
            make_loss=lambda output: loss_of(
                output, causal=False, masked=False, device=torch.device("cpu")
            ),
        )
    )
    assert (found.gaps, found.loss) == ((), SUM)
    assert sum(tensor.role == "input" for tensor in found.tensors) == 3
