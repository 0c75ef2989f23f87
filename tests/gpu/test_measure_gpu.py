"""The benchmark on a real NVIDIA card. Skipped without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farm.benchmark.bench import Bench
from farm.benchmark.cache import found_again
from farm.benchmark.checks import HealthCheck
from farm.benchmark.torch_device import cache_bytes
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.host import discover, open_device
from farm.errors import Unmeasurable
from farm.settings import settings
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant
from tests.benchmark.operators import linear, relu_in_place
from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    device = open_device(discover(settings())[0])
    yield Bench(device, "cuda:0")
    device.close()


def test_a_matrix_product_is_read_with_energy_within_its_interval(bench: Bench) -> None:
    reading = bench.measure(linear(256, 2048, 2048), Protocol(), Stopping())
    assert reading.power_source == "energy_counter"
    assert reading.time_us.relative <= 0.01
    assert reading.energy_mj.value == pytest.approx(
        reading.power_w.value * reading.time_us.value * 1e-3
    )
    assert reading.window_s >= 0.45
    assert reading.base_power_w is not None
    assert reading.trace is not None


def test_a_graph_is_faster_than_eager_for_a_short_operator(bench: Bench) -> None:
    graph = bench.measure(linear(1, 64, 64), Protocol(), Stopping())
    eager = bench.measure(linear(1, 64, 64), Protocol(launch="eager"), Stopping())
    assert graph.time_us.value < eager.time_us.value


def test_an_operator_that_writes_its_input_is_read(bench: Bench) -> None:
    assert bench.measure(relu_in_place(64, 1024), Protocol(), Stopping()).time_us.value > 0


def test_a_large_product_in_half_precision_is_also_read_in_bursts(bench: Bench) -> None:
    reading = bench.measure(linear(8192, 8192, 8192, "bfloat16"), Protocol(), Stopping())
    if "throttled_power" not in reading.flags:
        pytest.skip("this card does not reach its power limit")
    burst = reading.details.burst
    assert burst.time_us.value < 1.02 * reading.time_us.value
    assert burst.power_w.value > 0.9 * reading.power_w.value


def test_an_operator_among_others_is_timed_on_the_same_memory(bench: Bench) -> None:
    reading = bench.measure(linear(32, 1024, 1024), Protocol(), Stopping())
    context = reading.details.context
    assert 0 < context.alone_us < 1.5 * reading.time_us.value
    assert -0.1 * context.alone_us < context.effect_us.value < 20
    assert context.effect_us.half_width < 1
    assert (
        bench.measure(
            linear(32, 1024, 1024), Protocol(residency="reuse"), Stopping()
        ).details.context
        is None
    )


def test_a_whole_model_tells_what_it_holds_and_what_of_it_stays_in_the_cache(bench: Bench) -> None:
    variant = Variant("resnet18", 2, 224)
    details = bench.measure(
        Subject("variant", variant.id, variant.to_json()), Protocol(), Stopping()
    ).details
    assert details.memory.parameter_bytes > 40e6
    assert details.memory.activation_peak_bytes > 2 * 64 * 112 * 112 * 4
    assert 0 <= details.memory.found_again <= 1
    places = details.order.places.values()
    assert sum(place.calls for place in places) == 68
    assert min(place.effect_us.value for place in places) > -1
    assert max(place.effect_us.value for place in places) > 1  # somewhere weights are fetched


def test_a_replayed_whole_is_also_launched_eagerly_and_that_takes_longer(bench: Bench) -> None:
    variant = Variant("resnet18", 1, 224)
    reading = bench.measure(
        Subject("variant", variant.id, variant.to_json()), Protocol(), Stopping()
    )
    eager_time_us = reading.details.timing.eager_time_us
    assert eager_time_us.value > reading.time_us.value
    assert 0 < eager_time_us.half_width < eager_time_us.value


def test_who_is_on_the_card_is_looked_up_during_the_window(bench: Bench) -> None:
    reading = bench.measure(linear(256, 1024, 1024), Protocol(), Stopping())
    assert reading.trace is not None
    assert len(reading.trace.series["foreign_processes"][0]) >= 2
    assert "shared" not in reading.flags


def test_a_small_footprint_is_found_again_and_a_large_one_is_not(bench: Bench) -> None:
    device = bench.torch_device
    size = cache_bytes(device)
    assert (found_again(size // 2, device) or 0) > 0.5
    assert (found_again(2 * size, device) or 0) < 0.2
    assert found_again(100 * size, device) == 0


def test_all_work_of_a_process_is_on_one_stream_which_is_not_the_default_one(bench: Bench) -> None:
    device = bench.torch_device
    stream = torch.cuda.current_stream(device)
    assert stream != torch.cuda.default_stream(device)
    assert HealthCheck(device).run() == ""
    bench.measure(linear(256, 1024, 1024), Protocol(), Stopping())
    another = Bench(bench.device, device, idle_power_w=80.0)
    assert torch.cuda.current_stream(device) == stream == another._stream == bench._stream


def test_rounds_are_as_long_for_a_whole_model_that_is_short_on_the_card_and_long_to_launch(
    bench: Bench,
) -> None:
    variant = Variant("mobilenet_v2", 1, 224)
    reading = bench.measure(
        Subject("variant", variant.id, variant.to_json()), Protocol(), Stopping()
    )
    assert reading.details.launching.passes_per_round * reading.time_us.value > 2000
    assert 0 < reading.details.powering.paused_share < 0.04
    assert "starved" not in reading.flags
    assert reading.time_us.value == pytest.approx(reading.time_median_us, rel=0.01)


def test_what_does_not_fit_is_out_of_memory_and_the_card_is_usable_afterwards(bench: Bench) -> None:
    with pytest.raises(Unmeasurable) as caught:
        bench.measure(relu_in_place(1024, 2**28), Protocol(), Stopping())
    assert caught.value.reason == "out_of_memory"
    assert bench.measure(linear(8, 64, 64), Protocol(), Stopping()).time_us.value > 0


def test_the_benchmark_process_measures_and_verifies_a_whole_model() -> None:
    variant = Variant("resnet18", 2, 224)
    subject = Subject("variant", variant.id, variant.to_json())
    phases: list[str] = []

    def on_phase(phase: str, details: dict[str, Any]) -> None:
        phases.append(phase)

    with BenchmarkProcess(discover(settings())[0].id) as process:
        answer = process.measure(
            MeasureRequest(subject, Protocol(), Stopping(), predicted={}),
            verify=True,
            on_phase=on_phase,
        )
    assert phases[:4] == ["verify", "rebuild", "warm-up", "window"]
    assert answer.verification is not None
    assert answer.verification.observed is not None
    assert answer.verification.observer_effect == ()
    assert answer.reading.energy_mj is not None
