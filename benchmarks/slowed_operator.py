"""Slow one operator type in the benchmark processes that start within a block: the tuples and the
whole stay the same.

Each pass of the type's tuples takes longer by a factor. A GPU sleeps, and a CPU computes, until the
time is over. `slowed` lets each new Python process run this file at its start (as `sitecustomize`).
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Run = Callable[[], Any]

TYPE, FACTOR, SIDE_B_IN = "SLOWED_TYPE", "SLOWED_FACTOR", "SLOWED_SIDE_B_IN"


@contextlib.contextmanager
def slowed(
    operator_type: str, factor: float, side_b_in: Path | None = None
) -> Iterator[dict[str, str]]:
    """The environment for a farm whose benchmark processes slow this type.

    Args:
        side_b_in: a SQLite database: slow the type only while side B of a comparison in this
            database is measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(__file__, Path(folder) / "sitecustomize.py")
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        yield {
            "PYTHONPATH": path,
            TYPE: operator_type,
            FACTOR: str(factor),
            SIDE_B_IN: str(side_b_in or ""),
        }


def _wanted() -> bool:
    if not os.environ[SIDE_B_IN]:
        return True
    with contextlib.closing(sqlite3.connect(os.environ[SIDE_B_IN], timeout=30)) as connection:
        query = "SELECT request FROM job WHERE state = 'open' ORDER BY created_at_s DESC LIMIT 1"
        row = connection.execute(query).fetchone()
    return row is not None and str(json.loads(row[0]).get("comparison", "")).endswith("/B")


def _on_cpu(run: Run) -> Run:
    def slow() -> Any:
        begin_s = time.thread_time()
        output = run()
        until_s = begin_s + float(os.environ[FACTOR]) * (time.thread_time() - begin_s)
        while time.thread_time() < until_s:
            pass
        return output

    return slow


def _on_gpu(run: Run) -> Run:
    import torch

    def graph_ms(work: Run) -> float:
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 400

    def with_sleep(cycles: int) -> Run:
        def slow() -> Any:
            output = run()
            torch.cuda._sleep(cycles)
            return output

        return slow

    alone_ms, short_ms, long_ms = (
        graph_ms(run),
        graph_ms(with_sleep(1000)),
        graph_ms(with_sleep(101000)),
    )
    wanted_ms = float(os.environ[FACTOR]) * alone_ms
    return with_sleep(max(1, int(1000 + (wanted_ms - short_ms) / (long_ms - short_ms) * 100000)))


def _patch(module: Any) -> None:
    plain = module.OperatorTupleKind.passes

    def slowed_passes(kind: Any, subject: Any, protocol: Any, device: Any) -> Any:
        passes = plain(kind, subject, protocol, device)
        if str(subject.spec["operator"]).rpartition(".")[2] == os.environ[TYPE] and _wanted():
            slow = _on_cpu if device.type == "cpu" else _on_gpu
            passes.first, copy = slow(passes.first), passes.copy
            passes.copy = None if copy is None else lambda index: slow(copy(index))
        return passes

    module.OperatorTupleKind.passes = slowed_passes


class _Finder(importlib.abc.MetaPathFinder):
    """Patches `farm.benchmark.subjects.operator_tuple` when it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "farm.benchmark.subjects.operator_tuple":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), _patch(module))  # type: ignore[method-assign, assign, func-returns-value]
        return spec


if TYPE in os.environ and "farm.benchmark_process.server" in sys.orig_argv:
    sys.meta_path.insert(0, _Finder())
