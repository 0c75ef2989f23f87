"""Check whether readings repeat, and whether other meters agree. The second half of
`benchmarks/card_results.py`.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from farm.benchmark_process.requests import MeasureRequest
from farm.devices.lock import CardLock
from farm.errors import Unmeasurable
from farm.settings import settings
from farm.subjects.label import label_of
from farm.subjects.parsing import parse
from farm.types.figure import value_of
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant

TIMES = 5
LOOP_S = 10.0


def repeatability(
    database: Any, cards: Sequence[Any], wanted: int, budget_s: float
) -> dict[str, Any]:
    """Measure tuples of the database five times each on one card, in rounds over all of that card's
    tuples.

    The tuples are shared out over the cards, which work at the same time. A round before the five
    is not counted: in a job a whole model and other tuples have warmed the card before. A card goes
    on to warm up or to cool down for minutes, and a degree more costs power: so the energies are
    told as they were read, and restated to one temperature by what the card's fingerprint, taken at
    the beginning, knows of that."""
    from sqlmodel import col, select

    from farm.store import tables

    with database.read() as session:
        query = (
            select(tables.Operator, tables.ProtocolRow)
            .join(tables.ReadingRow, col(tables.ReadingRow.subject_id) == col(tables.Operator.id))
            .join(
                tables.ProtocolRow, col(tables.ProtocolRow.id) == col(tables.ReadingRow.protocol_id)
            )
            .where(tables.ReadingRow.card_model == cards[0].model)
        )
        known = {(one.id, two.id): (one, two) for one, two in session.exec(query)}
    chosen = [known[key] for key in sorted(known)]
    random.Random(0).shuffle(chosen)
    shares = [chosen[:wanted][number :: len(cards)] for number in range(len(cards))]
    until_s = time.monotonic() + budget_s
    with ThreadPoolExecutor(len(cards)) as threads:
        lists = list(
            threads.map(lambda card, share: _read_again(card, share, until_s), cards, shares)
        )
    found = [entry for _, one in lists for entry in one]
    fingerprints = {
        card.id: fingerprint for card, (fingerprint, _) in zip(cards, lists, strict=True)
    }
    return {
        "times": TIMES,
        "tuples": len(found),
        "cards": len(cards),
        **_spreads(found, fingerprints),
        "fingerprints": fingerprints,
        "readings": found,
    }


def _read_again(
    card: Any, share: Sequence[tuple[Any, Any]], until_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    from farm.benchmark_process.client import BenchmarkProcess
    from farm.benchmark_process.requests import FingerprintRequest

    stopping = Stopping() if card.is_gpu else Stopping(warm_up_s=0.1, minimum_s=0.2, maximum_s=0.5)
    found: list[dict[str, Any]] = [
        {
            "label": operator.label,
            "data": protocol.data,
            "card": card.id,
            "time_us": [],
            "energy_mj": [],
            "effect_us": [],
            "temperature_c": [],
            "flags": [],
        }
        for operator, protocol in share
    ]
    with CardLock(card.id, settings().lock_dir), BenchmarkProcess(card.id) as process:
        fingerprint = process.call(FingerprintRequest(), timeout_s=60.0)
        for number in range(TIMES + 1):
            for (operator, protocol), entry in zip(share, found, strict=True):
                if time.monotonic() > until_s:
                    return fingerprint, found
                subject = Subject("operator", operator.id, operator.spec)
                try:
                    reading = process.measure(
                        MeasureRequest(subject, Protocol.from_json(protocol.spec), stopping)
                    ).reading
                except Unmeasurable as error:
                    entry["flags"].append(error.reason)
                    continue
                if number == 0:
                    continue
                entry["temperature_c"].append(reading.temperature_c)
                entry["time_us"].append(reading.time_us.value)
                entry["energy_mj"].append(value_of(reading.energy_mj))
                entry["effect_us"].append(
                    reading.details.context and reading.details.context.effect_us.value
                )
                entry["flags"] += reading.flags
    return fingerprint, found


def _spreads(found: list[dict[str, Any]], fingerprints: Mapping[str, Any]) -> dict[str, Any]:
    together = pooled(fingerprints.values())
    lists: dict[str, list[list[float]]] = {
        "time": [entry["time_us"] for entry in found],
        "energy": [entry["energy_mj"] for entry in found],
        "energy_at_one_temperature": [_at_one_temperature(entry, together) for entry in found],
    }
    spreads: dict[str, Any] = {}
    for name, read in lists.items():
        values = [
            (max(one) - min(one)) / statistics.median(one)
            for one in read
            if len(one) == TIMES and all(one)
        ]
        spreads[name] = (
            {"median": statistics.median(values), "most": max(values), "of": len(values)}
            if values
            else {}
        )
    return spreads


def _at_one_temperature(entry: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[float]:
    """A tuple's energies, each restated to the mean temperature of its readings; empty where a
    degree is worth no one knows what."""
    if not entry["time_us"] or not all(entry["energy_mj"]) or not all(entry["temperature_c"]):
        return []
    mean_c = statistics.mean(entry["temperature_c"])
    restated: list[float] = []
    for time_us, energy_mj, temperature_c in zip(
        entry["time_us"], entry["energy_mj"], entry["temperature_c"], strict=True
    ):
        watts = w_per_c(fingerprint, energy_mj / time_us * 1e3)
        if watts is None:
            return []
        restated.append(energy_mj + watts * (mean_c - temperature_c) * time_us * 1e-3)
    return restated


def w_per_c(fingerprint: Mapping[str, Any], power_w: float) -> float | None:
    """The watts that an operator with power `power_w` draws more per degree (C); None if unknown.

    The function interpolates between the two values of the fingerprint: under load, and at full
    clocks without work. The result is unknown if one of the two is missing or not significant."""
    low, high = (fingerprint.get(name) or {} for name in ("base_w_per_c", "w_per_c"))
    if not all(one.get("at_w") and one["half_width"] < abs(one["value"]) for one in (low, high)):
        return None
    share = (power_w - low["at_w"]) / (high["at_w"] - low["at_w"])
    return float(low["value"] + share * (high["value"] - low["value"]))


def pooled(fingerprints: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean watts per degree of several cards of one model, weighted by the precision of each
    card's value.
    """
    found: dict[str, Any] = {}
    listed = list(fingerprints)
    for name in ("base_w_per_c", "w_per_c"):
        known = [
            one[name]
            for one in listed
            if (one.get(name) or {}).get("at_w") and one[name]["half_width"] > 0
        ]
        if known:
            weights = [1 / one["half_width"] ** 2 for one in known]
            means = {
                key: statistics.fmean([one[key] for one in known], weights)
                for key in ("value", "at_w")
            }
            found[name] = means | {"half_width": math.sqrt(1 / math.fsum(weights))}
    return found


