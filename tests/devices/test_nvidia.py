"""NVIDIA cards, through the real `pynvml` and a library that stands in for the driver's."""

from __future__ import annotations

from collections.abc import Iterator

import pynvml
import pytest

from farm.benchmark_process.requests import from_json, to_json
from farm.devices import host, nvidia_errors, software
from farm.devices.cpu import cpu_card
from farm.devices.device import Card, Device
from farm.devices.host import discover, find_card, open_device
from farm.devices.nvidia_links import links
from farm.errors import NoSuchCard
from farm.settings import settings
from tests.devices.fake_nvml import OTHER_UUID, UUID, FakeNvml, behind_pynvml


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with behind_pynvml(monkeypatch) as library:
        yield library


def device() -> Device:
    return open_device(find_card(UUID, settings()))


def test_a_card_is_found_by_its_uuid(nvml: FakeNvml) -> None:
    (card,) = discover(settings())
    assert card == Card(
        id=UUID,
        kind="cuda",
        model="NVIDIA H200",
        memory_bytes=143_771 * 2**20,
        driver="580.00",
        index=0,
        host=settings().host,
    )
    assert from_json(Card, to_json(card)) == card


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), (UUID, 1), (UUID[:12], 1), ("1", 0), ("", 0)]
)
def test_hidden_cards_are_left_out(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sum(card.kind == "cuda" for card in discover(settings())) == count
    assert find_card(UUID, settings()).id == UUID


def test_every_getter_gives_its_unit(nvml: FakeNvml) -> None:
    nvml.throttle_mask = (
        pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    )
    nvml.processes = [17, 23]
    card = device()
    assert card.energy_counter_mj() == 123_456_789
    assert card.power_instant_w() == pytest.approx(345.678)
    assert card.power_average_w() == pytest.approx(300)
    assert card.power_limit_w() == pytest.approx(700)
    assert card.sm_clock_mhz() == 1980
    assert card.memory_clock_mhz() == 3201
    assert card.temperature_c() == 41
    assert card.memory_temperature_c() == 55
    assert card.throttle_reasons() == ("power_cap", "hardware_thermal")
    assert card.compute_processes() == {17, 23}
    assert len(card.capabilities) == 10


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_UNKNOWN,
    ],
)
@pytest.mark.parametrize(
    ("function", "getter"),
    [
        ("nvmlDeviceGetTotalEnergyConsumption", "energy_counter_mj"),
        ("nvmlDeviceGetFieldValues", "power_instant_w"),
        ("nvmlDeviceGetPowerUsage", "power_average_w"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "throttle_reasons"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "compute_processes"),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w"),
    ],
)
def test_what_a_card_lacks_is_none_and_not_asked_again(
    nvml: FakeNvml, code: int, function: str, getter: str
) -> None:
    nvml.lacks[function] = code
    nvml.missing.add("nvmlDeviceGetCurrentClocksThrottleReasons")
    card = device()
    nvml.calls.clear()
    assert getattr(card, getter)() is None
    assert getter not in card.capabilities
    assert function not in nvml.calls


def test_a_field_that_is_not_supported_is_none_though_the_call_succeeds(nvml: FakeNvml) -> None:
    nvml.lacking_fields[pynvml.NVML_FI_DEV_POWER_INSTANT] = pynvml.NVML_ERROR_NOT_SUPPORTED
    card = device()
    assert card.power_instant_w() is None
    assert card.memory_temperature_c() == 55


def test_a_counter_of_zero_is_a_counter_that_is_not_there(nvml: FakeNvml) -> None:
    nvml.energy_mj = 0
    assert "energy_counter_mj" not in device().capabilities


def test_functions_missing_from_an_old_driver_are_lacks_too(nvml: FakeNvml) -> None:
    nvml.missing |= {
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    }
    card = device()
    assert card.energy_counter_mj() is None
    assert card.compute_processes() is None


def test_an_old_driver_names_throttle_reasons_differently(nvml: FakeNvml) -> None:
    nvml.missing.add("nvmlDeviceGetCurrentClocksEventReasons")
    nvml.throttle_mask = pynvml.nvmlClocksEventReasonSwThermalSlowdown
    assert device().throttle_reasons() == ("thermal",)


def test_an_error_in_passing_does_not_lose_a_source(nvml: FakeNvml) -> None:
    card = device()
    nvml.lacks["nvmlDeviceGetTemperature"] = pynvml.NVML_ERROR_UNKNOWN
    assert card.temperature_c() is None
    del nvml.lacks["nvmlDeviceGetTemperature"]
    assert card.temperature_c() == 41


def test_a_card_in_mig_mode_is_listed_and_refused_with_the_reason(nvml: FakeNvml) -> None:
    nvml.mig = 1
    (card,) = discover(settings())
    assert "MIG" in card.refusal
    with pytest.raises(NoSuchCard, match="MIG"):
        find_card(UUID, settings())
    with pytest.raises(NoSuchCard, match="MIG"):
        open_device(card)


