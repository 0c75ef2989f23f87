"""Readings of a CPU, on the machine's own CPU and with whatever else it does meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from farm.benchmark.bench import Bench
from farm.benchmark.clock import TimedRound
from farm.benchmark.host_clock import LEAST_TURNS, TURNS, HostTimer, fastest_us, take_turns
from farm.benchmark.host_places import HostPlaces
from farm.benchmark.passes import applied
from farm.benchmark.subjects import prepare
from farm.benchmark.workload import Workload
from farm.devices.cpu import CpuDevice
from farm.devices.device import Card
from farm.errors import Unmeasurable
from farm.operators.capture import capture
from farm.types.protocol import Protocol, Stopping
from farm.types.reading import CPU_METHOD, Reading
from tests.benchmark.fake_device import FakeDevice
from tests.benchmark.operators import linear

EAGER = Protocol(launch="eager")
SHORT = Stopping(
    warm_up_s=0.02, minimum_s=0.1, maximum_s=0.2, time_half_width=0.5, energy_half_width=0.5
)
CARD = Card("CPU-1", "cpu", "a CPU", 2**30)
CPU = torch.device("cpu")


def read(device: FakeDevice | CpuDevice, protocol: Protocol = EAGER) -> Reading:
    return Bench(device, "cpu").measure(linear(16, 64, 64), protocol, SHORT)


def timer(*calls: Callable[[], object], maximum_s: float = 0.2) -> HostTimer:
    workload = Workload([], CPU, 0.0, calls=[lambda call=call: call() for call in calls])  # type: ignore[misc]
    return HostTimer(workload, EAGER, dataclasses.replace(SHORT, maximum_s=maximum_s))


def test_time_in_which_the_core_does_other_work_is_no_part_of_a_pass() -> None:
    one = timer(lambda: time.sleep(0.05))
    one.visit(0)
    assert one.rounds[0].took_s < 0.025
    assert one.waited_share > 0.5


def test_calls_of_modules_in_another_thread_make_no_time_negative() -> None:
    """Each thread has a clock of its own, and that of a new thread begins at zero."""
    layer = torch.nn.Linear(8, 8)

    def work() -> None:
        thread = threading.Thread(target=lambda: layer(torch.randn(4, 8)))
        thread.start()
        thread.join()
        layer(torch.randn(4, 8))

    one = timer(work)
    one.visit(0)
    assert all(section_s >= 0 for found in one.rounds for section_s in found.sections_s)
    assert {len(found.sections_s) for found in one.rounds} == {2}


def test_subjects_are_timed_in_turn_and_the_whole_three_times_in_each() -> None:
    order: list[str] = []
    first, long = (
        timer(lambda: order.append("first")),
        timer(lambda: (order.append("long"), time.sleep(0.3))),
    )
    whole = timer(lambda: order.append("whole"))
    whole.whole = True
    take_turns([whole, first, long])
    assert [key for key, _ in itertools.groupby(order)][:8] == [
        "first",
        "whole",
        "long",
        "whole",
    ] * 2
    assert LEAST_TURNS <= len(first.turns) == len(whole.turns) <= TURNS
    assert len(long.turns) == 4, "the visits of long passes end after five times the longest window"
    assert len({one.group for one in (first, long, whole)}) == 1


def test_a_turn_in_which_everything_was_slow_does_not_change_the_time_of_a_pass() -> None:
    one = timer()
    one.turns = [
        [TimedRound(0.0, took, 1, sections_s=(took,)) for took in (1e-6, 1.1e-6)] for _ in range(9)
    ]
    before_us = one.time_us()
    one.turns += [[TimedRound(0.0, 9e-6, 1, sections_s=(9e-6,))] * 2 for _ in range(3)]
    after_us = one.time_us()
    assert after_us.value == pytest.approx(before_us.value)
    assert after_us.relative < 0.05
    assert len(one.without_turn_us()) == 12


def test_an_item_that_was_timed_in_turn_is_not_timed_again() -> None:
    bench = Bench(CpuDevice(CARD), "cpu")
    broken = dataclasses.replace(
        linear(16, 64, 64), id="broken", spec={"operator": "no such operator"}
    )
    wide, narrow = linear(16, 64, 64), linear(16, 64, 32)
    assert bench.time_in_turn([(wide, EAGER), (broken, EAGER), (narrow, EAGER)], SHORT) == [0, 2]
    phases: list[str] = []
    reading = bench.measure(narrow, EAGER, SHORT, lambda phase, _: phases.append(phase))
    assert (phases, reading.details.method) == ([], CPU_METHOD)
    again = bench.measure(narrow, EAGER, SHORT, lambda phase, _: phases.append(phase))
    assert phases[:2] == ["rebuild", "window"]
    assert again.time_us.value == pytest.approx(reading.time_us.value, rel=3)
    with pytest.raises(Unmeasurable):
        bench.measure(broken, EAGER, SHORT)


def test_of_each_section_the_fastest_passes_count() -> None:
    def passes(*sections: tuple[float, ...]) -> list[TimedRound]:
        return [TimedRound(0.0, sum(one), 1, sections_s=one) for one in sections]

    assert fastest_us(
        passes((1e-6, 9e-6), (5e-6, 2e-6), (4e-6, 4e-6), (3e-6, 3e-6))
    ) == pytest.approx(1 + 2)
    assert fastest_us(passes((1e-6, 9e-6), (5e-6,))) == pytest.approx(5), (
        "a pass that runs other modules"
    )


def test_the_time_of_the_clock_is_no_part_of_a_pass() -> None:
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(20)))
    one = timer(lambda: model(1))
    one.visit(0)
    measured_us = fastest_us(one.rounds)
    clock_us = measured_us - one.time_us().value
    assert len(one.rounds[0].sections_s) == 22
    assert 0 < clock_us < measured_us


def test_the_calls_of_a_model_are_timed_in_their_order_with_its_weights() -> None:
    layer = torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
    captured = capture(model, (torch.randn(8, 64),), device_type="cpu", grad_enabled=False)
    places = HostPlaces(captured, CPU)
    with torch.no_grad():
        for _ in range(4):
            places.visit(0.001)
    found = places.places()
    assert {captured.tuples[key].short_name: place.calls for key, place in found.items()} == {
        "Linear": 2,
        "ReLU": 1,
    }
    assert all(abs(place.effect_us.value) < 1000 for place in found.values())
    assert all(0 < place.effect_us.half_width < math.inf for place in found.values())


def test_an_operator_is_also_timed_with_warm_data_unless_its_protocol_is_no_models() -> None:
    warm = read(CpuDevice(CARD)).details.timing
    assert warm.warm_us is not None
    assert len(warm.warm_without_turn_us) == len(warm.without_turn_us)
    reuse = read(CpuDevice(CARD), Protocol(launch="eager", residency="reuse")).details.timing
    assert reuse.warm_us is reuse.warm_without_turn_us is None


def test_a_section_begins_with_each_call_of_a_module_and_calls_are_as_before_afterwards() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    before = torch.nn.Module.__call__
    one = timer(lambda: model(torch.ones(4)))
    one.visit(0)
    assert {len(each.sections_s) for each in one.rounds} == {
        4
    }  # to the model, to each of its modules, the rest
    assert all(sum(each.sections_s) == pytest.approx(each.took_s) for each in one.rounds)
    assert torch.nn.Module.__call__ is before


@pytest.mark.parametrize(("residency", "written"), [("resident", True), ("reuse", False)])
def test_an_operator_finds_inputs_that_were_just_written_as_in_a_model(
    residency: str, written: bool
) -> None:
    protocol = Protocol(launch="eager", residency=residency)  # type: ignore[arg-type]
    with applied(protocol):
        workload = prepare(linear(16, 64, 64), protocol, CPU)
        assert workload.passes is not None
        (memory,) = workload.passes.inputs
        before = memory._version
        HostTimer(workload, protocol, SHORT).visit(0)
    assert (memory._version > before) is written


def test_a_reading_of_a_cpu_names_its_own_method_and_runs_in_one_thread() -> None:
    details = read(CpuDevice(CARD)).details
    assert (details.method, details.launching.threads, details.timing.time_figure) == (
        CPU_METHOD,
        1,
        "fastest",
    )
    assert details.conditions.waited_share is not None


def test_the_energy_of_a_cpu_is_its_power_in_a_loop_times_the_time_of_a_pass() -> None:
    device = FakeDevice(
        tick_s=0.001
    )  # a coarse counter misses a part of a short window on a busy machine
    device.card, device.counter_source = CARD, CpuDevice.counter_source
    reading = read(device)
    assert reading.power_w.value == pytest.approx(300, rel=0.1)
    energy_mj = reading.power_w.value * reading.time_us.value * 1e-3
    assert reading.energy_mj.value == pytest.approx(energy_mj)
    assert (reading.power_source, reading.details.timing.time_figure) == ("rapl", "fastest")
    assert reading.trace is not None
    assert reading.trace.series["energy_mj"][0]
    assert "no_energy" not in reading.flags


@pytest.fixture
def crowded_core() -> Iterator[None]:
    """One core for this process and three busy ones."""
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()  # it is busy from now on
        stack.callback(os.sched_setaffinity, 0, allowed)
        os.sched_setaffinity(0, {core})
        yield


@pytest.mark.usefixtures("crowded_core")
def test_a_reading_that_waited_for_its_core_most_of_the_time_is_flagged() -> None:
    reading = Bench(CpuDevice(CARD), "cpu").measure(
        linear(16, 64, 64), EAGER, Stopping(warm_up_s=0.3, minimum_s=0.6, maximum_s=0.6)
    )
    assert "busy_host" in reading.flags
    assert reading.details.conditions.waited_share > 0.5
