"""`farm memory`: what a training step needs, from a capture alone."""

import contextlib
import json
import re
import statistics

import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter
from sqlmodel import select

from farm.addons.memory import offload_plan, step_on_card
from farm.addons.memory import planned_step as benchmarked
from farm.addons.memory.handlers import HANDLERS
from farm.benchmark_process.handlers import OpenCard
from farm.models import catalog
from farm.settings import settings
from farm.store import tables
from tests import slow
from tests.addons.memory.test_offload import Fake
from tests.report import filled, measured

CPU = torch.device("cpu")


def test_memory_tells_the_peak_and_what_it_is_made_of(farm):
    said = farm(
        "memory",
        "resnet18",
        "-b",
        "2",
        "--input-size",
        "64",
        "--optimizer",
        "adamw",
        "--json",
        "--card",
        "A100",
    )
    assert said.code == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["loss"] == "cross-entropy"
    assert (found["times"]["from"], found["times"]["card"], found["times"]["read_calls"]) == (
        "roofline",
        "A100 80GB",
        0,
    )
    peak = found["peak"]
    assert (
        sum(peak["bytes_by_role"].values())
        == peak["bytes"]
        == max(row["held_bytes"] for row in found["kernels"])
    )
    assert peak["bytes"] <= peak["allocated_bytes"]
    assert found["base_bytes"] == sum(
        row["size_bytes"] for row in found["tensors"] if row["global"]
    )
    assert found["step_us"] == pytest.approx(sum(row["time_us"] for row in found["kernels"]))
    (weight,) = [row for row in found["tensors"] if row["name"] == "conv1.weight"]
    assert (weight["role"], weight["shape"], weight["birth"]) == ("parameter", [64, 3, 7, 7], None)
    (state,) = [row for row in found["tensors"] if row["name"] == "conv1.weight.exp_avg"]
    assert state["inactive_periods"][-1]["over_the_end"]  # the optimizer alone uses it
    convolutions = [
        row for row in found["kernels"] if row["operator"] == "aten.convolution.default"
    ]
    assert len(convolutions) == 20
    assert min(row["flops"] for row in convolutions) > 0


def test_memory_shows_training_steps_only(farm):
    refused = farm("memory", "resnet18", "--step", "inference")
    assert (refused.code, refused.stdout) == (2, "")
    assert "training steps only" in refused.stderr
    assert "farm estimate resnet18 --card" in refused.stderr
    assert "farm.fits(" in refused.stderr


@pytest.mark.parametrize(
    ("optimizer", "card", "line"),
    [
        ("adamw", "H200", "adamw-foreach, PyTorch's default on a GPU"),
        ("adamw-fused", "H200", "adamw-fused"),
        ("adamw", "cpu", "adamw"),
    ],
)
def test_memory_names_the_implementation_of_the_optimizer(farm, optimizer, card, line):
    small = ("-b", "2", "--input-size", "32", "--card", card, "--optimizer", optimizer)
    said = farm("memory", "squeezenet1_1", *small).stdout
    (shown,) = [row for row in said.splitlines() if row.startswith("  optimizer  ")]
    assert shown.split(None, 1)[1].strip().partition(";")[0] == line


@slow.MEASURED
def test_memory_says_what_its_times_and_operators_are(farm):
    told = farm("memory", "resnet18", "-b", "512", "--input-size", "64", "--fit", "1GB")
    assert (
        "Using the packaged readings" in told.stderr
    )  # of the optimizer's calls, whatever the batch is
    said = told.stdout
    assert "captured on the CPU" in said
    assert "estimated from the peak rates of the H200" in said
    assert "convolution of call 0" in said
    assert "The batch of 512 does not fit" in said


SMALL = ("memory", "resnet18", "-b", "2", "--input-size", "64")
LINE = r"tensor(\d+), Name: (\S+), Is global\?: ([01]): Size in byte: (\d+), "


