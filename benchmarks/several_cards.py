"""Tables of measurements on several cards, from the database of a farm: sum against whole, and
collectives over sizes.

    FARM_DATABASE_URL=sqlite:///several_cards.db farm run -f examples/several_cards.yml
    python benchmarks/several_cards.py several_cards.db

A row for the newest finished job of each variant on several cards: the time of the slowest rank and
the energy of all cards, with the gap of the plain sum, and the communication that the report
separates. A row for the newest reading of each collective: its bus bandwidth, and the share of the
link's peak."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

from sqlmodel import col, select

from farm.addons.predict.collectives import Size
from farm.report.report import Report, build
from farm.store.database import Database
from farm.store.tables import Job, JobState, Operator, ReadingRow
from farm.types.details import Details
from farm.types.format import ENERGY, TIME, count_of, gap, quantity
from farm.types.request import Request


def main(path: Path) -> None:
    database = Database(f"sqlite:///{path}")
    with database.read() as session:
        jobs = (
            select(Job)
            .where(Job.state == JobState.DONE, Job.kind == "model")
            .order_by(col(Job.created_at_s))
        )
        newest = {job.request_id: job for job in session.exec(jobs)}
        built = [build(session, job.id) for job in newest.values()]
        variants = [one for one in built if Request.from_json(one.request).variant.cards > 1]  # type: ignore[union-attr]
        readings = (
            select(ReadingRow, Operator)
            .join(Operator, col(Operator.id) == col(ReadingRow.subject_id))
            .where(Operator.kind == "collective")
            .order_by(col(ReadingRow.created_at_s))
        )
        collectives = {
            operator.id: (reading, operator) for reading, operator in session.exec(readings)
        }
    for lines in (
        _variants(variants),
        _collectives(list(collectives.values())),
        _overlaps(list(collectives.values())),
    ):
        print("\n".join(lines), end="\n\n")


def _variants(reports: list[Report]) -> list[str]:
    heads = (
        "variant | job | whole | gap in time | energy | gap in energy | ranks | collectives alone "
        "| exposed | flags"
    )
    lines = [f"| {heads} |", "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --- |"]
    for report in reports:
        verdict = report.verdict
        energy, communication = (
            verdict.energy,
            (verdict.time.gap and verdict.communication_us) or (None, None),
        )
        cells = [
            report.title,
            report.job_id,
            quantity(verdict.time.whole.value if verdict.time.whole else None, TIME),
            gap(verdict.time.gap),
            quantity(energy.whole.value if energy and energy.whole else None, ENERGY),
            gap(energy.gap if energy else None),
            ", ".join(quantity(rank.time_us.value, TIME) for rank in report.ranks) or "-",
            *(quantity(us, TIME) for us in communication),
            ", ".join(f"{name} {number}" for name, number in verdict.flags.items()) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for name, limits in (("time", "2 % and 4 %"), ("energy", "3 % and 6 %")):
        compared = [getattr(report.verdict, name) for report in reports]
        gaps = [abs(one.gap.value) for one in compared if one and one.gap]
        if gaps:
            of = f"{len(gaps)} of {len(reports)} variants"
            most = f"median {statistics.median(gaps):.1%}, largest {max(gaps):.1%}"
            lines += ["", f"Absolute gap in {name}: {most} ({of}; the aim is {limits})."]
    return lines


def _collectives(rows: list[tuple[ReadingRow, Operator]]) -> list[str]:
    heads = (
        "collective | input | time | energy of all cards | bus bandwidth | of the link's peak | "
        "flags"
    )
    lines = [f"| {heads} |", "| --- | --: | --: | --: | --: | --: | --- |"]
    for reading, operator in sorted(
        rows, key=lambda row: (row[1].short_name, _input_bytes(row[1]))
    ):
        details = Details.from_json(reading.details)
        if details.cards.overlap is not None:
            continue
        bus, link = details.cards.bus_bytes_per_s, details.cards.link_bytes_per_s
        cells = [
            operator.label.partition(" | ")[0],
            count_of(_input_bytes(operator), "B"),
            f"{quantity(reading.time_us, TIME)} ± "
            f"{reading.time_half_width_us / reading.time_us:.1%}",
            quantity(reading.energy_mj, ENERGY),
            count_of(bus, "B/s") if bus else "-",
            f"{bus / link:.0%}" if bus and link else "-",
            ", ".join(reading.flags) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _overlaps(rows: list[tuple[ReadingRow, Operator]]) -> list[str]:
    heads = (
        "collective beside a matrix product | alone | product alone | together | exposed | hidden"
    )
    lines = [f"| {heads} |", "| --- | --: | --: | --: | --: | --: |"]
    for reading, operator in rows:
        if (found := Details.from_json(reading.details).cards.overlap) is not None:
            times = (
                found.collective_us,
                found.product_us,
                found.together_us,
                found.exposed_us,
                found.hidden_us,
            )
            lines.append(f"| {operator.label} | {' | '.join(quantity(us, TIME) for us in times)} |")
    return lines if len(lines) > 2 else []


def _input_bytes(operator: Any) -> int:
    return Size.of(operator.spec).input_bytes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
