"""The audit of a soak: what was submitted against the database, the events of its items, and what the cards executed.

It reads files and SQL only and uses none of the farm's code. Its sources are independent of each other:

- `jobs.jsonl`: the subjects of each job, recorded before they were submitted;
- the tables item, reading, verdict and job at the end;
- the table soak_event: a trigger of the database (`EVENTS`) records each change of an item's state, token or reading;
- `host*/executions.log`: the processes of the cards record the begin and end of each measurement (`in_hosts`).

    python -m benchmarks.soak --folder FOLDER --audit
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
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
#: A card's process and the database read the same clock; a claim is recorded before its answer arrives.
TOLERANCE_S = 0.01
EXAMPLES = 5


@dataclass
class Audit:
    """The result: `wrong` has the checks that found something (there must be none), `facts` the figures."""

    checks: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, list[str]]:
        return {name: self.examples[name] for name, number in self.checks.items() if number}

    def none(self, name: str, found: Iterator[Any]) -> None:
        """There must be none of these."""
        examples = [str(one) for one in found]
        self.checks[name], self.examples[name] = len(examples), examples[:EXAMPLES]


@dataclass
class Submission:
    purpose: str
    subjects: dict[str, str]  # subject -> "" or the behaviour of a bad item
    job: str = ""


def audit(connection: Any, folder: Path) -> Audit:
    """Audit an ended soak. `connection`: a psycopg connection to its database."""

    def rows(query: str) -> list[dict[str, Any]]:
        cursor = connection.execute(query)
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    items = rows("SELECT id, job_id, subject_id, card_id, state, attempts, repeated, reading_id, reason FROM item")
    readings = rows("SELECT id, subject_id, card_id, time_us, power_w, energy_mj, created_at_s FROM reading")
    jobs = {job["id"]: job for job in rows("SELECT id, state FROM job")}
    verdicts = Counter(row["job_id"] for row in rows("SELECT job_id FROM verdict"))
    events = rows("SELECT * FROM soak_event ORDER BY number")
    submissions = _submissions(folder)
    executions = _executions(folder)

    found = Audit()
    _check_items(found, submissions, items, jobs, verdicts)
    _check_readings(found, submissions, items, readings, executions)
    _check_events(found, items, events)
    _check_executions(found, items, events, executions)
    ends = sum(len(times) for (_, _, what), times in executions.items() if what == "end")
    begins = sum(len(times) for (_, _, what), times in executions.items() if what == "begin")
    found.facts |= {
        "jobs": len(jobs),
        "cancelled_jobs": sum(job["state"] == "cancelled" for job in jobs.values()),
        "items": len(items),
        "items_by_state": dict(Counter(item["state"] for item in items)),
        "bad_items": sum(bool(how) for one in submissions for how in one.subjects.values()),
        "readings": len(readings),
        "measurements_begun": begins,
        "measurements_ended": ends,
        "items_begun_again": sum(item["attempts"] > 1 for item in items),
        "late_results_refused": sum(item["repeated"] for item in items),
        "events": len(events),
    }
    return found


def _submissions(folder: Path) -> list[Submission]:
    found: dict[int, Submission] = {}
    for line in (folder / "jobs.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "subjects" in record:
            found[record["submission"]] = Submission(record["purpose"], record["subjects"])
        else:
            found[record["submission"]].job = record["job"]
    return list(found.values())


def _executions(folder: Path) -> dict[tuple[str, str, str], list[float]]:
    """(subject, card, "begin" or "end") -> sorted times."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for file in folder.glob("host*/executions.log"):
        for line in file.read_text().splitlines():
            at_s, card, subject, what = line.split()
            found[subject, card, what].append(float(at_s))
    return {key: sorted(times) for key, times in found.items()}


def _check_items(
    found: Audit,
    submissions: list[Submission],
    items: list[dict[str, Any]],
    jobs: dict[str, dict[str, Any]],
    verdicts: Counter[str],
) -> None:
    of_subject = defaultdict(list)
    for item in items:
        of_subject[item["subject_id"]].append(item)
    submitted = {subject: (one, how) for one in submissions for subject, how in one.subjects.items()}
    accepted = []
    for one in submissions:
        # A connection may have ended at the commit: the database knows the job, and the submitter does not.
        known = {item["job_id"] for subject in one.subjects for item in of_subject[subject]}
        accepted += [(one, known)] if one.job or known else []
    found.none(
        "jobs divided, or other than submitted",
        ((one.job, known) for one, known in accepted if len(known) != 1 or (one.job and {one.job} != known)),
    )
    found.none(
        "items lost: submitted and not in the database",
        (subject for one, _ in accepted for subject in one.subjects if not of_subject[subject]),
    )
    found.none(
        "items doubled, or not submitted",
        (subject for subject, its in of_subject.items() if len(its) != 1 or subject not in submitted),
    )
    found.none("items open at the end", (item["id"] for item in items if item["state"] not in CLOSED))
    ends = {job: ("done", "cancelled") if row["state"] == "cancelled" else ("done",) for job, row in jobs.items()}
    good = [item for item in items if not submitted.get(item["subject_id"], (None, ""))[1]]
    bad = [item for item in items if submitted.get(item["subject_id"], (None, ""))[1]]
    found.none(
        "good items lost: they did not end as done",
        ((item["id"], item["state"], item["reason"]) for item in good if item["state"] not in ends[item["job_id"]]),
    )
    found.none(
        "bad items that did not end as failed",
        (
            (item["id"], item["state"])
            for item in bad
            if item["state"] not in {"failed", *ends[item["job_id"]]} - {"done"}
        ),
    )
    purposes = {job: one.purpose for one, known in accepted for job in known}
    found.none(
        "jobs that did not end as they should",
        (
            (job, row["state"])
            for job, row in jobs.items()
            if row["state"] != "done" and (row["state"], purposes.get(job)) != ("cancelled", "cancelled")
        ),
    )
    found.none(
        "jobs without exactly one verdict",
        (job for job, row in jobs.items() if row["state"] != "cancelled" and verdicts[job] != 1),
    )


