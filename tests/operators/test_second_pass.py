"""A capture describes the passes that run again and again, and leaves the model as it was."""

import torch
from torch import nn

from farm.operators import self_check
from farm.operators.capture import capture, predict, settled
from farm.operators.fake_pass import held_tensors


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
