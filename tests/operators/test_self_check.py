"""A tuple that does not describe the call that ran is a row with its reason, never a reading of
another operator.
"""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import farm
from benchmarks.self_check import variant_of
from farm.errors import CaptureError
from farm.operators import self_check
from farm.operators.capture import capture
from farm.operators.captured import CallTrace
from farm.settings import settings
from farm.training.extract import extract


class Model(nn.Module):
    """Ends with an addition, so that one of its tuples can always be measured."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, values):
        return self.function(self, values) + 1


VALUES = torch.randn(2, 4, 8)


def captured(function, **how):
    return farm.capture_model(Model(function).eval(), VALUES, **how)


def mismatched(found):
    return {
        found.extraction.capture.tuples[id_].short_name: text
        for id_, text in found.mismatches.items()
    }


def with_math_attention(model, values):
    query = values[:, None]
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, query, query)


def with_another_default_dtype(model, values):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made = torch.zeros(4, 8)
    torch.set_default_dtype(before)
    return values + made


@pytest.mark.parametrize(
    ("function", "name", "text"),
    [
        (with_math_attention, "scaled_dot_product_attention", "the model runs aten.mul.Scalar"),
        (
            with_another_default_dtype,
            "zeros",
            "the model returns (4, 8) contiguous torch.float64; the operator",
        ),
    ],
)
def test_a_setting_that_a_tuple_does_not_contain_is_noticed(function, name, text):
    found = mismatched(captured(function))
    assert text in found[name]
    assert "add" not in found


def test_a_setting_of_the_users_program_is_noticed_although_the_check_runs_in_it():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        found = mismatched(captured(lambda model, values: model.layer(values)))
        assert torch.backends.mha.get_fastpath_enabled() is False
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert list(found) == ["TransformerEncoderLayer"]
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        query = VALUES[:, None]
        found = mismatched(
            captured(lambda model, values: F.scaled_dot_product_attention(query, query, query))
        )
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert list(found) == ["scaled_dot_product_attention"]


def columns(values):
    """Values whose batch cannot become rows of one product without a copy. PyTorch copies them if a
    weight is trained; otherwise it multiplies in batches."""
    return values.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    ("trained", "view", "role", "runs"),
    [
        (True, lambda weight: weight, "parameter", ("aten.clone.default", "aten.mm.default")),
        (True, lambda weight: weight.mT, "parameter", ("aten.clone.default", "aten.mm.default")),
        (False, lambda weight: weight, "buffer", ("aten.bmm.default",)),
    ],
)
def test_a_product_is_the_same_alone_whether_its_weight_is_trained_or_not(
    trained, view, role, runs
):
    model = Model(lambda model, values: columns(values) @ view(model.weight)).eval()
    model.weight.requires_grad_(trained)
    found = farm.capture_model(model, VALUES)
    assert mismatched(found) == {}
    (product,) = [spec for spec in found.tuples if spec.short_name == "matmul"]
    assert product.tensors[1].role == role
    assert found.extraction.capture.traces[product.id].operators == runs
    assert [call.tuple_id for call in found.extraction.capture.calls].count(product.id) == 1


def test_the_role_of_a_weight_stays_where_it_changes_nothing():
    view, frozen = (
        (lambda model, values: values @ model.weight.mT),
        Model(lambda model, values: values @ model.weight),
    )
    frozen.weight.requires_grad_(False)
    of_view = [spec for spec in captured(view).tuples if spec.short_name == "matmul"]
    of_frozen = [
        spec
        for spec in farm.capture_model(frozen.eval(), VALUES).tuples
        if spec.short_name == "matmul"
    ]
    assert [spec.tensors[1].role for spec in (*of_view, *of_frozen)] == ["activation", "parameter"]


def test_calls_with_equal_arguments_that_run_otherwise_are_noticed():
    def both(model, values):
        query = values[:, None]
        with sdpa_kernel(SDPBackend.MATH):
            first = F.scaled_dot_product_attention(query, query, query)
        return first + F.scaled_dot_product_attention(query, query, query)

    recorded = capture(Model(both).eval(), (VALUES,))
    (text,) = recorded.mismatches.values()
    assert text.startswith("one call runs aten.mul.Scalar")


def test_a_replaced_forward_of_a_class_is_looked_into():
    original = nn.Linear.forward
    nn.Linear.forward = lambda self, values: F.relu(F.linear(values, self.weight, self.bias))
    try:
        found = farm.capture_model(nn.Linear(8, 8).eval(), VALUES)
    finally:
        nn.Linear.forward = original
    assert [spec.short_name for spec in found.tuples] == ["linear", "relu"]


def in_inference_mode(model, values):
    with torch.inference_mode():
        return F.linear(values, model.weight)


def once_in_inference_mode(model, values):
    return F.linear(in_inference_mode(model, values).clone(), model.weight)


def with_gradients(model, values):
    with torch.enable_grad():
        return values @ model.weight


@pytest.mark.parametrize(
    "function",
    [
        in_inference_mode,
        once_in_inference_mode,
        with_gradients,
        lambda model, values: F.dropout(values, 0.5, training=True),
        lambda model, values: values.clone().mul_(values).relu_(),
        lambda model, values: torch.cat(values.chunk(2, dim=1)),
        lambda model, values: values[:, torch.tensor([0, 2])],
        lambda model, values: torch.where(values > 0, values, 0.0),
        lambda model, values: values.expand(3, 2, 4, 8) * values.mT.mT,
        lambda model, values: model.layer(values),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_what_is_described_completely_has_no_mismatch(function, grad):
    assert mismatched(captured(function, grad=grad)) == {}


def test_a_capture_with_values_is_checked_with_values():
    def reads(model, values):
        rows = values if values.sum() < 1e9 else values[:1]
        return with_math_attention(model, rows)

    found = captured(reads)
    assert "bool" in [spec.short_name for spec in found.tuples]
    assert list(mismatched(found)) == ["scaled_dot_product_attention"]


def test_a_model_without_a_tuple_that_can_be_measured_is_refused():
    class Attention(nn.Module):
        def forward(self, values):
            return with_math_attention(self, values)

    with pytest.raises(CaptureError, match="No operator of Attention"):
        farm.capture_model(Attention().eval(), VALUES)


def test_a_mismatch_is_a_row_with_its_reason_and_lowers_the_coverage(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FARM_SIMULATED_CARDS", "1")
    monkeypatch.setenv("FARM_SIMULATED_ITEM_S", "0")
    settings.cache_clear()
    database = farm.open_database(tmp_path / "farm.db")
    model = captured(with_math_attention)
    # Another model has read both tuples: this one must not use that reading.
    farm.measure_tuples(model.tuples, database=database)
    report = farm.measure_model(model, database=database).report
    (row,) = report.verdict.unmeasured
    assert row.short_name == "scaled_dot_product_attention"
    assert row.reason.startswith("the model runs aten.mul.Scalar")
    assert report.verdict.coverage < 1
    assert (report.verdict.measured, report.verdict.parts) == (1, 2)
    database.close()


def test_the_trace_of_a_tuple_is_taken_once(monkeypatch):
    function = lambda model, values: torch.tanh(values) * 3  # noqa: E731
    captured(function)
    monkeypatch.setattr(self_check, "_traced", lambda *_: pytest.fail("it was traced before"))
    assert mismatched(captured(function)) == {}


@pytest.mark.parametrize(
    "text",
    [
        "resnet18,step=training,amp=bfloat16,optimizer=adamw-fused,input_size=64",
        "gpt2,step=training,length=16,layers=1",
        "bert-base,length=16,layers=1",
        "longformer-base,length=16,layers=1",
        "gpt2,phase=decode,cache=32,layers=1,dtype=bfloat16",
    ],
)
def test_a_variant_has_no_mismatch(text):
    """`benchmarks/self_check.py` does this for the whole catalog."""
    found = extract(variant_of(text, 2), device_type="cuda").capture
    assert found.mismatches == {}
    assert found.traces.keys() == found.tuples.keys()


def test_a_training_step_is_checked_by_the_outputs_of_its_operators():
    found = extract(variant_of("squeezenet1_1,step=training,input_size=64", 2)).capture
    id_ = next(
        id_ for id_, spec in found.tuples.items() if spec.operator == "aten.convolution.default"
    )
    other = CallTrace(found.traces[id_].operators, ("(1,) contiguous torch.float32",))
    found.traces[id_] = other
    assert set(self_check.checked(found, "cpu").mismatches) == {id_}


def test_an_operator_that_does_not_run_alone_is_no_mismatch():
    """Its measurement reports the error."""
    recorded = capture(nn.Linear(8, 8).eval(), (VALUES,))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(self_check, "_traced", lambda *_: 1 / 0)
        assert self_check.checked_on(torch.device("cpu"), recorded).mismatches == {}


def without_oneDNN(model, values):
    with torch.backends.mkldnn.flags(enabled=False):
        return values * 2


def with_determinism(model, values):
    torch.use_deterministic_algorithms(True)
    try:
        return values * 2
    finally:
        torch.use_deterministic_algorithms(False)


def with_another_precision(model, values):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return values * 2
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("function", "setting"),
    [
        (without_oneDNN, "torch.backends.mkldnn.enabled"),
        (with_determinism, "torch.use_deterministic_algorithms"),
        (with_another_precision, "torch.backends.cuda.matmul.fp32_precision"),
    ],
)
def test_a_setting_that_no_operator_shows_is_noticed(function, setting):
    expected = f"it runs with another value of {setting} than a worker has"
    assert mismatched(captured(function)) == {"mul": expected}


def test_determinism_of_the_users_program_is_noticed_because_a_worker_does_not_have_it():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(CaptureError, match="use_deterministic_algorithms"):
            captured(lambda model, values: values * 2)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_capture_leaves_the_settings_of_the_users_program_as_they_are():
    def forward(model, values):
        torch.set_default_dtype(torch.float64)
        return values * 2

    captured(forward)
    assert torch.get_default_dtype() is torch.float32
