"""The audit of a soak: what was submitted against the database, the events of its items, and what
the cards executed.

It reads files and SQL only and uses none of the farm's code. Its sources are independent of each
other:

- `jobs.jsonl`: the subjects of each job, recorded before they were submitted;
- the tables item, reading, verdict and job at the end;
- the table soak_event: a trigger of the database (`EVENTS`) records each change of an item's state,
  token or reading;
- `host*/executions.log`: the processes of the cards record the begin and end of each measurement
  (`in_hosts`).

    python -m benchmarks.soak --folder FOLDER --audit
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

EVENTS = """
CREATE TABLE IF NOT EXISTS soak_event (
    number bigserial PRIMARY KEY, at_s double precision, item_id bigint, card_id text, old_state text, state text,
    old_token text, token text, old_attempts int, attempts int, old_reading_id text, reading_id text
);
CREATE OR REPLACE FUNCTION note_soak_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO soak_event (at_s, item_id, card_id, old_state, state, old_token, token, old_attempts, attempts,
        old_reading_id, reading_id)
    VALUES (extract(epoch FROM clock_timestamp()), new.id, new.card_id, old.state, new.state, old.token, new.token,
        old.attempts, new.attempts, old.reading_id, new.reading_id);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER soak_event AFTER UPDATE ON item FOR EACH ROW
