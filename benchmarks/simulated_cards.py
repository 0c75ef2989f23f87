"""Placement over many cards, and what the broker and the database bear.

    python benchmarks/simulated_cards.py --json cards.json              # the placement, by simulation
    python benchmarks/simulated_cards.py --real 6 --items 600           # and real workers on simulated cards

The simulation runs the farm's own `farm.placement`: 100 cards, 10,000 items, one card four times slower, one dying
half-way. Cards work at their own pace, every five seconds a pass of the reconciler balances them, a dead card is
noticed after 15 s. "Best possible" knows everything beforehand: all work, divided by all the speed there is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from farm.placement import Queue, Work, balance, place

PASS_S, LOST_S = 5.0, 15.0


def simulate(cards: int, items: int, seed: int, *, balancing: bool = True) -> dict[str, float]:
    chance = random.Random(seed)
    # What is expected, and what it then takes: off by a spread of 20 %.
    expected = {number: chance.lognormvariate(0.3, 0.5) for number in range(items)}
    takes = {number: seconds * chance.lognormvariate(0.0, 0.2) for number, seconds in expected.items()}
    ids = [f"c{number:03d}" for number in range(cards)]
    speed = dict.fromkeys(ids, 1.0)
    speed[ids[1]] = 0.25
    dead, total_s = ids[2], sum(takes.values())
    dies_s = total_s / (cards - 0.75 - 0.5) / 2
    best_s = (total_s - dies_s) / (cards - 1 - 0.75) if cards > 3 else total_s

    waiting: dict[str, list[int]] = {card: [] for card in ids}
    placed = place((Work(n, s) for n, s in expected.items()), dict.fromkeys(ids, 0.0))
    for number, card in placed.items():
        waiting[card].append(number)
    for queue in waiting.values():
        chance.shuffle(queue)
    current: dict[str, tuple[int, float]] = {}  # card -> item, when it ends
    spent = {card: [0.0, 0.0] for card in ids}  # expected and taken, of what it has done
    now_s, done, moves = 0.0, 0, 0
    step_s, next_pass_s, moved_off = 0.05, PASS_S, False
    while done < items:
        now_s += step_s
        for card in ids:
            alive = card != dead or now_s < dies_s
            if not alive:
                continue
            while True:
                if card in current:
                    number, ends_s = current[card]
                    if ends_s > now_s:
                        break
                    del current[card]
                    done += 1
                    spent[card][0] += expected[number]
                    spent[card][1] += takes[number] / speed[card]
                    begin_s = ends_s
                else:
                    begin_s = now_s
                if not waiting[card]:
                    break
                number = waiting[card].pop(0)
                current[card] = (number, begin_s + takes[number] / speed[card])
        if now_s < next_pass_s:
            continue
        next_pass_s += PASS_S
        slowness = {card: (t / e if e > 4 else 1.0) for card, (e, t) in spent.items()}
        if now_s > dies_s + LOST_S and not moved_off:
            moved_off = True
            stranded = waiting[dead] + ([current.pop(dead)[0]] if dead in current else [])
            free_at_s = {c: sum(expected[n] for n in waiting[c]) for c in ids if c != dead}
            for number, card in place((Work(n, expected[n]) for n in stranded), free_at_s, slowness).items():
                waiting[card].append(number)
            waiting[dead] = []
        if balancing:
            queues = [
                Queue(
                    card,
                    [Work(n, expected[n]) for n in waiting[card]],
                    max(0.0, current[card][1] - now_s) * speed[card] if card in current else 0.0,
                    slowness[card],
                )
                for card in ids
                if card != dead or (now_s < dies_s)
            ]
            for number, card in balance(queues, dry_within_s=2 * PASS_S).items():
                for other in ids:
                    if number in waiting[other]:
                        waiting[other].remove(number)
                        break
                waiting[card].append(number)
                moves += 1
    return {"ends_s": round(now_s, 1), "best_s": round(best_s, 1), "over": round(now_s / best_s - 1, 4), "moves": moves}


def real(cards: int, items: int, item_s: float) -> dict[str, float]:
    """Real workers: how busy the cards are, what broker and database take."""
    import psutil
    import redis

    from farm import jobs
    from farm.settings import Settings
    from tasks.app import configure
    from tasks.queues import publish_round
    from tasks.servers import BrokerServer
    from tests.farms import running, store_operators
    from tests.planned import sweep
    from tests.servers import PostgresServer

    with tempfile.TemporaryDirectory() as folder, BrokerServer() as broker, PostgresServer() as postgres:
        url = postgres.new_database()
        with running(Path(folder), broker.url, url, cards=cards, FARM_SIMULATED_ITEM_S=str(item_s)) as farm:
            ids = store_operators(farm.database, [""] * items)
            chosen = [card.id for card in farm.alive()]
            job_id = jobs.create(farm.database, sweep(items), chosen, operator_ids=ids).job_id
            configure(Settings(broker_url=broker.url))
            server = psutil.Process(postgres.pid)
            before_s = _processor_s(server)
            began_s = time.monotonic()
            publish_round(farm.database, job_id, 1)
            with redis.Redis.from_url(broker.redis_url) as client:
                full_mb = client.info("memory")["used_memory"] / 1e6
            farm.wait_for(lambda: farm.ended(job_id), 900)
            whole_s = time.monotonic() - began_s
            with redis.Redis.from_url(broker.redis_url) as client:
                peak_mb = client.info("memory")["used_memory_peak"] / 1e6
            database_s = _processor_s(server) - before_s
            attempts = sum(item.attempts for item in farm.items(job_id))
    return {
        "cards": cards,
        "items": items,
        "whole_s": round(whole_s, 1),
        "items_per_s": round(items / whole_s, 1),
        "card_busy_share": round(items * item_s / cards / whole_s, 3),
        "broker_full_mb": round(full_mb, 1),
        "broker_peak_mb": round(peak_mb, 1),
        "database_processor_ms_per_item": round(1e3 * database_s / items, 2),
        "database_share_of_one_core": round(database_s / whole_s, 3),
        "repeated": attempts - items,
    }


def _processor_s(server) -> float:  # type: ignore[no-untyped-def]
    import psutil

    taken = 0.0
    for process in [server, *server.children()]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        taken += times.user + times.system + times.children_user + times.children_system
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cards", type=int, default=100, help="of the simulation")
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--real", type=int, default=0, help="so many real workers instead of the simulation")
    parser.add_argument("--item-s", type=float, default=0.2, help="how long an item takes on a real worker's card")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = {}
    if options.real:
        found["real"] = real(options.real, options.items, options.item_s)
    else:
        found["balanced"] = [simulate(options.cards, options.items, seed) for seed in range(options.seeds)]
        found["first placement only"] = simulate(options.cards, options.items, 0, balancing=False)
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
