"""Measurement files: what they may say, and how mistakes are named."""

import contextlib
import io
import os
from pathlib import Path

import pytest

from farm.errors import MeasurementFileError, UnknownModel, UsageError
from farm.requests.measurement_file import load, parse
from farm.requests.partial_request import complete


def test_lists_multiply_out_and_defaults_fill_in():
    requests = parse(
        """
defaults: {dtype: bfloat16, protocol: {tf32: true}}
measurements:
  - model: [resnet18, resnet50]
    batch: [1, 32]
  - model: vit_b_16
    dtype: float32
    operators: [Conv2d, Linear]
    stopping: {maximum_s: 2}
""",
        "jobs.yml",
    )
    assert [(request.model, request.batch, request.dtype) for request in requests] == [
        ("resnet18", 1, "bfloat16"),
        ("resnet18", 32, "bfloat16"),
        ("resnet50", 1, "bfloat16"),
        ("resnet50", 32, "bfloat16"),
        ("vit_b_16", None, "float32"),
    ]
    assert all(request.tf32 for request in requests)
    assert requests[-1].operators == ("Conv2d", "Linear")
    assert requests[-1].maximum_s == 2.0
    assert requests[-1].where == "jobs.yml:6"


def test_a_text_and_its_tokenizer_lie_where_the_file_says_seen_from_the_file():
    (request,) = parse(
        "- {model: bert-base, text: mine/a.txt, tokenizer: /models/bert}", "files/jobs.yml"
    )
    assert (request.text, request.tokenizer) == (Path("files/mine/a.txt"), Path("/models/bert"))
    with pytest.raises(UsageError, match=r"files/mine/a\.txt does not exist"):
        complete(request, "cuda", target=0.95)


def test_a_bare_list_is_enough():
    assert [
        request.model for request in parse("- model: resnet18\n- model: resnet34\n", "jobs.yml")
    ] == [
        "resnet18",
        "resnet34",
    ]


def test_anchors_and_merges_work_and_own_keys_win():
    requests = parse(
        """
x-big: &big {batch: 128, dtype: float16}
measurements:
  - {<<: *big, model: resnet18}
  - model: resnet34
    batch: 1
    <<: *big
""",
        "jobs.yml",
    )
    assert [(request.batch, request.dtype) for request in requests] == [
        (128, "float16"),
        (1, "float16"),
    ]


def test_a_sweep_takes_only_the_defaults_that_mean_something_for_it():
    (request,) = parse(
        """
defaults: {batch: 8, reuse: none, protocol: {launch: eager}}
measurements:
  - sweep: Conv2d
    name: kernels
    grid: {in_channels: 64, out_channels: [64, 128], kernel_size: [1, 3, [3, 5]], zeros: [0, 0.5]}
""",
        "jobs.yml",
    )
    assert request.sweep is not None
    assert request.sweep.size == 12
    assert request.sweep.grid["kernel_size"] == (1, 3, [3, 5])
    assert (request.batch, request.reuse, request.launch) == (None, "none", "eager")
    assert complete(request, "cpu", target=0.95).title == "kernels"


def test_numbers_may_have_the_units_of_the_command_line():
    text = (
        "- {model: a, within: 1%, target: 90%, stopping: {maximum_s: 2min}}\n- {model: a, "
        "budget_s: 60s}"
    )
    first, second = parse(text, "jobs.yml")
    assert (first.within, first.target, first.maximum_s, second.budget_s) == (
        0.01,
        0.9,
        120.0,
        60.0,
    )


