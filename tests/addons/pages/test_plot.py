"""Drawings and the readings that they are of."""

import os
import random
import sys

import pytest

from farm.addons.pages import plots
from farm.errors import UsageError
from farm.report.lookup import find_traced
from farm.store import tables
from farm.types.reading import Trace
from tests.report import rows


def sampled() -> Trace:
    """A second at 300 W after a warm-up, as an H200 tells it: ticks of 100 ms, instant power every
    5 ms.
    """
    noise = random.Random(1)
    power_s = [0.005 * step for step in range(300)]
    ticks_s = [0.1 * step for step in range(1, 15)]
    series = {
        "energy_mj": (ticks_s, [300e3 * moment for moment in ticks_s]),
        "power_instant_w": (
            power_s,
            [min(300, 100 + 800 * moment) + noise.gauss(0, 4) for moment in power_s],
        ),
        "sm_clock_mhz": ([0.1 * step for step in range(15)], [1980.0] * 15),
        "temperature_c": (
            [0.1 * step for step in range(15)],
            [40.0 + step // 5 for step in range(15)],
        ),
    }
    return Trace((0.4, 1.4), series)


def test_power_is_the_slope_of_the_counter_between_its_ticks():
    trace = sampled()
    ends_s, powers = plots.counter_power(trace)
    assert ends_s == pytest.approx(trace.series["energy_mj"][0][1:])
    assert powers == pytest.approx([300.0] * 13)
    assert plots.window_power_w(trace) == pytest.approx(300.0)
    assert plots.window_power_w(Trace((0.0, 0.1), {})) is None


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_trace_is_drawn(tmp_path, suffix):
    path = tmp_path / f"trace.{suffix}"
    plots.draw_trace(sampled(), path, "Conv2d 64->64", {"idle": 80.0})
    assert path.stat().st_size > 5_000


def test_a_trace_of_a_group_has_the_power_of_each_card(tmp_path):
    trace = sampled()
    times_s, energies_mj = trace.series["energy_mj"]
    trace.series["rank_1_energy_mj"] = times_s, [2 * energy_mj for energy_mj in energies_mj]
    assert plots.window_power_w(trace, "rank_1_") == pytest.approx(600.0)
    plots.draw_trace(trace, tmp_path / "trace.svg", "")
    drawn = (tmp_path / "trace.svg").read_text()
    assert "mean of the window: 300.0 W" in drawn
    assert "rank 1 mean of the window: 600.0 W" in drawn


def test_a_trace_shows_when_the_card_was_throttled_and_who_else_was_on_it(tmp_path):
    trace = sampled()
    times = trace.series["sm_clock_mhz"][0]
    trace.series["throttle_reasons"] = trace.series["throttle_power_cap"] = (
        times,
        [int(5 < t < 9) for t in range(15)],
    )
    trace.series["foreign_processes"] = (times, [int(t == 11) for t in range(15)])
    plots.draw_trace(trace, tmp_path / "trace.svg", "")
    drawn = (tmp_path / "trace.svg").read_text()
    assert "power cap" in drawn
    assert "foreign processes" in drawn


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError) as raised:
        plots.draw_trace(sampled(), tmp_path / "trace.png", "")
    assert "operator-farm[plot]" in raised.value.next_step


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        plots.check_path(tmp_path / "nowhere" / "trace.png")


@pytest.mark.parametrize("name", ["trace.xyz", "folder.png", "x" * 300 + ".png", "a\0b.png"])
def test_what_cannot_become_a_drawing_is_said_at_once(tmp_path, name):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UsageError) as raised:
        plots.check_path(tmp_path / name)
    assert raised.value.next_step
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        plots.check_path(tmp_path / "trace.png")


def test_looking_at_a_path_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "kept.svg").write_text("kept")
    (tmp_path / "link.png").symlink_to(tmp_path / "later.png")
    for name in ("kept.svg", "link.png", "new.PNG", "no suffix"):
        plots.check_path(tmp_path / name)
    assert (tmp_path / "kept.svg").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"kept.svg", "link.png"}


def test_a_reading_is_found_by_the_beginning_of_its_id(database):
    with database.write() as session:
        rows.ground(session)
        subject = rows.operator(session, "Conv2d", "64->64 k3")
        session.flush()
        one, other = (rows.reading(session, subject, 10.0, 3.0) for _ in range(2))
        session.add(tables.TraceRow(reading_id=one, packed=sampled().pack()))
    with database.read() as session:
        found = find_traced(session, one[:10])
        assert found.trace == sampled()
        assert found.label == "Conv2d 64->64 k3"
        assert found.levels_w == {"idle": 80.0}
        with pytest.raises(UsageError, match="is empty"):
            find_traced(session, "")
        with pytest.raises(UsageError, match="No reading"):
            find_traced(session, "nothing")
        for kind, origin, message, step in (
            ("cpu", "", "its card has no power sensors", "Only readings of GPUs"),
            ("cuda", "", "the database does not contain it", "farm db prune"),
            ("cuda", "berlin", "the export from berlin did not include it", "--traces"),
        ):
            session.get_one(tables.CardRow, rows.CARD).kind = kind
            session.get_one(tables.ReadingRow, other).origin = origin
            with pytest.raises(UsageError, match=f"no time series: {message}") as caught:
                find_traced(session, other)
            assert step in caught.value.next_step
