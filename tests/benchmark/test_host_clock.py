"""Readings of a CPU, on the machine's own CPU and with whatever else it does meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from farm.benchmark.clock import TimedRound
from farm.benchmark.host_clock import HostClock, fastest_us
from farm.benchmark.measure import Bench
from farm.benchmark.passes import applied
from farm.benchmark.workload import Workload, prepare
from farm.devices.device import Card
from farm.devices.host import CpuDevice
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import CPU_METHOD, Reading
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import linear

EAGER = Protocol(launch="eager")
SHORT = Stopping(warm_up_s=0.02, minimum_s=0.1, maximum_s=0.2, time_half_width=0.5, energy_half_width=0.5)
CARD = Card("CPU-1", "cpu", "a CPU", 2**30)
CPU = torch.device("cpu")


def read(device: FakeDevice | CpuDevice, protocol: Protocol = EAGER) -> Reading:
    return Bench(device, "cpu").measure(linear(16, 64, 64), protocol, SHORT)


def test_time_in_which_the_core_does_other_work_is_no_part_of_a_pass() -> None:
    clock = HostClock(Workload([], CPU, 0.0, calls=[lambda: time.sleep(0.05)]))
    clock.step()
    (one,) = clock.done
    assert one.took_s < 0.025
    assert clock.waited_share(0.0, time.perf_counter()) == 0.0  # one step has no begin and end yet
    clock.step()
    assert clock.waited_share(0.0, time.perf_counter()) > 0.5


def test_of_each_section_the_fastest_passes_count() -> None:
    def passes(*sections: tuple[float, ...]) -> list[TimedRound]:
        return [TimedRound(0.0, sum(one), 1, sections_s=one) for one in sections]

    assert fastest_us(passes((1e-6, 9e-6), (5e-6, 2e-6), (4e-6, 4e-6), (3e-6, 3e-6))) == pytest.approx(1 + 2)
    assert fastest_us(passes((1e-6, 9e-6), (5e-6,))) == pytest.approx(5), "a pass that runs other modules"


def test_a_section_begins_with_each_call_of_a_module_and_calls_are_as_before_afterwards() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    before = torch.nn.Module.__call__
    clock = HostClock(Workload([], CPU, 0.0, calls=[lambda: model(torch.ones(4))]))
    clock.step()
    assert {len(one.sections_s) for one in clock.done} == {4}  # to the model, to each of its modules, the rest
    assert all(sum(one.sections_s) == pytest.approx(one.took_s) for one in clock.done)
    assert torch.nn.Module.__call__ is before


@pytest.mark.parametrize(("residency", "written"), [("resident", True), ("reuse", False)])
def test_an_operator_finds_inputs_that_were_just_written_as_in_a_model(residency: str, written: bool) -> None:
    protocol = Protocol(launch="eager", residency=residency)  # type: ignore[arg-type]
    with applied(protocol):
        workload = prepare(linear(16, 64, 64), protocol, CPU)
        assert workload.passes is not None
        (memory,) = workload.passes.inputs
        before = memory._version
        HostClock(workload).step()
    assert (memory._version > before) is written


def test_a_reading_of_a_cpu_names_its_own_method_and_runs_in_one_thread() -> None:
    details = read(CpuDevice(CARD)).details
    assert (details.method, details.threads, details.time_figure) == (CPU_METHOD, 1, "fastest")
    assert details.waited_share is not None


def test_the_energy_of_a_cpu_is_its_power_in_a_loop_times_the_time_of_a_pass() -> None:
    device = FakeDevice()
    device.card = CARD
    reading = read(device)
    assert reading.power_w == pytest.approx(300, rel=0.05)
    assert reading.energy_mj == pytest.approx(reading.power_w * reading.time_us * 1e-3)
    assert (reading.power_source, reading.details.time_figure) == ("rapl", "fastest")
    assert reading.trace is not None
    assert reading.trace.series["energy_mj"][0]
    assert "no_energy" not in reading.flags


@pytest.fixture
def crowded_core() -> Iterator[None]:
    """One core for this process and three busy ones."""
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(3)]
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("crowded_core")
def test_a_reading_that_waited_for_its_core_most_of_the_time_is_flagged() -> None:
    reading = Bench(CpuDevice(CARD), "cpu").measure(
        linear(16, 64, 64), EAGER, Stopping(warm_up_s=0.3, minimum_s=0.6, maximum_s=0.6)
    )
    assert "busy_host" in reading.flags
    assert reading.details.waited_share > 0.5
