"""Compare N cards of one host with one card: items per hour, and readings beside busy neighbours.

    python benchmarks/throughput.py --budget-s 150 --json throughput.json
    FARM_SIMULATED_CARDS=4 FARM_SIMULATED_ITEM_S=0.2 python benchmarks/throughput.py     # the farm
    without the cards

Three jobs, nothing reused:

1. *all*: one large job of distinct tuples (Conv2d, Linear and ReLU in many sizes) over all cards;
2. *one*: every n-th of its tuples by duration, n being the number of cards, on the first card while
   the others are
   idle: a share like that of every card, and the same kind of work. It runs on a new farm, so that
   its benchmark process, too, meets every kernel for the first time;
3. *rest*: the tuples that the first card measured in *all* but not in *one*, so that each of its
   readings beside busy neighbours has a reading alone.

Items per hour count from the first item's start to the last one's end; the ratio is that of *all*
to *one*. Its target is 1.9 for two cards and 3.7 for four. `--cards 2` uses two cards of a host
that has more."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = {2: 1.9, 4: 3.7}
START_S = 30.0  # workers importing torch, the first context
ITEM_S = 1.15  # on an H200: rebuild, warm-up, window, write
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Conv2d": {
        "in_channels": (32, 64, 96, 128, 256),
        "out_channels": (32, 64, 96, 128, 256),
        "kernel_size": (1, 3),
        "image_size": (14, 28, 56),
    },
    "Linear": {
        "in_features": (256, 512, 768, 1024, 2048),
        "out_features": (256, 512, 768, 1024, 2048),
        "tokens": (50, 197),
    },
    "ReLU": {"channels": (32, 64, 96, 128, 256), "image_size": (14, 28, 56, 112)},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--per-card",
        type=int,
        default=0,
        help="tuples per card; default: as many as the budget allows",
    )
    parser.add_argument(
        "--cards", type=int, default=0, help="number of the host's cards to use; default: all"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget-s", type=float, default=150.0)
    parser.add_argument("--json", type=Path, default=Path("throughput.json"))
    options = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="farm-throughput-") as folder:
        os.environ["FARM_DATABASE_URL"] = f"sqlite:///{folder}/farm.db"
        os.environ["FARM_STATE_DIR"] = folder
        out = compare(options, began_s)
    out["took_s"] = round(time.monotonic() - began_s, 1)
    options.json.write_text(json.dumps(out, indent=1))
    show(out)


def compare(options: argparse.Namespace, began_s: float) -> dict[str, Any]:
    from farm.devices.host import discover
    from farm.requests.card_selection import by_model
    from farm.settings import settings
    from farm.store.upgrades import writable_database
    from tasks.embedded import EmbeddedFarm

    usable = [card for card in discover(settings()) if not card.refusal]
    cards = max(by_model(usable).values(), key=len)[: options.cards or None]
    deadline_s = began_s + options.budget_s
    per_card = options.per_card or max(2, int((options.budget_s - 2 * START_S) / 3 / ITEM_S))
    everyone = [card.id for card in cards]
    database = writable_database()
    with EmbeddedFarm(settings(), database, cards) as farm:
        runs = Runs(farm, deadline_s)
        operator_ids = runs.store(options.batch)
        chosen = random.Random(0).sample(
            operator_ids, min(per_card * len(cards), len(operator_ids) - len(cards))
        )
        spare = [one for one in operator_ids if one not in set(chosen)]
        jobs = [runs.job("all", chosen, everyone, before=spare[: len(cards)])]
    by_duration = sorted(jobs[0]["rows"], key=lambda row: sum(row["cost_s"].values()))
    share = [row["tuple"] for row in by_duration[len(cards) // 2 :: len(cards)]]
    first = [row["tuple"] for row in jobs[0]["rows"] if row["card"] == everyone[0]]
    with EmbeddedFarm(settings(), database, cards[:1]) as farm:
        runs = Runs(farm, deadline_s)
        for name, tuples in (("one", share), ("rest", sorted(set(first) - set(share)))):
            if tuples and runs.left_s() > 0:
                random.Random(1).shuffle(tuples)
                jobs.append(
                    runs.job(name, tuples, everyone[:1], before=spare[:1] if name == "one" else ())
                )
    readings = {job["name"]: {row["tuple"]: row for row in job.pop("rows")} for job in jobs}
    return {
        "cards": [vars(card) for card in cards],
        "jobs": jobs,
        **conclusion(jobs, readings, everyone[0], len(cards)),
    }


class Runs:
    """Run jobs of given tuples on an embedded farm, and wait for each."""

    def __init__(self, farm: Any, deadline_s: float) -> None:
        self.farm = farm
        self.database = farm.database
        self.deadline_s = deadline_s

    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def store(self, batch: int) -> list[str]:
        """Store the tuples of all grids; return their ids."""
        from farm.operators.sweep_builder import Expansion
        from farm.store.content import store_operators

        ids: list[str] = []
        for name in GRIDS:
            sweep = self._request(name, batch).sweep
            assert sweep is not None
            for tuples in Expansion(sweep).batches():
                with self.database.write() as session:
                    store_operators(session, tuples)
                ids += [spec.id for spec in tuples]
        return ids

    def job(
        self,
        name: str,
        operator_ids: Sequence[str],
        card_ids: Sequence[str],
        before: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Measure the tuples on the cards; return the readings and the duration.

        Args:
            before: tuples to be measured first, so that the job does not pay for a process's first
                reading.
        """
        from farm.jobs import jobs
        from tasks.queues import publish_round

        self.farm.wait_ready()
        if before:
            self.job("warm-up", before, card_ids)
        print(f"{name}: {len(operator_ids)} tuples on {len(card_ids)} cards", flush=True)
        planned = jobs.create(
            self.database,
            self._request("Conv2d", 1, name),
            card_ids,
            operator_ids=operator_ids,
            farm=self.farm.id,
            pinned=True,
        )
        publish_round(self.database, planned.job_id, planned.round)
        while True:
            with self.database.read() as session:
                progress = jobs.progress(session, planned.job_id)
            if progress.state != "open":
                break
            if self.left_s() < 0:
                jobs.cancel(self.database, planned.job_id)
                print(
                    f"the budget ended with {progress.closed} of {progress.total} items", flush=True
                )
            self.farm.tend()
            time.sleep(0.2)
        return self._outcome(name, planned.job_id, card_ids)

    def _request(self, operator: str, batch: int, name: str = "") -> Any:
        from farm.requests.partial_request import PartialRequest, complete
        from farm.types.request import Sweep

        sweep = Sweep(operator, {**GRIDS[operator], "batch": (batch,)}, name)
        return complete(
            PartialRequest(sweep=sweep, reuse="none"), self.farm.cards[0].kind, target=0.95
        )

    def _outcome(self, name: str, job_id: str, card_ids: Sequence[str]) -> dict[str, Any]:
        from sqlmodel import col, select

        from farm.store.tables import Item, Operator, ReadingRow

        with self.database.read() as session:
            items = list(session.exec(select(Item).where(Item.job_id == job_id)))
            query = (
                select(Item, ReadingRow, Operator.label)
                .join(ReadingRow, col(ReadingRow.id) == col(Item.reading_id))
                .join(Operator, col(Operator.id) == col(Item.subject_id))
                .where(Item.job_id == job_id)
            )
            rows = [
                {
                    "tuple": item.subject_id,
                    "label": label,
                    "card": item.card_id,
                    "time_us": reading.time_us,
                    "time_half_width_us": reading.time_half_width_us,
                    "energy_mj": reading.energy_mj,
                    "energy_half_width_mj": reading.energy_half_width_mj,
                    "temperature_c": reading.temperature_c,
                    "sm_clock_mhz": reading.sm_clock_mhz,
                    "flags": reading.flags,
                    "cost_s": reading.cost_s,
                }
                for item, reading, label in session.exec(query)
            ]
        done = [item for item in items if item.state == "done"]
        began_s = min((i.started_at_s or 0.0 for i in done), default=0.0)
        by_card = {
            card_id: _of_card([i for i in done if i.card_id == card_id], began_s)
            for card_id in card_ids
        }
        took_s = max((i.ended_at_s or 0.0 for i in done), default=began_s) - began_s
        parts = sorted({part for row in rows for part in row["cost_s"]})
        return {
            "name": name,
            "cards": len(card_ids),
            "done": len(done),
            "failed": sum(item.state == "failed" for item in items),
            "not_done": len(items) - len(done),
            "took_s": took_s,
            "items_per_hour": 3600 * len(done) / took_s if took_s else None,
            "by_card": by_card,
            "mean_cost_s": {
                part: statistics.mean(row["cost_s"].get(part, 0.0) for row in rows)
                for part in parts
            },
            "in_windows_or_warm_up": _share(rows, took_s * len(card_ids)),
            "rows": rows,
        }


