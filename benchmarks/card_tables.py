"""The tables of `benchmarks/card_results.py`: one row per variant, and a summary of the rows, as
JSON and Markdown.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
import statistics
from pathlib import Path
from typing import Any

from card_agreement import pooled, w_per_c

from farm.types.reading import inside_s
from farm.types.request import Request

EXTRAS = ("repeatability", "outside")
IDLE_S = 1.0  # a longer pause between two items is a wait for work


def newest(database: Any, asked: Request) -> dict[str, Any] | None:
    """Return the row of the newest finished job with the same request on one card."""
    from sqlmodel import col, select

    from farm.report import report
    from farm.store import tables

    with database.read() as session:
        query = (
            select(tables.Job)
            .where(tables.Job.request_id == asked.id, tables.Job.state == tables.JobState.DONE)
            .order_by(col(tables.Job.created_at_s).desc())
        )
        for job in session.exec(query):
            if len(card_ids := job.request.get("cards") or []) == 1:
                return {"card": card_ids[0], **row_of(session, report.build(session, job.id))}
    return None


def row_of(session: Any, built: Any) -> dict[str, Any]:
    from sqlmodel import col, select

    from farm.store import tables
    from farm.store.database import fetch

    verdict, readings = built.verdict, built.readings
    items = session.exec(select(tables.Item).where(tables.Item.job_id == built.job_id)).all()
    by_id = fetch(
        session, tables.ReadingRow, [item.reading_id for item in items if item.reading_id]
    )
    rows = list(by_id.values())
    whole = [row for row in rows if row.subject_kind == "variant"]
    tuples = [row for row in rows if row.subject_kind == "operator"]
    # Of any job: from claim to written result, including verification.
    query = select(tables.Item).where(
        col(tables.Item.reading_id).in_(list(by_id)), col(tables.Item.reused).is_(False)
    )
    spans = sorted(
        (item.started_at_s or 0.0, item.ended_at_s or 0.0, item.role)
        for item in session.exec(query)
    )
    held_s = [ended_s - started_s for started_s, ended_s, role in spans if role == "tuple"]
    between_s = [later[0] - earlier[1] for earlier, later in itertools.pairwise(spans)]
    wall_s = sum(ended_s - started_s for started_s, ended_s, _ in spans)
    wall_s += sum(gap_s for gap_s in between_s if 0 < gap_s < IDLE_S)
    busy_s = sum(inside_s(row.cost_s) for row in rows)
    parts = sorted({name for row in tuples for name in row.cost_s})
    temperatures = [row.temperature_c for row in tuples if row.temperature_c]

    def gap(comparison: Any) -> list[float] | None:
        found = comparison.gap if comparison else None
        return [found.value, found.half_width] if found else None

    calls = {one.reading_id: one.calls for one in built.tuples}
    weighted = [
        (calls.get(row.id, 1) * row.time_us, row.temperature_c)
        for row in tuples
        if row.temperature_c
    ]
    return {
        "variant": built.request["variant"],
        "title": built.title,
        "job": built.job_id,
        "protocol": built.protocol.to_json(),
        "rounds": len(built.rounds),
        "calls": sum(one.calls for one in built.tuples),
        "parts": verdict.parts,
        "measured": verdict.measured,
        "coverage": verdict.coverage,
        "time_gap": gap(verdict.time),
        "looped_time_gap": (verdict.time.total.value - (verdict.context_time_us or 0.0))
        / verdict.time.whole.value
        - 1
        if verdict.time.whole
        else None,
        "weights_in_cache": verdict.weights_in_cache,
        "energy_gap": gap(verdict.energy),
        "energy_above_idle_gap": gap(verdict.energy_above_idle),
        "whole_time_us": verdict.time.whole.value if verdict.time.whole else None,
        "whole_energy_mj": verdict.energy.whole.value
        if verdict.energy and verdict.energy.whole
        else None,
        "whole_power_w": verdict.power.whole.value
        if verdict.power and verdict.power.whole
        else None,
        "whole_temperature_c": [row.temperature_c for row in whole],
        "whole_sm_clock_mhz": [row.sm_clock_mhz for row in whole],
        "whole_flags": sorted({flag for row in whole for flag in row.flags}),
        "tuple_temperature_c": [
            min(temperatures),
            statistics.median(temperatures),
            max(temperatures),
        ]
        if temperatures
        else None,
        "tuple_temperature_by_time_c": sum(a * b for a, b in weighted) / sum(a for a, _ in weighted)
        if weighted
        else None,
        "read_for_this_job": readings.measured,
        "reused": readings.reused,
        "failed": readings.failed,
        "card_s_per_tuple": statistics.median(held_s) if held_s else None,
        "card_s": readings.card_time_s,
        "cost_s": {
            name: statistics.median(row.cost_s.get(name, 0.0) for row in tuples) for name in parts
        },
        "in_windows": busy_s / wall_s if wall_s else None,
        "read_within_s": max(row.created_at_s for row in rows)
        - min(row.created_at_s for row in rows),
        "launch_gap_us": verdict.launch_gap_us,
        "flags": verdict.flags,
        "adjustments": [
            {
                "label": one.label,
                "calls": one.count,
                "used": one.used,
                "effect_time_us": one.effect_time_us,
                "effect_energy_mj": one.effect_energy_mj,
            }
            for one in verdict.adjustments
        ],
        "unmeasured": [[one.label, one.reason] for one in verdict.unmeasured[:10]],
        "reasons": list(verdict.reasons),
        "observed": {
            name: getattr(built.verification, name) for name in ("matches", "difference_count")
        },
        "kernels": dataclasses.asdict(verdict.kernels) if verdict.kernels else None,
        "types": [
            {
                "operator": one.short_name,
                "calls": one.calls,
                "time_us": one.time_us,
                "energy_mj": one.energy_mj,
                "in_model_us": getattr(one, "in_model_us", None),
            }
            for one in built.types
        ],
    }


def write(
    out: Path, card: Any, database: Any, rows: list[dict[str, Any]], extras: dict[str, Any]
) -> None:
    from farm.store import tables

    with database.read() as session:
        row = session.get(tables.CardRow, card.id)
        software = (
            session.get(tables.SoftwareRow, row.software_id) if row and row.software_id else None
        )
        fingerprint = dict(row.fingerprint) if row else {}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    out.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", card.model.lower()).strip("-")
    path = out / f"{slug}-{day}"
    before = (
        json.loads(path.with_suffix(".json").read_text())
        if path.with_suffix(".json").exists()
        else {}
    )
    extras = {name: extras.get(name) or before.get(name) for name in EXTRAS}
    again = extras.get("repeatability") or {}
    compare_power(rows, {**fingerprints_of(database, card.model), **again.get("fingerprints", {})})
    summary = summarise(rows)
    data = {
        "date": day,
        "card": {
            "id": card.id,
            "model": card.model,
            "driver": card.driver,
            "memory_bytes": card.memory_bytes,
        },
        "fingerprint": fingerprint,
        "software": software.model_dump() if software else {},
        "summary": summary,
        **extras,
        "variants": rows,
    }
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    text = markdown(data)
    path.with_suffix(".md").write_text(text)
    print("\n" + text)


def fingerprints_of(database: Any, model: str) -> dict[str, dict[str, Any]]:
    from sqlmodel import col, select

    from farm.store import tables

    with database.read() as session:
        cards = session.exec(select(tables.CardRow).where(col(tables.CardRow.model) == model)).all()
        return {card.id: dict(card.fingerprint) for card in cards}


def compare_power(rows: list[dict[str, Any]], fingerprints: dict[str, dict[str, Any]]) -> None:
    """Compare the power of sum and whole model, as measured and with the tuples restated to the
    whole model's temperature.

    The whole is read at one temperature and the tuples each at another; a degree more costs watts.
    What it costs is taken from the fingerprints of all cards of the model together. Wholes at the
    power limit are left out."""
    together = pooled(fingerprints.values())

    for row in rows:
        row["power_gap"] = row["power_gap_at_one_temperature"] = None
        if not row["energy_gap"] or not row["time_gap"] or not row["whole_power_w"]:
            continue
        whole_w = row["whole_power_w"]
        row["power_gap"] = (1 + row["energy_gap"][0]) / (1 + row["time_gap"][0]) - 1
        watts = w_per_c(together, whole_w)
        whole_c, tuples_c = row["whole_temperature_c"], row["tuple_temperature_by_time_c"]
        limited = (
            "throttled_power" in row["whole_flags"]
        )  # then the limit decides its power, not the temperature
        if watts is not None and tuples_c and all(whole_c) and not limited:
            row["power_gap_at_one_temperature"] = (
                row["power_gap"] + watts * (statistics.mean(whole_c) - tuples_c) / whole_w
            )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"variants": len(rows)}
    for name in ("time_gap", "energy_gap"):
        values = [abs(row[name][0]) for row in rows if row[name]]
        if values:
            found[name] = {
                "median": statistics.median(values),
                "most": max(values),
                "above_3_percent": [],
            }
            found[name]["above_3_percent"] = [
                row["title"] for row in rows if row[name] and abs(row[name][0]) > 0.03
            ]
    for name in ("power_gap", "power_gap_at_one_temperature"):
        values = [abs(row[name]) for row in rows if row.get(name) is not None]
        if values:
            found[name] = {
                "median": statistics.median(values),
                "most": max(values),
                "of": len(values),
            }
    explained = [row["kernels"]["explained"] for row in rows if row.get("kernels")]
    found["least_explained"] = min(explained, default=None)
    found["read_within_s"] = max((row.get("read_within_s", 0.0) for row in rows), default=None)
    found["least_coverage"] = min(
        (row["coverage"] for row in rows if row["coverage"]), default=None
    )
    for name in ("card_s_per_tuple", "in_windows"):
        values = [row[name] for row in rows if row[name]]
        found[name] = statistics.median(values) if values else None
    return found


def markdown(data: dict[str, Any]) -> str:
    card, software = data["card"], data["software"]
    lines = [
        f"# {card['model']}, {data['date']}",
        "",
        f"- Cards: {', '.join(sorted({row['card'] for row in data['variants']}))}",
        f"- Software: driver {card['driver']}, torch {software.get('torch', '?')}, CUDA "
        f"{software.get('cuda', '?')}, "
        f"cuDNN {software.get('cudnn', '?')}",
        "- Command: `python benchmarks/card_results.py`",
        "",
        "The columns of the table:",
        "",
        "- *Gap*: sum / whole - 1, with the half-width of its 95 % interval. The sum is over all "
        "tuples, without a "
        "fitted factor. The whole model was measured on the same card.",
        "- *Looped*: the gap in time of the same tuples in a loop, without the effect of their "
        "neighbours.",
        "- *In windows*: the share of the card time in warm-ups, windows and bursts.",
        "- *°C*: the temperature of the whole model, and the mean temperature of its tuples.",
        "",
        "| variant | card | calls | tuples | coverage | gap, time | looped | gap, energy | whole "
        "| card time of a tuple, s | in windows | °C: whole, tuples | flags |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for row in data["variants"]:
        whole = f"{row['whole_time_us'] / 1e3:.2f} ms" if row["whole_time_us"] else "-"
        whole += f", {row['whole_power_w']:.0f} W" if row["whole_power_w"] else ""
        warm = row["tuple_temperature_by_time_c"]
        temperatures = " ".join(f"{value:.0f}" for value in row["whole_temperature_c"] if value)
        lines.append(
            f"| {row['title']} | {row['card'][4:12]} | {row['calls']} | "
            f"{row['measured']}/{row['parts']} "
            f"| {percent(row['coverage'])} "
            f"| {gap_text(row['time_gap'])} | {signed(row['looped_time_gap'])} "
            f"| {gap_text(row['energy_gap'])} | {whole} "
            f"| {number(row['card_s_per_tuple'])} | {percent(row['in_windows'])} "
            f"| {temperatures}, {number(warm)} "
            f"| {', '.join(f'{name} {count}' for name, count in row['flags'].items()) or '-'} |"
        )
    lines += ["", *summary_lines(data["summary"])]
    if one := data.get("repeatability"):
        lines.append(repeatability_line(one))
    if outside := data.get("outside"):
        lines += ["", "Other tools, with the same loops on one card:", ""]
        lines += [
            "| measured | tool | tool's value | farm's value | farm / tool - 1 |",
            "| --- | --- | --: | --: | --: |",
        ]
        lines += [
            f"| {one['what'].replace('|', '·')} | {one['meter']} | {one['theirs']:.4g} "
            f"{one['unit']} "
            f"| {one['ours']:.4g} {one['unit']} | {one['ours'] / one['theirs'] - 1:+.2%} |"
            for one in outside
        ]
    return "\n".join(lines) + "\n"


def summary_lines(summary: dict[str, Any]) -> list[str]:
    lines = []
    for name, word in (("time_gap", "time"), ("energy_gap", "energy")):
        if one := summary.get(name):
            above = ", ".join(one["above_3_percent"]) or "none"
            lines.append(
                f"- Absolute gap in {word}: {one['median']:.1%} in the median, {one['most']:.1%} "
                "at most. "
                f"Above 3 %: {above}."
            )
    if one := summary.get("power_gap"):
        other = summary.get("power_gap_at_one_temperature")
        lines.append(
            f"- Absolute gap in power: {one['median']:.1%} in the median, {one['most']:.1%} at "
            "most."
            + (
                f" With the tuples restated to the temperature of the whole model ({other['of']} "
                "variants): "
                f"{other['median']:.1%} and {other['most']:.1%}."
                if other
                else ""
            )
        )
    return [
        *lines,
        f"- The least coverage is {percent(summary['least_coverage'])}. The kernels of the tuples "
        "account for at least "
        f"{percent(summary['least_explained'])} of the kernel time of a whole model.",
        "- The readings of a variant were taken within "
        f"{(summary['read_within_s'] or 0.0) / 60:.0f} min at most.",
        f"- A tuple took {number(summary['card_s_per_tuple'])} s of card time (median of the "
        "medians of the variants). "
        f"Warm-ups, windows and bursts took {percent(summary['in_windows'])} of the card's whole "
        "time.",
    ]


def repeatability_line(one: dict[str, Any]) -> str:
    line = (
        f"- Repeatability: {one['time']['of']} tuples were measured {one['times']} times. "
        f"(Largest - smallest) / median is {one['time']['median']:.2%} in time in the "
        f"median of the tuples, and {one['time']['most']:.2%} at most."
    )
    if energy := one["energy"]:
        line += f" For the energy these are {energy['median']:.2%} and {energy['most']:.2%}."
    if level := one.get("energy_at_one_temperature"):
        line += f" At one temperature they are {level['median']:.2%} and {level['most']:.2%}."
    return line


def gap_text(gap: list[float] | None) -> str:
    return f"{gap[0]:+.1%} ± {gap[1]:.1%}" if gap else "-"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
