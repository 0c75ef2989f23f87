"""Write docs/results/README.md from the packaged verdicts: all variants of all card models, with
gaps, intervals and outcomes.

    python benchmarks/results_page.py            # --check: exit 1 if the page is not current

It reads `farm/data/*/verdicts.parquet`, which `package_readings.py` writes. Nothing is computed
again: the figures are those that `farm report JOB` prints after `farm import h200`."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "README.md"
#: Heading of a table -> pattern in the title of a verdict; the first one that fits counts.
GROUPS = {
    "Models on two cards": r" on \d+ cards$",
    "Training steps": r" training ",
    "Compiled models": r" compiled ",
    "Language models and encoders": r" tokens |x1x\d+ bfloat16$|^bert |^gpt2 ",
    "Image models": r"",
}
OPENING = """# Results on cards

This page lists all packaged verdicts of models. `python benchmarks/results_page.py` writes it from
`farm/data/*/verdicts.parquet`. A test checks that it is current. The [design
notes](../design/README.md) have the experiments behind the method.

- *Sum*: the number of calls times the reading, added up over all tuples of a model. No factor is
  fitted. Each tuple is rebuilt from its description and measured separately.
- *Whole*: the whole model, measured in one piece, if possible on the same card and within minutes
  of the tuples.
- *Gap*: the sum minus the whole, relative to the whole. A ± is the half-width of the 95 % interval.
  If a variant has several jobs, the row shows the newest job with an outcome. The range of all jobs
  with an outcome follows in brackets.
- *Inside*: the interval of a gap contains zero.
- *Pass*: coverage is at least 95 %, and both gaps are at most 5 %. *No outcome*: a verdict would be
  a guess; the reason is in the last table of a card model.