TELLING = [
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
]


@pytest.mark.parametrize(
    ("code", "said", "next_step"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, "GPU is lost", "restart the host"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions", "/dev/nvidia"),
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error", "nvidia-smi"),
    ],
)
@pytest.mark.parametrize("function", TELLING)
@pytest.mark.parametrize("silent", [0, 1])
def test_a_card_that_does_not_answer_is_refused_and_the_other_works(
    nvml: FakeNvml, silent: int, function: str, code: int, said: str, next_step: str
) -> None:
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.faults[function, silent] = code
    cards = discover(settings())
    assert [card.kind for card in cards] == ["cuda", "cuda"]
    assert [card.index for card in cards] == [0, 1]
    refused, well = cards[silent], cards[1 - silent]
    assert said in refused.refusal
    assert next_step in refused.refusal
    for ask in (lambda: find_card(refused.id, settings()), lambda: open_device(refused)):
        with pytest.raises(NoSuchCard, match=said):
            ask()
    assert (well.id, well.refusal) == (nvml.uuids[1 - silent], "")
    assert find_card(well.id, settings()) == well
    assert open_device(well).temperature_c() == 41


def test_a_card_keeps_what_it_told_before_it_failed(nvml: FakeNvml) -> None:
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.faults["nvmlDeviceGetHandleByIndex_v2", 0] = pynvml.NVML_ERROR_GPU_IS_LOST
    nvml.faults["nvmlDeviceGetName", 1] = pynvml.NVML_ERROR_GPU_IS_LOST
    first, second = discover(settings())
    assert (first.id, first.model) == (f"NVIDIA-{settings().host}-0", "NVIDIA card")
    assert (second.id, second.model) == (OTHER_UUID, "NVIDIA card")


def test_a_lost_card_that_still_tells_its_name_is_refused(nvml: FakeNvml) -> None:
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.faults["nvmlDeviceGetMemoryInfo", 0] = pynvml.NVML_ERROR_NOT_SUPPORTED
    nvml.faults["nvmlDeviceGetMemoryInfo", 1] = pynvml.NVML_ERROR_GPU_IS_LOST
    shared, lost = discover(settings())
    assert (shared.refusal, shared.memory_bytes) == ("", 0), "memory that is the host's is not told"
    assert (lost.id, lost.model) == (OTHER_UUID, "NVIDIA H200")
    assert "GPU is lost" in lost.refusal


def test_whoever_looks_for_a_lost_card_is_told_which_does_not_answer(nvml: FakeNvml) -> None:
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.faults["nvmlDeviceGetHandleByIndex_v2", 1] = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(NoSuchCard, match="GPU is lost"):
        find_card(OTHER_UUID, settings())


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        ("0", [0]),
        ("1", [1]),
        ("0,1", [0, 1]),
        (UUID, [0]),
        (OTHER_UUID, [1]),
        (f"{UUID},{OTHER_UUID}", [0, 1]),
    ],
)
def test_a_card_without_a_uuid_is_hidden_unless_it_may_be_meant(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, indexes: list[int]
) -> None:
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.faults["nvmlDeviceGetHandleByIndex_v2", 1] = pynvml.NVML_ERROR_GPU_IS_LOST
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cards = discover(settings())
    assert [card.index for card in cards] == indexes
    assert [bool(card.refusal) for card in cards] == [index == 1 for index in indexes]


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch'; restart the host"),
    ],
)
@pytest.mark.parametrize("visible", [None, "0", "1", UUID])
def test_a_driver_that_counts_no_cards_is_refused_as_one(
    nvml: FakeNvml,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    function: str,
    code: int,
    said: str,
) -> None:
    nvml.lacks[function] = code
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (card,) = discover(settings())
    assert (card.kind, card.id) == ("cuda", f"NVIDIA-{settings().host}")
    assert said in card.refusal
    with pytest.raises(NoSuchCard, match=said):
        find_card(UUID, settings())


def test_where_all_gpus_are_hidden_the_cpu_is_the_card_whatever_the_driver_says(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.lacks["nvmlDeviceGetCount_v2"] = pynvml.NVML_ERROR_NO_PERMISSION
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [card.kind for card in discover(settings())] == ["cpu"]


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("MIG-aaaa", ["MIG-aaaa"]),
        (f"MIG-{UUID}/1/0,MIG-bbbb", [f"MIG-{UUID}/1/0", "MIG-bbbb"]),
        ("1,MIG-aaaa", [OTHER_UUID, "MIG-aaaa"]),
    ],
)
def test_a_mig_instance_that_is_named_is_refused_with_the_reason(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, ids: list[str]
) -> None:
    nvml.uuids = [UUID, OTHER_UUID]
    nvml.mig = 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cards = discover(settings())
    assert [card.id for card in cards] == ids
    for card in cards:
        with pytest.raises(NoSuchCard, match="MIG mode"):
            open_device(card)


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND]
)
@pytest.mark.parametrize("visible", [None, "0", "MIG-aaaa"])
def test_without_a_driver_the_cpu_is_the_card(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, code: int
) -> None:
    nvml.lacks["nvmlInitWithFlags"] = code
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (card,) = discover(settings())
    assert (card.kind, card.id) == ("cpu", settings().cpu_card_id)


