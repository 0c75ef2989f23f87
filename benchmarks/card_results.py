"""Compare sum and whole model for the project's list of models on one card; write JSON and a table.

    python benchmarks/card_results.py --plan                              # count the items; needs
    no card python benchmarks/card_results.py --database farm.db --budget-s 540   # a run of nine
    minutes; repeat to continue python benchmarks/card_results.py --database farm.db --budget-s 0
    # tables from existing readings, without a card python benchmarks/card_results.py --database
    farm.db --repeatability 50 --outside --only-extras

An embedded farm on all cards of the host does the work. A variant's tuples and its whole model are
measured on one card, the one with the least work. Two jobs per card are open at a time, so that the
next model is captured while the card measures. A card does not repeat its own readings for another
model. Readings stay in the database, so several runs may complete the list. On another host, with
its own database, `--also` includes the tables of the first host. Seconds count from the claim of an
item to its written result."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from card_tables import EXTRAS, newest, write

from farm.requests.resolved import ResolvedRequest
from farm.types.protocol import Stopping
from farm.types.request import Request
from farm.types.variant import Variant

# By priority, in case the card time ends: families first, then batch 1, then the long variants.
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
# on an H200: rebuild, warm-up, window, write, and its share of canaries and repetitions
EXPECTED_TUPLE_S = 1.15
EXPECTED_WHOLE_S = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=LIST, help="NAME[:BATCH[:DTYPE]]")
    parser.add_argument(
        "--plan", action="store_true", help="count tuples and card seconds; measure nothing"
    )
    parser.add_argument(
        "--database",
        type=Path,
        default=Path("card_results.db"),
        help="a SQLite file, created if missing",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=540.0,
        help="time in seconds after which no job begins and the script waits for none",
    )
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the two tables")
    parser.add_argument(
        "--also",
        type=Path,
        help="tables (JSON) of an earlier run, for variants that this database lacks",
    )
    parser.add_argument(
        "--cards",
        default="",
        help="indices of the cards to use, such as 0,1; default: all cards of the host",
    )
    parser.add_argument(
        "--data",
        default="",
        help="values of the inputs (seen, normal or zeros) instead of the card's default",
    )
    parser.add_argument("--minimum-s", type=float, default=Stopping().minimum_s)
    parser.add_argument("--reuse", default="card", choices=("model", "card", "none"))
    parser.add_argument(
        "--repeatability", type=int, default=0, metavar="N", help="measure N tuples five times each"
    )
    parser.add_argument(
        "--outside",
        action="store_true",
        help=(
            "compare with the measurements of other projects (Zeus, torch.utils.benchmark, Triton)"
        ),
    )
    parser.add_argument(
        "--without-traces", action="store_true", help="remove the traces: most of a database's size"
    )
    parser.add_argument(
        "--only-extras",
        action="store_true",
        help="run only --repeatability and --outside, and measure no model",
    )
    options = parser.parse_args()
    began_s = time.monotonic()
    os.environ["FARM_DATABASE_URL"] = f"sqlite:///{options.database.resolve()}"
    if options.plan:
        return plan(options)
    from farm.devices.host import discover
    from farm.settings import settings
    from farm.store.upgrades import writable_database

    settings.cache_clear()
    wanted = {int(index) for index in options.cards.split(",") if index}
    database = writable_database()
    if options.budget_s > 0:
        cards = [
            card
            for card in discover(settings())
            if not card.refusal and (not wanted or card.index in wanted)
        ]
    else:
        cards = cards_that_read(database)
    card = cards[0]
    requests = [request(text, card.kind, options) for text in options.models]
    if not options.only_extras and options.budget_s > 0:
        measure(database, requests, cards, began_s + options.budget_s)
    extras: dict[str, Any] = {}
    if options.budget_s > 0 and (options.repeatability or options.outside):
        # Before torch is imported, because torch runs in this process, on the first of the cards.
        os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": str(card.index)}
        from card_agreement import outside, repeatability

        # The other meters run in this process. Its context stays on the card and would share it
        # with later measurements.
        if options.repeatability:
            left_s = options.budget_s - (time.monotonic() - began_s)
            again = repeatability(database, cards, options.repeatability, left_s)
            if again["time"]:
                extras["repeatability"] = again
            else:
                print(
                    f"repeatability: no tuple was measured {again['times']} times in {left_s:.0f} "
                    "s; increase "
                    "--budget-s"
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
    write(options.out, card, database, rows, extras)
    print(f"all in {time.monotonic() - began_s:.0f} s")


def cards_that_read(database: Any) -> list[Any]:
    """Return the cards of the database's readings, GPUs first."""
    from sqlmodel import col, select

    from farm.store import tables

    with database.read() as session:
        query = select(tables.CardRow).where(
            col(tables.CardRow.id).in_(select(tables.ReadingRow.card_id))
        )
        return sorted(session.exec(query), key=lambda card: (not card.is_gpu, card.id))


def variant(text: str) -> Variant:
    name, batch, dtype, *_ = [*text.split(":"), "", ""]
    return Variant(
        name, int(batch or 32), 299 if name == "inception_v3" else 224, dtype or "float32"
    )