# ---------------------------------------------------------------------------------------------------
# outside


def outside(card: Any) -> list[dict[str, Any]]:
    """Compare the farm's figures with those of meters that share no code with it, on the same
    loops.
    """
    from farm.benchmark.bench import Bench
    from farm.devices.host import open_device

    cuda = card.is_gpu
    found: list[dict[str, Any]] = []
    with CardLock(card.id, settings().lock_dir):
        bench = Bench(open_device(card), "cuda:0" if cuda else "cpu", canary_every=0)
        if cuda:
            for text in ("resnet50", "vit_b_16"):
                found.append(_energy(Variant(text, 32, 224), bench))
        timed = [(subject, _times(subject, bench)) for subject in _operators()]
        found += [row for _, row in timed]
        if cuda:  # last: it uses a second stream, which may change the time of later graphs
            found += [other for subject, row in timed if (other := _by_triton(subject, row, bench))]
    return found


def _energy(variant: Variant, bench: Any) -> dict[str, Any]:
    """Measure the power of one 10 s loop with another meter around it and with the farm's sampler
    inside.
    """
    import torch

    from farm.benchmark.passes import numeric_flags
    from farm.benchmark.sampler import Sampler
    from farm.benchmark.subjects import prepare
    from farm.benchmark.window import window_power

    subject = Subject("variant", variant.id, variant.to_json())
    protocol = Protocol()
    with numeric_flags(protocol), torch.set_grad_enabled(protocol.grad):
        workload = prepare(subject, protocol, bench.torch_device)

        def loop(seconds: float) -> None:
            begin_s = time.perf_counter()
            while time.perf_counter() - begin_s < seconds:
                for _ in range(4):
                    workload.next_round().launch()
                torch.cuda.synchronize()

        loop(2.0)
        with Sampler(bench.device, bench.own_processes) as sampler:
            begin_s = time.perf_counter()
            name, power_w = _other_power_w(lambda: loop(LOOP_S))
            end_s = time.perf_counter()
        ours_w = window_power(sampler, begin_s, end_s).power_w
        workload.close()
    return {
        "what": f"power of {variant}",
        "meter": name,
        "unit": "W",
        "theirs": power_w,
        "ours": value_of(ours_w) or 0.0,
    }


