"""AMD cards, with recorded answers of AMD SMI: untested on hardware."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.cards import lines
from farm.devices.device import Card, Device
from farm.devices.host import discover, find_card, is_installed, open_device, visible_only
from farm.errors import NoSuchCard
from farm.jobs.in_process import _torch_device
from farm.settings import settings
from farm.types.software import Software
from tasks.doctor.host import host_checks
from tests.devices.recorded_amdsmi import (
    MADE_UP,
    RADEON_UUID,
    UUID,
    AmdSmiLibraryException,
    RecordedAmdSmi,
    rocm,
)


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedAmdSmi]:
    with rocm(monkeypatch) as library:
        yield library


def device(uuid: str = UUID) -> Device:
    return open_device(find_card(uuid, settings()))


def test_cards_have_hips_uuid_and_order(smi: RecordedAmdSmi) -> None:
    first, second = discover(settings())
    assert first == Card(
        id=UUID,
        kind="cuda",
        model="AMD Instinct MI308X",
        memory_bytes=192 * 2**30,
        driver="6.12.12",
        index=0,
        host=settings().host,
    )
    assert (second.id, second.index, second.model) == (RADEON_UUID, 1, "NAVI21")


def test_every_getter_gives_its_unit(smi: RecordedAmdSmi) -> None:
    card = device()
    assert card.energy_counter_mj() == pytest.approx(8_152_136 * 15.3 / 1e3)
    assert card.power_instant_w() == MADE_UP
    assert card.power_limit_w() == 750
    assert (card.sm_clock_mhz(), card.memory_clock_mhz()) == (MADE_UP, MADE_UP)
    assert (card.temperature_c(), card.memory_temperature_c()) == (43, 38)
    assert card.compute_processes() == {17}
    assert "power_average_w" not in card.capabilities


def test_a_radeon_has_averaged_power_and_no_energy_counter(smi: RecordedAmdSmi) -> None:
    card = device(RADEON_UUID)
    assert (card.energy_counter_mj(), card.power_instant_w(), card.power_average_w()) == (
        None,
        None,
        39,
    )
    assert not card.capabilities & {"energy_counter_mj", "power_instant_w"}
    assert (card.sm_clock_mhz(), card.memory_clock_mhz(), card.power_limit_w()) == (500, 96, 272)
    assert card.throttle_reasons() == ()
    smi.cards[0]["gpu_metrics_info"]["throttle_status"] = True
    assert card.throttle_reasons() == ("hardware_slowdown",)


def test_throttling_is_a_counter_that_has_grown_since_the_last_query(smi: RecordedAmdSmi) -> None:
    card, metrics = device(), smi.cards[1]["gpu_metrics_info"]
    assert card.throttle_reasons() == ()
    metrics["ppt_residency_acc"] += 3
    assert card.throttle_reasons() == ("power_cap",)
    assert card.throttle_reasons() == ()
    for name in ("socket_thm", "hbm_thm", "prochot"):
        metrics[f"{name}_residency_acc"] += 1
    assert card.throttle_reasons() == ("thermal", "hardware_thermal")


def test_a_counter_that_goes_back_gives_no_value(smi: RecordedAmdSmi) -> None:
    card, counter = device(), smi.cards[1]["energy_count"]
    before = card.energy_counter_mj()
    counter["energy_accumulator"] -= 1
    assert card.energy_counter_mj() is None
    counter["energy_accumulator"] += 1
    assert card.energy_counter_mj() == before


def test_a_sensor_that_is_not_supported_is_lacking_and_an_error_in_passing_is_not(
    smi: RecordedAmdSmi,
) -> None:
    smi.cards[1]["energy_count"] = AmdSmiLibraryException(2)
    card, metrics = device(), smi.cards[1]["gpu_metrics_info"]
    assert "energy_counter_mj" not in card.capabilities
    smi.cards[1]["gpu_metrics_info"] = AmdSmiLibraryException(30)  # busy
    assert card.throttle_reasons() is None
    smi.cards[1]["gpu_metrics_info"] = metrics
    assert card.throttle_reasons() == ()


def test_one_die_of_two_has_no_power(smi: RecordedAmdSmi) -> None:
    smi.cards[1]["gpu_asic_info"]["market_name"] = "AMD Instinct MI250X"
    card = device()
    assert not card.capabilities & {"energy_counter_mj", "power_instant_w", "power_average_w"}
    assert card.temperature_c() == 43


def test_a_partitioned_card_is_refused_with_the_reason(smi: RecordedAmdSmi) -> None:
    smi.cards[1]["gpu_compute_partition"] = "CPX"
    with pytest.raises(
        NoSuchCard, match=r"partition mode CPX.*`amd-smi set --compute-partition SPX`"
    ):
        device()
    assert device(RADEON_UUID).temperature_c() == 35


@pytest.mark.parametrize(
    ("variables", "uuids"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, [RADEON_UUID]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, [UUID]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [UUID]),
        ({"ROCR_VISIBLE_DEVICES": RADEON_UUID.upper()}, [RADEON_UUID]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [RADEON_UUID]),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_hidden_cards_are_left_out(smi: RecordedAmdSmi, monkeypatch, variables, uuids) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [card.id for card in discover(settings()) if card.kind == "cuda"] == uuids


@pytest.mark.parametrize("uuids", [[], [UUID], [RADEON_UUID, UUID]])
def test_a_process_that_is_pinned_sees_its_cards_only(
    smi: RecordedAmdSmi, monkeypatch, uuids
) -> None:
    for name, value in visible_only(uuids).items():
        monkeypatch.setenv(name, value)
    assert {card.id for card in discover(settings()) if card.kind == "cuda"} == set(uuids)


def test_pytorchs_device_of_a_card_is_found_by_hips_uuid(smi: RecordedAmdSmi, monkeypatch) -> None:
    import torch

    formatted = [uuid.removeprefix("GPU-").encode().hex() for uuid in (RADEON_UUID, UUID)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=formatted[index])
    )
    assert _torch_device(find_card(UUID, settings())) == torch.device("cuda", 1)


def test_software_of_a_rocm_build_is_recognized(smi: RecordedAmdSmi) -> None:
    card = find_card(UUID, settings())
    assert is_installed(Software(torch="2.11.0+rocm7.0", driver="6.12.12", cudnn="3005000"), card)
    assert not is_installed(Software(torch="2.11.0+rocm7.0", driver="6.10"), card)


@pytest.mark.parametrize("named", [None, "0", UUID])
def test_without_the_library_one_line_says_what_to_install(
    smi: RecordedAmdSmi, monkeypatch, named
) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    if named:
        monkeypatch.setenv("ROCR_VISIBLE_DEVICES", named)
    (card,) = discover(settings())
    assert card.kind == "cuda"
    assert "amdsmi is not installed; install the version" in card.refusal
    with pytest.raises(NoSuchCard, match="amdsmi is not installed"):
        find_card(UUID, settings())


def test_a_library_that_fails_is_quoted_in_one_line(smi: RecordedAmdSmi) -> None:
    smi.fault = AmdSmiLibraryException(34)
    (card,) = discover(settings())
    assert "AMD SMI says 'Error code: 34 | AMDSMI_STATUS'" in card.refusal
    assert "\n" not in card.refusal


def test_without_the_driver_of_rocm_the_cpu_is_the_card(monkeypatch, tmp_path: Path) -> None:
    with rocm(monkeypatch, kfd=tmp_path / "absent"):
        assert [card.kind for card in discover(settings())] == ["cpu"]


def test_the_doctor_and_the_cards_say_that_no_hardware_was_tested(
    smi: RecordedAmdSmi, monkeypatch
) -> None:
    monkeypatch.setattr(
        "tasks.doctor.host.installed_torch",
        lambda: SimpleNamespace(version="2.11", cuda=None, hip="7.0"),
    )
    checks = {check.name: check for check in host_checks(settings())}
    assert (checks["torch"].level, checks["torch"].message) == ("ok", "built for ROCm 7.0")
    assert checks["driver"].message == "amdgpu 6.12.12"
    assert checks["AMD"].level == "warning"
    assert "untested on hardware" in checks["AMD"].message
    assert "untested on hardware" in dict(lines(vars(find_card(UUID, settings()))))["note"]
