"""What a reading and a verification found, as JSON of this version and of others."""

import json
from dataclasses import replace

import pytest

from farm.errors import Unmeasurable, Unreadable
from farm.types.details import Burst, CanaryNote, Details, InContext, InOrder, Place
from farm.types.figure import Figure
from farm.types.rank_readings import of_ranks
from farm.types.reading import Reading, Trace
from farm.types.verification import Verification
from tests.details import details_with


def reading_of(time_us: Figure, **figures) -> Reading:
    """A reading whose median and trimmed mean are its time."""
    return Reading(
        time_us,
        time_us.value,
        time_us.value,
        passes=100,
        window_s=0.5,
        warm_up_s=0.1,
        **figures,
    )


NOT_POSITIVE = "the measured figures are not positive"
STORED = {
    "method": 4,
    "copies": 9,
    "parameter_bytes": 46_000_000,
    "activation_peak_bytes": 4_000_000,
    "found_again": None,
    "lacks": ["temperature_c"],
    "throttle_shares": {"power_cap": 1.0},
    "burst": {"time_us": 80.0, "energy_mj": 50.0, "duties": [0.6, 0.3]},
    "context": {"alone_us": 80.0, "effect_us": 5.0, "effect_half_width_us": 0.5, "passes": 144},
    "canary": {"number": 2, "process": 7, "time_us": 27.0, "flags": ["shared"]},
}
FOUND = {
    "matches": False,
    "missing": {"a": 1},
    "kernels": {"gemm": {"count": 8, "time_us": 700.0}},
    "tuple_kernels": {"a": {"gemm": 1}},
    "in_model": {
        "calls_us": {"a": [1.0, None]},
        "source": "kernels",
        "passes": 3,
        "attributed_share": 1.0,
    },
    "numerics": {"tf32": False},
    "differences": ["predicted, but not run on the card: 1x a"],
    "card": "GPU-1",
}


def test_details_of_a_stored_reading_have_types():
    details = Details.from_json(STORED)
    assert details.burst == Burst(Figure(80.0), Figure(50.0), duties=(0.6, 0.3))
    assert details.context == InContext(80.0, Figure(5.0, 0.5), 144)
    assert details.canary == CanaryNote(Figure(27.0), number=2, process=7, flags=("shared",))
    assert details.conditions.lacks == ("temperature_c",)
    assert (details.timing.starved_share, details.timing.eager_time_us) == (None, None)


def test_details_are_written_under_the_keys_that_they_were_read_from():
    again = json.loads(json.dumps(Details.from_json(STORED).to_json()))
    assert again.keys() == STORED.keys()
    assert Details.from_json(again) == Details.from_json(STORED)
    assert Details().to_json() == {}


def test_details_of_another_version_are_read_as_far_as_they_are_known():
    data = {
        "copies": 2,
        "humidity_percent": 40,
        "burst": {"time_us": 1.0, "colour": "red"},
        "canary": {"number": 1},
    }
    details = Details.from_json(data)
    assert details.burst == Burst(Figure(1.0))
    assert details.canary is None, "a canary without a time is none"
    assert details.to_json()["humidity_percent"] == 40
    assert Details.from_json(None) == Details.from_json({}) == Details()


PLAIN = reading_of(Figure(10.0, 0.1), power_w=Figure(100.0), energy_mj=Figure(1.0))


@pytest.mark.parametrize(
    ("noted", "left"),
    [
        ({"burst": Burst(Figure(-1.0))}, {}),
        ({"burst": Burst(Figure(9.0), Figure(0.0))}, {}),
        ({"eager_time_us": Figure(0.0)}, {"eager_time_missing": NOT_POSITIVE}),
        (
            {"in_order": InOrder(Figure(9.0, 0.1), Figure(-2.0, 0.1))},
            {"in_order_missing": NOT_POSITIVE},
        ),
    ],
)
def test_further_figures_that_are_not_positive_are_left_out_with_the_reason(noted, left):
    found = replace(PLAIN, details=details_with(**noted)).plausible()
    assert found.details.to_json() == left
    assert (found.time_us, found.energy_mj, found.flags) == (PLAIN.time_us, PLAIN.energy_mj, ())


