"""Does the sum explain the whole? The project's list of models on one card, as JSON and as a table.

    python benchmarks/card_results.py --plan                                # counts what is to be read; needs no card
    python benchmarks/card_results.py --database farm.db --budget-s 540     # a go of nine minutes; again to go on
    python benchmarks/card_results.py --database farm.db --budget-s 0       # tables from what is there; needs no card
    python benchmarks/card_results.py --database farm.db --repeatability 50 --outside --only-extras

The farm does the work: an embedded one on all cards of the host. A variant's tuples and its whole are read on one card,
whichever has the least before it; two jobs a card are open at a time, so that the next model is taken apart while the
card measures. What a card has read already it does not read again for another model. Whatever was read stays in the
database, so the list may be completed in several goes; on another host, with its own database, `--also` takes in the
tables of the first. A second is from the claim of an item to its written result.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from farm.benchmark.protocol import Stopping, Variant, inside_s
from farm.request import Request

# In the order of their worth, should the card's time end: families first, then batch 1, then the long ones.
LIST = [
    "resnet50:32",
    "vit_b_16:32",
    "mobilenet_v2:32",
    "swin_t:32",
    "vit_b_16:32:bfloat16",
    "resnet18:32",
    "convnext_tiny:32",
    "resnet50:1",
    "vit_b_16:1",
    "resnet18:1",
    "mobilenet_v2:1",
    "convnext_tiny:32:bfloat16",
    "swin_t:32:bfloat16",
    "swin_t:1",
    "efficientnet_b0:32",
    "regnet_y_400mf:32",
    "mobilenet_v3_large:32",
    "googlenet:32",
    "inception_v3:32",
    "maxvit_t:32",
    "maxvit_t:32:bfloat16",
    "densenet121:32",
]
EXTRAS = ("repeatability", "outside")
IDLE_S = 1.0  # a longer pause between two items is not the card's, but a wait for work
EXPECTED_TUPLE_S = 1.15  # on an H200: rebuild, warm-up, window, write, and its part of canaries and repetitions
EXPECTED_WHOLE_S = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=LIST, help="NAME[:BATCH[:DTYPE]]")
    parser.add_argument("--plan", action="store_true", help="count tuples and card seconds; measure nothing")
    parser.add_argument("--database", type=Path, default=Path("card_results.db"), help="a SQLite file, made if absent")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no job is begun, and none waited for, after it")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the two tables")
    parser.add_argument(
        "--also", type=Path, help="tables (JSON) of an earlier go, for variants that this database lacks"
    )
    parser.add_argument("--cards", default="", help="indices of the cards to use, as 0,1; without it, all of the host")
    parser.add_argument("--data", default="", help="another data policy than the default of the card")
    parser.add_argument("--minimum-s", type=float, default=Stopping().minimum_s)
    parser.add_argument("--reuse", default="card", choices=("model", "card", "none"))
    parser.add_argument("--repeatability", type=int, default=0, metavar="N", help="read N tuples five times each")
    parser.add_argument("--outside", action="store_true", help="compare with meters that are not ours")
    parser.add_argument("--without-traces", action="store_true", help="remove the traces: most of a database's size")
    parser.add_argument("--only-extras", action="store_true", help="run only the two above, no model")
    options = parser.parse_args()
    began_s = time.monotonic()
    os.environ["FARM_DATABASE_URL"] = f"sqlite:///{options.database.resolve()}"
    if options.plan:
        return plan(options)
    from farm.devices.device import discover
    from farm.settings import settings
    from farm.store.database import Database

    settings.cache_clear()
    wanted = {int(index) for index in options.cards.split(",") if index}
    database = Database(settings().database)
    database.upgrade()
    if options.budget_s > 0:
        cards = [card for card in discover(settings()) if not card.refusal and (not wanted or card.index in wanted)]
    else:
        cards = cards_that_read(database)
    card = cards[0]
    requests = [request(text, card.kind, options) for text in options.models]
    if not options.only_extras and options.budget_s > 0:
        measure(database, requests, cards, began_s + options.budget_s)
    extras: dict[str, Any] = {}
    if options.budget_s > 0 and (options.repeatability or options.outside):
        # Before torch is imported: here it works in this process, on the first of the cards.
        os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(card.index)}
        from card_agreement import outside, repeatability

        # What is outside works in this process, whose context stays on the card and would share it with what comes after.
        if options.repeatability:
            left_s = options.budget_s - (time.monotonic() - began_s)
            again = repeatability(database, cards, options.repeatability, left_s)
            if again["time"]:
                extras["repeatability"] = again
            else:
                print(
                    f"repeatability: no tuple was read {again['times']} times in {left_s:.0f} s; it wants a longer --budget-s"
                )
        if options.outside:
            extras["outside"] = outside(card)
    rows = [row for one in requests if (row := newest(database, one)) is not None]
    if options.also:
        before = json.loads(options.also.read_text())
        there = {row["title"] for row in rows}
        rows += [row for row in before["variants"] if row["title"] not in there]
        extras = {name: extras.get(name) or before.get(name) for name in EXTRAS}
    if options.without_traces:
        without_traces(options.database)
    write(options, card, database, rows, extras)
    print(f"all in {time.monotonic() - began_s:.0f} s")


def cards_that_read(database: Any) -> list[Any]:
    """The cards of the database's readings, GPUs first."""
    from sqlmodel import col, select

    from farm.store import tables

    with database.read() as session:
        query = select(tables.Card).where(col(tables.Card.id).in_(select(tables.Reading.card_id)))
        return sorted(session.exec(query), key=lambda card: (card.kind != "cuda", card.id))


