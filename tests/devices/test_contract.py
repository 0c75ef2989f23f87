"""The contracts of `farm.devices.device` and `farm.devices.vendor`, for every class of the farm.

To add a `Device` class, add a function that makes a device. A vendor is found in the table of
`farm.devices.host`. Classes without hardware here run on a recorded or simulated library."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from farm.devices import amd, host, software
from farm.devices.amd import Amd
from farm.devices.cpu import CpuDevice, cpu_card
from farm.devices.device import Device
from farm.devices.host import discover, find_card, open_device
from farm.devices.nvidia import Nvidia
from farm.devices.simulated import SimulatedDevice, simulated_cards
from farm.devices.software import Installed
from farm.devices.vendor import Vendor
from farm.settings import Settings, settings
from farm.types.card_kind import card_kind_of
from farm.types.software import Software
from tests.benchmark.fake_device import FakeDevice
from tests.devices import contract, fake_nvml, recorded_amdsmi
from tests.devices.test_cpu import package

Maker = Callable[[pytest.MonkeyPatch, Path, ExitStack], Device]
MAKERS: dict[str, Maker] = {}


def maker(make: Maker) -> Maker:
    MAKERS[make.__name__] = make
    return make


@maker
def cpu(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    return CpuDevice(cpu_card(settings()))


@maker
def cpu_with_an_energy_counter(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack
) -> Device:
    package(folder, "intel-rapl:0", "package-0", 500_000)
    return CpuDevice(cpu_card(settings()), folder)


@maker
def simulated(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    return SimulatedDevice(simulated_cards(Settings(simulated_cards=1))[0])


@maker
def fake(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    return FakeDevice()


@maker
def nvidia_on_a_fake_library(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack
) -> Device:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stack.enter_context(fake_nvml.behind_pynvml(monkeypatch))
    return open_device(find_card(fake_nvml.UUID, settings()))


@maker
def nvidia(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pytest.skip("this host has no NVIDIA card")
    usable = [card for card in discover(settings()) if card.kind == "cuda" and not card.refusal]
    if not usable:
        pytest.skip("this host has no usable NVIDIA card")
    return open_device(usable[0])


@maker
def amd_instinct_recorded(
    monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack
) -> Device:
    stack.enter_context(recorded_amdsmi.rocm(monkeypatch))
    return open_device(find_card(recorded_amdsmi.UUID, settings()))


@maker
def amd_radeon_recorded(monkeypatch: pytest.MonkeyPatch, folder: Path, stack: ExitStack) -> Device:
    stack.enter_context(recorded_amdsmi.rocm(monkeypatch))
    return open_device(find_card(recorded_amdsmi.RADEON_UUID, settings()))


@pytest.fixture(params=MAKERS)
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Device]:
    with ExitStack() as stack:
        yield MAKERS[request.param](monkeypatch, tmp_path, stack)


def test_every_device_conforms(device: Device) -> None:
    contract.check(device)


@pytest.fixture(params=host.VENDORS, ids=lambda vendor: vendor.name)
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vendor]:
    """A vendor on a host with its cards."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with ExitStack() as stack:
        if request.param.name == "NVIDIA":
            stack.enter_context(fake_nvml.behind_pynvml(monkeypatch))
        if request.param.name == "AMD":
            stack.enter_context(recorded_amdsmi.rocm(monkeypatch))
        yield request.param


WITH_CARDS = Settings(simulated_cards=2)


def test_a_vendor_finds_and_opens_its_cards(vendor: Vendor) -> None:
    cards = vendor.cards(WITH_CARDS)
    assert cards
    for card in cards:
        assert card_kind_of(card.id) == card.kind == vendor.kind
        assert host.vendor_of(card.kind) is vendor
        assert find_card(card.id, WITH_CARDS) == card
        device = vendor.open(card)
        assert device.card == card
        device.close()


def test_a_vendor_pins_a_process_to_some_of_its_cards(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pins(vendor, monkeypatch)


def test_a_vendor_of_several_gpus_that_hides_none_breaks_the_contract(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unpinned(Nvidia):
        def visible_only(self, card_ids: Sequence[str]) -> dict[str, str]:
            return {}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with fake_nvml.behind_pynvml(monkeypatch) as library:
        _pins(Unpinned(), monkeypatch)
        library.uuids = [fake_nvml.UUID, fake_nvml.OTHER_UUID]
        _pins(Nvidia(), monkeypatch)
        with pytest.raises(AssertionError, match="each process sees all cards"):
            _pins(Unpinned(), monkeypatch)


def _pins(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    every = vendor.cards(WITH_CARDS)
    assert vendor.visible_cards(WITH_CARDS) == every
    if vendor.kind == "cuda" and len(every) > 1:
        shown = [every[1].id]
        assert vendor.visible_only(shown), "each process sees all cards, and measures on the first"
    for cards in (every[:1], every[1:2], []):
        variables = vendor.visible_only([card.id for card in cards])
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            visible = vendor.visible_cards(WITH_CARDS)
        assert visible == (cards if variables else every)


def test_links_of_a_card_name_what_is_known(vendor: Vendor) -> None:
    card = vendor.cards(WITH_CARDS)[0]
    assert vendor.links(card).keys() <= {"nvlinks", "peers", "communication"}
    link, bytes_per_s = vendor.link_between([card.id])
    assert isinstance(link, str)
    assert bytes_per_s is None or bytes_per_s > 0


def test_software_of_another_torch_is_not_installed(vendor: Vendor) -> None:
    card = vendor.cards(WITH_CARDS)[0]
    registered = Software(torch="2.11.0", driver=card.driver)
    assert not vendor.is_installed(registered, card, Installed("2.12.0", None))


def test_one_vendor_has_the_cards_of_a_kind() -> None:
    for torch in (None, Installed("2.11.0", "13.0"), Installed("2.11.0", None, "7.0")):
        kinds = [vendor.kind for vendor in host.VENDORS if vendor.serves(torch)]
        assert sorted(kinds) == ["cpu", "cuda", "simulated"]


def test_a_host_without_gpus_has_no_gpu_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amd, "KFD", Path("/nonexistent"))
    assert Amd().cards(settings()) == []
    assert host.discover(settings())[0].kind in ("cuda", "cpu")


def test_torchs_version_file_is_read_as_data(tmp_path: Path) -> None:
    file = tmp_path / "version.py"
    file.write_text(
        "from typing import Optional\n"
        "__version__ = '2.11.0+rocm7.0'\n"
        "debug = False\n"
        "cuda: Optional[str] = None\n"
        "hip: Optional[str] = '7.0.51831'\n"
        "raise SystemExit('this file was executed')\n"
    )
    assert software._read_version(file, 0) == Installed("2.11.0+rocm7.0", None, "7.0.51831")


def test_torchs_version_file_is_read_again_after_a_change(tmp_path: Path, monkeypatch) -> None:
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    assert software.installed_torch() is None
    for number, version in enumerate(("2.11.0", "2.12.0")):
        file = tmp_path / "version.py"
        file.write_text(f"__version__ = '{version}'\n")
        os.utime(file, ns=(number, number))
        assert software.installed_torch() == Installed(version, None)
