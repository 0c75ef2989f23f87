"""The arithmetic of a verdict, by hand-computed figures."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.types.details import Burst, Overlap, Place, RankFigures
from farm.types.figure import Figure, figure_of
from farm.verdict.aggregate import aggregate, coverage_of, next_operators
from farm.verdict.corrections import cost_in_model
from farm.verdict.cost_line import CostLine, TupleView
from farm.verdict.figures import ReadingView, Whole
from farm.verdict.verdict import Verdict
from tests.details import details_with


def reading(
    time_us=10.0, half=0.0, energy_mj=2.0, energy_half=0.0, card="GPU-1", **more
) -> ReadingView:
    return ReadingView(
        Figure(time_us, half),
        figure_of(energy_mj, energy_half),
        idle_power_w=80.0,
        card_id=card,
        **more,
    )


def part(name="Conv2d", count=1, weight=1.0, read: ReadingView | None = None, **more) -> CostLine:
    subject = TupleView(f"id-{name}", name, f"{name} 64->64", estimated_us=weight)
    if read is None:
        return CostLine(subject, count, "missing", **more)
    return CostLine.of_reading(subject, count, read)


def judge(parts, whole: ReadingView | None, **more) -> Verdict:
    wholes = [Whole("GPU-1", whole)] if whole else []
    return aggregate(
        parts,
        wholes,
        more.pop("canaries", {}),
        target=more.pop("target", 0.95),
        launch="graph",
        **more,
    )


def test_sums_gaps_accuracy_and_power():
    parts = [
        part(count=3, read=reading(10, energy_mj=2)),
        part("add", count=2, read=reading(5, energy_mj=0.5)),
    ]
    verdict = judge(parts, reading(38.0, energy_mj=7.2))
    assert verdict.time.total.value == 40 and verdict.energy.total.value == 7  # noqa: PT018
    assert verdict.time.gap.value == pytest.approx(40 / 38 - 1)
    assert verdict.time.accuracy == pytest.approx(1 - 2 / 38)
    assert verdict.energy.accuracy == pytest.approx(1 - 0.2 / 7.2)
    assert verdict.power.total.value == pytest.approx(7 / 40 * 1000)  # mJ/µs are kW
    assert verdict.outcome == "fail"
    assert "time of the sum differs by +5.3 %" in verdict.reasons[0]
    assert judge(parts, reading(39.0, energy_mj=7.2)).outcome == "pass"


def test_energy_above_idle_counts_idle_once():
    verdict = judge(
        [part(count=4, read=reading(1000, energy_mj=300))], reading(4000, energy_mj=1200)
    )
    idle_mj = 80.0 * 4.0  # W x ms
    assert verdict.energy_above_idle.total.value == pytest.approx(1200 - idle_mj)
    assert verdict.energy_above_idle.whole.value == pytest.approx(1200 - idle_mj)


def test_errors_of_one_tuple_scale_with_its_calls_and_tuples_add_in_quadrature():
    parts = [part(count=3, read=reading(10, 0.1)), part("add", count=4, read=reading(10, 0.1))]
    assert judge(parts, reading(70)).time.total.half_width == pytest.approx(
        (0.3**2 + 0.4**2) ** 0.5
    )


def test_what_canaries_show_counts_for_all_tuples_and_is_independent_of_their_own_errors():
    canaries = [
        reading(time, energy_mj=e, card=card) for card, time, e in (("A", 99, 1.0), ("B", 101, 1.0))
    ]
    verdict = judge(
        [part(count=10, read=reading(10, 0.1))], reading(100, 2.0), canaries={"c": canaries}
    )
    assert verdict.systematic_time == pytest.approx(0.01)
    assert verdict.systematic_energy == 0
    assert verdict.time.total.half_width == pytest.approx(math.hypot(1.0, 0.01 * 100))
    assert verdict.time.gap.half_width == pytest.approx(math.hypot(2**0.5 / 100, 2 / 100))
    assert "2 cards. No canary was measured on GPU-1" in verdict.systematic_note


def test_what_was_timed_in_the_same_turns_has_the_interval_of_the_gap_in_each_turn():
    def timed(time_us: float, group: str = "one", half: float = 0.2) -> ReadingView:
        without = tuple(time_us * (1 + speed) for speed in (-0.02, 0.0, 0.01, 0.01))
        return reading(
            time_us,
            half * time_us,
            None,
            details=details_with(turns_group=group, without_turn_us=without),
            flags=("not_converged",),
        )

    parts = [part(read=timed(10.0), count=2), part("Linear", read=timed(80.0))]
    found = judge(parts, timed(101.0)).time
    assert found.gap.value == pytest.approx(-1 / 101)
    assert found.gap.half_width == pytest.approx(0), (
        "the machine was as slow for the tuples as for the whole"
    )
    assert found.total.half_width > 10
    assert not any("converge" in reason for reason in judge(parts, timed(101.0)).reasons)
    apart = judge(parts, timed(101.0, group="another")).time
    assert apart.gap is None, "the readings are of different moments"
    stored = Verdict.from_json(judge(parts, timed(101.0)).to_json())
    assert stored.time == found


def test_a_call_on_a_cpu_takes_a_warm_loop_and_what_its_place_in_the_model_adds():
    def timed(time_us, **details):
        return reading(
            time_us, 0.1, None, card="CPU-1", details=details_with(turns_group="one", **details)
        )

    turns = dict(without_turn_us=(20.0, 21.0, 22.0), warm_without_turn_us=(10.0, 10.0, 10.0))
    small = part(read=timed(21.0, warm_us=Figure(10.0, 0.2), **turns), count=4)
    places = {small.subject.operator_id: Place(Figure(2.0, 0.5), 4)}
    whole = timed(50.0, places=places, without_turn_us=(50.0, 50.0, 50.0))
    verdict = judge([small], whole)
    assert verdict.time.total.value == pytest.approx(4 * (10 + 2))
    assert verdict.time.gap.half_width == pytest.approx(4 * 0.5 / 50)
    assert verdict.context_time_us == pytest.approx(4 * (12 - 21))
    alone = judge([small], timed(50.0, without_turn_us=(50.0, 50.0, 50.0)))
    assert alone.time.total.value == pytest.approx(4 * 21), "no replay of the calls: cold data"
    assert any("A larger batch" in reason for reason in alone.reasons)


def test_without_a_canary_the_interval_says_what_it_leaves_out():
    parts = [part(read=reading(card="A")), part("add", read=reading(card="B"))]
    verdict = judge(parts, reading(20, card="A"))
    assert verdict.systematic_time == 0
    assert "No canary compares the 2 cards" in verdict.systematic_note


def test_wholes_of_several_cards_combine_and_their_spread_widens_the_interval():
    wholes = [Whole("A", reading(98, card="A")), Whole("B", reading(102, card="B"))]
    verdict = aggregate([part(read=reading(100))], wholes, target=0.95, launch="graph")
    assert (verdict.time.whole.value, verdict.time.whole.half_width) == (100, 2)


def test_wholes_that_no_interval_explains_are_said_to_contradict_each_other():
    def reasons(other_us, half_us=0.2):
        wholes = [
            Whole("A", reading(100, 0.2, card="A")),
            Whole("B", reading(other_us, half_us, card="B")),
        ]
        return aggregate([part(read=reading(100))], wholes, target=0.95, launch="graph").reasons

    assert "contradict each other: 14.17 µs on B, 100 µs on A" in str(reasons(14.17))
    for alike in (reasons(104), reasons(120, half_us=10)):
        assert not any("contradict" in reason for reason in alike)


def test_a_whole_counts_by_what_its_card_gave_to_the_sum():
    wholes = [Whole("A", reading(96, 1, card="A")), Whole("B", reading(104, 1, card="B"))]
    parts = [part(read=reading(75, card="A")), part("add", read=reading(25, card="B"))]
    assert aggregate(parts, wholes, target=0.95, launch="graph").time.whole.value == pytest.approx(
        98
    )
    only_a = aggregate(parts[:1], wholes, target=0.95, launch="graph").time.whole
    assert (only_a.value, only_a.half_width) == (96, 1)


def test_coverage_weighs_by_estimated_cost():
    parts = [
        part(count=2, weight=45.0, read=reading()),
        part("add", count=10, weight=1.0, reason="raised: no"),
    ]
    assert coverage_of(parts) == pytest.approx(0.9)
    verdict = judge(parts, reading(20, energy_mj=4))
    assert verdict.outcome == "fail"  # accurate, yet a tenth was left out
    (missing,) = verdict.unmeasured
    assert (missing.label, missing.count, missing.reason) == ("add 64->64", 10, "raised: no")
    assert missing.share == pytest.approx(0.1)


def test_errors_that_cancel_do_not_pass():
    parts = [
        part(read=reading(100, energy_mj=20)),
        part("add", weight=1.0),
    ]  # the one is too slow by the other
    verdict = judge(parts, reading(100, energy_mj=20))
    assert verdict.time.accuracy == 1
    assert verdict.outcome == "fail"
    assert "coverage is 50.0 %" in verdict.reasons[0]


def test_missing_energy_is_not_available_never_zero():
    parts = [part(read=reading()), part("add", read=reading(energy_mj=None))]
    verdict = judge(parts, reading(20))
    assert verdict.energy is None and verdict.power is None  # noqa: PT018
    assert verdict.columns()["sum_energy_mj"] is None
    assert verdict.outcome == "pass"
    assert any("Energy is not available for 1 of 2" in reason for reason in verdict.reasons)


def test_energy_missing_outside_the_scope_does_no_harm():
    verdict = judge([part(read=reading(20), weight=99.0), part("add", in_scope=False)], reading(20))
    assert verdict.energy.accuracy == 1
    assert verdict.unmeasured[0].reason == "not in scope"


def test_without_a_whole_there_is_no_verdict_but_a_sum():
    verdict = judge([part(read=reading())], None)
    assert verdict.outcome == "none" and verdict.time.total.value == 10  # noqa: PT018
    failed = aggregate(
        [part(read=reading())], [Whole("A", None, "out_of_memory")], target=0.9, launch="graph"
    )
    assert failed.outcome == "none"
    assert "A: out_of_memory" in failed.reasons[0]
    assert judge([part()], reading()).outcome == "none"
    assert judge([], None).outcome == "none"


def test_a_gap_near_the_limit_is_said_to_be():
    verdict = judge([part(read=reading(95.5, 1.0, energy_mj=20))], reading(100, energy_mj=20))
    assert verdict.outcome == "pass"
    assert any("limit lies inside the interval" in reason for reason in verdict.reasons)


def test_readings_that_did_not_converge_are_said_with_what_to_do():
    loose = {"flags": ("not_converged",)}
    parts = [
        part(read=reading(4000, **loose)),
        part("add", read=reading(10, **loose)),
        part("ReLU", read=reading()),
    ]
    assert not [
        reason for reason in judge(parts, reading(100)).reasons if "converge" in reason
    ]  # half of them
    (reason,) = [
        reason for reason in judge(parts, reading(100, **loose)).reasons if "converge" in reason
    ]
    assert reason.startswith("3 of 4 readings did not converge: other programs")
    assert "--reuse none" in reason
    (reason,) = [
        reason
        for reason in judge(parts[2:] * 3, reading(30, **loose)).reasons
        if "converge" in reason
    ]
    assert reason.startswith("The whole model's reading did not converge")


@pytest.mark.parametrize(
    ("tuple_half", "whole_half", "why"),
    [
        (3.0, 0.5, "1 of 3 tuples did not converge"),
        (0.5, 3.0, "The whole model's reading did not converge"),
    ],
)
def test_the_less_precise_side_of_a_gap_is_named(tuple_half, whole_half, why):
    loose = {"flags": ("not_converged",)}
    parts = [
        part(read=reading(20, tuple_half, **loose)),
        part("add", read=reading(5)),
        part("ReLU", read=reading(5)),
    ]
    (reason,) = judge(parts, reading(30, whole_half, energy_mj=6, **loose)).reasons
    assert reason.startswith(why)
    assert "The gap would be uncertain by" in reason
    parts = [part(name, read=reading(10, 0.3, **loose)) for name in ("Conv2d", "add", "ReLU")]
    assert (
        judge(parts, reading(30, 3.0, energy_mj=6)).outcome == "pass"
    )  # the whole is wide, but has converged


@pytest.mark.parametrize("whole_us", [100, 31])
@pytest.mark.parametrize(
    ("flag", "half", "why"),
    [
        (
            "busy_host",
            0.0,
            "Other programs used the CPU during 2 of 3 readings, so no gap is shown.",
        ),
        ("shared", 0.0, "Other processes computed on the card during 2 of 3 readings"),
        ("not_converged", 2.0, "2 of 2 tuples did not converge"),
    ],
)
def test_readings_that_were_disturbed_give_no_verdict_and_no_gap_however_wide_it_is(
    whole_us, flag, half, why
):
    parts = [
        part(read=reading(20, half, flags=(flag,))),
        part("add", read=reading(10, half, flags=(flag,))),
    ]
    verdict = judge(parts, reading(whole_us, energy_mj=4))
    assert (verdict.outcome, verdict.missed, len(verdict.reasons)) == ("none", True, 1)
    assert verdict.reasons[0].startswith(why)
    assert "--reuse none" in verdict.reasons[0]
    assert {
        held.gap
        for held in (verdict.time, verdict.energy, verdict.power, verdict.energy_above_idle)
    } == {None}
    assert verdict.time.whole.value == whole_us
    again = Verdict.from_json(json.loads(json.dumps(verdict.columns()["details"])))
    assert (again.time.gap, again.columns()) == (None, verdict.columns())
    assert (verdict.columns()["accuracy_time"], verdict.columns()["accuracy_energy"]) == (
        None,
        None,
    )


def test_a_disturbed_whole_is_enough_and_a_few_disturbed_tuples_are_not():
    calm = part(read=reading(30))
    assert (
        judge([calm], reading(30, energy_mj=2, flags=("busy_host",)))
        .reasons[0]
        .startswith("Other programs used the CPU")
    )
    few = [calm, part("add", count=0, read=reading(1, flags=("busy_host",)))]
    assert judge(few, reading(30, energy_mj=2)).outcome == "pass"
    assert (
        judge(few, reading(90, energy_mj=2)).outcome == "fail"
    )  # wide, and nothing was in the way


def test_a_few_operators_of_a_model_are_not_judged():
    parts = [part("MaxPool2d", read=reading(3)), part("Conv2d", weight=99.0, in_scope=False)]
    verdict = judge(parts, reading(100), requested=("MaxPool2d",))
    assert (verdict.outcome, verdict.missed) == ("none", False)
    (reason,) = verdict.reasons
    assert "MaxPool2d" in reason
    assert "1.0 %" in reason
    assert "95.0 %" in reason
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))).missed is False
    # What was asked for and could not be read is missing.
    failed = [*parts, part("MaxPool2d", reason="raised: no")]
    assert judge(failed, reading(100), requested=("MaxPool2d",)).missed
    # Without a whole there is nothing to say of it either.
    assert judge(parts, None, requested=("MaxPool2d",)).missed
    # The accuracy loop goes on from what falls short.
    assert judge(parts, reading(100)).outcome == "fail"


def test_a_few_operators_that_are_nearly_all_of_a_model_are_judged():
    parts = [part(read=reading(99), weight=99.0), part("add", weight=1.0, in_scope=False)]
    assert judge(parts, reading(100, energy_mj=2), requested=("Conv2d",)).outcome == "pass"
    assert judge(parts, reading(300, energy_mj=2), requested=("Conv2d",)).outcome == "fail"


def test_a_gap_that_is_hardly_known_says_what_would_help():
    verdict = judge([part(read=reading(100, 50, energy_mj=20))], reading(100, 50, energy_mj=20))
    assert any("uncertain by ± 70.7 %. Longer windows" in reason for reason in verdict.reasons)


BURST = Burst(Figure(80.0, 1.0), Figure(70.0), sm_clock_mhz=1980.0)


def limited(**more) -> ReadingView:
    details = details_with(burst=BURST)
    return reading(
        100.0,
        0.5,
        energy_mj=66.0,
        sm_clock_mhz=1500.0,
        details=details,
        throttle_reasons=("power",),
        **more,
    )


def test_a_model_below_the_power_limit_takes_the_burst_figures():
    verdict = judge(
        [part(count=2, read=limited())], reading(160, energy_mj=140, sm_clock_mhz=1980.0)
    )
    assert (verdict.time.total.value, verdict.energy.total.value) == (160, 140)
    (adjustment,) = verdict.adjustments
    assert (adjustment.used, adjustment.effect_time_us, adjustment.effect_energy_mj) == (
        "burst",
        -40,
        8,
    )


@pytest.mark.parametrize(
    ("clock", "time", "energy"), [(1740, 90, 68), (1400, 100, 66), (2000, 80, 70)]
)
def test_a_model_at_the_power_limit_interpolates_by_its_clock(clock, time, energy):
    whole = reading(100, sm_clock_mhz=clock, throttle_reasons=("sw_power_cap",))
    chosen = cost_in_model(limited(), [whole])
    assert chosen.used == "interpolated"
    assert (chosen.time_us.value, chosen.energy_mj.value) == (time, energy)


def test_the_whole_of_the_same_card_decides():
    cool = reading(card="GPU-2", sm_clock_mhz=1980.0)
    hot = reading(card="GPU-1", sm_clock_mhz=1500.0, flags=("throttled_power",))
    assert cost_in_model(limited(), [cool, hot]).time_us.value == 100
    assert cost_in_model(limited(card="GPU-2"), [cool, hot]).used == "burst"


def test_without_clocks_or_whole_the_steady_figure_stands_and_says_why():
    assert cost_in_model(limited(), []).used == "steady"
    assert "the whole model has no reading" in cost_in_model(limited(), []).why
    chosen = cost_in_model(limited(), [reading(flags=("throttled_power",))])
    assert chosen.used == "steady" and "clocks" in chosen.why  # noqa: PT018


def test_the_other_launch_gives_only_the_launch_gap():
    wholes = [Whole("A", reading(100), launch="graph"), Whole("A", reading(130), launch="eager")]
    verdict = aggregate([part(read=reading(100))], wholes, target=0.95, launch="graph")
    assert verdict.launch_gap_us == 30
    assert verdict.time.whole.value == 100


def test_a_verdict_says_what_sum_and_whole_leave_out():
    left_out = {"aten.nonzero.default": 1.0, "torch.tensor": 2.0}
    details = details_with(
        host_copies={"aten._local_scalar_dense.default": 4}, left_out_us=left_out
    )
    verdict = aggregate(
        [part(read=reading(100))],
        [Whole("A", reading(100, details=details))],
        target=0.95,
        launch="graph",
    )
    copies, left_out = verdict.host_steps.split("; ")
    assert copies.startswith("4 copies between host and card")
    assert left_out.endswith("leave out aten.nonzero.default, torch.tensor")
    assert aggregate([part(read=reading(100))], target=0.95, launch="graph").host_steps == ""


def test_a_replayed_whole_that_was_timed_eagerly_too_tells_its_launch_gap():
    timed = reading(100, details=details_with(eager_time_us=Figure(140.0)))
    verdict = aggregate([part(read=reading(100))], [Whole("A", timed)], target=0.95, launch="graph")
    assert verdict.launch_gap_us == 40
    both = [Whole("A", timed, launch="graph"), Whole("A", reading(130), launch="eager")]
    assert (
        aggregate([part(read=reading(100))], both, target=0.95, launch="graph").launch_gap_us == 30
    )


def test_flags_are_counted():
    parts = [
        part(read=reading(flags=("not_converged",))),
        part("add", read=reading(flags=("not_converged", "x"))),
    ]
    assert judge(parts, reading(20)).flags == {"not_converged": 2, "x": 1}


def test_a_verdict_survives_json():
    parts = [part(count=2, read=limited()), part("add", reason="hung")]
    verdict = judge(parts, reading(160, 1, energy_mj=140))
    data = json.loads(json.dumps(verdict.to_json()))
    again = Verdict.from_json(data)
    assert (again.to_json(), again.tuples) == (data, ())
    stored = json.loads(json.dumps(verdict.columns()["details"]))
    lines = [line.to_json() for line in Verdict.from_json(stored).tuples]
    assert lines == [line.to_json() for line in verdict.tuples]
    assert dataclasses.replace(again, wholes=()) == dataclasses.replace(verdict, wholes=())
    assert data["sum_time_us"] == 160 and data["whole_energy_mj"] == 140  # noqa: PT018
    later = (
        "kernels",
        "context_time_us",
        "context_energy_mj",
        "weights_in_cache",
        "asked_for",
        "asked_share",
    )
    later += ("temperature_energy_mj",)
    assert (
        Verdict.from_json({key: value for key, value in data.items() if key not in later}) == again
    )


@given(
    st.lists(
        st.builds(
            part,
            st.sampled_from(["Conv2d", "add", "ReLU"]),
            count=st.integers(1, 50),
            weight=st.floats(0.1, 1e6),
            read=st.none()
            | st.builds(
                reading, st.floats(0.1, 1e6), st.floats(0, 10), st.none() | st.floats(0, 1e3)
            ),
        ),
        max_size=8,
    ),
    st.floats(0.1, 1e7),
    st.randoms(),
)
@settings(max_examples=150)
def test_whatever_was_read_the_verdict_is_consistent(parts, whole_us, random):
    verdict = judge(parts, reading(whole_us, 0.1))
    shuffled = random.sample(parts, len(parts))
    assert (
        judge(shuffled, reading(whole_us, 0.1)).columns()["accuracy_time"]
        == verdict.columns()["accuracy_time"]
    )
    data = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert Verdict.from_json(data).to_json() == data
    measured = [p for p in parts if p.reading]
    assert verdict.measured + len(verdict.unmeasured) == len(parts)
    assert verdict.outcome in (("pass", "fail") if measured else ("none",))
    if verdict.outcome == "pass":
        assert verdict.coverage >= 0.95
        assert (
            abs(sum(p.count * p.reading.time_us.value for p in measured) / whole_us - 1)
            <= 0.05 + 1e-9
        )
    assert all(0 <= entry.share <= 1 for entry in verdict.unmeasured)


class TestNextOperators:
    model = (
        part("Conv2d", weight=80.0),
        part("Linear", weight=15.0),
        part("add", weight=4.0),
        part("ReLU", weight=1.0),
    )

    def scoped(self, *names):
        return [dataclasses.replace(p, in_scope=p.subject.short_name in names) for p in self.model]

    def test_begins_with_the_significant_types_that_the_model_has(self):
        assert next_operators(self.scoped(), {"add", "Linear", "LSTM"}) == ["Linear", "add"]

    def test_begins_with_the_heaviest_where_none_is_significant(self):
        assert next_operators(self.scoped(), set()) == ["Conv2d", "Linear"]
        assert next_operators(self.scoped(), {"LSTM"}, target=0.5) == ["Conv2d"]

    def test_adds_at_least_one_type_until_nothing_is_left(self):
        assert next_operators(self.scoped("Conv2d", "Linear"), set()) == ["add"]
        assert next_operators(self.scoped("Conv2d", "Linear", "add"), {"Conv2d"}) == ["ReLU"]
        assert next_operators(self.model, set()) == []

    def test_fills_up_to_the_target(self):
        assert next_operators(self.scoped("add"), {"add"}) == ["Conv2d", "Linear"]


def test_a_split_model_has_the_energy_of_all_cards_and_says_how_much_communication_is_hidden():
    ranks = details_with(
        ranks=(RankFigures(Figure(30.0), card="GPU-1"), RankFigures(Figure(30.0), card="GPU-2"))
    )
    burst = details_with(burst=Burst(Figure(9.0), Figure(1.5)))
    product = reading(10, energy_mj=2.0, details=burst).on_cards(2)
    assert (
        product.energy_mj.value,
        product.idle_power_w,
        product.details.burst.energy_mj.value,
    ) == (
        4.0,
        160.0,
        3.0,
    )
    assert product.time_us.value == 10
    reduced = reading(30, energy_mj=5.0, details=ranks)
    assert reduced.on_cards(2) == reduced
    parts = [
        part("mm", count=10, read=reading(10, energy_mj=2.0).on_cards(2)),
        part("all_reduce", read=reduced),
    ]
    verdict = judge(parts, reading(110, energy_mj=45.0))
    assert verdict.energy.total.value == pytest.approx(10 * 4.0 + 5.0)
    assert verdict.communication_us == pytest.approx((30.0, 10.0))
    assert judge(parts[:1], reading(100)).communication_us is None
    bus = details_with(
        bus_bytes_per_s=9e10, link_bytes_per_s=4.5e11, overlap=Overlap.of(30.0, 100.0, 110.0)
    )
    (row,) = judge([part("all_reduce", read=reading(30, details=bus))], None).tuples
    assert row.bus == "bus 90.0 GB/s (20.0 % of the link), 10.0 µs exposed, 20.0 µs hidden"
