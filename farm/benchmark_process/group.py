"""A group of benchmark processes, one per card, that measure one item together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from farm.benchmark_process.client import BenchmarkProcess, Measured
from farm.types.protocol import OnPhase, Protocol, Software, Stopping, Subject


class BenchmarkGroup:
    """One benchmark process per card. If one of them fails, all are killed."""

    def __init__(self, card_ids: Sequence[str]) -> None:
        self._ranks = [BenchmarkProcess(card_id, verify_apart=False) for card_id in card_ids]

    @property
    def unhealthy(self) -> str:
        return " ".join(f"{one.card_id}: {one.unhealthy}" for one in self._ranks if one.unhealthy)

    def wait_ready(self) -> Software:
        for rank in self._ranks:
            rank.start()
        return tuple(rank.wait_ready() for rank in self._ranks)[0]

    def measure(
        self, subject: Subject, protocol: Protocol, stopping: Stopping, *, timeout_s: float, on_phase: OnPhase
    ) -> Measured:
        self.wait_ready()
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            asked = [
                threads.submit(rank.measure, subject, protocol, stopping, timeout_s=timeout_s) for rank in self._ranks
            ]
            done, _ = wait(asked, return_when=FIRST_EXCEPTION)
            if failed := next((one.exception() for one in done if one.exception()), None):
                self.kill()
                raise failed
        return asked[0].result()

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def __enter__(self) -> BenchmarkGroup:
        for rank in self._ranks:
            rank.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