def variant(text: str) -> Variant:
    name, batch, dtype, *_ = [*text.split(":"), "", ""]
    return Variant(name, int(batch or 32), 299 if name == "inception_v3" else 224, dtype or "float32")


def request(text: str, card_kind: str, options: argparse.Namespace) -> Request:
    from farm.defaults import Wish, complete

    one = variant(text)
    wish = Wish(
        model=one.model,
        batch=one.batch,
        input_size=one.input_size,
        dtype=one.dtype,
        data=options.data or None,
        reuse=options.reuse,
        minimum_s=options.minimum_s if card_kind == "cuda" else None,
    )
    return complete(wish, card_kind, target=0.95)


# --------------------------------------------------------------------------------------------------- a plan


def plan(options: argparse.Namespace) -> None:
    """What the list comes to, by captures on this machine: tuples, those that are new, expected card seconds."""
    from farm.captures import capture_for, classes
    from farm.installed import torch_version
    from farm.settings import settings
    from farm.store.database import Database

    settings.cache_clear()
    database = Database(settings().database)
    database.upgrade()
    there: set[tuple[str, str]] = set()
    total_s = 0.0
    print(f"{'variant':34} {'calls':>6} {'tuples':>7} {'parts':>6} {'new':>5} {'card s':>7} {'sum s':>7}")
    for text in options.models:
        one = request(text, "cuda", options)
        capture_id = capture_for(database, one, device_type="cuda", torch=torch_version())
        with database.read() as session:
            parts = classes(session, capture_id, one.protocol.data)
        new = set(parts) - there
        there |= new
        expected_s = EXPECTED_WHOLE_S + EXPECTED_TUPLE_S * len(new)
        total_s += expected_s
        tuples = len({operator_id for operator_id, _ in parts})
        print(
            f"{one.title:34} {sum(parts.values()):6} {tuples:7} {len(parts):6} {len(new):5} {expected_s:7.0f} "
            f"{total_s:7.0f}",
            flush=True,
        )
    by_class = Counter(data for _, data in there)
    print(
        f"\n{len(there)} readings of tuples, {len({operator_id for operator_id, _ in there})} tuples; {total_s:.0f} s"
    )
    print("classes:", ", ".join(f"{name} {count}" for name, count in by_class.most_common(12)))


# --------------------------------------------------------------------------------------------------- the farm