def test_what_is_positive_stays():
    noted = details_with(burst=Burst(Figure(9.0), Figure(1.0)), eager_time_us=Figure(20.0))
    found = replace(PLAIN, details=noted)
    assert found.plausible() == found


def test_a_pass_that_takes_no_longer_than_the_copies_in_it_has_no_time():
    copies = reading_of(Figure(10.0, 0.1), power_w=Figure(90.0), energy_mj=Figure(0.9))
    with pytest.raises(Unmeasurable, match="time_us is 0") as caught:
        PLAIN.without(copies).plausible()
    assert caught.value.reason == "not_positive"


def test_a_verification_is_written_as_it_was_read():
    found = Verification.from_json({**FOUND, "from_a_later_version": 1})
    assert found.kernels["gemm"].time_us == 700.0
    assert found.in_model.calls_us == {"a": (1.0, None)}
    assert json.loads(json.dumps(found.to_json())) == {**FOUND, "from_a_later_version": 1}
    assert Verification.from_json({}).to_json() == {}


def test_an_older_record_names_the_launches_of_a_kernel():
    older = {
        "eagerly": {
            "operators": [],
            "kernels": {"gemm": {"launched": 0, "eager": 12}, "relu": [1, 0]},
        }
    }
    assert Verification.from_json(older).to_json()["eagerly"]["kernels"] == {
        "gemm": {"launched": 0, "eager": 12},
        "relu": [1, 0],
    }


def of(burst=None, **noted):
    return reading_of(Figure(100.0, 100.0), details=details_with(burst=burst, **noted))


def test_ranks_replay_in_order_together_and_wait_for_each_other():
    one = of(
        in_order=InOrder(Figure(50.0, 1.0), Figure(20.0, 3.0)),
        places={"a": Place(Figure(2.0, 0.3), 4)},
        looped_us={"a": 5.0},
    )
    other = of(
        in_order=InOrder(Figure(51.0, 1.0), Figure(22.0, 4.0)),
        places={"a": Place(Figure(1.0, 0.4), 4)},
        looped_us={"a": 6.0},
    )
    order = of_ranks([one, other], ["a", "b"]).details.order
    assert order.in_order == InOrder(Figure(51.0, 1.0), Figure(42.0, 5.0))
    assert order.places == {"a": Place(Figure(1.5, 0.25), 4)}
    assert order.looped_us == {"a": 5.5}
    assert of_ranks([one, of()], ["a", "b"]).details.order.in_order is None
    without = of_ranks([one, of(in_order_missing="its flags")], ["a", "b"])
    assert without.details.missing == {"in_order": "its flags"}


def test_a_reading_of_several_cards_has_the_energy_of_all_cards_in_bursts_too():
    one = Burst(Figure(80.0), Figure(24.0, 3.0), power_w=Figure(300.0), pause_power_w=100.0)
    other = Burst(Figure(90.0), Figure(36.0, 4.0), power_w=Figure(400.0), pause_power_w=120.0)
    burst = of_ranks([of(one), of(other)], ["a", "b"]).details.burst
    assert burst == Burst(
        Figure(90.0), Figure(60.0, 5.0), power_w=Figure(700.0), pause_power_w=220.0
    )
    assert of_ranks([of(one), of(None)], ["a", "b"]).details.burst is None


def test_stored_series_that_unpack_to_too_much_or_are_damaged_are_refused(monkeypatch):
    packed = Trace((0.0, 1.0), {"power_w": ([0.0] * 1000, [1.0] * 1000)}).pack()
    assert Trace.unpack(packed).series["power_w"][1] == [1.0] * 1000
    for damaged in (b"", b"nothing", packed[:-9]):
        with pytest.raises(Unreadable, match="series of a reading are"):
            Trace.unpack(damaged)
    monkeypatch.setattr("farm.types.reading.MOST_TRACE_BYTES", 1000)
    with pytest.raises(Unreadable, match="larger than 1000 bytes"):
        Trace.unpack(packed)