def test_text_files_have_the_form_of_g10s_tool(farm, tmp_path):
    found = json.loads(farm(*SMALL, "--config", tmp_path, "--json").stdout)
    kernels, tensors, lives = (
        (tmp_path / f"{name}.config").read_text()
        for name in ("kernels", "tensors", "liveness_analysis")
    )
    listed = re.findall(rf"^{LINE}$", tensors, re.MULTILINE)
    assert [(int(number), int(size)) for number, _, _, size in listed] == [
        (row["number"], row["size_bytes"]) for row in found["tensors"]
    ]
    assert len({name for _, name, _, _ in listed}) == len(listed)
    assert re.findall(r"^Kernel ID: (\d+), Name: torch.ops.aten\.", kernels, re.MULTILINE) == list(
        map(str, range(found["calls"]))
    )
    assert "Name: torch.ops.aten.relu_.default(cudnn_batch_norm)\nInput Tensors:\ntensor" in kernels
    assert re.search(
        rf"Output Tensors:\n{LINE}Dimensions: f32\[2, 64, 32, 32\]$", kernels, re.MULTILINE
    )
    convolution = r"Name: convolution, Is global\?: 0: Size in byte: 524288, \n"
    assert re.search(convolution + r"Liveness: Birth: 0, Death: \d+\.\n(_ )+\n", lives)
    assert re.search(
        convolution + r"Inactive Periods:\nPeriod 0: \d+-{8}\d+\nEstimated Time:[\d.]+us\n", lives
    )


def test_tables_trace_and_drawings_are_files(farm, tmp_path):
    said = farm(*SMALL, "--out", tmp_path, "--offload", "55GB/s", "--json")
    found = json.loads(said.stdout)
    assert pq.read_table(tmp_path / "kernels.parquet").num_rows == found["calls"]
    assert pq.read_table(tmp_path / "tensors.parquet")["size_bytes"].to_pylist() == [
        row["size_bytes"] for row in found["tensors"]
    ]
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    held = [sum(event["args"].values()) for event in trace if event["name"] == "held, bytes"]
    assert held == [row["held_bytes"] for row in found["kernels"]]
    owners = [
        event["name"]
        for event in trace
        if event["ph"] == "X" and event["name"].startswith("backward of")
    ]
    assert "backward of conv1 (Conv2d)" in owners
    slices = [
        (event["ts"], event["ts"] + event["dur"])
        for event in trace
        if event.get("tid") == 2 and event["ph"] == "X"
    ]
    assert not [
        one for one in slices if any(one[0] < other[0] < one[1] < other[1] for other in slices)
    ]  # nested, or apart
    assert "with offloading" in (tmp_path / "memory.svg").read_text()
    assert "inactive periods" in (tmp_path / "memory.html").read_text().lower()
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert found["offload"]["peak_bytes"] <= found["peak"]["bytes"]


@slow.MEASURED
def test_memory_answers_what_fits_and_what_blocks_would_free(farm):
    limit_bytes = told(farm)["peak"]["allocated_bytes"] + 10**6  # of a batch of 2
    found = told(farm, "--fit", str(limit_bytes), "--what-if-recompute")
    fit = found["fit"]
    assert fit["exact"]
    assert fit["allocated_peak_bytes"] <= fit["limit_bytes"] == limit_bytes
    peaks = {row["batch"]: row["allocated_peak_bytes"] for row in fit["captured"]}
    assert peaks[fit["batch"] + 1] > limit_bytes
    rows = found["recomputed"]
    assert [row["modules"] for row in rows[:2]] == ["layer1.0", "layer1.1"]
    assert rows[-1]["calls"] == sum(row["calls"] for row in rows[:-1])
    assert all(row["freed_bytes"] == found["peak"]["bytes"] - row["peak_bytes"] for row in rows)


STEP = catalog.variant("resnet18", 2, input_size=64, step="training")


def told(farm, *more):
    said = farm(*SMALL, *more, "--json")
    assert said.code == 0, said.stderr
    return json.loads(said.stdout)


def test_times_are_those_that_were_read_and_the_share_is_told(
    database, farm, monkeypatch, tmp_path
):
    estimated = told(farm)
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    assert told(farm)["kernels"] == estimated["kernels"]  # no reading is there
    filled.fill(
        database, STEP, leave_out=lambda spec: spec.short_name == "convolution", whole=False
    )
    filled.fill(database, STEP, model="NVIDIA H100", card="GPU-1", whole=False)
    found = told(farm)
    read = [row for row in found["kernels"] if row["time_from"] == "reading"]
    assert {row["operator"] for row in found["kernels"] if row not in read} == {
        "aten.convolution.default"
    }
    assert found["times"]["read_calls"] == len(read)
    assert found["times"]["read_share"] == pytest.approx(
        sum(row["time_us"] for row in read) / found["step_us"]
    )
    assert found["times"]["from"] == "both"
    assert all(
        row["time_us"] != before["time_us"]
        for row, before in zip(found["kernels"], estimated["kernels"], strict=True)
        if row["time_from"] == "reading"
    )
    complete = told(farm, "--card", "H100", "--what-if-recompute")["times"]
    assert (complete["from"], complete["read_share"]) == ("readings", 1)
    assert told(farm, "--card", "A100")["times"]["from"] == "roofline"
    said = farm(*SMALL, "--out", tmp_path).stdout
    assert " % of this sum measured (" in said
    assert "; at least " in said, "the rest of the step is a lower bound"
    assert "NVIDIA H200, torch 2.11.0+cu130, graph launch)" in " ".join(said.split())
    assert " % measured, rest estimated" in (tmp_path / "memory.svg").read_text()
    assert "of this sum measured" in (tmp_path / "memory.html").read_text()


