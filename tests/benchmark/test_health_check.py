"""A card is checked with a known product before it measures."""

import time

import pytest
import torch

from farm.benchmark import checks
from farm.benchmark_process import server


def test_this_cpu_is_healthy():
    assert checks.HealthCheck(torch.device("cpu")).run() == ""


def test_a_wrong_product_is_found(monkeypatch):
    left, times = torch.Tensor.to, []

    def flipped(self, *arguments, **options):
        moved = left(self, *arguments, **options)
        if len(arguments) == 2:
            times.append(1)
            moved = moved.clone()
            moved[0, 0] += 1
        return moved

    monkeypatch.setattr(torch.Tensor, "to", flipped)
    assert "came out wrong in" in checks.HealthCheck(torch.device("cpu")).run()
    assert times


def test_a_time_that_cannot_be_is_found():
    assert checks.implausible(0.01, "cpu") == ""
    assert "is plausible" in checks.implausible(1e-9, "cpu")
    assert "is plausible" in checks.implausible(60.0, "cpu")


def test_a_gpu_that_takes_as_long_as_a_cpu_crawls():
    assert checks.implausible(1e-5, "cuda") == ""
    assert checks.implausible(1e-3, "cuda") == "", "at the clock it rests at"
    assert "is plausible" in checks.implausible(0.01, "cuda")


def test_a_device_that_begins_to_fail_is_found_when_it_is_asked_again(monkeypatch):
    check = checks.HealthCheck(torch.device("cpu"))
    assert check.run() == ""
    product = torch.Tensor.__matmul__

    def off_by_one(left, right):
        found = product(left, right)
        found[3, 4] += 1
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_one)
    assert "came out wrong in 1 of" in check.run()


def test_a_process_checks_before_an_item_once_in_a_while(monkeypatch):
    asked = []

    class Watched(server.Runner):
        def unhealthy(self):
            asked.append(1)
            return ""

    runner = Watched()
    assert runner.check_due
    assert runner.check() == ""
    assert not runner.check_due
    later = server.time.monotonic() + server.CHECK_EVERY_S
    monkeypatch.setattr(server.time, "monotonic", lambda: later)
    assert runner.check_due
    assert asked == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_healthy_and_asking_it_again_costs_little():
    check = checks.HealthCheck(torch.device("cuda:0"))
    assert check.run() == ""
    begin_s = time.perf_counter()
    assert check.run() == ""
    assert time.perf_counter() - begin_s < 0.01
