"""The regular checks of the cards of a host (`farm worker --check-every`), in its control worker.

A thread looks every minute which cards are due and which checks have ended. If there is something
to do, a short-lived process plans the new checks, which imports torch, and judges those that have
ended (`python -m tasks.card_checks`). The outcomes are metrics (`tasks.metrics`)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlmodel import col, select

from farm import extensions
from farm.errors import FarmError
from farm.jobs import card_checks, cards
from farm.jobs.card_checks import JudgedCheck
from farm.jobs.outage import Outage
from farm.settings import Settings, die_with_parent, environment_of_children, settings
from farm.store.database import Database, read_clock_s
from farm.store.tables import CardRow

log = logging.getLogger("farm.control")

#: The longest pause between two passes. Unit: s.
PASS_EVERY_S = 60.0
#: Outcomes of checks that began in so many periods are shown: a card that is not checked any more
#: has no outcome.
SHOWN_PERIODS = 2
#: To plan and to judge the checks of a host. Unit: s.
TIMEOUT_S = 600.0


@dataclass
class RegularChecks:
    """Plans the checks of some cards of this host, and knows the outcomes of the newest ones."""

    current: Settings
    card_ids: Sequence[str]
    database: Database
    _judged: dict[str, JudgedCheck] = field(default_factory=dict, init=False)
    _began_s: float | None = field(default=None, init=False)

    def outcomes(self) -> list[JudgedCheck]:
        """The newest check of each card and link that has ended."""
        return list(self._judged.values())

    def run(self, ended: threading.Event) -> None:
        """Make passes until the event is set."""
        outage = Outage(log, "No card is checked")
        pause_s = min(PASS_EVERY_S, self.current.check_every_s / 10)
        while not ended.wait(pause_s):
            try:
                self.make_pass()
                outage.over()
            except Exception as error:  # the next pass tries again
                outage.note(error)

    def make_pass(self) -> None:
        """Plan the checks that are due, and judge those that have ended since the last pass."""
        every_s = self.current.check_every_s
        with self.database.read() as session:
            if self._began_s is None:
                self._began_s = read_clock_s(session)
            due = [card.id for card in card_checks.due_cards(session, self.card_ids, every_s)]
            newest = card_checks.newest_ended(session, self.card_ids, SHOWN_PERIODS * every_s)
        new = [job_id for job_id in newest if job_id not in self._judged]
        judged = _plan_and_judge(due, new) if due or new else []
        for check in judged:
            log.info(
                "Check %s of %s: %s", check.job_id, " and ".join(check.card_ids), check.outcome
            )
            self._quarantine(check)
        outcomes = {**self._judged, **{check.job_id: check for check in judged}}
        self._judged = {job_id: outcomes[job_id] for job_id in newest if job_id in outcomes}

    def _quarantine(self, check: JudgedCheck) -> None:
        """Put a card that is outside in quarantine, if the settings say so.

        Not for a check that ended before this process began: a person may have released the card
        since. Not for a link: it is unknown which of its cards is slow."""
        is_new = self._began_s is not None and check.ended_at_s >= self._began_s
        is_meant = self.current.check_quarantine and check.outcome == "outside"
        if is_new and is_meant and check.checked == "card":
            reason = (
                f"A card check found it outside: {', '.join(check.outside)} "
                f"(`farm cards check --job {check.job_id}`)."
            )
            cards.quarantine(self.database, check.card_ids[0], reason)


def _plan_and_judge(due: Sequence[str], ended: Sequence[str]) -> list[JudgedCheck]:
    """Let a process of its own plan checks of the cards ``due``, and judge the jobs ``ended``."""
    done = subprocess.run(
        [sys.executable, "-m", "tasks.card_checks", "--due", *due, "--ended", *ended],
        env=environment_of_children(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    )
    return [JudgedCheck(**_with_tuples(check)) for check in json.loads(done.stdout)]


def _with_tuples(check: dict[str, Any]) -> dict[str, Any]:
    return {
        **check,
        "card_ids": tuple(check["card_ids"]),
        "outside": tuple(check["outside"]),
    }


def main() -> int:
    """Plan checks, and print the judged ones as JSON. Returns the exit code."""
    try:
        judged = _planned_and_judged()
    except FarmError as error:
        log.error("%s %s", error.message, error.next_step)
        return error.exit_code
    sys.stdout.write(json.dumps([dataclasses.asdict(check) for check in judged]))
    return 0


def _planned_and_judged() -> list[JudgedCheck]:
    from tasks.submissions import submit  # here, so that the control worker starts faster

    parser = argparse.ArgumentParser(prog="python -m tasks.card_checks")
    parser.add_argument("--due", nargs="*", default=[])
    parser.add_argument("--ended", nargs="*", default=[])
    options = parser.parse_args()
    die_with_parent()
    checks = extensions.card_checks("The setting check_every_s")
    with contextlib.closing(Database(settings().database)) as database:
        with database.read() as session:
            due = session.exec(select(CardRow).where(col(CardRow.id).in_(options.due))).all()
            requests = checks.requests(session, due)
        for resolved in requests:
            with contextlib.suppress(FarmError):  # a card may have stopped meanwhile
                submit(database, resolved)
        return [checks.judged(database, job_id) for job_id in options.ended]


if __name__ == "__main__":
    sys.exit(main())
