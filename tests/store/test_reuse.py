"""Which reading serves a later request."""

from __future__ import annotations

import pytest
from sqlmodel import select

from farm.store import content, tables
from farm.store.reuse import find_readings, satisfies
from farm.types.protocol import Stopping
from farm.types.reading import CPU_METHOD, METHOD
from tests.planned import READING, items_of, plan, register, sweep

QUICK, USUAL, PATIENT = (Stopping(maximum_s=seconds) for seconds in (0.5, 3.0, 6.0))


def row(
    time_half_width_us: float = 1.0,
    *,
    flags: tuple[str, ...] = (),
    window_s: float = 0.5,
    card_id: str = "GPU-1",
    **details,
) -> tables.ReadingRow:
    return tables.ReadingRow(
        id="r",
        card_id=card_id,
        time_us=1000.0,
        time_half_width_us=time_half_width_us,
        window_s=window_s,
        flags=list(flags),
        details={"method": METHOD, **details},
    )


def test_a_tight_reading_serves_whoever_would_wait_longer():
    assert satisfies(row(), QUICK)
    assert satisfies(row(), PATIENT)
    assert satisfies(row(9.9), USUAL)
    assert not satisfies(row(10.2), USUAL)


def test_one_that_did_not_converge_serves_who_would_not_wait_longer_than_it_was_given():
    loose = row(60.0, flags=("not_converged",), window_s=2.6, ceiling_s=3.0)
    assert satisfies(loose, QUICK)
    assert satisfies(loose, USUAL)
    assert not satisfies(loose, PATIENT)
    assert not satisfies(row(60.0, flags=("not_converged",), ceiling_s=0.5), USUAL)


@pytest.mark.parametrize("flag", ["study", "shared", "starved", "throttled_thermal", "canary_off"])
def test_what_may_be_better_the_next_time_is_read_again(flag: str):
    assert not satisfies(row(flags=(flag,)), USUAL)


def test_a_rough_reading_serves_only_who_asked_for_no_more():
    rough = row(flags=("rough",))
    assert not satisfies(rough, USUAL)
    assert satisfies(rough, USUAL.allowing(0.03))
    assert not satisfies(row(50.0, flags=("rough",)), USUAL.allowing(0.03))
    assert satisfies(row(), USUAL.allowing(0.03)), "a precise one serves, too"


def test_readings_by_another_method_are_not_mixed_in():
    assert not satisfies(row(method=METHOD - 1), USUAL)
    assert not satisfies(row(card_id="CPU-1"), USUAL), "a CPU that was measured like a GPU"
    assert satisfies(row(card_id="CPU-1", method=CPU_METHOD), USUAL)
    old = row()
    old.details = {}
    assert not satisfies(old, USUAL)


def test_a_reading_of_another_farm_serves_only_who_asked_for_those(database):
    (card,) = register(database, 0)
    job_id = plan(database, [card])
    (item,) = items_of(database, job_id, "tuple")
    values = content.reading_row(READING)
    about = {
        "subject_kind": "operator",
        "subject_id": item.subject_id,
        "card_id": card,
        "card_model": item.card_model,
    }
    with database.write() as session:
        software_id = session.exec(select(tables.SoftwareRow.id)).one()
        known = {"software_id": software_id, "protocol_id": item.protocol_id, "simulated": False}
        session.add(tables.ReadingRow(id="r", **about, **known, **values, origin="elsewhere"))
    with database.read() as session:
        for reuse, serves in (
            ("model", False),
            ("card", False),
            ("imported", True),
            ("none", False),
        ):
            (found,) = find_readings(session, [item], sweep(reuse=reuse), software_id, [card])
            assert (found is not None) == serves, reuse
