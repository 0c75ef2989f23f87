"""Compilations ahead of an item's turn: real processes that stand for the compiler
(`tests.jobs.compile_process`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import update

from farm.benchmark_process.client import BenchmarkProcess
from farm.devices.quiet import free_slot, quiet
from farm.errors import Unmeasurable
from farm.jobs import groups, items, jobs
from farm.jobs.compile_ahead import CompileAhead
from farm.jobs.item_driver import ItemDriver
from farm.jobs.items import Claim
from farm.settings import settings
from farm.store.database import Database
from farm.store.tables import Item
from tests.clock import Clock
from tests.jobs.test_compile_items import compile_item, plan_compiled
from tests.planned import claim, plan, register

DEADLINE_S = 120.0  # reached only if the event never happens


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILE_TEST", str(tmp_path))
    monkeypatch.setenv("FARM_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setenv("FARM_COMPILE_PROCESSES", "2")
    monkeypatch.setattr("farm.jobs.compile_ahead.LOOK_EVERY_S", 0.0)
    settings.cache_clear()
    return tmp_path


class Ahead(CompileAhead):
    def __init__(self, database: Database, card_id: str = "SIM-0") -> None:
        self.published: list[int] = []
        super().__init__(database, card_id, self.keep, "tests.jobs.compile_process")

    def keep(self, item_ids: Iterable[int]) -> None:
        self.published += item_ids


@pytest.fixture
def ahead(database: Database) -> Iterator[Ahead]:
    register(database, 0)
    started = Ahead(database)
    yield started
    started.close()


def until(happened: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def begun(folder: Path) -> dict[int, int]:
    """Batch of each variant that a process has begun to compile -> the id of the process."""
    file = folder / "begun"
    lines = file.read_text().splitlines() if file.exists() else []
    return {int(batch): int(pid) for batch, _, pid in (line.partition(" ") for line in lines)}


def claimed(database: Database, batch: int) -> Claim:
    """Plan a compiled model and claim its item."""
    return taken(database, planned(database, batch))


def planned(database: Database, batch: int) -> str:
    return plan_compiled(database, ["SIM-0"], batch)


def taken(database: Database, job_id: str) -> Claim:
    answer = claim(database, compile_item(database, job_id))
    assert isinstance(answer, Claim)
    return answer


def item_that_is_compiled_ahead(ahead: Ahead, database: Database, folder: Path) -> Claim:
    """Claim an item whose model another process has begun to compile."""
    coming = planned(database, 2)
    assert ahead.turn_of(claimed(database, 7))
    until(lambda: begun(folder))
    return taken(database, coming)


def test_the_present_item_compiles_itself_and_coming_ones_are_compiled_ahead(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    coming = planned(database, 1)
    assert ahead.turn_of(claimed(database, 7))
    until(lambda: not ahead._threads)
    assert begun(folder).keys() == {1}
    assert ahead.turn_of(taken(database, coming))
    assert not ahead.published


def test_a_job_that_is_submitted_while_an_item_compiles_its_model_is_compiled_ahead(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    assert ahead.turn_of(claimed(database, 7))
    assert not begun(folder)
    planned(database, 1)
    until(lambda: begun(folder).keys() == {1})


def test_a_turn_that_raises_ends(ahead: Ahead, database: Database) -> None:
    """The guard of the compilations waits for the end of the turn."""
    item = claimed(database, 7)
    assert ahead.turn_of(item)
    assert ahead._guard_thread is not None
    driver = ItemDriver("SIM-0", "holder", database, BenchmarkProcess("SIM-0"), ahead=ahead)
    with pytest.raises(Unmeasurable), driver._turn(item):
        raise Unmeasurable("raised", "an error of the measurement")
    until(lambda: ahead._guard_thread is None)


def test_an_item_whose_model_is_being_compiled_is_put_off_and_published_at_the_end(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    late = item_that_is_compiled_ahead(ahead, database, folder)
    assert not ahead.turn_of(late)
    (folder / "go").touch()
    until(lambda: ahead.published)
    assert ahead.published == [late.item_id]
    assert ahead.turn_of(late)


@pytest.mark.parametrize(("batch", "said"), [(4, "no shape is known"), (5, "out_of_memory")])
def test_a_compiler_that_refuses_or_needs_more_memory_leaves_the_item_its_turn(
    ahead: Ahead,
    database: Database,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    batch: int,
    said: str,
) -> None:
    coming, after = planned(database, batch), planned(database, 1)
    assert ahead.turn_of(claimed(database, 7))
    until(lambda: begun(folder).keys() == {1, batch})
    until(lambda: not ahead._threads)
    assert "is compiled in its turn" in caplog.text
    assert said in caplog.text
    assert ahead.turn_of(taken(database, coming))
    assert ahead.turn_of(taken(database, after))


def test_a_compiler_that_crashes_fails_its_item_and_no_other(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    coming, after = planned(database, 3), planned(database, 1)
    assert ahead.turn_of(claimed(database, 7))
    until(lambda: begun(folder).keys() == {1, 3})
    until(lambda: not ahead._threads)
    crashed = taken(database, coming)
    with pytest.raises(Unmeasurable, match="ended ahead of its turn") as raised:
        ahead.turn_of(crashed)
    assert raised.value.reason == "crashed"
    assert "FARM_COMPILE_PROCESSES=0" in raised.value.next_step
    assert ahead.turn_of(taken(database, after))


def test_a_compilation_that_takes_too_long_fails_its_item(
    ahead: Ahead, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_ITEM_TIMEOUT_S", "0.2")
    settings.cache_clear()
    coming = planned(database, 2)
    assert ahead.turn_of(claimed(database, 7))
    until(lambda: not ahead._threads)
    with pytest.raises(Unmeasurable, match=r"It took longer than 0\.2 s") as raised:
        ahead.turn_of(taken(database, coming))
    assert raised.value.reason == "hung"


def test_an_item_that_is_put_off_is_published_once_and_not_by_others(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    late = item_that_is_compiled_ahead(ahead, database, folder)
    assert not ahead.turn_of(late)
    items.put_off(database, late, groups.COMPILING, counted=False, reason=groups.HOST_BUSY_NOTED)
    assert groups.due(database, "") == [], "its worker publishes it"
    (folder / "go").touch()
    until(lambda: not ahead._guard_thread)
    assert ahead.published == [late.item_id]


def test_an_item_that_its_worker_has_lost_is_published_by_others(
    any_database: Database, clock: Clock
) -> None:
    register(any_database, 0)
    late = claimed(any_database, 2)
    put_off = {"counted": False, "reason": groups.HOST_BUSY_NOTED}
    items.put_off(any_database, late, groups.COMPILING, **put_off)
    assert groups.due(any_database, "") == []
    clock.forward(groups.COMPILING_LOST_AFTER_S + 1)
    register(any_database, 0)
    assert groups.due(any_database, "") == [late.item_id]


def test_compilations_pause_while_a_time_that_depends_on_the_host_is_measured(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    planned(database, 2)
    assert ahead.turn_of(claimed(database, 7))
    work = folder / "work"
    until(lambda: work.exists() and work.stat().st_size)
    with quiet(settings().lock_dir):
        before = work.stat().st_size
        status = psutil.Process(begun(folder)[2]).status()
        for _ in range(20):
            time.sleep(0.01)
        assert work.stat().st_size == before
        assert status == psutil.STATUS_STOPPED
    until(lambda: work.stat().st_size > before)


def test_a_cancelled_job_ends_its_compilation(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    coming, other = planned(database, 2), planned(database, 7)
    assert ahead.turn_of(taken(database, other))
    until(lambda: begun(folder))
    jobs.cancel(database, coming)
    until(lambda: not ahead._threads)
    assert not psutil.pid_exists(begun(folder)[2])


def test_the_end_of_the_worker_ends_its_compilations_even_paused_ones(
    ahead: Ahead, database: Database, folder: Path
) -> None:
    planned(database, 2)
    assert ahead.turn_of(claimed(database, 7))
    until(lambda: begun(folder))
    with quiet(settings().lock_dir):
        ahead.close()
    assert not psutil.pid_exists(begun(folder)[2])
    slots = [free_slot(settings().lock_dir, 2) for _ in range(2)]
    assert all(slots)
    for slot in slots:
        assert slot is not None
        slot.close()


def test_a_model_whose_compilation_has_not_begun_is_compiled_in_its_turn_if_nothing_else_waits(
    ahead: Ahead, database: Database
) -> None:
    slots = [free_slot(settings().lock_dir, 2) for _ in range(2)]  # all places of the host
    coming = planned(database, 1)
    assert ahead.turn_of(claimed(database, 7))
    late = taken(database, coming)
    waiting = plan(database, ["SIM-0"])
    with database.write() as session:
        session.execute(update(Item).where(Item.job_id == waiting).values(published_at_s=1.0))
    assert not ahead.turn_of(late)
    assert not ahead.published
    jobs.cancel(database, waiting)
    until(lambda: ahead.published)
    assert ahead.published == [late.item_id]
    assert ahead.turn_of(late)
    for slot in slots:
        assert slot is not None
        slot.close()


def test_two_workers_of_a_host_share_its_places(database: Database, folder: Path) -> None:
    register(database, 0, 1)
    first, second = Ahead(database), Ahead(database, "SIM-1")
    for batch in (2, 12, 22):
        plan_compiled(database, ["SIM-0"], batch)
    plan_compiled(database, ["SIM-1"], 1)
    assert first.turn_of(claimed(database, 7))
    until(lambda: begun(folder))
    assert len(first._threads) == 1, "its share is one of two places"
    other = claim(database, compile_item(database, plan_compiled(database, ["SIM-1"], 7)))
    assert second.turn_of(other)
    until(lambda: 1 in begun(folder))
    first.close()
    second.close()


def test_no_model_is_compiled_ahead_if_the_setting_is_zero(
    database: Database, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(database, 0)
    monkeypatch.setenv("FARM_COMPILE_PROCESSES", "0")
    settings.cache_clear()
    planned(database, 1)
    ahead = Ahead(database)
    assert ahead.turn_of(claimed(database, 7))
    assert not ahead._threads
    assert not begun(folder)