def measure(database: Any, requests: list[Request], cards: list[Any], until_s: float) -> None:
    from farm.captures import capture_for, classes
    from farm.installed import torch_version
    from farm.settings import settings
    from tasks.embedded import EmbeddedFarm
    from tasks.submit import submit

    pending = [one for one in requests if newest(database, one) is None]
    if not pending:
        return
    opened: dict[str, tuple[str, str]] = {}  # job -> card, title
    given_s = dict.fromkeys((card.id for card in cards), 0.0)
    known: dict[str, set[tuple[str, str]]] = {card.id: set() for card in cards}
    begun = {one.id: card_id for one in pending if (card_id := begun_on(database, one)) in given_s}
    with EmbeddedFarm(settings(), cards) as farm:
        farm.wait_ready()
        while (pending or opened) and time.monotonic() < until_s:
            waiting = Counter(card_id for card_id, _ in opened.values())
            card_id = min(given_s, key=lambda one: (waiting[one], given_s[one]))
            if pending and waiting[card_id] < 2:
                # What an earlier go began on this card, else what none began, else what is left.
                at_home = sorted(
                    pending, key=lambda one: (begun.get(one.id) not in (card_id, None), one.id not in begun)
                )
                one = at_home[0]
                pending.remove(one)
                try:
                    made = submit(database, one, [card_id], pinned=True, ready=farm.wait_ready)
                    capture_id = capture_for(database, one, device_type=cards[0].kind, torch=torch_version())
                    with database.read() as session:
                        parts = set(classes(session, capture_id, one.protocol.data))
                except Exception as error:  # one model that cannot be taken apart must not end the go
                    print(f"{one.title}: {type(error).__name__}: {error}", flush=True)
                    continue
                given_s[card_id] += EXPECTED_WHOLE_S + EXPECTED_TUPLE_S * len(parts - known[card_id])
                known[card_id] |= parts
                opened[made.job_id] = (card_id, one.title)
                print(f"{made.title}: {made.new} to measure, {made.reused} known, on {card_id[:12]}", flush=True)
            farm.tend()
            for job_id in list(opened):
                if closed(database, job_id):
                    card_id, title = opened.pop(job_id)
                    took_s = time.monotonic() - until_s
                    print(f"{title}: done on {card_id[:12]}, {-took_s:.0f} s left", flush=True)
            time.sleep(0.05 if pending else 0.2)


def begun_on(database: Any, asked: Request) -> str | None:
    """The card of the newest job that asked the same, ended or not: there its readings are."""
    from sqlmodel import col, select

    from farm.store import tables

    with database.read() as session:
        query = (
            select(tables.Job).where(tables.Job.request_id == asked.id).order_by(col(tables.Job.created_at_s).desc())
        )
        cards = [job.request.get("cards") or [] for job in session.exec(query)]
    return next((ids[0] for ids in cards if len(ids) == 1), None)


def closed(database: Any, job_id: str) -> bool:
    from farm.store import tables

    with database.read() as session:
        return session.get_one(tables.Job, job_id).state != tables.JobState.OPEN


# --------------------------------------------------------------------------------------------------- the table