def request(text: str, card_kind: str, options: argparse.Namespace) -> Request:
    from farm.requests.partial_request import PartialRequest, complete

    one = variant(text)
    partial = PartialRequest(
        model=one.model,
        batch=one.batch,
        input_size=one.input_size,
        dtype=one.dtype,
        data=options.data or None,
        reuse=options.reuse,
        minimum_s=options.minimum_s if card_kind == "cuda" else None,
    )
    return complete(partial, card_kind, target=0.95)


# ---------------------------------------------------------------------------------------------------
# a plan


def plan(options: argparse.Namespace) -> None:
    """Count the tuples, new tuples and expected card seconds of the list, with captures on this
    machine.
    """
    from farm.devices.software import torch_version
    from farm.jobs.captures import capture_for
    from farm.settings import settings
    from farm.store.captures import classes
    from farm.store.upgrades import writable_database

    settings.cache_clear()
    database = writable_database()
    there: set[tuple[str, str]] = set()
    total_s = 0.0
    print(
        f"{'variant':34} {'calls':>6} {'tuples':>7} {'parts':>6} {'new':>5} {'card s':>7} "
        f"{'sum s':>7}"
    )
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
            f"{one.title:34} {sum(parts.values()):6} {tuples:7} {len(parts):6} {len(new):5} "
            f"{expected_s:7.0f} "
            f"{total_s:7.0f}",
            flush=True,
        )
    by_class = Counter(data for _, data in there)
    print(
        f"\n{len(there)} readings of tuples, {len({operator_id for operator_id, _ in there})} "
        f"tuples; {total_s:.0f} s"
    )
    print("classes:", ", ".join(f"{name} {count}" for name, count in by_class.most_common(12)))


# ---------------------------------------------------------------------------------------------------
# the farm


def measure(database: Any, requests: list[Request], cards: list[Any], until_s: float) -> None:
    from farm.devices.software import torch_version
    from farm.jobs.captures import capture_for
    from farm.settings import settings
    from farm.store.captures import classes
    from tasks.embedded import EmbeddedFarm
    from tasks.submissions import submit

    pending = [one for one in requests if newest(database, one) is None]
    if not pending:
        return
    opened: dict[str, tuple[str, str]] = {}  # job -> card, title
    given_s = dict.fromkeys((card.id for card in cards), 0.0)
    known: dict[str, set[tuple[str, str]]] = {card.id: set() for card in cards}
    begun = {one.id: card_id for one in pending if (card_id := begun_on(database, one)) in given_s}
    with EmbeddedFarm(settings(), database, cards) as farm:
        farm.wait_ready()
        while (pending or opened) and time.monotonic() < until_s:
            waiting = Counter(card_id for card_id, _ in opened.values())
            card_id = min(given_s, key=lambda one: (waiting[one], given_s[one]))
            if pending and waiting[card_id] < 2:
                # Variants that an earlier run began on this card, else new ones, else the rest.
                at_home = sorted(
                    pending,
                    key=lambda one: (begun.get(one.id) not in (card_id, None), one.id not in begun),
                )
                one = at_home[0]
                pending.remove(one)
                try:
                    made = submit(
                        database,
                        dataclasses.replace(ResolvedRequest.of(one, [card_id]), pinned=True),
                        farm=farm,
                    )
                    capture_id = capture_for(
                        database, one, device_type=cards[0].kind, torch=torch_version()
                    )
                    with database.read() as session:
                        parts = set(classes(session, capture_id, one.protocol.data))
                except Exception as error:  # a model that cannot be extracted must not end the run
                    print(f"{one.title}: {type(error).__name__}: {error}", flush=True)
                    continue
                given_s[card_id] += EXPECTED_WHOLE_S + EXPECTED_TUPLE_S * len(
                    parts - known[card_id]
                )
                known[card_id] |= parts
                opened[made.job_id] = (card_id, one.title)
                print(
                    f"{made.title}: {made.new} to measure, {made.reused} known, on {card_id[:12]}",
                    flush=True,
                )
            farm.tend()
            for job_id in list(opened):
                if closed(database, job_id):
                    card_id, title = opened.pop(job_id)
                    took_s = time.monotonic() - until_s
                    print(f"{title}: done on {card_id[:12]}, {-took_s:.0f} s left", flush=True)
            time.sleep(0.05 if pending else 0.2)


def begun_on(database: Any, asked: Request) -> str | None:
    """Return the card of the newest job with the same request, ended or not, because it has the
    readings.
    """
    from sqlmodel import col, select

    from farm.store import tables

    with database.read() as session:
        query = (
            select(tables.Job)
            .where(tables.Job.request_id == asked.id)
            .order_by(col(tables.Job.created_at_s).desc())
        )
        cards = [job.request.get("cards") or [] for job in session.exec(query)]
    return next((ids[0] for ids in cards if len(ids) == 1), None)


def closed(database: Any, job_id: str) -> bool:
    from farm.store import tables

    with database.read() as session:
        return session.get_one(tables.Job, job_id).state != tables.JobState.OPEN


def without_traces(path: Path) -> None:
    """Remove the traces from the database; the tables do not use them."""
    import sqlite3

    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM trace")
    with sqlite3.connect(path, isolation_level=None) as connection:
        connection.execute("VACUUM")


if __name__ == "__main__":
    main()
