"""The ablation of corrections: what it leaves out, and when it calls an effect one."""

import dataclasses

import numpy as np
import pytest
import yaml

from benchmarks import ablation
from farm.types.details import Burst, Details
from farm.types.figure import Figure
from farm.verdict.corrections import CORRECTIONS, POWER_PER_C, cost_in_model
from farm.verdict.figures import ReadingView
from farm.verdict.gap_errors import CORRECTIONS_OF_GAPS
from farm.verdict.replay import CORRECTIONS_OF_CALLS


def reading(**fields) -> ReadingView:
    return ReadingView(Figure(100.0, 1.0), Figure(40.0, 0.4), card_id="GPU-1", **fields)


def test_each_correction_is_left_out_once():
    every = (*ablation.all_of_calls(), *CORRECTIONS_OF_CALLS, *CORRECTIONS_OF_GAPS)
    names = [name for key, names in ablation.ABLATIONS.items() for name in names]
    assert set(names) == {type(correction).__name__ for correction in every}
    designs = yaml.safe_load(ablation.MODELS.read_text())
    assert {*designs, "removed_ones"} == set(ablation.ABLATIONS)
    for design in designs.values():
        assert not set(design["used"]) & set(design["unused"])
        assert design["evidence"]


def test_a_removed_correction_applies_only_in_the_ablation():
    names = [type(correction).__name__ for correction in ablation.all_of_calls()]
    assert names[2] == "BurstsAtTheLimit"
    assert len(names) == len(CORRECTIONS) + 1


def test_a_correction_that_is_left_out_changes_nothing():
    warm, cool = reading(temperature_c=60.0), reading(temperature_c=50.0)
    restated = cost_in_model(warm, [cool])
    assert restated.energy_mj.value == pytest.approx(40 * (1 - 10 * POWER_PER_C.value))
    with ablation.left_out(["Temperature"]):
        assert cost_in_model(warm, [cool]).energy_mj == warm.energy_mj


def test_bursts_at_the_limit_are_unsure_by_what_their_clock_lacks_in_the_ablation():
    burst = Burst(
        Figure(90.0), Figure(50.0), sm_clock_mhz=1485.0, throttle_shares={"power_cap": 1.0}
    )
    limited = reading(details=Details(burst=burst), flags=("throttled_power",))
    whole = reading(sm_clock_mhz=1980.0)
    assert cost_in_model(limited, [whole]).unsure_us == 0
    with ablation.left_out(()):
        chosen = cost_in_model(limited, [whole])
    assert (chosen.time_us.value, chosen.unsure_us) == (90, pytest.approx(90 / 4))
    full = dataclasses.replace(burst, sm_clock_mhz=1980.0)
    with ablation.left_out(()):
        assert cost_in_model(reading(details=Details(burst=full)), [whole]).unsure_us == 0


def test_an_effect_is_outside_its_interval_only_if_most_models_show_it():
    models = [f"model {number}" for number in range(20)]
    sizes = np.linspace(0.01, 0.02, 20)
    clear = ablation.bootstrap(models, np.array([sizes, sizes + 0.01]), np.median)
    assert clear.outside
    assert clear.value == pytest.approx(0.01)
    one_moved = sizes.copy()
    one_moved[0] += 0.05
    assert not ablation.bootstrap(models, np.array([sizes, one_moved]), np.mean).outside
    # The verdicts of one model stay together: twenty of the same model are one observation.
    mixed = ["model 0"] * 19 + ["model 1"]
    moved = np.array([[0.0] * 20, [0.0] * 19 + [1.0]])
    assert not ablation.bootstrap(mixed, moved, np.mean).outside