def newest(database: Any, asked: Request) -> dict[str, Any] | None:
    """The row of the newest finished job that asked the same of one card."""
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
    from farm.store.batches import fetch

    verdict, readings = built.verdict, built.readings
    items = session.exec(select(tables.Item).where(tables.Item.job_id == built.job_id)).all()
    by_id = fetch(session, tables.Reading, [item.reading_id for item in items if item.reading_id])
    rows = list(by_id.values())
    whole = [row for row in rows if row.subject_kind == "variant"]
    tuples = [row for row in rows if row.subject_kind == "operator"]
    # Whichever job had them read: from claim to written result, verification included.
    query = select(tables.Item).where(col(tables.Item.reading_id).in_(list(by_id)), col(tables.Item.reused).is_(False))
    spans = sorted((item.started_at_s or 0.0, item.ended_at_s or 0.0, item.role) for item in session.exec(query))
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

    weighted = [(row.time_us, row.temperature_c) for row in tuples if row.temperature_c]
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
        "looped_time_gap": (verdict.time.total.value - (verdict.context_time_us or 0.0)) / verdict.time.whole.value - 1
        if verdict.time.whole
        else None,
        "weights_in_cache": verdict.weights_in_cache,
        "energy_gap": gap(verdict.energy),
        "energy_above_idle_gap": gap(verdict.energy_above_idle),
        "whole_time_us": verdict.time.whole.value if verdict.time.whole else None,
        "whole_energy_mj": verdict.energy.whole.value if verdict.energy and verdict.energy.whole else None,
        "whole_power_w": verdict.power.whole.value if verdict.power and verdict.power.whole else None,
        "whole_temperature_c": [row.temperature_c for row in whole],
        "whole_sm_clock_mhz": [row.sm_clock_mhz for row in whole],
        "whole_flags": sorted({flag for row in whole for flag in row.flags}),
        "tuple_temperature_c": [min(temperatures), statistics.median(temperatures), max(temperatures)]
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
        "cost_s": {name: statistics.median(row.cost_s.get(name, 0.0) for row in tuples) for name in parts},
        "in_windows": busy_s / wall_s if wall_s else None,
        "read_within_s": max(row.created_at_s for row in rows) - min(row.created_at_s for row in rows),
        "launch_gap_us": verdict.launch_gap_us,
        "flags": verdict.flags,
        "adjusted": len(verdict.adjustments),
        "unmeasured": [[one.label, one.reason] for one in verdict.unmeasured[:10]],
        "reasons": list(verdict.reasons),
        "observed": {name: built.verification.get(name) for name in ("matches", "difference_count")},
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
    options: argparse.Namespace, card: Any, database: Any, rows: list[dict[str, Any]], extras: dict[str, Any]
) -> None:
    from farm.store import tables

    with database.read() as session:
        row = session.get(tables.Card, card.id)
        software = session.get(tables.Software, row.software_id) if row and row.software_id else None
        fingerprint = dict(row.fingerprint) if row else {}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    options.out.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", card.model.lower()).strip("-")
    path = options.out / f"{slug}-{day}"
    before = json.loads(path.with_suffix(".json").read_text()) if path.with_suffix(".json").exists() else {}
    extras = {name: extras.get(name) or before.get(name) for name in EXTRAS}
    again = extras.get("repeatability") or {}
    compare_power(rows, {**fingerprints_of(database, card.model), **again.get("fingerprints", {})})
    summary = summarise(rows)
    data = {
        "date": day,
        "card": {"id": card.id, "model": card.model, "driver": card.driver, "memory_bytes": card.memory_bytes},
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
        cards = session.exec(select(tables.Card).where(col(tables.Card.model) == model)).all()
        return {card.id: dict(card.fingerprint) for card in cards}


def compare_power(rows: list[dict[str, Any]], fingerprints: dict[str, dict[str, Any]]) -> None:
    """How far the sum's power is off, as read and with the tuples restated to the whole's temperature.

    The whole is read at one temperature and the tuples each at another; a degree more costs watts. What it costs is
    taken from the fingerprints of all cards of the model together. Wholes at the power limit are left out.
    """
    from farm.fingerprints import pooled, w_per_c

    together = pooled(fingerprints.values())

    for row in rows:
        row["power_gap"] = row["power_gap_at_one_temperature"] = None
        if not row["energy_gap"] or not row["time_gap"] or not row["whole_power_w"]:
            continue
        whole_w = row["whole_power_w"]
        row["power_gap"] = (1 + row["energy_gap"][0]) / (1 + row["time_gap"][0]) - 1
        watts = w_per_c(together, whole_w)
        whole_c, tuples_c = row["whole_temperature_c"], row["tuple_temperature_by_time_c"]
        limited = "throttled_power" in row["whole_flags"]  # then the limit says what it draws, not the temperature
        if watts is not None and tuples_c and all(whole_c) and not limited:
            row["power_gap_at_one_temperature"] = (
                row["power_gap"] + watts * (statistics.mean(whole_c) - tuples_c) / whole_w
            )


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"variants": len(rows)}
    for name in ("time_gap", "energy_gap"):
        values = [abs(row[name][0]) for row in rows if row[name]]
        if values:
            found[name] = {"median": statistics.median(values), "most": max(values), "above_3_percent": []}
            found[name]["above_3_percent"] = [row["title"] for row in rows if row[name] and abs(row[name][0]) > 0.03]
    for name in ("power_gap", "power_gap_at_one_temperature"):
        values = [abs(row[name]) for row in rows if row.get(name) is not None]
        if values:
            found[name] = {"median": statistics.median(values), "most": max(values), "of": len(values)}
    explained = [row["kernels"]["explained"] for row in rows if row.get("kernels")]
    found["least_explained"] = min(explained, default=None)
    found["read_within_s"] = max((row.get("read_within_s", 0.0) for row in rows), default=None)
    found["least_coverage"] = min((row["coverage"] for row in rows if row["coverage"]), default=None)
    for name in ("card_s_per_tuple", "in_windows"):
        values = [row[name] for row in rows if row[name]]
        found[name] = statistics.median(values) if values else None
    return found