def test_a_closed_device_says_nothing(nvml: FakeNvml) -> None:
    card = device()
    card.close()
    assert card.energy_counter_mj() is None


def test_the_links_of_a_card_are_what_the_driver_reports_of_them(nvml: FakeNvml) -> None:
    nvml.uuids = [UUID, OTHER_UUID]
    assert links(UUID) == {}, "nothing is invented"
    nvml.nvlinks, nvml.access = [1, 1, 0], True
    assert links(UUID) == {"nvlinks": 2, "peers": [OTHER_UUID]}
    nvml.nvlinks, nvml.access = [], False
    assert links(UUID) == {"peers": []}
    nvml.faults[("nvmlDeviceGetUUID", 1)] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert links(UUID) == {}
    assert links("GPU-unknown") == {}


def test_the_software_with_which_the_cards_communicate_is_known_without_torch(
    nvml: FakeNvml, monkeypatch, tmp_path
):
    card, cpu = device().card, cpu_card(settings())
    nvml.uuids, nvml.nvlinks, nvml.access = [UUID, OTHER_UUID], [1, 1, 0], True
    (tmp_path / "nvidia_nccl_cu13-2.28.9.dist-info").mkdir()
    (tmp_path / "nvidia_nccl_cu13-2.28.9.dist-info/METADATA").write_text(
        "Name: nvidia-nccl-cu13\nVersion: 2.28.9\n"
    )
    (tmp_path / "nccl.conf").write_text("NCCL_ALGO=Ring\nNCCL_DEBUG=INFO\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        software, "installed_torch", lambda: software.Installed("2.11.0+cu130", "13.0")
    )
    monkeypatch.setattr(software, "_NCCL_FILES", (str(tmp_path / "nccl.conf"),))
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    known = host.links_of(card)
    assert host.link_between([UUID, OTHER_UUID]) == ("NVLink x2", 2 * 26_562e6)
    nvml.lacking_fields[pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON] = (
        pynvml.NVML_ERROR_NOT_SUPPORTED
    )
    assert host.link_between([UUID, OTHER_UUID]) == ("NVLink x2", 2 * 25e9), (
        "the data sheet of the H200"
    )
    assert known["communication"] == "nccl 2.28.9 NCCL_ALGO=Ring NCCL_NVLS_ENABLE=0 over NVLink x2"
    monkeypatch.setattr(software, "installed_torch", lambda: software.Installed("2.11.0+cpu", None))
    assert host.links_of(card) == {"nvlinks": 2, "peers": [OTHER_UUID]}, "unknown"
    assert host.links_of(cpu) == {"communication": "gloo"}


def test_each_error_counter_has_its_count_or_the_reason(nvml, tmp_path, monkeypatch):
    nvml.nvlinks = [1, 0, 1]
    nvml.nvlink_errors = {pynvml.NVML_NVLINK_ERROR_DL_REPLAY: 3}
    nvml.ecc_errors = {pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED: 7}
    nvml.remapped_rows = (1, 0, 1, 0)
    nvml.lacks["nvmlDeviceGetPcieReplayCounter"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    monkeypatch.setattr(nvidia_errors, "KERNEL_LOG", str(tmp_path / "kmsg"))
    counters = host.error_counters(device().card)
    assert counters.counts == {
        "ecc_corrected": 7,
        "ecc_uncorrected": 0,
        "remapped_rows_corrected": 1,
        "remapped_rows_uncorrected": 0,
        "remapping_pending": 1,
        "remapping_failed": 0,
        "nvlink_replays": 6,
        "nvlink_recoveries": 0,
        "nvlink_crc_errors": 0,
    }
    assert counters.not_read == {
        "pcie_replays": "Not Supported",
        "xid_errors": f"{tmp_path / 'kmsg'}: No such file or directory",
    }


def test_xid_errors_of_the_card_are_counted_in_the_kernel_log(nvml, tmp_path, monkeypatch):
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n")
    monkeypatch.setattr(nvidia_errors, "KERNEL_LOG", str(log))
    assert host.error_counters(device().card).counts["xid_errors"] == 1
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:5e:00): 79, pid=1\n4,2,2,-;another message\n")
    assert host.error_counters(device().card).counts["xid_errors"] == 0


def test_without_a_driver_no_error_counter_is_read(nvml):
    card = device().card
    nvml.lacks["nvmlInitWithFlags"] = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    counters = host.error_counters(card)
    assert not counters.counts
    assert set(counters.not_read.values()) == {"Driver Not Loaded"}
