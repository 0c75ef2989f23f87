"""The time of eager launches is measured while no compilation of the host runs."""

from types import SimpleNamespace

import torch

from farm.benchmark.phases.eager import EagerLaunch
from farm.devices.quiet import QUIET, HostGate
from farm.settings import settings
from farm.types.details import Details


def test_compilations_of_the_host_pause_while_launches_are_timed(tmp_path, monkeypatch):
    monkeypatch.setenv("FARM_LOCK_DIR", str(tmp_path))
    monkeypatch.setattr("farm.benchmark.clock.EAGER_S", 0.01)
    settings.cache_clear()
    gate = HostGate(QUIET, tmp_path)
    was_free = []

    def one_pass():
        with gate.alone() as free:
            was_free.append(free)

    measurement = SimpleNamespace(
        passes=SimpleNamespace(first=one_pass), torch_device=torch.device("cpu")
    )
    details = EagerLaunch().measure(measurement, Details())
    assert details.timing.eager_time_us.value > 0
    assert was_free
    assert not any(was_free)
    with gate.alone() as free:
        assert free
    gate.close()
