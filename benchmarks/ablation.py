"""What each correction of a sum contributes: all stored verdicts, computed without it.

    python -m benchmarks.ablation                     # the packaged readings
    python -m benchmarks.ablation held.db --write tables.md       # and databases of farms

A database is copied, and the copy upgraded. Every verdict of a GPU that measured at least 99 % of a model and has a gap is computed again from
its readings: with all corrections, also those that were removed (`removed_corrections.py`), and
without each of them. *Effect* is a figure without the
correction minus the same figure with it: the median of |gap|, and the share of intervals that
contain zero, of time and of energy. Only verdicts whose time or energy changes count.

Each effect is judged in groups of one card model, dtype, batch, phase, and compiled or not. Its
95 % interval is a paired bootstrap: it draws models with replacement, because the verdicts of one
model are not independent. `ablation_models.yml` says which models were used to design a correction;
only the others are judged. A correction that has no effect outside its interval in any group, on at
least 20 verdicts, does not earn its place.

The last table tests the errors of single tuples in the same way: two readings of one tuple on one
card are *apart* if they differ by more than the sum of their half-widths."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import yaml
from sqlmodel import Session, col, select

from benchmarks.removed_corrections import REMOVED
from farm.exchange.packaged import packaged_database
from farm.store import tables
from farm.store.database import Database
from farm.types.figure import Figure
from farm.types.variant import Variant
from farm.verdict import corrections, gap_errors, replay
from farm.verdict.job_results import JobResults
from farm.verdict.verdict import Comparison, Verdict

MODELS = Path(__file__).with_name("ablation_models.yml")
QUANTITIES = ("time", "energy")
LEAST_COVERAGE = 0.99
#: A correction is judged by at least this number of verdicts of models not used to design it.
LEAST_VERDICTS = 20
#: A group is judged if it has at least this number of models: else a bootstrap of models says
#: little.
LEAST_MODELS = 5
DRAWS = 4000

#: Name -> the classes that are left out, in the order in which they apply.
ABLATIONS = {
    "rough_readings": ("RoughReadings",),
    "model_clock": ("ModelClock",),
    "bursts_at_the_limit": ("BurstsAtTheLimit",),
    "temperature": ("Temperature",),
    "neighbours": ("Neighbours", "PlaceOnHost"),
    "builds": ("Builds",),
    "waiting_power": ("WaitingPower",),
    "between_jobs": ("BetweenJobs",),
    "order_replay": ("OrderReplay", "Addresses"),
    "canaries": ("Canaries",),
    "removed_ones": ("BurstsAtTheLimit", "Temperature"),
}
#: What acts while a card measures cannot be left out of stored readings.
NOT_TESTED = {
    "order_replay": "the replay acts while a card measures, and few stored verdicts have one",
}

#: What has no effect on the gaps of stored verdicts, but stays for another reason.
STAYS = {
    "temperature": (
        "without it and bursts at the limit, fewer than 90 % of the intervals of energy gaps contain zero"
    ),
    "builds": "it decides whether two readings of one tuple differ (Single tuples)",
    "canaries": (
        "they measure changes of the job's own cards. They were not on the list of corrections to "
        "judge, and only ten stored verdicts are of several cards"
    ),
}


@dataclass(frozen=True)
class Gap:
    """A gap and the half-width of its interval, both relative to the whole."""

    value: float
    half_width: float

    @property
    def inside(self) -> bool:
        return abs(self.value) <= self.half_width


@dataclass(frozen=True)
class Judged:
    """One stored verdict: its groups, and quantity -> gap, with all corrections and without
    each.
    """

    title: str
    model: str
    groups: Mapping[str, str]
    full: Mapping[str, Gap]
    without: Mapping[str, Mapping[str, Gap]]

    def changed(self, name: str) -> bool:
        """True if the correction changes a gap or its interval."""
        return self.without[name] != self.full


def all_of_calls() -> tuple[corrections.Correction, ...]:
    """Return the corrections of a call, with those that were removed in their former places."""
    clock = next(
        place
        for place, correction in enumerate(corrections.CORRECTIONS)
        if isinstance(correction, corrections.ModelClock)
    )
    before, after = corrections.CORRECTIONS[: clock + 1], corrections.CORRECTIONS[clock + 1 :]
    return (*before, *REMOVED, *after)


@contextlib.contextmanager
def left_out(names: Sequence[str]) -> Iterator[None]:
    """Compute verdicts with all corrections except those of these classes."""
    lists = (
        (corrections, "CORRECTIONS", all_of_calls()),
        (replay, "CORRECTIONS_OF_CALLS", replay.CORRECTIONS_OF_CALLS),
        (gap_errors, "CORRECTIONS_OF_GAPS", gap_errors.CORRECTIONS_OF_GAPS),
    )
    with contextlib.ExitStack() as stack:
        for module, name, every in lists:
            kept = [one for one in every if type(one).__name__ not in names]
            stack.enter_context(patch.object(module, name, tuple(kept)))
        yield


def gaps_of(verdict: Verdict) -> dict[str, Gap]:
    """Return quantity -> gap, also if the verdict withholds it."""
    gaps = {}
    comparisons: tuple[Comparison | None, ...] = (verdict.time, verdict.energy)
    for quantity, comparison in zip(QUANTITIES, comparisons, strict=True):
        gap = replace(comparison, representative=True).gap if comparison else None
        if gap:
            gaps[quantity] = Gap(gap.value, gap.half_width)
    return gaps


def judged_verdicts(session: Session) -> Iterator[Judged]:
    """Yield the last verdict of each job that has a gap, computed with and without each
    correction.
    """
    jobs = select(tables.Job).where(tables.Job.kind == "model").order_by(col(tables.Job.id))
    for job in session.exec(jobs):
        rows = select(tables.VerdictRow).where(tables.VerdictRow.job_id == job.id)
        last = session.exec(rows.order_by(col(tables.VerdictRow.round).desc())).first()
        if last is None:
            continue
        results = JobResults(session, job, last.round)
        with left_out(()):
            verdict = results.verdict()
        complete = verdict.parts > 1 and (verdict.coverage or 0) >= LEAST_COVERAGE
        if verdict.time.gap is None or not complete:
            continue

        without = {}
        for name, classes in ABLATIONS.items():
            with left_out(classes):
                without[name] = gaps_of(results.verdict())
        variant = Variant.from_json(job.request["variant"])
        card = session.get_one(tables.CardRow, verdict.wholes[0].card_id)
        yield Judged(
            job.title, variant.model, groups_of(variant, card.model), gaps_of(verdict), without
        )


def groups_of(variant: Variant, card_model: str) -> dict[str, str]:
    """Return kind of group -> group of a verdict."""
    batch = "1" if variant.batch == 1 else "2 to 15" if variant.batch < 16 else "16 or more"
    dtype = f"{variant.dtype} with {variant.amp}" if variant.amp else variant.dtype
    return {
        "card model": card_model,
        "dtype": dtype,
        "batch": batch,
        "phase": variant.step or variant.phase or "one pass",
        "compiled": "yes" if variant.compile else "no",
    }


# ---- statistics


@dataclass(frozen=True)
class Effect:
    """A figure without a correction minus the figure with it, and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def outside(self) -> bool:
        """True if the interval does not contain zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if not (self.value or self.low or self.high):
            return "0"
        text = f"{100 * self.value:+.2f} ({100 * self.low:+.2f} to {100 * self.high:+.2f})"
        return f"**{text}**" if self.outside else text


def effects_of(verdicts: Sequence[Judged], name: str) -> dict[str, Effect]:
    """Return statistic -> the effect of leaving the correction out."""
    effects = {}
    for quantity in QUANTITIES:
        pairs = [
            (verdict.model, verdict.full[quantity], verdict.without[name][quantity])
            for verdict in verdicts
            if quantity in verdict.full and quantity in verdict.without[name]
        ]
        if not pairs:
            continue
        models = [model for model, _, _ in pairs]
        with_, without = [gap for _, gap, _ in pairs], [gap for _, _, gap in pairs]
        sizes = np.array([[abs(gap.value) for gap in gaps] for gaps in (with_, without)])
        inside = np.array([[gap.inside for gap in gaps] for gaps in (with_, without)], float)
        effects[f"{quantity}, median"] = bootstrap(models, sizes, np.median)
        effects[f"{quantity}, inside"] = bootstrap(models, inside, np.mean)
    return effects


def bootstrap(models: Sequence[str], pairs: np.ndarray, statistic: object) -> Effect:
    """Return the difference of a statistic between both rows, with a 95 % interval over models."""
    assert callable(statistic)
    of_model = defaultdict(list)
    for column, model in enumerate(models):
        of_model[model].append(column)
    columns = [np.array(group) for group in of_model.values()]
    random = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        chosen = random.integers(len(columns), size=len(columns))
        with_, without = pairs[:, np.concatenate([columns[index] for index in chosen])]
        drawn.append(statistic(without) - statistic(with_))
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Effect(float(statistic(pairs[1]) - statistic(pairs[0])), float(low), float(high))


def grouped(verdicts: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Return name of a group -> its verdicts, for all kinds of groups."""
    groups = defaultdict(list)
    for verdict in verdicts:
        for kind, group in verdict.groups.items():
            groups[f"{kind}: {group}"].append(verdict)
    return dict(sorted(groups.items()))


