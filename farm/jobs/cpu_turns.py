"""Items that a CPU times in turn: a request to the benchmark process times a claimed item together
with the items that wait behind it.

The benchmark process keeps the results until it measures these items. If it crashes before, each
item is measured alone, so that only the item that makes it crash fails. If this process must stop,
only the claimed item is measured. Such readings are flagged ``timed_alone``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import TurnsRequest
from farm.errors import Unmeasurable
from farm.jobs.items import Claim
from farm.types.protocol import OnPhase, Protocol
from farm.types.reading import Reading
from farm.types.subject import Subject

log = logging.getLogger("farm.worker")

MOST_IN_TURN = 63  # most items that are timed in turn with a claimed item


class MustStop(Exception):
    """Raised by ``on_phase`` during a request, because this process must stop. The client then ends
    the benchmark process.
    """


class CpuTurns:
    """What the benchmark process of a CPU has timed in turn, and what it lost.

    An item is identified by its job, its subject and its protocol."""

    def __init__(self, benchmark: BenchmarkProcess) -> None:
        self._benchmark = benchmark
        self._timed: set[tuple[str, ...]] = set()  # with an earlier item, and not yet measured
        self._timed_by = 0  # the start of the benchmark process that has timed them
        self._timed_alone: set[tuple[str, ...]] = set()  # their turns were lost

    def had_turn(self, claimed: Claim) -> bool:
        """True if the item was timed with an earlier item, even if the result is lost. To be asked
        once for each claim.
        """
        key = _key_of(claimed)
        if key not in self._timed:
            return False
        self._timed.discard(key)
        if not self._benchmark.alive or self._benchmark.starts != self._timed_by:
            self._timed_alone.add(key)
        return True

    def time(
        self,
        claimed: Claim,
        waiting: Sequence[tuple[Subject, Protocol]],
        calls: Mapping[str, int],
        on_phase: OnPhase,
    ) -> None:
        """Time the item in turn with the items ``waiting`` behind it.

        Args:
            calls: tuple id -> number of calls in the model.
            on_phase: called at the begin of each phase; it may raise `MustStop`.
        """
        key, work = _key_of(claimed), claimed.work
        behind = [pair for pair in waiting if pair[1].takes_turns]
        pairs = [(work.subject, work.protocol), *behind]
        keys = [(claimed.job_id, subject.id, protocol.id) for subject, protocol in pairs]
        self._timed = set(keys[1:])
        if not behind:
            return
        subjects, protocols = zip(*pairs, strict=True)
        counts = tuple(calls.get(subject.id, 1) for subject in subjects)
        request = TurnsRequest(subjects, protocols, counts, work.stopping)
        try:
            positions = self._benchmark.call(request, on_phase=on_phase)
        except MustStop:
            self._timed_alone.add(key)
            log.info("The worker stops: %s is measured without the items behind it", claimed.label)
        except Unmeasurable as error:
            self._timed_alone |= self._timed | {key}
            log.warning(
                "%s and the items behind it are measured one after the other: %s",
                claimed.label,
                error.message,
            )
        else:
            self._timed = {keys[position] for position in positions if position}
            self._timed_by = self._benchmark.starts
            self._timed_alone -= self._timed | {key}

    def flagged(self, claimed: Claim, reading: Reading) -> Reading:
        """The reading, with a flag if the item lost its turn."""
        key = _key_of(claimed)
        if key not in self._timed_alone:
            return reading
        self._timed_alone.discard(key)
        return reading.flagged("timed_alone")


def _key_of(claimed: Claim) -> tuple[str, ...]:
    return claimed.job_id, claimed.work.subject.id, claimed.work.protocol.id