def _of_card(items: Sequence[Any], began_s: float) -> dict[str, float]:
    """One card's items of a job, in seconds after the start of the job's first item."""
    return {
        "items": len(items),
        "first_began_s": min((item.started_at_s - began_s for item in items), default=0.0),
        "last_ended_s": max((item.ended_at_s - began_s for item in items), default=0.0),
        "held_s": sum(item.ended_at_s - item.started_at_s for item in items),
        "longest_s": max((item.ended_at_s - item.started_at_s for item in items), default=0.0),
    }


def _share(rows: Sequence[dict[str, Any]], card_s: float) -> float | None:
    from farm.types.reading import inside_s

    return sum(inside_s(row["cost_s"]) for row in rows) / card_s if card_s else None


def conclusion(
    jobs: Sequence[dict[str, Any]],
    readings: dict[str, dict[str, dict[str, Any]]],
    first_card: str,
    cards: int,
) -> dict[str, Any]:
    rates = {job["name"]: job["items_per_hour"] for job in jobs}
    beside = {key: row for key, row in readings["all"].items() if row["card"] == first_card}
    alone = {**readings.get("rest", {}), **readings.get("one", {})}
    return {
        "items_per_hour_one": rates.get("one"),
        "items_per_hour_all": rates["all"],
        "ratio": rates["all"] / rates["one"] if rates["all"] and rates.get("one") else None,
        "target": TARGETS.get(cards),
        "differences": {
            "with busy neighbour cards, compared with alone": {
                figure: _differences(beside, alone, figure) for figure in ("time_us", "energy_mj")
            }
        },
        "tuples": [
            {"tuple": key, "label": row["label"], "beside": _kept(row), "alone": _kept(alone[key])}
            for key, row in beside.items()
            if key in alone
        ],
    }


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    """The values of a reading that a comparison shows."""
    names = (
        "time_us",
        "energy_mj",
        "time_half_width_us",
        "energy_half_width_mj",
        "temperature_c",
        "sm_clock_mhz",
        "flags",
    )
    return {name: row[name] for name in names}


