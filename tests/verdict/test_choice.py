"""Which state of an operator belongs into a sum: alone or among others, its weights fetched or in
the cache.
"""

import dataclasses
import math

import pytest

from farm.types.details import Burst, InContext, InOrder, Place, RankFigures
from farm.types.figure import Figure, figure_of
from farm.verdict.aggregate import aggregate
from farm.verdict.corrections import (
    BUILD_UNSURE_US,
    CORRECTIONS,
    PLACE_UNSURE,
    PLACE_UNSURE_US,
    POWER_PER_C,
    ROUGH_POWER,
    WAITING,
    Builds,
    MeasuredCall,
    cost_in_model,
    weights_in_cache,
)
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import CallCost, ReadingView, Whole
from farm.verdict.gap_errors import BETWEEN_JOBS
from farm.verdict.replay import WaitingPower, measured_lines
from tests.details import details_with

CONTEXT = InContext(alone_us=80.0, effect_us=Figure(5.0, 0.5), passes=144)


def reading(time_us: float = 100.0, **more) -> ReadingView:
    time = Figure(time_us, more.pop("time_half_width_us", 1.0))
    energy = figure_of(more.pop("energy_mj", 40.0), more.pop("energy_half_width_mj", 0.4))
    more.setdefault("base_power_w", 100.0)
    return ReadingView(time, energy, card_id="GPU-1", **more)


def part_of(id_: str, count: int, reading: ReadingView) -> CostLine:
    """A line with so many calls; lines weigh alike."""
    return CostLine.of_reading(TupleView(id_, id_, id_, estimated_us=1.0), count, reading)


def whole(found_again: float, **more) -> ReadingView:
    return reading(details=details_with(found_again=found_again), **more)


def test_a_reading_without_a_context_stands_as_it_is():
    cost = cost_in_model(reading(), [whole(0)])
    assert (cost.time_us.value, cost.energy_mj.value, cost.context_us) == (100, 40, 0)


def test_each_correction_applies_only_under_its_conditions():
    loop = reading()
    limited = reading(details=details_with(burst=Burst(Figure(80.0), Figure(40.0))))
    placed = reading(
        details=details_with(found_again=0.0, places={"conv": Place(Figure(12.0, 0.3), 2)})
    )
    assert applied(loop, [loop]) == []
    assert applied(reading(temperature_c=60.0), [reading(temperature_c=50.0)]) == ["Temperature"]
    assert applied(limited, [loop]) == ["ModelClock"]
    assert applied(reading(details=details_with(context=CONTEXT)), [placed]) == [
        "Neighbours",
        "Builds",
    ]


def test_rough_readings_share_an_error_of_the_energy():
    rough = reading(flags=("rough",))
    assert applied(rough, [reading()]) == ["RoughReadings"]
    cost = cost_in_model(rough, [reading()])
    assert cost.energy_mj.value == 40
    assert cost.unsure_mj == pytest.approx(ROUGH_POWER * 40)


def test_each_build_of_an_operator_takes_another_time():
    tuple_reading = reading(details=details_with(context=CONTEXT))
    call = MeasuredCall.of(tuple_reading, [whole(0)], "conv", WAITING)
    cost = CallCost(tuple_reading.time_us, tuple_reading.energy_mj)
    assert Builds().applies(cost, call)
    corrected = Builds().correct(cost, call).settled()
    assert corrected.time_us.value == 100
    assert corrected.time_us.half_width == pytest.approx(math.hypot(1.0, BUILD_UNSURE_US * 10))
    assert not Builds().applies(cost, MeasuredCall.of(reading(), [whole(0)], "conv", WAITING))


def applied(tuple_reading: ReadingView, wholes: list[ReadingView]) -> list[str]:
    """Return the names of the corrections that apply to the figures of the loop."""
    call = MeasuredCall.of(tuple_reading, wholes, "conv", WAITING)
    cost = CallCost(tuple_reading.time_us, tuple_reading.energy_mj)
    return [type(one).__name__ for one in CORRECTIONS if one.applies(cost, call)]