def test_what_no_operator_sees_is_a_row_of_its_own_where_the_whole_was_read(
    database, farm, monkeypatch
):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    filled.fill(database, STEP)
    unread = told(farm)["peak"]
    assert (unread["unseen_bytes"], unread["read"]) == (None, None)
    assert "no whole step was measured on an H200" in farm(*SMALL).stdout
    with database.write() as session:
        whole = session.exec(
            select(tables.ReadingRow).where(tables.ReadingRow.subject_id == STEP.id)
        ).one()
        known = {
            "allocated_peak_bytes": unread["allocated_bytes"] + 40_000_000,
            "workspace_bytes": 33_554_432,
        }
        whole.details = {**whole.details, **known, "reserved_peak_bytes": 300_000_000}
        session.add(whole)
    peak = told(farm)["peak"]
    assert peak["unseen_bytes"] == 40_000_000
    assert peak["read"]["workspace_bytes"] == 33_554_432
    said = " ".join(farm(*SMALL).stdout.split())
    assert "other memory 40.0 MB" in said
    assert "33.6 MB of cuBLAS workspaces, and 300 MB reserved" in said
    assert "unknown: on a CPU" in farm(*SMALL, "--card", "cpu").stdout


def test_times_are_those_of_a_job_that_is_named(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    job = measured.measured(database, STEP)
    found = told(farm, "--job", job[:3])
    assert (found["times"]["job"], found["times"]["from"]) == (job, "readings")
    report = json.loads(farm("report", job, "--json").stdout)
    read = {row["operator_id"]: row["time_us"] for row in report["tuples"]}
    assert all(row["time_us"] == pytest.approx(read[row["tuple"]]) for row in found["kernels"])
    other = farm(
        "memory",
        "squeezenet1_1",
        "-b",
        "2",
        "--input-size",
        "64",
        "--dtype",
        "bfloat16",
        "--job",
        job,
    )
    assert (other.code, other.stdout) == (2, "")
    assert f"Job {job} has no reading" in other.stderr
    assert (
        "farm run resnet18 --batch 2 --input-size 64 --step training --optimizer sgd"
        in other.stderr
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("resnet18", "--optimizer", "lion"), "optimizer 'lion' is unknown"),
        (("resnet18", "--card", "Voodoo"), "There is no data sheet for 'Voodoo'."),
        (("resnet18", "--recompute", "layer9"), "--recompute: the model has no module 'layer9'."),
        (("gpt2", "--phase", "decode"), "Omit --phase."),
        (("resnet18", "--fit", "a lot"), "--fit needs an amount of memory, not 'a lot'."),
        (("resnet18", "--fit", "80"), "--fit 80 has no unit: it means 80 bytes."),
        (("resnet18", "--offload", "0"), "--offload needs a bandwidth, not '0'."),
        (
            ("resnet18", "-b", "2", "--input-size", "64", "--fit", "100MB"),
            "Not even a batch of 1 fits",
        ),
        (("resnet18", "--job", "none", "--card", "H200"), "--card cannot be combined with --job"),
        (("resnet18", "--run"), "--slow-bandwidth, --moves and --run need a plan"),
        (
            ("resnet18", "--fast", "1GB", "--run", "--fit", "1GB"),
            "--fit cannot be combined with --run",
        ),
        (("resnet18", "--fast", "50%,0%"), "--fast needs a share above 0, not '0%'"),
        (("resnet18", "--fast", "50%,some"), "--fast needs an amount of memory, not 'some'"),
        (
            ("resnet18", "--what-if-recompute", "--recompute", "layer1.0"),
            "--what-if-recompute cannot be combined with",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_line(farm, asked, told):
    said = farm("memory", *asked)
    assert (said.code, said.stdout) == (2, "")
    assert told in said.stderr


@slow.MEASURED
def test_a_plan_says_what_lies_in_slow_memory_and_what_other_amounts_would_give(
    farm, tmp_path, monkeypatch
):
    monkeypatch.setattr(offload_plan, "POINTS", 5)
    peak_bytes = told(farm)["peak"]["bytes"]
    said = farm(
        *SMALL,
        "--fast",
        str(peak_bytes - 10**6),
        "--slow-bandwidth",
        "55GB/s",
        "--out",
        tmp_path,
        "--json",
    )
    found = json.loads(said.stdout)
    plan = found["placement"]
    names = {row["number"]: row for row in found["tensors"]}
    added_us = sum(row["slow_us"] for row in plan["slow"])
    assert plan["time_us"] == pytest.approx(found["step_us"] + added_us)
    assert plan["all_fast_us"] < plan["time_us"] < plan["all_slow_us"]
    assert plan["peak_bytes"] <= plan["fast_bytes"]
    assert plan["slow_bytes_per_s"] == 55e9
    assert plan["read_share"] < 0.01  # of a size that next to nobody has read
    assert [row["size_bytes"] for row in plan["slow"]] == [
        names[row["tensor"]]["size_bytes"] for row in plan["slow"]
    ]
    times = [point["time_us"] for point in plan["curve"]]
    assert times == sorted(times, reverse=True)
    assert times[-1] == plan["all_fast_us"]
    assert "all slow" in (tmp_path / "memory.svg").read_text()
    assert "Cost of a slow tensor" in (tmp_path / "memory.html").read_text()
    shown = farm(*SMALL, "--fast", "1GB", "--slow-bandwidth", "55GB/s").stdout
    assert "0 tensors of 0 B are in" in " ".join(shown.split())


def test_a_plan_without_enough_memory_or_a_wire_is_refused(farm):
    less = farm(*SMALL, "--fast", "1MB", "--slow-bandwidth", "55GB/s")
    assert (less.code, less.stdout) == (2, "")
    assert re.search(
        r"1\.00 MB .* too little .* aten\.\S+ \(call \d+\)",
        less.stderr,
    )
    unread = farm(*SMALL, "--card", "cpu", "--fast", "1GB")
    assert unread.code == 2
    command = " ".join(unread.stderr.split())
    assert all(
        word in command
        for word in ("resnet18", "--batch 2", "--input-size 64", "--step training", "each")
    )
    assert farm(*SMALL, "--moves").code == 2
    assert farm(*SMALL, "--fast", "1GB", "--moves").code == 2


class Here:
    """A benchmark process that is this one; answers travel as JSON."""

    item_timeout_s = 60.0

    def __init__(self):
        self.card = OpenCard(device=None, torch_device=CPU, bench=None)
        self.answers = {handler.request: handler.answer for handler in HANDLERS}

    def call(self, request, timeout_s=None):
        answer = self.answers[type(request)](request, self.card, lambda phase, details: None)
        adapter = TypeAdapter(request.answer)
        return adapter.validate_json(adapter.dump_json(answer))


@pytest.fixture
def a_cpu_with_slow_memory(monkeypatch):
    monkeypatch.setattr(benchmarked, "slow_memory_of", lambda device: Fake())
    monkeypatch.setattr(benchmarked, "WINDOW_S", 0.01)
    monkeypatch.setattr(offload_plan, "POINTS", 3)
    monkeypatch.setattr(step_on_card, "no_slow_memory", lambda card: "")
    monkeypatch.setattr(step_on_card, "hold_card", lambda card: contextlib.nullcontext(Here()))


@slow.MEASURED
@pytest.mark.usefixtures("a_cpu_with_slow_memory")
def test_a_step_is_run_under_each_plan_against_its_prediction(farm, tmp_path):
    small = ("memory", "squeezenet1_1", "-b", "2", "--input-size", "32")
    asked = (*small, "--fast", "90%,60%", "--slow-bandwidth", "1GB/s", "--run", "--card", "cpu")
    said = farm(*asked, "--out", tmp_path, "--json")
    assert said.code == 0, said.stderr
    found = json.loads(said.stdout)
    assert "Running the step on" in said.stderr
    plans = found["placement"]
    assert [plan["fast_bytes"] for plan in plans["plans"]] == [
        int(share * found["peak"]["allocated_bytes"]) for share in (0.9, 0.6)
    ]
    assert plans["run"]["slow_memory"] == "fake memory"
    fast = plans["run"]["all_fast"]
    assert fast["prediction_off"] == pytest.approx(plans["all_fast_us"] / fast["time_us"] - 1)
    sizes = {row["number"]: row["size_bytes"] for row in found["tensors"]}
    for plan in plans["plans"]:
        run = plan["run"]
        assert run["prediction_off"] == pytest.approx(plan["time_us"] / run["time_us"] - 1)
        assert set(run["stayed_fast"]) < set(plan["slow"])
        assert run["stayed_fast_bytes"] == sum(sizes[number] for number in run["stayed_fast"])
        assert plan["not_run"] is None
    assert sorted(row["tensor"] for row in plans["slow"]) == plans["plans"][0]["slow"]
    assert "run on the card" in (tmp_path / "memory.svg").read_text()
    page = (tmp_path / "memory.html").read_text()
    assert "stayed in fast memory" in page
    assert "prediction error" in page
    assert '"mode": "markers"' in page
    rows = [line.split() for line in farm(*asked).stdout.splitlines()]
    assert len([row for row in rows if "±" in row]) == 3  # all fast and two plans


@slow.MEASURED
@pytest.mark.usefixtures("a_cpu_with_slow_memory")
def test_a_step_is_run_with_moves_that_are_planned_by_what_copies_get_beside_it(
    farm, tmp_path, monkeypatch
):
    monkeypatch.setattr(offload_plan, "POINTS", 2)
    small = ("memory", "squeezenet1_1", "-b", "2", "--input-size", "32")
    asked = (*small, "--fast", "90%", "--moves", "--run", "--card", "cpu")
    found = json.loads(farm(*asked, "--out", tmp_path, "--json").stdout)
    placed = found["placement"]
    assert placed["moves_bytes_per_s"] == placed["wire"]["bytes_per_s"] > 0
    sizes = {row["number"]: row["size_bytes"] for row in found["tensors"]}
    (plan,) = placed["plans"]
    assert plan["moved_bytes"] == sum(sizes[row["tensor"]] for row in plan["moved"]) > 0
    assert (plan["run"]["moves"], plan["run"]["moved_bytes"]) == (
        len(plan["moved"]),
        plan["moved_bytes"],
    )
    page = (tmp_path / "memory.html").read_text()
    assert "moves per step" in page
    assert "keeps its fast memory reserved" in page
    said = " ".join(farm(*asked, "--slow-bandwidth", "1TB/s").stdout.split())
    assert "Measured copies without a step: " in said
    assert "at 1.00 TB/s each way" in said
    assert "moves per step" in said


def test_a_host_without_slow_memory_runs_no_plan(farm):
    said = farm(*SMALL, "--fast", "50%", "--run", "--card", "cpu")
    assert (said.code, said.stdout) == (2, "")
    assert "one NUMA node" in said.stderr


def test_a_plan_goes_by_what_was_read_with_tensors_in_slow_memory(database, farm, monkeypatch):
    monkeypatch.setenv("FARM_DATABASE_URL", str(database))
    settings.cache_clear()
    others = {"leave_out": lambda spec: spec.short_name != "convolution"}
    filled.fill(database, STEP, whole=False)
    for word, slower in (("in0", 3.0), ("in1", 2.0), ("out0", 4.0), ("in0-1+out0", 5.0)):
        filled.fill(
            database,
            STEP,
            whole=False,
            protocol=filled.PROTOCOL.with_placement(word),
            slower=slower,
            **others,
        )
    found = told(farm, "--fast", "1GB")
    plan = found["placement"]
    assert plan["sum_over_together"] == pytest.approx((1 + 2 + 1 + 3) / 5)
    assert 0 < plan["read_share"] < 1
    assert found["times"]["read_share"] == 1  # with everything fast
    kernels = [row for row in found["kernels"] if row["operator"] == "aten.convolution.default"]
    sizes = {row["number"]: row["size_bytes"] for row in found["tensors"]}
    chosen = {row["tuple"]: row for row in kernels}.values()
    each = [
        [(sizes[row["reads"][0]], 2 * row["time_us"]) for row in chosen],
        [(sizes[row["reads"][1]], row["time_us"]) for row in chosen],
        [(sizes[row["writes"][0]], 3 * row["time_us"]) for row in chosen],
    ]
    rates = [[size / added_us for size, added_us in pairs if size >= 1e6] for pairs in each]
    wire = statistics.median(map(statistics.median, filter(None, rates))) * 1e6
    assert plan["slow_bytes_per_s"] == pytest.approx(wire)