WHEN ((old.state, old.token, old.reading_id) IS DISTINCT FROM (new.state, new.token, new.reading_id))
EXECUTE FUNCTION note_soak_event();
"""
CLOSED = ("done", "failed", "cancelled")
#: The cards' processes and the database read the same clock.
TOLERANCE_S = 0.01
EXAMPLES = 5


@dataclass
class Submission:
    purpose: str
    subjects: dict[str, str]  # subject -> "" or the behaviour of a bad item
    # "": the connection ended at the commit, so the submitter does not know whether there is a job
    job: str = ""


@dataclass
class Evidence:
    """All sources. Rows are dictionaries by column."""

    submissions: list[Submission]
    executions: dict[
        tuple[str, str, str], list[float]
    ]  # (subject, card, "begin" or "end") -> sorted times in s
    spans: dict[
        str, list[tuple[float, float, str]]
    ]  # card -> begin and end in s, subject: of each whole measurement
    items: list[dict[str, Any]]
    readings: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    verdicts: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @cached_property
    def behaviour(self) -> dict[str, str]:
        """Submitted subject -> "" or the behaviour of a bad item."""
        return {subject: how for one in self.submissions for subject, how in one.subjects.items()}

    @cached_property
    def items_of(self) -> dict[str, list[dict[str, Any]]]:
        """Subject -> its items."""
        found = defaultdict(list)
        for item in self.items:
            found[item["subject_id"]].append(item)
        return found

    @cached_property
    def cards_of(self) -> dict[str, int]:
        """Subject -> the number of cards that measure it together."""
        return {item["subject_id"]: item["cards"] for item in self.items}

    @cached_property
    def planned(self) -> list[tuple[Submission, set[str]]]:
        """The submissions that the database accepted, and the jobs of their items."""
        found = []
        for one in self.submissions:
            jobs = {
                item["job_id"]
                for subject in one.subjects
                for item in self.items_of.get(subject, ())
            }
            found += [(one, jobs)] if one.job or jobs else []
        return found

    @cached_property
    def cancelled(self) -> set[str]:
        return {job["id"] for job in self.jobs if job["state"] == "cancelled"}

    @cached_property
    def claims(self) -> list[dict[str, Any]]:
        """The events by which a worker took an item."""
        return [
            e
            for e in self.events
            if e["state"] == "claimed" and e["token"] and e["token"] != e["old_token"]
        ]


CHECKS: dict[str, Callable[[Evidence], Iterable[Any]]] = {}


def none(
    name: str,
) -> Callable[[Callable[[Evidence], Iterable[Any]]], Callable[[Evidence], Iterable[Any]]]:
    """Register a check: there must be none of what it returns."""

    def register(check: Callable[[Evidence], Iterable[Any]]) -> Callable[[Evidence], Iterable[Any]]:
        CHECKS[name] = check
        return check

    return register


# ------------------------------------------------------------------------------------------ jobs
# and items


@none("submissions that are not exactly one job")
def _not_one_job(of: Evidence) -> Iterable[Any]:
    return [
        (one.job, jobs)
        for one, jobs in of.planned
        if len(jobs) != 1 or (one.job and {one.job} != jobs)
    ]


@none("items lost: submitted and not in the database")
def _missing_items(of: Evidence) -> Iterable[Any]:
    return [
        subject for one, _ in of.planned for subject in one.subjects if subject not in of.items_of
    ]


@none("items doubled, or not submitted")
def _unknown_items(of: Evidence) -> Iterable[Any]:
    return [
        subject
        for subject, its in of.items_of.items()
        if len(its) != 1 or subject not in of.behaviour
    ]


@none("items open at the end")
def _open_items(of: Evidence) -> Iterable[Any]:
    return [item["id"] for item in of.items if item["state"] not in CLOSED]


@none("good items that did not end as done")
def _good_items(of: Evidence) -> Iterable[Any]:
    for item in of.items:
        ends = ("done", "cancelled") if item["job_id"] in of.cancelled else ("done",)
        if not of.behaviour.get(item["subject_id"]) and item["state"] not in ends:
            yield item["id"], item["state"], item["reason"]


@none("bad items that did not end as failed")
def _bad_items(of: Evidence) -> Iterable[Any]:
    bad = [item for item in of.items if of.behaviour.get(item["subject_id"])]
    return [(item["id"], item["state"]) for item in bad if item["state"] != "failed"]


@none("jobs that are not done, and cancelled jobs that nobody cancelled")
def _job_ends(of: Evidence) -> Iterable[Any]:
    may_be_cancelled = {
        job for one, jobs in of.planned if one.purpose == "cancelled" for job in jobs
    }
    for job in of.jobs:
        if job["state"] != "done" and not (
            job["id"] in of.cancelled and job["id"] in may_be_cancelled
        ):
            yield job["id"], job["state"]


@none("jobs without exactly one verdict")
def _verdicts(of: Evidence) -> Iterable[Any]:
    found = Counter(verdict["job_id"] for verdict in of.verdicts)
    return [job["id"] for job in of.jobs if job["id"] not in of.cancelled and found[job["id"]] != 1]


# ------------------------------------------------------------------------------------------------
# readings


@none("items done without a reading of their subject")
def _without_reading(of: Evidence) -> Iterable[Any]:
    subject_of = {reading["id"]: reading["subject_id"] for reading in of.readings}
    done = [item for item in of.items if item["state"] == "done"]
    return [item["id"] for item in done if subject_of.get(item["reading_id"]) != item["subject_id"]]


@none("subjects with two readings")
def _two_readings(of: Evidence) -> Iterable[Any]:
    found = Counter(reading["subject_id"] for reading in of.readings)
    return [subject for subject, number in found.items() if number > 1]


@none("readings without an item")
def _stray_readings(of: Evidence) -> Iterable[Any]:
    accepted = {item["reading_id"] for item in of.items}
    return [reading["id"] for reading in of.readings if reading["id"] not in accepted]


@none("readings of bad items")
def _bad_readings(of: Evidence) -> Iterable[Any]:
    return [reading["id"] for reading in of.readings if of.behaviour.get(reading["subject_id"])]


@none("readings with the value of another subject")
def _wrong_values(of: Evidence) -> Iterable[Any]:
    """A simulated card computes time and power from the id of the subject."""

    def fraction(word: str, subject: str) -> float:
        digest = hashlib.sha256(f"{word} {subject}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    for reading in of.readings:
        subject = reading["subject_id"]
        time_us = 10.0 * 100.0 ** fraction("time", subject)
        # A reading of several cards has the time of one of them, and the power of all.
        power_w = of.cards_of.get(subject, 1) * (150.0 + 500.0 * fraction("power", subject))
        expected = {"time_us": time_us, "power_w": power_w, "energy_mj": time_us * power_w * 1e-3}
        if not all(
            math.isclose(reading[name], value, rel_tol=1e-9) for name, value in expected.items()
        ):
            yield reading["id"]


# ---------------------------------------------------------------------------------- events and
# executions


@none("items begun or opened after their end")
def _begun_after_end(of: Evidence) -> Iterable[Any]:
    return [
        e["item_id"] for e in of.events if e["old_state"] in CLOSED and e["state"] != e["old_state"]
    ]


@none("items whose reading was accepted twice")
def _accepted_twice(of: Evidence) -> Iterable[Any]:
    changed = (e for e in of.events if e["reading_id"] and e["reading_id"] != e["old_reading_id"])
    return [item for item, number in Counter(e["item_id"] for e in changed).items() if number > 1]


@none("items whose number of attempts is not their claims less those handed back")
def _attempts(of: Evidence) -> Iterable[Any]:
    attempts = Counter(e["item_id"] for e in of.claims)
    for event in of.events:
        attempts[event["item_id"]] -= max(0, event["old_attempts"] - event["attempts"])
    return [item["id"] for item in of.items if item["attempts"] != attempts[item["id"]]]


@none("measurements without a claim of their item on their card")
def _without_claim(of: Evidence) -> Iterable[Any]:
    """Up to any time, a card has begun at most as many measurements of a subject as there were
    claims.

    The claim of an item on several cards is one of each card of its host.
    """
    subject_of = {item["id"]: item["subject_id"] for item in of.items}
    claimed_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in of.claims:
        subject = subject_of.get(
            event["item_id"], ""
        )  # "": the item is missing, which is another check
        claimed_s[subject, _place(of, subject, event["card_id"])].append(event["at_s"])
    for (subject, card, what), times in of.executions.items():
        claims_s = sorted(claimed_s[subject, _place(of, subject, card)])
        for number, begun_s in enumerate(times, 1):
            if what == "begin" and bisect_right(claims_s, begun_s + TOLERANCE_S) < number:
                yield subject, card, begun_s


def _place(of: Evidence, subject: str, card: str) -> str:
    """The card, or the host of the cards that measure a subject together."""
    return card if of.cards_of.get(subject, 1) == 1 else card.rpartition("-")[0]


@none("readings without a measurement that ended on their card before")
def _without_measurement(of: Evidence) -> Iterable[Any]:
    accepted_s: dict[
        str, float
    ] = {}  # by the clock of the trigger: faults set back the clock of the farm's database
    for event in of.events:
        if event["reading_id"]:
            accepted_s.setdefault(event["reading_id"], event["at_s"])
    for reading in of.readings:
        ended_s = of.executions.get((reading["subject_id"], reading["card_id"], "end"), [math.inf])
        if ended_s[0] > accepted_s.get(reading["id"], -math.inf) + TOLERANCE_S:
            yield reading["id"]


@none("measurements of a card that overlap")
def _overlaps(of: Evidence) -> Iterable[Any]:
    for card, spans in of.spans.items():
        before_s = -math.inf
        for begin_s, end_s, subject in sorted(spans):
            if begin_s < before_s - TOLERANCE_S:
                yield card, subject, begin_s
            before_s = max(before_s, end_s)


# -----------------------------------------------------------------------------------------------
# the audit


@dataclass(frozen=True)
class Audit:
    """The result: check -> how many it found (all must be 0), and the first of them; and the
    figures of the soak.
    """

    checks: dict[str, int]
    wrong: dict[str, list[str]]
    figures: dict[str, Any]


def audit(connection: Any, folder: Path) -> Audit:
    """Audit an ended soak. `connection`: a psycopg connection to its database."""
    of = collect(connection, folder)
    found = {name: list(check(of)) for name, check in CHECKS.items()}
    return Audit(
        {name: len(problems) for name, problems in found.items()},
        {
            name: [str(one) for one in problems[:EXAMPLES]]
            for name, problems in found.items()
            if problems
        },
        _figures(of),
    )


def collect(connection: Any, folder: Path) -> Evidence:
    def rows(query: str) -> list[dict[str, Any]]:
        cursor = connection.execute(query)
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    return Evidence(
        _submissions(folder / "jobs.jsonl"),
        *_executions(folder),
        items=rows(
            "SELECT id, job_id, subject_id, card_id, cards, state, attempts, repeated, "
            "reading_id, reason FROM item"
        ),
        readings=rows("SELECT id, subject_id, card_id, time_us, power_w, energy_mj FROM reading"),
        jobs=rows("SELECT id, state FROM job"),
        verdicts=rows("SELECT job_id FROM verdict"),
        events=rows("SELECT * FROM soak_event ORDER BY number"),
    )


def _submissions(file: Path) -> list[Submission]:
    found: dict[int, Submission] = {}
    for line in file.read_text().splitlines():
        record = json.loads(line)
        if "subjects" in record:
            found[record["submission"]] = Submission(record["purpose"], record["subjects"])
        else:
            found[record["submission"]].job = record["job"]
    return list(found.values())


def _executions(
    folder: Path,
) -> tuple[dict[tuple[str, str, str], list[float]], dict[str, list[tuple[float, float, str]]]]:
    """Return `Evidence.executions` and `Evidence.spans`."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    spans: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for file in folder.glob("host*/executions.log"):
        begun: dict[tuple[str, str, str], float] = {}
        for line in file.read_text().splitlines():
            at_s, process, card, subject, what = line.split()
            found[subject, card, what].append(float(at_s))
            if what == "begin":
                begun[process, card, subject] = float(at_s)
            else:
                spans[card].append((begun[process, card, subject], float(at_s), subject))
    return {key: sorted(times) for key, times in found.items()}, spans


def _figures(of: Evidence) -> dict[str, Any]:
    executed = Counter[str]()
    for (_, _, what), times in of.executions.items():
        executed[what] += len(times)
    return {
        "jobs": len(of.jobs),
        "jobs_cancelled": len(of.cancelled),
        "items": len(of.items),
        "items_by_state": dict(Counter(item["state"] for item in of.items)),
        "items_on_several_cards": sum(item["cards"] > 1 for item in of.items),
        "bad_items": sum(bool(of.behaviour.get(item["subject_id"])) for item in of.items),
        "readings": len(of.readings),
        "claims": len(of.claims),
        "measurements_begun": executed["begin"],
        "measurements_ended": executed["end"],
        "items_begun_again": sum(item["attempts"] > 1 for item in of.items),
        "late_results_refused": sum(item["repeated"] for item in of.items),
    }