def test_the_neighbours_add_time_and_power_between_waiting_and_working():
    cost = cost_in_model(reading(details=details_with(context=CONTEXT)), [whole(0)])
    assert cost.time_us.value == pytest.approx(105)
    assert cost.time_us.half_width == pytest.approx(
        math.hypot(1.0, 0.5, BUILD_UNSURE_US * 10)
    )  # of 100 us
    # 400 W while it works, 100 W with nothing to do: 5 us at 250 W, known to 150 W, and the effect
    # to as much as it is, at 400 W.
    assert cost.energy_mj.value == pytest.approx(40 + 1.25)
    assert cost.energy_mj.half_width == pytest.approx((0.4**2 + 0.125**2) ** 0.5)
    assert (cost.unsure_us, cost.unsure_mj) == (pytest.approx(5.0), pytest.approx(0.75 + 2.0))
    assert (cost.context_us, cost.context_mj) == (pytest.approx(5), pytest.approx(1.25))


@pytest.mark.parametrize(
    ("energy_mj", "share", "half_width"),
    [
        (
            11 * 4.0 + 10 * 0.5 * 0.400,
            1.0,
            0.1,
        ),  # the card draws the full 400 W while the kernels wait
        (11 * 4.0 + 10 * 0.5 * 0.100, 0.0, 0.1),
        (11 * 4.0 + 10 * 0.5 * 0.190, 0.3, 0.1),
        (46.3, 1.0, 0.3),  # never more than the operator's own power, but less certain
    ],
)
def test_the_power_of_a_waiting_kernel_follows_from_the_replay_in_order(
    energy_mj, share, half_width
):
    context = InContext(alone_us=9.0, effect_us=Figure(0.5), passes=144)
    each = reading(10.0, time_half_width_us=0.0, energy_mj=4.0, energy_half_width_mj=0.001)
    parts = [
        part_of(
            "relu",
            10,
            dataclasses.replace(each, details=details_with(context=context)),
        ),
        part_of("add", 1, each),
    ]
    places = {"relu": Place(Figure(0.5, 0.0), 10)}
    replay = InOrder(Figure(115.0, 0.1), Figure(energy_mj, 0.01))
    measured = reading(
        115.0, energy_mj=46.0, details=details_with(found_again=0.0, places=places, in_order=replay)
    )
    bare = dataclasses.replace(measured, details=details_with(found_again=0.0, places=places))
    waiting = WaitingPower().share(
        measured_lines(parts, [Whole("GPU-1", bare)], "graph"), [measured]
    )
    assert waiting.value == pytest.approx(share)
    assert waiting.half_width == pytest.approx(half_width)
    without_share = measured_lines(parts, [Whole("GPU-1", bare)], "graph")
    assert WaitingPower().applies(without_share, [measured])
    assert not WaitingPower().applies(without_share, [bare])
    with_replay = aggregate(
        parts, [Whole("GPU-1", measured)], target=0.95, launch="graph"
    ).energy.total
    without = aggregate(parts, [Whole("GPU-1", bare)], target=0.95, launch="graph").energy.total
    assert with_replay.value == pytest.approx(without.value + (share - 0.5) * 10 * 0.5 * 0.3)
    assert with_replay.half_width < without.half_width


def test_a_replay_of_all_calls_in_order_bounds_the_error_of_the_sum():
    context = InContext(alone_us=9.0, effect_us=Figure(0.5), passes=144)
    part = part_of("relu", 10, reading(10.0, details=details_with(context=context)))
    places = {"relu": Place(Figure(0.5, 0.0), 10)}

    def half_width(replay_us: float | None) -> float:
        replay = replay_us and InOrder(Figure(replay_us, 0.2), Figure(400.0, 2.0))
        whole = reading(
            105.0, details=details_with(found_again=0.0, places=places, in_order=replay)
        )
        return aggregate(
            [part], [Whole("GPU-1", whole)], target=0.95, launch="graph"
        ).time.total.half_width

    assert half_width(105.3) == pytest.approx(0.3 + 0.2)  # the sum is 105
    assert half_width(None) > 5
    assert half_width(120.0) == pytest.approx(
        15 + 0.2
    )  # a replay that disagrees widens the interval


