"""A GPU that is there and cannot be measured on: never silently the CPU in its place."""

import json
import threading

import pynvml
import pytest

from cli.output import said_through, say
from farm.devices.device import Card
from farm.jobs import cards
from farm.settings import Settings, settings
from farm.types.software import Software
from tasks.doctor import host
from tasks.servers import BrokerServer
from tests.devices.fake_nvml import OTHER_UUID, UUID, behind_pynvml

NO_GRAPHS = ("run", "resnet18", "--launch", "graph")  # a CPU refuses that, so nothing is measured


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with behind_pynvml(monkeypatch) as library:
        yield library


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            {"faults": {("nvmlDeviceGetHandleByIndex_v2", 0): pynvml.NVML_ERROR_GPU_IS_LOST}},
            "GPU is lost",
        ),
        (
            {"lacks": {"nvmlDeviceGetCount_v2": pynvml.NVML_ERROR_NO_PERMISSION}},
            "Insufficient Permissions",
        ),
        ({"mig": 1}, "MIG mode"),
    ],
)
def test_a_run_says_why_the_cpu_is_left(farm, nvml, fault, said):
    vars(nvml).update(fault)
    told = farm(*NO_GRAPHS)
    assert told.code == 2
    first, second, *_, last = told.stderr.splitlines()
    assert first.startswith("Not usable: ")
    assert said in first
    assert second.endswith("; it uses the CPU.")
    assert "--launch eager" in last


def test_a_run_that_was_told_to_take_the_gpu_does_not_take_the_cpu(farm, nvml):
    nvml.lacks["nvmlDeviceGetCount_v2"] = pynvml.NVML_ERROR_NO_PERMISSION
    told = farm("run", "resnet18", "--card", "gpu")
    assert told.code == 2
    assert "Insufficient Permissions" in told.stderr
    assert "The farm cannot measure on" in told.stderr


def test_a_mig_instance_that_is_named_is_told(farm, nvml, monkeypatch):
    nvml.mig = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aaaa")
    assert "Not usable: MIG instance (MIG-aaaa)" in farm(*NO_GRAPHS).stderr


def test_what_is_said_of_it_goes_into_the_log_where_lines_have_a_form(nvml, capsys):
    nvml.mig = 1
    lines = []
    with said_through(lines.append):
        cards.own_cards(say)
    assert "MIG mode" in lines[0]
    assert capsys.readouterr().err == ""


def test_nothing_is_said_where_the_cpu_is_all_there_is(farm, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Left out" not in farm(*NO_GRAPHS).stderr
    assert "No GPU" not in farm(*NO_GRAPHS).stderr


def test_cards_lists_what_does_not_answer_beside_what_does(farm, nvml):
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.faults["nvmlDeviceGetUUID", 1] = pynvml.NVML_ERROR_NO_PERMISSION
    rows = json.loads(farm("cards", "--local", "--json").stdout)["cards"]
    assert [(row["kind"], row["state"]) for row in rows] == [
        ("cuda", "here"),
        ("cuda", "refused"),
        ("cpu", "here"),
    ]
    assert "Insufficient Permissions" in rows[1]["state_reason"]
    shown = " ".join(farm("cards", "NVIDIA-", "--local").stdout.split())
    assert f"not usable {rows[1]['state_reason']}" in shown


def test_a_card_that_joined_once_is_shown_with_what_its_driver_says_now(
    farm, nvml, any_database, monkeypatch
):
    monkeypatch.setenv("FARM_DATABASE_URL", any_database.url.render_as_string(hide_password=False))
    settings.cache_clear()
    card = Card(id=UUID, kind="cuda", model="NVIDIA H200", memory_bytes=1, host=settings().host)
    cards.register(
        any_database, card, Software(torch="2.11.0", driver="580"), holder="h", queue="q"
    )
    nvml.faults["nvmlDeviceGetName", 0] = pynvml.NVML_ERROR_NO_PERMISSION

    def shown():
        rows = json.loads(farm("cards", "--json").stdout)["cards"]
        return next((row["state"], row["state_reason"]) for row in rows if row["id"] == UUID)

    assert shown() == ("idle", ""), "its worker may ask what this user may not"
    cards.stopped(any_database, "h")
    state, reason = shown()
    assert state == "refused"
    assert "Insufficient Permissions" in reason


def test_the_index_of_a_gpu_that_is_lost_does_not_mean_the_cpu(farm, nvml):
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.faults["nvmlDeviceGetHandleByIndex_v2", 0] = pynvml.NVML_ERROR_GPU_IS_LOST
    told = farm("run", "resnet18", "--card", "0")
    assert told.code == 2
    assert "The farm cannot measure on" in told.stderr
    assert "GPU is lost" in told.stderr


def test_a_worker_does_not_serve_nothing_where_every_gpu_is_refused(farm, nvml):
    nvml.mig = 1
    told = farm("worker")
    assert told.code == 3, "its service tries again"
    assert "any GPU of this host" in told.stderr
    assert "--card cpu" in told.stderr


@pytest.mark.parametrize(
    "lacks", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]
)
@pytest.mark.parametrize("card", ["gpu", UUID])
def test_a_worker_of_gpus_waits_for_a_driver_that_comes_late(farm, nvml, lacks, card):
    """Right after a host has started, or while its driver is updated: never the CPU instead."""
    nvml.lacks = {"nvmlInit_v2": lacks}
    told = farm("worker", "--card", card)
    assert told.code == 3
    assert "Serving" not in told.stderr


def test_a_worker_of_a_card_that_is_no_gpu_and_not_there_is_a_wrong_request(farm, nvml):
    assert farm("worker", "--card", "7").code == 2
    assert farm("worker", "--card", "A900").code == 2


def test_a_run_on_a_gpu_that_others_use_ends_before_it_measures(farm, nvml, monkeypatch, tmp_path):
    monkeypatch.setattr(host, "ALONE_WITHIN_S", 0.0)
    monkeypatch.setattr(BrokerServer, "__enter__", lambda broker: pytest.fail("it started"))
    nvml.processes = [1]
    for arguments in (("run", "alexnet", "-b", "1"), ("cards", "check")):
        told = farm(*arguments)
        assert told.code == 4
        error, step = told.stderr.splitlines()[-2:]
        assert error.startswith(f"error: other processes compute on NVIDIA H200 ({UUID})")
        assert "--card" in step
        assert "FARM_ALLOW_SHARED=1" in step


def test_a_process_that_ends_or_a_setting_lets_a_command_measure(nvml):
    nvml.processes = [1]
    card = Card(id=UUID, kind="cuda", model="NVIDIA H200", memory_bytes=1)
    host.check_alone([card], Settings(allow_shared=True))
    assert [check.level for check in host.disturbances([card], Settings())] == ["warning"]
    later = threading.Timer(0.3, nvml.processes.clear)
    later.start()
    host.check_alone([card], Settings())
    later.join()