def _differences(
    one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]], figure: str
) -> dict[str, float | int] | None:
    """Return the relative differences by tuple: their median (signed), the median of the absolute
    values, and the largest."""
    found = [
        one[key][figure] / other[key][figure] - 1
        for key in sorted(one.keys() & other.keys())
        if one[key][figure] and other[key][figure]
    ]
    if not found:
        return None
    sizes = [abs(value) for value in found]
    return {
        "tuples": len(found),
        "median": statistics.median(found),
        "median_size": statistics.median(sizes),
        "largest_size": max(sizes),
    }


def show(out: dict[str, Any]) -> None:
    names = sorted({card["model"] for card in out["cards"]})
    print(f"\n{len(out['cards'])} x {', '.join(names)}, {out['took_s']:.0f} s in all\n")
    print(
        "| job | cards | items | failed | seconds | items per hour | share of the cards' time in "
        "windows and warm-ups |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for job in out["jobs"]:
        rate, share = job["items_per_hour"], job["in_windows_or_warm_up"]
        print(
            f"| {job['name']} | {job['cards']} | {job['done']} | {job['failed']} | "
            f"{job['took_s']:.1f} "
            f"| {rate or 0:.0f} | {100 * (share or 0):.0f} % |"
        )
    if out["ratio"]:
        target = f", target {out['target']}" if out["target"] else ""
        print(f"\nratio {out['ratio']:.2f}{target}")
    print(
        "\n| the first card's readings | figure | tuples | median | median of the absolute values "
        "| largest |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name, figures in out["differences"].items():
        for figure, found in figures.items():
            if found:
                print(
                    f"| {name} | {figure.partition('_')[0]} | {found['tuples']} | "
                    f"{100 * found['median']:+.2f} % "
                    f"| {100 * found['median_size']:.2f} % | {100 * found['largest_size']:.2f} % |"
                )


if __name__ == "__main__":
    main()