def test_the_addresses_of_a_replay_count_in_the_sum_and_those_of_the_whole_in_the_gap():
    part = part_of("relu", 10, reading(10.0, details=details_with(context=CONTEXT)))
    places = {"relu": Place(Figure(0.5, 0.0), 10)}
    replay = InOrder(Figure(105.0, 0.0), Figure(400.0, 0.0))
    details = details_with(
        found_again=0.0, places=places, in_order=replay, layouts_half_width_us=2.1
    )
    whole = reading(105.0, time_half_width_us=0.0, details=details)
    verdict = aggregate([part], [Whole("GPU-1", whole)], target=0.95, launch="graph")
    off = abs(verdict.time.total.value - 105)
    assert verdict.time.total.half_width == pytest.approx(
        off + verdict.time.total.value * 0.02 / math.sqrt(2)
    )
    assert verdict.time.gap.half_width == pytest.approx(off / 105 + 0.02, rel=0.01)
    assert verdict.power.between_jobs == 0


def test_weights_that_stay_in_the_cache_are_not_fetched():
    assert cost_in_model(
        reading(details=details_with(context=CONTEXT, copies=9)), [whole(1)]
    ).time_us.value == pytest.approx(105 - 20)
    assert cost_in_model(
        reading(details=details_with(context=CONTEXT, copies=1)), [whole(1)]
    ).time_us.value == pytest.approx(105)


def test_an_operator_at_the_power_limit_is_compared_with_itself_at_full_clocks():
    burst = Burst(Figure(82.0, 1.0), Figure(50.0))
    limited = reading(
        details=details_with(context=CONTEXT, burst=burst, copies=9), flags=("throttled_power",)
    )
    assert cost_in_model(limited, [whole(0)]).time_us.value == pytest.approx(82 + 5)
    assert cost_in_model(limited, [whole(1)]).time_us.value == pytest.approx(82 + 5 - 2)


def test_of_weights_that_stay_in_part_that_part_is_not_fetched():
    assert cost_in_model(
        reading(details=details_with(context=CONTEXT, copies=9)), [whole(0.4)]
    ).time_us.value == pytest.approx(105 - 8)
    assert weights_in_cache([whole(0.4), whole(0.6)]) == pytest.approx(0.5)


def test_without_a_whole_that_tells_weights_are_cold():
    assert weights_in_cache([]) is None
    assert weights_in_cache([reading(details=details_with(found_again=None))]) is None
    assert cost_in_model(
        reading(details=details_with(context=CONTEXT, copies=9)), [reading()]
    ).time_us.value == pytest.approx(105)


def test_a_verdict_says_how_much_of_the_sum_is_the_neighbours():
    part = part_of(
        "a",
        3,
        reading(details=details_with(context=CONTEXT)),
    )
    verdict = aggregate([part], [Whole("GPU-1", whole(0))], target=0.9, launch="graph")
    assert verdict.time.total.value == pytest.approx(315)
    own = math.hypot(1.0, 0.5, BUILD_UNSURE_US * 10)
    assert verdict.time.total.half_width == pytest.approx(3 * math.hypot(own, 5))
    apart = math.hypot(
        verdict.time.total.deviation_from(verdict.time.whole).half_width, BETWEEN_JOBS["time"]
    )
    assert verdict.time.gap.half_width == pytest.approx(apart), (
        "a gap includes what differs between jobs"
    )
    assert (verdict.between_jobs_time, verdict.between_jobs_energy) == (
        BETWEEN_JOBS["time"],
        BETWEEN_JOBS["energy"],
    )
    assert verdict.context_time_us == pytest.approx(15)
    assert verdict.context_energy_mj == pytest.approx(3.75)
    assert verdict.weights_in_cache == pytest.approx(0)
    told = verdict.to_json()
    assert type(verdict).from_json(told).to_json() == told
    without = aggregate(
        [part_of("a", 3, reading())],
        [Whole("GPU-1", whole(1))],
        target=0.9,
        launch="graph",
    )
    assert (without.context_time_us, without.weights_in_cache) == (None, None)
    assert without.between_jobs_time == 0, "it was measured for tuples among other operators"