- *Within 1 %*: a job of `farm run --within 1%`, with [rough readings](../method.md#rough-readings).
  The other jobs have windows of full length.
- *Variants*: `32x224` has batch 32 and images of 224 px. `prefill 4x1024` computes the prompts of 4
  sequences with 1,024 tokens each. `decode 16 beside 2048` computes one token for each of 16
  sequences, with 2,048 tokens in the cache.
- *Tuples*: measured, of all tuples of the model.

All readings come from driver 580.159.04 and torch 2.11.0+cu130, from 2026-11-22 to 2026-11-26. The
method changed in this time. A part of the stored verdicts was computed again with a later method,
but the readings are those of their day. Some models were used to choose a part of the method
([which](ablation.md)). So this table is not a blind test. Three lists were fixed before they were
measured: `examples/held_out.yml`, `examples/several_cards.yml` and `examples/compiled.yml`.

The largest gaps in time are those of models that are split over two cards. The intervals use a few
constants from these readings for every card model
([method](../method.md#constants-from-two-card-models)).

![Sum of the parts against the whole model, on an NVIDIA H200](../pictures/sum-against-whole.svg)

Other evidence, each written by a command:

| page | question |
| --- | --- |
| [what each correction contributes](ablation.md) | what do verdicts lose without a correction? |
| [predictions across cards](across-cards.md) | how well does one card model predict another? |
| [second opinions](second-opinions.md) | do Zeus and `torch.utils.benchmark` agree? |
| [aiconfigurator](aiconfigurator.md) | do NVIDIA's published operator tables agree? |
| [public models](public-models.md) | which models of public packages can be captured? Eleven of them on an H200 |
| [architectures](architectures.md) | which architectures of transformers can be captured? |
| [training steps](training-steps.md) | which training steps can be captured? |
| [layers](layers.md) | which layers and functions of PyTorch can be captured? |
"""
OUTCOMES = {"pass": "pass", "fail": "fail", "none": "no outcome"}


@dataclass(frozen=True)
class Verdict:
    """The newest verdict of one job of a model.

    Gaps are shares of the whole model, and None if there is no gap.
    """

    job_id: str
    title: str
    within: str  # empty: windows of full length
    outcome: str
    parts: int
    measured: int
    whole_time_us: float | None
    whole_energy_mj: float | None
    gap_time: float | None
    gap_time_half_width: float | None
    gap_energy: float | None
    gap_energy_half_width: float | None
    created_at_s: float
    reasons: tuple[str, ...]

    @property
    def variant(self) -> str:
        return f"{self.title}, within {self.within}" if self.within else self.title

    @property
    def group(self) -> str:
        return next(name for name, pattern in GROUPS.items() if re.search(pattern, self.title))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        sys.exit(int(PAGE.read_text() != text))
    PAGE.write_text(text)


def page() -> str:
    """Return the text of docs/results/README.md."""
    cards = {}
    for path in sorted((ROOT / "farm" / "data").glob("*/verdicts.parquet")):
        model, verdicts = verdicts_of(path)
        cards[model] = path.parent.name, verdicts
    parts = [OPENING.rstrip("\n"), "## Summary", summary(cards)]
    for model, (name, verdicts) in sorted(cards.items()):
        parts += [f"## {model}", of_card(name, verdicts)]
    return "\n\n".join(parts) + "\n"


def verdicts_of(path: Path) -> tuple[str, list[Verdict]]:
    """Return a card model and the newest verdict of each of its jobs of a model."""
    newest: dict[str, dict[str, Any]] = {}
    for row in sorted(pq.read_table(path).to_pylist(), key=lambda row: row["round"]):
        if row["job_kind"] == "model":
            newest[row["job_id"]] = row
    (model,) = {model for row in newest.values() for model in row["card_models"]}
    return model, [verdict_of(row) for row in newest.values()]


def verdict_of(row: dict[str, Any]) -> Verdict:
    details, request = json.loads(row["details"]), json.loads(row["request"])
    within = request.get("within")
    return Verdict(
        row["job_id"],
        row["title"],
        f"{100 * within:g} %" if within else "",
        row["outcome"],
        row["parts"],
        row["measured"],
        row["whole_time_us"],
        row["whole_energy_mj"],
        details["gap_time"],
        details["gap_time_half_width"],
        details["gap_energy"],
        details["gap_energy_half_width"],
        row["created_at_s"],
        tuple(details["reasons"]),
    )


def summary(cards: dict[str, tuple[str, list[Verdict]]]) -> str:
    lines = [
        "| card model | models | jobs: pass, fail, no outcome | gap, time: median, largest "
        "| gap, energy: median, largest | inside: time, energy "
        "| half-width, median: time, energy |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for model, (_, verdicts) in sorted(cards.items()):
        for group in ("all", *GROUPS):
            chosen = [verdict for verdict in verdicts if group in ("all", verdict.group)]
            if chosen:
                name = "all" if group == "all" else group[0].lower() + group[1:]
                lines.append(f"| {model} | {name} | {figures(chosen)} |")
    return "\n".join(lines)


def figures(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(verdict.outcome for verdict in verdicts)
    times = judged(
        (verdict.gap_time, verdict.gap_time_half_width, verdict.outcome) for verdict in verdicts
    )
    energies = judged(
        (verdict.gap_energy, verdict.gap_energy_half_width, verdict.outcome) for verdict in verdicts
    )
    cells = [
        f"{counts['pass']}, {counts['fail']}, {counts['none']}",
        size(times),
        size(energies),
        f"{inside(times)}, {inside(energies)}",
        f"{half_width(times)}, {half_width(energies)} %",
    ]
    return " | ".join(cells)


def judged(gaps: Iterable[tuple[float | None, float | None, str]]) -> list[tuple[float, float]]:
    """Return gaps and half-widths of the verdicts that have an outcome."""
    return [
        (gap, width)
        for gap, width, outcome in gaps
        if gap is not None and width is not None and outcome != "none"
    ]


def size(gaps: Sequence[tuple[float, float]]) -> str:
    if not gaps:
        return "-"
    sizes = [abs(gap) for gap, _ in gaps]
    largest = max((gap for gap, _ in gaps), key=abs)
    return f"{100 * statistics.median(sizes):.1f}, {100 * largest:+.1f} %"


def inside(gaps: Sequence[tuple[float, float]]) -> str:
    return f"{sum(abs(gap) <= width for gap, width in gaps)} of {len(gaps)}"


def half_width(gaps: Sequence[tuple[float, float]]) -> str:
    return f"{100 * statistics.median(width for _, width in gaps):.1f}" if gaps else "-"


def of_card(name: str, verdicts: Sequence[Verdict]) -> str:
    """Return the tables of one card model."""
    parts = [f"`farm import {name}`, then `farm report JOB`, shows a row with its operators."]
    for group in GROUPS:
        chosen = [verdict for verdict in verdicts if verdict.group == group]
        if chosen:
            parts += [f"### {group}, {name.upper()}", table(chosen)]
    failed = [verdict for verdict in verdicts if verdict.outcome == "fail"]
    if failed:
        parts += [f"### Failures, {name.upper()}", failures(failed)]
    missing = [verdict for verdict in verdicts if verdict.outcome == "none"]
    if missing:
        parts += [f"### No outcome, {name.upper()}", reasons(missing)]
    return "\n\n".join(parts)


def table(verdicts: Sequence[Verdict]) -> str:
    lines = [
        "| variant | tuples | whole | gap, time | gap, energy | outcome | newest job |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    variants = defaultdict(list)
    for verdict in sorted(verdicts, key=lambda verdict: verdict.created_at_s):
        variants[verdict.variant].append(verdict)
    for variant, jobs in sorted(variants.items()):
        judged_jobs = [job for job in jobs if job.outcome != "none"]
        shown = (judged_jobs or jobs)[-1]
        times = [job.gap_time for job in judged_jobs]
        energies = [job.gap_energy for job in judged_jobs]
        cells = [
            variant,
            f"{shown.measured} of {shown.parts}",
            whole(shown),
            gap(shown.gap_time, shown.gap_time_half_width, times),
            gap(shown.gap_energy, shown.gap_energy_half_width, energies),
            outcomes(jobs),
            shown.job_id,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def whole(verdict: Verdict) -> str:
    if verdict.whole_time_us is None:
        return "not measured"
    time = f"{verdict.whole_time_us / 1e3:.3g} ms"
    energy = verdict.whole_energy_mj
    if energy is None:
        return time
    return f"{time}, {energy / 1e3:.3g} J" if energy >= 1e3 else f"{time}, {energy:.3g} mJ"


def gap(value: float | None, width: float | None, several: Sequence[float | None]) -> str:
    """Return a gap with its interval; in brackets the range over several jobs."""
    if value is None:
        return "-"
    known = [one for one in several if one is not None]
    text = f"{percent(value)} ± {100 * width:.1f} %" if width is not None else percent(value)
    if len(known) > 1:
        text += f" ({percent(min(known))} to {percent(max(known))})"
    return text


def percent(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return text[1:] if float(text) == 0 else text


def outcomes(jobs: Sequence[Verdict]) -> str:
    counts = Counter(job.outcome for job in jobs)
    if len(jobs) == 1:
        return OUTCOMES[jobs[0].outcome]
    return ", ".join(f"{counts[name]} {word}" for name, word in OUTCOMES.items() if counts[name])


def failures(verdicts: Sequence[Verdict]) -> str:
    lines = ["| variant | gap, time | gap, energy | job |", "| --- | ---: | ---: | --- |"]
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.variant, verdict.created_at_s)):
        time = gap(verdict.gap_time, verdict.gap_time_half_width, [])
        energy = gap(verdict.gap_energy, verdict.gap_energy_half_width, [])
        lines.append(f"| {verdict.variant} | {time} | {energy} | {verdict.job_id} |")
    return "\n".join(lines)


def reasons(verdicts: Sequence[Verdict]) -> str:
    lines = ["| variant | reason | job |", "| --- | --- | --- |"]
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.variant, verdict.created_at_s)):
        reason = re.split(r": other programs| \(GPU-", verdict.reasons[0])[0].rstrip(".")
        lines.append(f"| {verdict.variant} | {reason} | {verdict.job_id} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