def _other_power_w(work: Any) -> tuple[str, float]:
    try:
        from zeus.monitor import ZeusMonitor
    except ImportError:
        return "NVML energy counter, read without the farm", _counter_power_w(work)
    monitor = ZeusMonitor(gpu_indices=[0])
    monitor.begin_window("loop")
    work()
    measured = monitor.end_window("loop")
    return "ZeusMonitor", measured.total_energy / measured.time


def _counter_power_w(work: Any) -> float:
    """Return the energy between the first and the last change of the counter during the work,
    divided by the time between."""
    import pynvml

    pynvml.nvmlInit()
    import torch

    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    changes: list[tuple[float, int]] = []
    stop = threading.Event()

    def poll() -> None:
        last = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        while not stop.is_set():
            value = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            if value != last:
                changes.append((time.perf_counter(), value))
                last = value
            time.sleep(0.001)

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    work()
    stop.set()
    thread.join()
    (begin_s, begin_mj), (end_s, end_mj) = changes[0], changes[-1]
    return (end_mj - begin_mj) / 1e3 / (end_s - begin_s)


def _operators() -> list[Subject]:
    """Return five tuples for which a timing loop with the same input has the same conditions as
    `reuse`.
    """
    import torch
    from torch import nn

    from farm.operators.capture import capture

    cases: list[tuple[nn.Module, torch.Tensor]] = [
        (nn.Conv2d(256, 256, 3, padding=1), torch.empty(32, 256, 14, 14)),
        (nn.Conv2d(64, 64, 3, padding=1), torch.empty(32, 64, 56, 56)),
        (nn.Linear(768, 3072), torch.empty(32, 197, 768)),
        (nn.LayerNorm(768), torch.empty(32, 197, 768)),
        (nn.BatchNorm2d(144).eval(), torch.empty(32, 144, 56, 56)),
    ]
    subjects = []
    for module, given in cases:
        (spec,) = capture(module.to("meta").eval(), (given.to("meta"),)).tuples.values()
        subjects.append(Subject("operator", spec.id, spec.to_json()))
    return subjects


def _protocol(bench: Any) -> Protocol:
    return Protocol(launch="graph" if bench.cuda else "eager", residency="reuse")


def _times(subject: Subject, bench: Any) -> dict[str, Any]:
    import torch
    from torch.utils import benchmark

    from farm.benchmark.passes import numeric_flags
    from farm.benchmark.subjects import prepare

    cuda, protocol = bench.cuda, _protocol(bench)
    stopping = Stopping() if cuda else Stopping(warm_up_s=0.1, minimum_s=0.3, maximum_s=0.6)
    ours_us = bench.measure(subject, protocol, stopping).time_us.value
    with numeric_flags(protocol), torch.set_grad_enabled(protocol.grad):
        workload = prepare(subject, protocol, bench.torch_device)
        one = workload.rounds[0]
        # Its clock around our rounds: a round is much longer than the launch and the
        # synchronisation.
        timer = benchmark.Timer(
            "for _ in range(20): launch()" + ("\ntorch.cuda.synchronize()" if cuda else ""),
            globals={"launch": one.launch, "torch": torch},
            num_threads=torch.get_num_threads(),
        )
        theirs_us = timer.blocked_autorange(min_run_time=1.0).median / 20 / one.passes * 1e6
        workload.close()
    label = label_of(parse(subject.spec))
    return {
        "what": label,
        "unit": "us",
        "ours": ours_us,
        "meter": "torch.utils.benchmark",
        "theirs": theirs_us,
    }


def _by_triton(subject: Subject, row: dict[str, Any], bench: Any) -> dict[str, Any] | None:
    """Return the row with another meter's time; None if the meter is missing or fails."""
    import torch

    from farm.benchmark.passes import numeric_flags
    from farm.operators.rebuild import rebuild

    protocol = _protocol(bench)
    with numeric_flags(protocol), torch.set_grad_enabled(protocol.grad):
        try:
            from triton.testing import do_bench_cudagraph

            built = rebuild(parse(subject.spec), bench.torch_device)
            return {
                **row,
                "meter": "do_bench_cudagraph",
                "theirs": do_bench_cudagraph(built.run, rep=300) * 1e3,
            }
        except Exception as error:  # a failure of another program becomes a note
            print(f"do_bench_cudagraph: {type(error).__name__}: {error}")
            return None
