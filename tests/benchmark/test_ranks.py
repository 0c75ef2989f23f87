"""Two ranks with other clocks, noise and sensors run the same passes: otherwise NCCL would wait for ever."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time

import pytest

from farm.benchmark import clock, ranks
from farm.benchmark.measure import Bench
from farm.operators.collectives import collective_tuple
from farm.types.protocol import Protocol, Stopping, Subject
from tests.benchmark.fake_device import FakeDevice

STOPPING = Stopping(warm_up_s=0.05, minimum_s=0.1, maximum_s=0.4, time_half_width=0.02, energy_half_width=0.02)


@pytest.mark.slow
def test_ranks_that_see_other_times_run_the_same_passes(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "tests.benchmark.test_ranks", str(tmp_path / "rendezvous")]
    started = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
    try:
        first, second = (json.loads(process.communicate(timeout=120)[0]) for process in started)
    finally:
        for process in started:
            process.kill()
    assert first["rounds"] == second["rounds"]
    assert first["decisions"] == second["decisions"]
    assert set(second["flags"]) - set(first["flags"]) >= {"shared", "throttled_power"}
    assert first["repeated"] == second["repeated"] == 2
    assert first["burst"]
    assert second["burst"]


def measure(rank: int, rendezvous: str) -> dict[str, object]:
    """Measure a collective as one of two ranks; the second is late, noisy, hot, shared and at its power limit."""
    import torch

    ranks.join(torch.device("cpu"), rank, 2, rendezvous)
    seen = {"rounds": 0, "decisions": 0}
    noise, step, largest = random.Random(rank), clock.Clock.step, ranks.largest

    def noisy_step(self: clock.Clock) -> None:
        seen["rounds"] += 1
        time.sleep(noise.random() * 0.004 * rank)
        step(self)

    def counted(value: float) -> float:
        seen["decisions"] += 1
        return largest(value)

    clock.Clock.step, ranks.largest = noisy_step, counted  # type: ignore[method-assign]
    device = FakeDevice(lambda now_s: 300.0 + rank * 100.0 * noise.random() + rank * 200.0 * now_s, 0.02 + 0.03 * rank)
    device.reasons, device.processes = ("power_cap",) * rank, [frozenset({99})] * rank
    device.temperature_c = lambda: 40.0 + rank * 30.0 * (time.perf_counter() % 1.0)  # type: ignore[method-assign]
    bench = Bench(device, "cpu", idle_power_w=80.0, canary_every=9, repeats=1)
    spec = collective_tuple("all_reduce", 4096, "float32", 2)
    reading = bench.measure(Subject("operator", spec.id, spec.to_json()), Protocol(launch="eager"), STOPPING)
    burst, repeated = reading.details.burst is not None, reading.details.attempts
    return {**seen, "flags": reading.flags, "burst": burst, "repeated": repeated}


if __name__ == "__main__":
    json.dump(measure(int(sys.argv[2]), sys.argv[1]), sys.stdout)
