"""The cost of a model that is split over cards: its collectives come from readings of other sizes,
or are refused.
"""

from __future__ import annotations

import dataclasses

import pytest
from sqlmodel import select

from farm.addons.predict.collectives import Size, measured_sizes, predicted
from farm.addons.predict.query import EstimateQuery
from farm.addons.predict.rank_effects import rank_effects
from farm.errors import NoReadings, UsageError
from farm.models import catalog
from farm.store import tables
from farm.subjects.collective_calls import collective_tuple
from farm.subjects.needed import needed_tuple
from farm.types.details import Place
from farm.types.figure import Figure, PassCost
from farm.types.format import TIME, quantity
from farm.types.stored import plain
from farm.types.tuple import Cost
from tests.report import filled

LINK = "nccl 2.28.9 over NVLink x18"
BYTES = (8_192, 524_288, 33_554_432, 268_435_456)


def on(communication):
    return dataclasses.replace(filled.SOFTWARE, communication=communication)


def line(size_bytes, latency_us=10.0, bytes_per_us=3e5):
    return latency_us + size_bytes / bytes_per_us


def cost_of(time_us):
    return PassCost(Figure(time_us, 0.001 * time_us), Figure(2 * time_us))


def sizes(name="all_reduce", cards=2, dtype="bfloat16", of=BYTES):
    return [Size(name, cards, dtype, one, cost_of(line(one))) for one in of]


