"""A check of a real NVIDIA card beside a process that takes a part of its bandwidth. About four minutes
of a card; skipped without one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlmodel import select

from farm.addons.check.card_check import LEAST_EARLIER, card_check
from farm.addons.check.figures import check_figures
from farm.store.database import Database
from farm.store.tables import ReadingRow
from farm.types.protocol import Protocol
from tests.gpu import NEEDS_A_CARD

pytestmark = NEEDS_A_CARD

CHECKS = 2  # without a disturbance
#: Copies so much memory, then sleeps for 19 times as long: 5 % of the time of the card's memory.
DISTURBANCE = """
import time
import torch
source = torch.zeros(2**28, dtype=torch.uint8, device="cuda")
target = torch.empty_like(source)
print("ready", flush=True)
while True:
    began_s = time.perf_counter()
    for _ in range(20):
        target.copy_(source)
    torch.cuda.synchronize()
    time.sleep(19 * (time.perf_counter() - began_s))
"""


@contextlib.contextmanager
def disturbed() -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-c", DISTURBANCE], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait()


def run_check(state_dir: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "cards", "check", "--card", "0", "--json"],
        env={**os.environ, "FARM_STATE_DIR": str(state_dir), **settings},
        capture_output=True,
        text=True,
    )


def check(state_dir: Path, **settings: str) -> dict[str, Any]:
    done = run_check(state_dir, **settings)
    assert done.returncode in (0, 5), done.stderr
    (result,) = json.loads(done.stdout)["checks"]
    return result


def test_a_process_that_takes_bandwidth_is_named_and_found_by_the_bandwidth(tmp_path: Path) -> None:
    results = [check(tmp_path) for _ in range(CHECKS)]
    assert all(not figure["reason"] for figure in results[0]["figures"]), results[0]
    with disturbed():
        refused = run_check(tmp_path)
        assert refused.returncode == 4
        assert "FARM_ALLOW_SHARED" in refused.stderr
        result = check(tmp_path, FARM_ALLOW_SHARED="1")
    figures = {figure["figure"]: figure for figure in result["figures"]}
    assert "shared" in figures["copy"]["reason"]

    # Without the flag, the figure alone shows it. The undisturbed readings count several times:
    # a judgement needs five.
    usual = Protocol()
    (copy,) = (figure for figure in check_figures() if figure.name == "copy")
    with contextlib.closing(Database(f"sqlite:///{tmp_path / 'farm.db'}")) as database:
        with database.write() as session:
            operator_id, protocol_id = copy.subject(usual)
            of_copy = select(ReadingRow).where(
                ReadingRow.subject_id == operator_id, ReadingRow.protocol_id == protocol_id
            )
            *before, last = sorted(session.exec(of_copy), key=lambda row: row.created_at_s)
            last.flags = [flag for flag in last.flags if flag != "shared"]
            for number in range(LEAST_EARLIER):
                columns = before[number % CHECKS].model_dump()
                session.add(ReadingRow(**columns | {"id": uuid.uuid4().hex}))
        with database.read() as session:
            judged = card_check(session, result["job"])
    (of_copy_time,) = (
        figure for figure in judged.figures if (figure.name, figure.quantity) == ("copy", "time")
    )
    assert of_copy_time.is_outside, of_copy_time