def _check_readings(
    found: Audit,
    submissions: list[Submission],
    items: list[dict[str, Any]],
    readings: list[dict[str, Any]],
    executions: dict[tuple[str, str, str], list[float]],
) -> None:
    by_id = {reading["id"]: reading for reading in readings}
    of_subject = Counter(reading["subject_id"] for reading in readings)
    accepted = {item["reading_id"] for item in items}
    bad = {subject for one in submissions for subject, how in one.subjects.items() if how}
    found.none(
        "items done without a reading of their subject",
        (
            item["id"]
            for item in items
            if item["state"] == "done" and by_id.get(item["reading_id"], {}).get("subject_id") != item["subject_id"]
        ),
    )
    found.none("subjects with two readings", (subject for subject, number in of_subject.items() if number > 1))
    found.none("readings without an item", (one["id"] for one in readings if one["id"] not in accepted))
    found.none("readings of bad items", (one["id"] for one in readings if one["subject_id"] in bad))
    found.none("readings of another subject's value", (one["id"] for one in readings if not _is_of_its_subject(one)))
    found.none(
        "readings without a measurement on their card before",
        (
            one["id"]
            for one in readings
            if (executions.get((one["subject_id"], one["card_id"], "end")) or [math.inf])[0]
            > one["created_at_s"] + TOLERANCE_S
        ),
    )


def _is_of_its_subject(reading: dict[str, Any]) -> bool:
    """A simulated card computes time and power from the id of the subject."""

    def fraction(word: str) -> float:
        digest = hashlib.sha256(f"{word} {reading['subject_id']}".encode()).digest()
        return int.from_bytes(digest[:6], "big") / 2**48

    time_us, power_w = 10.0 * 100.0 ** fraction("time"), 150.0 + 500.0 * fraction("power")
    expected = {"time_us": time_us, "power_w": power_w, "energy_mj": time_us * power_w * 1e-3}
    return all(math.isclose(reading[name], value, rel_tol=1e-9) for name, value in expected.items())


def _claims(event: dict[str, Any]) -> bool:
    return bool(event["state"] == "claimed" and event["token"] and event["token"] != event["old_token"])


def _check_events(found: Audit, items: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
    claims, returned, accepted = Counter[int](), Counter[int](), Counter[int]()
    for event in events:
        claims[event["item_id"]] += _claims(event)
        returned[event["item_id"]] += max(0, event["old_attempts"] - event["attempts"])
        accepted[event["item_id"]] += bool(event["reading_id"] and event["reading_id"] != event["old_reading_id"])
    found.none(
        "items begun, or open again, after their end",
        (event["item_id"] for event in events if event["old_state"] in CLOSED and event["state"] != event["old_state"]),
    )
    found.none(
        "items with two accepted readings, or with another one than at first",
        (item for item, number in accepted.items() if number > 1),
    )
    found.none(
        "items whose attempts are not their claims without those handed back",
        (item["id"] for item in items if item["attempts"] != claims[item["id"]] - returned[item["id"]]),
    )
    found.facts |= {"claims": claims.total(), "claims_handed_back": returned.total()}


def _check_executions(
    found: Audit,
    items: list[dict[str, Any]],
    events: list[dict[str, Any]],
    executions: dict[tuple[str, str, str], list[float]],
) -> None:
    """A measurement begins under a claim of its item on its card: up to any time, there are no more than claims."""
    subject_of = {item["id"]: item["subject_id"] for item in items}
    claimed_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if _claims(event):
            claimed_s[subject_of[event["item_id"]], event["card_id"]].append(event["at_s"])
    found.none(
        "measurements without a claim",
        (
            (subject, card, at_s)
            for (subject, card, what), times in executions.items()
            if what == "begin"
            for number, at_s in enumerate(times, 1)
            if bisect_right(sorted(claimed_s[subject, card]), at_s + TOLERANCE_S) < number
        ),
    )