# ---- tables


def summary(gaps: Sequence[Gap]) -> str:
    if not gaps:
        return "| | | |"
    sizes = [abs(gap.value) for gap in gaps]
    figures = (
        f"{100 * statistics.median(sizes):.2f}",
        f"{100 * float(np.percentile(sizes, 90)):.2f}",
        f"{100 * statistics.mean(gap.inside for gap in gaps):.0f}",
    )
    return " | ".join(figures)


def overview(verdicts: Sequence[Judged]) -> list[str]:
    lines = [
        "| without | verdicts that change | time: median, 90th percentile, inside | | | energy: "
        "median, 90th percentile, inside | | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]

    def row(label: str, changed: int, gaps: Sequence[Mapping[str, Gap]]) -> str:
        cells = [
            summary([of_verdict[quantity] for of_verdict in gaps if quantity in of_verdict])
            for quantity in QUANTITIES
        ]
        return f"| {label} | {changed} | {cells[0]} | {cells[1]} |"

    lines.append(row("nothing", 0, [verdict.full for verdict in verdicts]))
    for name in ABLATIONS:
        changed = sum(verdict.changed(name) for verdict in verdicts)
        lines.append(row(title(name), changed, [verdict.without[name] for verdict in verdicts]))
    return lines


def judgement(verdicts: Sequence[Judged], name: str, used: Sequence[str]) -> list[str]:
    """Return the section of a correction: its effect in each group, and whether it stays."""
    affected = [verdict for verdict in verdicts if verdict.changed(name)]
    unused = [verdict for verdict in affected if verdict.model not in used]
    lines = [f"### {title(name).capitalize()}", ""]
    count = f"{len(affected)} verdicts change, {len(unused)} of models not used to design it."
    if name in NOT_TESTED:
        return [*lines, f"{count} **Not tested, stays**: {NOT_TESTED[name]}.", ""]
    if len(unused) < LEAST_VERDICTS:
        return [*lines, f"{count} **Too few stored verdicts, stays.**", ""]

    columns = [
        f"{quantity}, {figure}" for quantity in QUANTITIES for figure in ("median", "inside")
    ]
    table = [
        f"| group | verdicts | models | {' | '.join(columns)} |",
        f"| --- | ---: | ---: |{' ---: |' * len(columns)}",
    ]
    earns, unjudged = False, []
    for group, members in {"all": unused, **grouped(unused)}.items():
        models = len({verdict.model for verdict in members})
        if models < LEAST_MODELS:
            unjudged.append(group)
            continue
        effects = effects_of(members, name)
        cells = [str(effects.get(column, "")) for column in columns]
        table.append(f"| {group} | {len(members)} | {models} | {' | '.join(cells)} |")
        earns = earns or any(effect.outside for effect in effects.values())
    outcome = "**No effect outside its interval: goes.**"
    if earns:
        outcome = "**Stays.**"
    elif name in STAYS:
        outcome = f"**No effect outside its interval; stays**: {STAYS[name]}."
    few = f"Too few models: {', '.join(unjudged)}." if unjudged else "All groups are judged."
    return [*lines, f"{count} {outcome}", "", *table, "", few, ""]


def title(name: str) -> str:
    return name.replace("_", " ")


# ---- single tuples


def tuples_apart(session: Session) -> list[str]:
    """Return a table: the share of pairs of readings that are apart, with and without builds."""
    readings = defaultdict(list)
    for row in session.exec(select(tables.ReadingRow)):
        if (row.details or {}).get("context"):
            same = row.subject_id, row.protocol_id, row.card_id, row.software_id
            readings[same].append(Figure(row.time_us, row.time_half_width_us))

    pairs = [pair for group in readings.values() for pair in itertools.combinations(group, 2)]
    table = [
        "| time of the tuple | pairs of readings | apart, with builds | apart, without |",
        "| --- | ---: | ---: | ---: |",
    ]
    for low_us, high_us in ((0, 10), (10, 100), (100, math.inf)):
        chosen = [pair for pair in pairs if low_us <= pair[0].value < high_us]
        with_ = statistics.mean(apart(*map(built, pair)) for pair in chosen)
        without = statistics.mean(apart(*pair) for pair in chosen)
        times = f"from {low_us} us" if math.isinf(high_us) else f"{low_us} to {high_us} us"
        table.append(f"| {times} | {len(chosen)} | {with_:.0%} | {without:.0%} |")
    return table


def built(time: Figure) -> Figure:
    """Return a time in us with the error of its build."""
    build_us = corrections.BUILD_UNSURE_US * math.sqrt(time.value)
    return replace(time, half_width=math.hypot(time.half_width, build_us))


def apart(a: Figure, b: Figure) -> bool:
    return abs(a.value - b.value) > a.half_width + b.half_width


# ---- command


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Session]:
    """Open an upgraded copy of a database."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.db"
        shutil.copyfile(path, copy)
        copy.chmod(0o600)
        database = Database(f"sqlite:///{copy}")
        database.upgrade()
        with database.read() as session:
            yield session
        database.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "databases", nargs="*", type=Path, metavar="DATABASE", help="SQLite files of farms"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all gaps")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables")
    options = parser.parse_args()

    verdicts: list[Judged] = []
    with packaged_database().read() as session:
        verdicts += judged_verdicts(session)
        single = tuples_apart(session)
    for path in options.databases:
        with opened(path) as session:
            verdicts += judged_verdicts(session)

    designs = yaml.safe_load(MODELS.read_text())
    unlisted = {verdict.model for verdict in verdicts} - set(stored_models(designs))
    if unlisted:
        sys.exit(f"{MODELS.name} does not list {', '.join(sorted(unlisted))}")

    lines = [*overview(verdicts), ""]
    for name in designs:
        lines += judgement(verdicts, name, designs[name]["used"])
    text = "\n".join([*lines, "### Single tuples", "", *single, ""])
    print(f"{len(verdicts)} verdicts of {len({verdict.model for verdict in verdicts})} models\n")
    print(text)
    if options.write:
        options.write.write_text(text)
    if options.json:
        rows = [
            {"title": verdict.title, "full": plain(verdict.full)}
            | {name: plain(gaps) for name, gaps in verdict.without.items()}
            for verdict in verdicts
        ]
        options.json.write_text(json.dumps(rows, indent=1))


def stored_models(designs: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Return the models that the list of designs names."""
    names: set[str] = set()
    for design in designs.values():
        names.update(design["used"], design["unused"])
    return sorted(names)


def plain(gaps: Mapping[str, Gap]) -> dict[str, tuple[float, float]]:
    return {quantity: (gap.value, gap.half_width) for quantity, gap in gaps.items()}


if __name__ == "__main__":
    main()