def asked(name="all_reduce", size_bytes=4_194_304, cards=2, dtype="bfloat16"):
    return needed_tuple(collective_tuple(name, size_bytes // 2, dtype, cards), Cost(0, 0))


def cost(one, known):
    found, notes = predicted([one], known, "a card")
    return found[one.operator_id], notes


def test_the_cost_between_two_sizes_is_interpolated_and_its_interval_has_the_linear_law():
    for size_bytes in (65_536, 4_194_304, 100_000_000):
        found, (note,) = cost(asked(size_bytes=size_bytes), sizes())
        assert line(8_192) < found.time_us.value < line(BYTES[-1])
        assert found.time_us.low < line(size_bytes) < found.time_us.high
        assert found.energy_mj.value == pytest.approx(2 * found.time_us.value)
        assert "from readings of other sizes" in note
    at, _ = cost(asked(size_bytes=BYTES[1]), sizes())
    assert at.time_us.value == pytest.approx(line(BYTES[1])), (
        "another dtype or reduction has this size"
    )
    beyond, _ = cost(asked(size_bytes=2 * BYTES[-1]), sizes())
    below, _ = cost(asked(size_bytes=128), sizes())
    assert beyond.time_us.value == pytest.approx(2 * line(BYTES[-1]))
    assert below.time_us.value == pytest.approx(line(BYTES[0]))
    assert (beyond.far, below.far, at.far) == (True, True, False)


def test_readings_of_the_same_dtype_come_first():
    slow = [
        dataclasses.replace(one, dtype="float32", cost=cost_of(9 * one.cost.time_us.value))
        for one in sizes()
    ]
    assert cost(asked(), slow + sizes())[0] == cost(asked(), sizes())[0]
    assert cost(asked(dtype="float16"), sizes() + slow)[0] == cost(asked(), slow)[0], (
        "both dtypes have these sizes"
    )
    assert cost(asked(), slow)[0].time_us.value == pytest.approx(
        9 * cost(asked(), sizes())[0].time_us.value
    )


@pytest.mark.parametrize(
    ("name", "bus", "steps"),
    [("all_reduce", 1.5, 3), ("reduce_scatter", 1.5, 3), ("all_gather", 3, 3)],
)
def test_four_cards_are_extrapolated_from_two_by_the_ring_algorithm_with_a_wide_interval(
    name, bus, steps
):
    latency_us = line(BYTES[0])
    large, notes = cost(asked(name, BYTES[-1], cards=4), sizes(name))
    expected_us = steps * latency_us + bus * (line(BYTES[-1]) - latency_us)
    assert large.time_us.value == pytest.approx(expected_us)
    assert large.energy_mj.value == pytest.approx(2 * 2 * expected_us), "as much power on each card"
    assert large.time_us.high / large.time_us.low > 4
    assert "4 cards are extrapolated from readings on 2" in notes[0]
    assert "ring algorithm" in notes[0]
    small, _ = cost(asked(name, BYTES[0], cards=4), sizes(name))
    assert small.time_us.value == pytest.approx(steps * latency_us)
    own, _ = cost(asked(name, cards=4), sizes(name) + sizes(name, cards=4))
    assert own.time_us == cost(asked(name), sizes(name))[0].time_us, (
        "readings on four cards come first"
    )


def test_a_collective_without_readings_of_several_sizes_is_refused():
    for known in ([], sizes()[:1], sizes("all_gather")):
        with pytest.raises(NoReadings, match="all_reduce has no readings") as refused:
            cost(asked(), known)
        assert "sweep: all_reduce" in refused.value.next_step


def variant(length, **split):
    fields = {"layers": 1, "dtype": "bfloat16", "phase": "prefill", "length": length, **split}
    return catalog.variant("qwen2.5-0.5b", 1, **fields)


def is_collective(spec):
    return spec.kind == "collective"


def is_operator(spec):
    return spec.kind != "collective"


@pytest.fixture
def no_package(monkeypatch):
    for module in ("addons.predict.query", "exchange.packaged"):
        monkeypatch.setattr(f"farm.{module}.packaged_files", list)


def test_a_split_model_is_estimated_from_readings_on_one_card_and_collectives_of_other_sizes(
    database, no_package
):
    query = EstimateQuery("H200")
    wanted = variant(64, tensor_parallel=2)
    taken = filled.fill(database, wanted, leave_out=is_collective, whole=False)
    with database.read() as session, pytest.raises(NoReadings, match="all_reduce has no readings"):
        query.estimate(session, wanted)
    for length in (16, 256):
        filled.fill(
            database,
            variant(length, tensor_parallel=2),
            software=on(LINK),
            leave_out=is_operator,
            whole=False,
        )
    ring = {
        "software": on("nccl 2.28.9 NCCL_ALGO=Ring over NVLink x18"),
        "created_at_s": 1.7e9,
        "slower": 9.0,
    }
    filled.fill(
        database, variant(16, tensor_parallel=2), leave_out=is_operator, whole=False, **ring
    )
    with database.read() as session:
        found = query.estimate(session, wanted)
        known = measured_sizes(
            session, {"all_reduce"}, "NVIDIA H200", [filled.PROTOCOL.id], filled.SOFTWARE
        )
    assert found.software.communication == LINK, "readings with other settings are not mixed in"
    assert len(known) == 2
    (missing,) = found.missing
    assert (missing.needed.short_name, missing.needed.all_calls) == ("all_reduce", 3)
    assert found.covered_tuples == len(taken.capture.tuples) - 1
    low, high = sorted(one.cost.time_us.value for one in known)
    assert low < missing.predicted_us < high
    gathered_us = found.communication_us - 3 * missing.predicted_us
    assert 0 < gathered_us < found.readings.time_us.value
    assert found.time.value == pytest.approx(
        found.readings.time_us.value + 3 * missing.predicted_us
    )
    # Readings on one card have the energy of one card, and both cards run the operators.
    operators_us = found.readings.time_us.value - gathered_us
    assert found.readings.energy_mj.value == pytest.approx(
        2 * 0.5 * operators_us + 0.5 * gathered_us, rel=0.06
    )
    assert (found.complete, found.exposed_us) == (True, None)
    with pytest.raises(UsageError, match="measure on one card"):
        found.to_measure(1)


def store_effects(database, split, taken, later_us, added_us):
    """Store with the whole of a split model what its calls take longer in the ranks."""
    with database.write() as session:
        of = {row.subject_id: row for row in session.exec(select(tables.ReadingRow)).all()}
        loops = {id_: of[id_].time_us for id_ in taken.capture.tuples}
        added = {id_: us for id_, us in loops.items() if is_collective(taken.capture.tuples[id_])}
        details = {
            "looped_us": {
                id_: 0.9 * us + later_us for id_, us in loops.items()
            },  # a loop alone takes 0.9 of the time
            "added": {
                id_: plain(Place(Figure(us + added_us, 0.1), 1)) for id_, us in added.items()
            },
        }
        of[split.id].details = {**of[split.id].details, **details}


def test_an_estimate_includes_what_calls_take_longer_in_the_ranks_of_other_split_models(
    database, no_package
):
    wanted, query = variant(64, tensor_parallel=2), EstimateQuery("H200")
    filled.fill(database, wanted, leave_out=is_collective, whole=False)
    for length in (16, 256):
        filled.fill(
            database, variant(length, tensor_parallel=2), leave_out=is_collective, whole=False
        )
        of_ranks = {"software": on(LINK), "leave_out": is_operator}
        taken = filled.fill(database, variant(length, tensor_parallel=2), **of_ranks)
    with database.read() as session:
        before = query.estimate(session, wanted)
    assert (before.ranks, before.to_json()["ranks_time_us"]) == (None, None)
    store_effects(database, variant(256, tensor_parallel=2), taken, later_us=0.5, added_us=3.0)
    with database.read() as session:
        found = query.estimate(session, wanted)
        about = session, "NVIDIA H200", filled.PROTOCOL, on(LINK)
        overlapping, _ = rank_effects(*about, overlaps=True)
    exchanges = sum(
        is_collective(taken.capture.tuples[one.tuple_id]) for one in taken.capture.calls
    )
    operators = len(taken.capture.calls) - exchanges
    assert found.ranks.time_us.value == pytest.approx(0.5 * (operators - 1) + 3.0 * exchanges), (
        "one takes above 20 µs"
    )
    assert found.time.value == pytest.approx(before.time.value + found.ranks.time_us.value)
    assert found.energy.value / found.time.value == pytest.approx(
        before.energy.value / before.time.value
    )
    width, width_before = (one.time.high - one.time.low for one in (found, before))
    assert width > width_before
    assert "medians of 1 whole split model" in found.notes[0]
    store_effects(database, variant(256, tensor_parallel=2), taken, later_us=-1.5, added_us=-3.0)
    with database.read() as session:
        less = query.estimate(session, wanted)
    size = quantity(-less.ranks.time_us.value, TIME)
    assert less.notes[0].startswith(f"Calls take {size} less in ranks than alone")
    assert set(overlapping) == {"operator below 20 µs"}, (
        "how much of a collective a training step hides is unknown"
    )


def test_without_whole_split_models_in_the_own_database_those_of_the_package_show_the_effects(
    database,
):
    wanted = variant(64, tensor_parallel=2)
    filled.fill(database, wanted, whole=False)
    with database.read() as session:
        found = EstimateQuery("H200").estimate(session, wanted)
    assert 0.2 * found.tuples < found.ranks.time_us.value < 0.5 * found.time.value
    size = quantity(found.ranks.time_us.value, TIME)
    assert found.notes[0].startswith(f"Calls take {size} longer in ranks")
