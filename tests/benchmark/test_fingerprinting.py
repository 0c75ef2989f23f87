"""What a card is like: rates that it reached, and how its sensors follow a step."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from sqlalchemy import text

from benchmarks.card_agreement import pooled, w_per_c
from farm.benchmark import fingerprinting
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import FingerprintRequest
from farm.devices.cpu import cpu_card
from farm.jobs.cards import keep_fingerprint, needs_fingerprint
from farm.settings import settings
from farm.store import tables
from farm.store.database import Database
from farm.types.fingerprint import FINGERPRINT_VERSION, sound_fingerprint
from farm.types.roofline import roofline_of


def test_a_benchmark_process_takes_the_fingerprint_of_its_card_and_the_roofline_reads_it() -> None:
    card = cpu_card(settings())
    with BenchmarkProcess(card.id) as process:
        taken = process.call(FingerprintRequest(), timeout_s=60.0)
    assert taken["driver"] == card.driver
    roofline = roofline_of("cpu", card.model, taken)
    assert roofline.bytes_per_s == taken["copy_bytes_per_s"] > 1e8
    assert roofline.flops_per_s == taken["matmul_flops_per_s"]["float32"] > 1e8
    assert 0.05 < roofline.launch_floor_us == taken["launch_floor_us"] < 100
    assert "w_per_c" not in taken, "what a card does not tell is missing"


@pytest.mark.parametrize(("delay_s", "average_s"), [(0.0, 0.1), (0.05, 1.0)])
def test_lag_and_averaging_of_a_power_sensor_are_read_from_a_step(
    delay_s: float, average_s: float
) -> None:
    def power_w(when: float) -> float:
        return 100 + 500 * min(1.0, max(0.0, (when - delay_s) / average_s))

    points = [(step / 200, power_w(step / 200)) for step in range(-100, 600)]
    answer = fingerprinting.step_answer(points)
    assert answer is not None
    assert answer["lag_s"] == pytest.approx(delay_s + average_s / 2, abs=0.02)
    assert answer["rise_s"] == pytest.approx(0.8 * average_s, abs=0.02)
    assert fingerprinting.step_answer([(when, 100.0) for when, _ in points]) is None


def test_watts_per_degree_come_from_the_counters_steps() -> None:
    times = [index / 10 for index in range(1, 31)]

    def degrees(when: float) -> float:
        return 50 + 4 * (1 - math.exp(-when))

    energy_mj, total = [], 0.0
    for when in times:
        energy_mj.append(total)
        total += 100 * (400 + 2 * degrees(when + 0.05))
    series = {"energy_mj": (times, energy_mj), "temperature_c": (times, list(map(degrees, times)))}
    found = fingerprinting._w_per_c(series, 0.1, 3.0)
    assert found is not None
    assert found["value"] == pytest.approx(2, rel=0.2)
    assert found["half_width"] < 0.4
    assert found["at_w"] == pytest.approx(505, abs=5)
    assert fingerprinting._w_per_c(series, 2.4, 3.0) is None, "too few steps, and hardly warmer"
    assert fingerprinting._w_per_c({}, 0, 3) is None


def test_what_a_degree_costs_goes_with_the_power_between_the_two_levels() -> None:
    taken = {
        "base_w_per_c": {"value": 1.0, "half_width": 0.2, "at_w": 125.0},
        "w_per_c": {"value": 2.4, "half_width": 0.4, "at_w": 650.0},
    }
    assert w_per_c(taken, 125) == pytest.approx(1.0)
    assert w_per_c(taken, 387.5) == pytest.approx(1.7)
    unsure = {**taken, "w_per_c": {"value": 2.4, "half_width": 3.0, "at_w": 650.0}}
    assert w_per_c(unsure, 387.5) is None
    assert w_per_c({}, 387.5) is None


def test_several_cards_know_better_what_a_degree_costs() -> None:
    def taken(base: float, load: float, half_width: float) -> dict[str, Any]:
        return {
            "base_w_per_c": {"value": base, "half_width": half_width, "at_w": 125.0},
            "w_per_c": {"value": load, "half_width": half_width, "at_w": 650.0},
        }

    one, other = taken(1.0, 2.0, 1.2), taken(1.0, 2.6, 1.2)
    assert w_per_c(one, 125) is None
    assert w_per_c(pooled([one, other, {}]), 125) == pytest.approx(1.0)
    assert w_per_c(pooled([one, other]), 650) == pytest.approx(2.3)
    assert w_per_c(pooled([one, taken(1.0, 2.6, 0.1)]), 650) == pytest.approx(2.6, abs=0.01)
    assert pooled([]) == {}


def test_a_fingerprint_stands_until_the_driver_changes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    database = Database(f"sqlite:///{tmp_path}/farm.db")
    database.upgrade()
    with database.write() as session:
        session.add(tables.CardRow(id="GPU-1", kind="cuda", model="NVIDIA H200"))
        session.add(tables.CardRow(id="SIM-1", kind="simulated", model="simulated card"))
    assert needs_fingerprint(database, "GPU-1", "580")
    sound = {"version": FINGERPRINT_VERSION, "driver": "580", "copy_bytes_per_s": 4e12}
    keep_fingerprint(database, "GPU-1", sound)
    assert not needs_fingerprint(database, "GPU-1", "580")
    assert needs_fingerprint(database, "GPU-1", "590")
    assert not needs_fingerprint(database, "SIM-1", "580")
    for damaged in (
        {**sound, "copy_bytes_per_s": "4e12"},
        {**sound, "copy_bytes_per_s": 0},
        [1],
        None,
    ):
        with database.write() as session:
            damaged_text = {"fingerprint": json.dumps(damaged), "id": "GPU-1"}
            session.execute(
                text("UPDATE card SET fingerprint = :fingerprint WHERE id = :id"), damaged_text
            )
        assert needs_fingerprint(database, "GPU-1", "580"), damaged


def test_damaged_entries_of_a_fingerprint_are_not_used() -> None:
    rates = {"float32": 51e12}
    stored = {
        "copy_bytes_per_s": "4e12",
        "matmul_flops_per_s": rates,
        "power_instant": {"lag_s": 1.0},
        "w_per_c": 3,
    }
    assert sound_fingerprint(stored) == {"matmul_flops_per_s": rates}
    assert sound_fingerprint("{") == {}
    sheet = roofline_of("cuda", "NVIDIA H200")
    assert roofline_of("cuda", "NVIDIA H200", stored).bytes_per_s == sheet.bytes_per_s
    assert roofline_of("cuda", "NVIDIA H200", {"matmul_flops_per_s": [1]}) == sheet