def test_a_gap_that_is_unsure_for_its_neighbours_does_not_ask_for_longer_windows():
    part = part_of(
        "a",
        3,
        reading(details=details_with(context=CONTEXT)),
    )
    verdict = aggregate(
        [part], [Whole("GPU-1", whole(0, time_us=310.0))], target=0.99, launch="graph"
    )
    (reason,) = (reason for reason in verdict.reasons if "time gap is uncertain" in reason)
    assert "the neighbouring operators or the power limit" in reason
    assert "Longer windows or" not in reason
    loose = whole(0, time_us=310.0, time_half_width_us=60.0)
    verdict = aggregate([part], [Whole("GPU-1", loose)], target=0.99, launch="graph")
    assert any(
        "time gap is uncertain" in reason and "Longer windows or" in reason
        for reason in verdict.reasons
    )


def test_a_sum_of_both_kinds_of_readings_says_so():
    parts = [
        part_of("a", 1, reading(details=details_with(context=CONTEXT))),
        part_of("b", 1, reading()),
    ]
    verdict = aggregate(parts, [Whole("GPU-1", whole(0))], target=0.9, launch="graph")
    assert any("1 of 2 tuples were measured in loops" in reason for reason in verdict.reasons)
    verdict = aggregate(parts[:1], [Whole("GPU-1", whole(0))], target=0.9, launch="graph")
    assert not any("in loops only" in reason for reason in verdict.reasons)


def test_in_its_place_in_the_model_a_tuple_takes_what_it_takes_warm_and_what_the_place_adds():
    placed = reading(
        details=details_with(found_again=0.0, places={"conv": Place(Figure(12.0, 0.3), 2)})
    )
    copied = reading(details=details_with(context=CONTEXT, copies=9))
    cost = cost_in_model(copied, [placed], "conv")
    assert cost.time_us.value == pytest.approx(80 + 12)  # the place's own weights were fetched
    assert cost.context_us == pytest.approx(12 - 20)
    assert cost.unsure_us == pytest.approx(PLACE_UNSURE_US + PLACE_UNSURE * 8)
    assert cost_in_model(copied, [placed], "other").time_us.value == pytest.approx(105)


def test_where_the_cache_holds_all_a_place_adds_no_more_than_strangers_do():
    places = {"conv": Place(Figure(12.0, 0.3), 2), "relu": Place(Figure(2.0, 0.1), 1)}
    copied = reading(details=details_with(context=CONTEXT, copies=9))
    times = [
        cost_in_model(
            copied, [reading(details=details_with(found_again=share, places=places))], name
        ).time_us.value
        for name, share in (("conv", 1), ("conv", 0.5), ("relu", 1))
    ]
    assert times == pytest.approx([80 + 5, 80 + 8.5, 80 + 2])


def test_in_a_split_model_a_tuple_takes_as_long_as_in_a_loop_of_the_ranks():
    details = details_with(
        found_again=0.0,
        places={"conv": Place(Figure(12.0, 0.3), 2)},
        looped_us={"conv": 80.4},
        added={"sum": Place(Figure(130.0, 0.2), 4)},
    )
    copied = reading(details=details_with(context=CONTEXT, copies=9))
    assert cost_in_model(copied, [reading(details=details)], "conv").time_us.value == pytest.approx(
        80.4 + 12
    )
    cost = cost_in_model(
        reading(details=details_with(context=CONTEXT)), [reading(details=details)], "sum"
    )
    assert cost.time_us.value == pytest.approx(130)  # what the collective adds to a pass
    assert cost.context_us == pytest.approx(30)
    assert cost_in_model(copied, [reading(details=details)], "sum").time_us.value == pytest.approx(
        130
    )