def test_several_files_make_one_list_without_repeats(tmp_path):
    first, second = tmp_path / "a.yml", tmp_path / "b.yml"
    first.write_text("- model: resnet18\n- model: resnet34\n")
    second.write_text("- model: resnet34\n- model: resnet50\n")
    assert [request.model for request in load([first, second])] == [
        "resnet18",
        "resnet34",
        "resnet50",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "jobs.yml:1: the file is empty"),
        ("- model: [a\n", "jobs.yml:2: this is not YAML"),
        ("- model: 'a\n", "this is not YAML"),
        ("\t- a", "this is not YAML"),
        ("- model: a\n---\n- model: b\n", "this is not YAML"),
        (
            "- {model: a, within: wide}",
            "is 'wide'; it must be a number, with or without a unit (1%, 60s)",
        ),
        ("just words", "must be a list of measurements"),
        ("[]", "the list has no entry"),
        ("measurements: 3", "measurements must be a list"),
        ("defaults: {batch: 1}", "the key 'measurements' is missing"),
        ("- resnet18", "entries[0] must be a mapping"),
        ("- {batch: 1}", "needs exactly one of 'model' and 'sweep'"),
        ("- {model: a, sweep: Conv2d}", "needs exactly one of"),
        ("- model: a\n  batsh: 1", "jobs.yml:2: entries[0].batsh is unknown"),
        (
            "- model: a\n  batch: [1, two]",
            "jobs.yml:2: entries[0].batch[1] is 'two'; it must be a whole number",
        ),
        ("- model: a\n  batch: 0", "entries[0].batch is 0; it must be greater than or equal to 1"),
        (
            "- model: a\n  batch: 99999999999999999999999",
            "entries[0].batch is 99999999999999999999999; it must be less than or equal to "
            "2147483647",
        ),
        (
            "- model: a\n  input_size: 2147483648",
            "entries[0].input_size is 2147483648; it must be less than or equal to 2147483647",
        ),
        (
            "- sweep: Linear\n  grid: {in_features: 9223372036854775808, out_features: 1}",
            "it must be from -9223372036854775808",
        ),
        ("- model: a\n  stopping: {maximum_s: 1%s}" % ("0" * 400), "0; it must be finite"),
        ("- model: a\n  batch: true", "it must be a whole number"),
        ("- model: a\n  batch: []", "is an empty list"),
        ("- model: a\n  dtype: float23", "entries[0].dtype is 'float23'"),
        ("- model: a\n  batch: 1\n  batch: 2", "jobs.yml:3: entries[0].batch occurs twice"),
        ("- model: a\n  target: 2", "entries[0].target is 2"),
        ("- model: a\n  target: .nan", "must be finite"),
        ("- model: a\n  model_: {x: 1}", "entries[0].model_ is unknown"),
        ("- model: 2020-01-01", "reads as date"),
        ("- model: a\n  operators: all,Conv2d", "mixes 'all' with names"),
        ("- model: a\n  protocol: {lunch: eager}", "entries[0].protocol.lunch is unknown"),
        ("- model: a\n  protocol: {launch: never}", "entries[0].protocol.launch is 'never'"),
        ("- &a {<<: *a, model: b}", "merges itself"),
        ("- &a [*a]", "contains itself"),
        ("- model: &a [*a]", "contains itself"),
        ("- model: {a: b}", "entries[0].model must be a single value"),
        ("- model: a\n  <<: 3", "merges ('<<') a value that is not a mapping"),
        ("- sweep: Conv2d", "The grid of a Conv2d sweep needs in_channels"),
        ("- sweep: Conv2\n  grid: {batch: 1}", "There is no sweep of the operator 'Conv2'"),
        (
            "- sweep: Conv2d\n  grid: {kernel: 1}",
            "A sweep of Conv2d has no parameter or size 'kernel'",
        ),
        (
            "- sweep: Linear\n  grid: {in_features: [a], out_features: 1}",
            "it must be a whole number",
        ),
        ("- model: !!python/object:os.system a", "cannot be read"),
        (
            "defaults: {batch: [1, 2]}\nmeasurements: [{model: a}]",
            "defaults.batch needs a single value",
        ),
        ("? [1, 2]\n: 3", "has a key that is not a plain text"),
    ],
)
def test_mistakes_are_named_by_file_line_and_key(text, message):
    with pytest.raises(MeasurementFileError) as caught:
        parse(text, "jobs.yml")
    assert message in caught.value.message
    assert caught.value.message.startswith("jobs.yml:")
    assert caught.value.next_step


def test_a_misspelt_key_is_answered_with_the_nearest():
    with pytest.raises(MeasurementFileError) as caught:
        parse("- model: a\n  batsh: 1", "jobs.yml")
    assert caught.value.next_step == "Did you mean batch?"


def test_an_unknown_model_is_named_with_its_line():
    def check(name):
        raise UnknownModel.named(name, ["resnet18"])

    with pytest.raises(MeasurementFileError) as caught:
        parse("- model: resnet81", "jobs.yml", resolve_model=check)
    assert caught.value.message.startswith("jobs.yml:1: entries[0].model: ")
    assert "'resnet81'" in caught.value.message
    assert caught.value.next_step == "Did you mean resnet18?"


def test_a_file_that_multiplies_without_bound_is_refused():
    ten = ", ".join(str(number) for number in range(1, 101))
    with pytest.raises(MeasurementFileError, match="more than 10000 jobs"):
        parse(f"- {{model: a, batch: [{ten}], input_size: [{ten}, 101]}}", "jobs.yml")


def test_a_pipe_is_refused_at_once_but_not_that_of_a_shell(tmp_path):
    os.mkfifo(tmp_path / "jobs.yml")
    with pytest.raises(MeasurementFileError, match=r"jobs\.yml is a pipe") as caught:
        load([tmp_path / "jobs.yml"])
    assert "-f -" in caught.value.next_step
    reader, writer = os.pipe()
    os.write(writer, b"- model: resnet18\n")
    os.close(writer)
    (request,) = load([f"/dev/fd/{reader}"])
    os.close(reader)
    assert request.model == "resnet18"


def test_a_dash_is_standard_input_read_once(monkeypatch):
    for text, told in (
        (b"- model: resnet18\n", ""),
        (b"- {}\n", "standard input:1: entries"),
        (b"\xff", "not UTF-8"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        with pytest.raises(MeasurementFileError, match=told) if told else contextlib.nullcontext():
            (request,) = load(["-", "-"])
            assert (request.model, request.where) == ("resnet18", "standard input:1")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MeasurementFileError, match=r"none\.yml: No such file"):
        load([tmp_path / "none.yml"])
    (tmp_path / "binary.yml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(MeasurementFileError, match="not UTF-8"):
        load([tmp_path / "binary.yml"])


def test_keys_of_a_training_step_take_what_its_options_take():
    text = (
        "- {model: resnet18, step: training, optimizer: [sgd, adamw-fused], amp: float16, "
        "accumulate: 2, "
        "recompute: blocks}"
    )
    found = [complete(request, "cuda", target=0.95).variant for request in parse(text, "jobs.yml")]
    assert [one.optimizer for one in found] == ["sgd-fused", "adamw-fused"]
    assert {(one.mode, one.amp, one.accumulate, one.recompute) for one in found} == {
        ("train", "float16", 2, "blocks")
    }
    with pytest.raises(MeasurementFileError, match="amp is 'float8'"):
        parse(text.replace("float16", "float8"), "jobs.yml")