def markdown(data: dict[str, Any]) -> str:
    card, software, summary = data["card"], data["software"], data["summary"]
    lines = [
        f"# {card['model']}, {data['date']}",
        "",
        f"Cards {', '.join(sorted({row['card'] for row in data['variants']}))}, driver {card['driver']}; torch {software.get('torch', '?')}, CUDA "
        f"{software.get('cuda', '?')}, cuDNN {software.get('cudnn', '?')}. Made by `benchmarks/card_results.py`: the "
        "plain sum over all operator tuples, no fitted factor, against the whole model on the same card. Gap: sum / whole "
        "- 1, with the half-width of its 95 % interval.",
        "",
        "*Looped* is the time gap of the same tuples without what their neighbours in a model change.",
        "",
        "| variant | card | calls | parts | coverage | time gap | looped | energy gap | whole | s/tuple | in windows "
        "| C whole, tuples | flags |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --- |",
    ]
    for row in data["variants"]:
        whole = f"{row['whole_time_us'] / 1e3:.2f} ms" if row["whole_time_us"] else "-"
        whole += f", {row['whole_power_w']:.0f} W" if row["whole_power_w"] else ""
        warm = row["tuple_temperature_by_time_c"]
        temperatures = " ".join(f"{value:.0f}" for value in row["whole_temperature_c"] if value)
        lines.append(
            f"| {row['title']} | {row['card'][4:12]} | {row['calls']} | {row['measured']}/{row['parts']} "
            f"| {percent(row['coverage'])} "
            f"| {gap_text(row['time_gap'])} | {signed(row['looped_time_gap'])} | {gap_text(row['energy_gap'])} | {whole} "
            f"| {number(row['card_s_per_tuple'])} | {percent(row['in_windows'])} "
            f"| {temperatures}, {number(warm)} "
            f"| {', '.join(f'{name} {count}' for name, count in row['flags'].items()) or '-'} |"
        )
    lines.append("")
    for name, word in (("time_gap", "time"), ("energy_gap", "energy")):
        if one := summary.get(name):
            lines.append(
                f"- absolute {word} gap: median {one['median']:.1%}, most {one['most']:.1%}; above 3 %: "
                f"{', '.join(one['above_3_percent']) or 'none'}"
            )
    if one := summary.get("power_gap"):
        other = summary.get("power_gap_at_one_temperature")
        lines.append(
            f"- absolute power gap: median {one['median']:.1%}, most {one['most']:.1%}"
            + (
                f"; with the tuples restated to the whole's temperature (of {other['of']}) {other['median']:.1%} and {other['most']:.1%}"
                if other
                else ""
            )
        )
    lines.append(
        f"- least coverage {percent(summary['least_coverage'])}; kernels of the tuples account for at least "
        f"{percent(summary['least_explained'])} of a whole's kernel time; the readings of a variant were taken within "
        f"{(summary['read_within_s'] or 0.0) / 60:.0f} min at most"
    )
    lines.append(
        f"- card seconds per tuple {number(summary['card_s_per_tuple'])}"
        f" (median of medians); share of the card's time in warm-ups, windows and bursts, everything included, {percent(summary['in_windows'])}"
    )
    if one := data.get("repeatability"):
        lines.append(
            f"- repeatability: {one['time']['of']} tuples read {one['times']} times, (most - least) / median: time median "
            f"{one['time']['median']:.2%}, most {one['time']['most']:.2%}"
            + (
                f"; energy median {one['energy']['median']:.2%}, most {one['energy']['most']:.2%}"
                if one["energy"]
                else ""
            )
            + (
                f", at one temperature {level['median']:.2%} and {level['most']:.2%}"
                if (level := one.get("energy_at_one_temperature"))
                else ""
            )
        )
    for one in data.get("outside") or []:
        lines.append(
            f"- {one['what']}: {one['meter']} {one['theirs']:.4g} {one['unit']}, farm {one['ours']:.4g}, "
            f"{one['ours'] / one['theirs'] - 1:+.2%}"
        )
    return "\n".join(lines) + "\n"


def gap_text(gap: list[float] | None) -> str:
    return f"{gap[0]:+.1%} ± {gap[1]:.1%}" if gap else "-"


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def without_traces(path: Path) -> None:
    """Traces are no part of a table."""
    import sqlite3

    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM trace")
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("VACUUM")


if __name__ == "__main__":
    main()