def test_ranks_may_draw_more_between_kernels_than_the_kernels_themselves():
    ranks = (RankFigures(Figure(115.0), card="GPU-1"), RankFigures(Figure(115.0), card="GPU-2"))
    context = InContext(alone_us=10.0, effect_us=Figure(0.5), passes=144)
    each = reading(
        10.0, energy_mj=4.0, energy_half_width_mj=0.001, details=details_with(context=context)
    )
    part = part_of("relu", 10, each)
    replay, places = (
        InOrder(Figure(105.0, 0.1), Figure(44.0, 0.01)),
        {"relu": Place(Figure(0.5, 0.0), 10)},
    )
    whole = reading(
        105.0, details=details_with(found_again=0.0, places=places, in_order=replay, ranks=ranks)
    )
    energy = aggregate([part], [Whole("GPU-1", whole)], target=0.95, launch="graph").energy
    assert energy.total.value == pytest.approx(44.0)


@pytest.mark.parametrize(
    ("clock", "unsure_us", "unsure_mj"), [(1400, 0, 0), (1690, 20 / 4, 12 / 4), (1980, 0, 0)]
)
def test_between_steady_and_bursts_a_sum_is_least_sure_half_way(clock, unsure_us, unsure_mj):
    burst = Burst(Figure(80.0), Figure(52.0), sm_clock_mhz=1980.0)
    limited = reading(
        details=details_with(burst=burst), flags=("throttled_power",), sm_clock_mhz=1400.0
    )
    cost = cost_in_model(limited, [whole(0, sm_clock_mhz=clock, flags=("throttled_power",))])
    assert (cost.unsure_us, cost.unsure_mj) == (
        pytest.approx(unsure_us),
        pytest.approx(unsure_mj),
    )


def test_energies_are_restated_to_the_temperature_of_the_whole_model_below_the_power_limit():
    warm, cool = reading(temperature_c=60.0, energy_mj=100.0), whole(1, temperature_c=50.0)
    cost = cost_in_model(warm, [cool])
    assert cost.energy_mj.value == pytest.approx(100 * (1 - 10 * POWER_PER_C.value))
    assert cost.warmth_mj == pytest.approx(-100 * 10 * POWER_PER_C.value)
    assert cost.unsure_mj == pytest.approx(100 * 10 * POWER_PER_C.half_width)
    assert (
        cost_in_model(warm, [whole(1, temperature_c=50.0, flags=("throttled_power",))]).warmth_mj
        == 0
    )
    assert cost_in_model(warm, [whole(1)]).warmth_mj == 0, (
        "the temperature of the whole model is unknown"
    )


def test_a_first_step_of_the_energy_counter_is_not_restated():
    warm, cool = reading(temperature_c=60.0, energy_mj=100.0), whole(1, temperature_c=50.0)
    for ticks, is_restated in ((2, False), (3, True)):
        rough = dataclasses.replace(warm, flags=("rough",), details=details_with(ticks=ticks))
        assert bool(cost_in_model(rough, [cool]).warmth_mj) == is_restated


def test_a_verdict_states_the_effect_of_the_temperature():
    warm, cool = reading(temperature_c=60.0, energy_mj=100.0), whole(1, temperature_c=50.0)
    verdict = aggregate([part_of("a", 3, warm)], [Whole("GPU-1", cool)], target=0.9, launch="graph")
    warmth_mj = cost_in_model(warm, [cool]).warmth_mj
    assert verdict.temperature_energy_mj == pytest.approx(3 * warmth_mj)
    stored = type(verdict).from_json(verdict.to_json())
    assert stored.temperature_energy_mj == verdict.temperature_energy_mj
