"""A group of benchmark processes, one per card, which measure one subject together: a collective or
a split model.

The ranks find each other through a file in a private folder and communicate on the host only. They
wait for each other without limit, so this client is their watchdog: if one rank fails, ends or is
late, it kills all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from farm.benchmark.bus_rate import bus_bytes_per_s
from farm.benchmark_process.client import A, BenchmarkProcess, CardReading, Rank
from farm.benchmark_process.requests import MeasureRequest, ProcessRequest, VerifyRequest
from farm.devices.host import link_between
from farm.errors import HostBusy, NoSuchCard, Unmeasurable
from farm.settings import START_TIMEOUT_S
from farm.settings.shared_files import TemporaryFolder, remove_left
from farm.types.protocol import OnPhase
from farm.types.rank_readings import of_ranks
from farm.types.software import Software
from farm.types.verification import Verification

POLL_S = 0.02
#: After a first failure, the farm waits so long for the failures of other ranks: the first one that
#: it sees is often that of a rank whose peer is gone. Unit: s.
OTHERS_S = 1.0
#: The ranks end a measurement together. If one has answered, the others may take so much longer.
#: Unit: s.
ANSWERS_S = 30.0
#: Longest time of a verification: the subject can be measured without it. Unit: s.
VERIFY_S = 90.0
#: Failures that a missing peer may have caused; others name a cause.
_PERHAPS_OF_A_PEER = ("hung", "raised")
_PREFIX = "farm-group-"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class BenchmarkGroup:
    """The benchmark processes of several cards of one host. A request starts the ranks if they do
    not run.

    On a host without GPUs, all ranks may share the card of the CPU: pass its id once per rank.
    """

    def __init__(self, card_ids: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.card_ids = tuple(card_ids)
        #: Called every `POLL_S` while the ranks start or measure. If it raises an exception, they
        #: are killed.
        self.watch: Callable[[], None] = lambda: None
        self._env = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _LOOPBACK)
        self._env |= {name: os.environ[name] for name in self._env if name in os.environ} | dict(
            env or {}
        )
        self._link: tuple[str, float | None] = ("", None)
        self._folder: str | None = None
        self._ranks: tuple[BenchmarkProcess, ...] = ()

    @property
    def alive(self) -> bool:
        return bool(self._ranks) and all(process.alive for process in self._ranks)

    @property
    def unhealthy(self) -> str:
        """The faults that the health checks found; "" if all cards passed."""
        return " ".join(
            f"{rank.card_id}: {rank.unhealthy}" for rank in self._ranks if rank.unhealthy
        )

    def start(self) -> None:
        """Start all ranks, if not all are alive, and return at once. Raises `Unmeasurable`
        (not_available) if the cards cannot access each other; `HostBusy` if the temporary folder
        cannot be used."""
        if self.alive:
            return
        self.kill()
        try:
            self._link = link_between(self.card_ids)
        except NoSuchCard as error:
            raise Unmeasurable("not_available", error.message, error.next_step) from error
        remove_left(_PREFIX, also_empty=True)
        try:
            self._temporary = TemporaryFolder(_PREFIX)
        except OSError as error:
            raise HostBusy(
                "not_available",
                f"The ranks of a group need a folder in {tempfile.gettempdir()}: "
                f"{error.strerror or error}.",
                "Free disk space there, or set the environment variable TMPDIR to another folder.",
            ) from error
        self._folder = str(self._temporary.path)
        rendezvous, number = str(self._temporary.path / "rendezvous"), len(self.card_ids)
        self._ranks = tuple(
            BenchmarkProcess(
                card_id, self._env, verify_apart=False, rank=Rank(rank, number, rendezvous)
            )
            for rank, card_id in enumerate(self.card_ids)
        )
        for process in self._ranks:
            process.start()

    def wait_ready(self) -> Software:
        """Start the ranks if necessary, wait until all have joined, and return their software.
        Raises `Unmeasurable`: crashed, hung or not_available."""
        self.start()
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with self._killing():
            waiting = dict(enumerate(self._ranks))
            while waiting:
                self.watch()
                for rank, process in tuple(waiting.items()):
                    if process.is_ready(deadline_s, POLL_S):
                        del waiting[rank]
        software = self._ranks[0].wait_ready()
        name, _ = self._link
        return dataclasses.replace(
            software, communication=software.communication + f" over {name}" * bool(name)
        )

    def measure(
        self,
        request: MeasureRequest,
        *,
        timeout_s: float = 300.0,
        on_phase: OnPhase | None = None,
    ) -> CardReading:
        """Measure one subject on all cards. If its calls are predicted, verify them first. Raises
        `Unmeasurable` if a rank failed, ended or was late; all ranks have then ended.

        The reading has the time of the slowest rank and the energy of all cards; `Details.ranks`
        has those of each."""
        verification: Verification | None = None
        unverified = None
        if request.predicted is not None:
            verifying = VerifyRequest(request.subject, request.protocol, request.predicted)
            try:
                verification = self._ask(verifying, min(timeout_s, VERIFY_S), on_phase)[0]
            except Unmeasurable as error:  # the variant can still be measured
                unverified = f"{error.reason}: {error.message}"
        software = self.wait_ready()
        readings = self._ask(request, timeout_s, on_phase)
        merged = of_ranks(readings, self.card_ids)
        if unverified is not None:
            merged = merged.lacking("verification", unverified)
        cards = dataclasses.replace(
            merged.details.cards,
            bus_bytes_per_s=bus_bytes_per_s(request.subject, merged),
            link_bytes_per_s=self._link[1],
        )
        reading = merged.noting(cards=cards)
        return CardReading(reading, software, self._ranks[0].card, verification)

    def _ask(
        self, request: ProcessRequest[A], timeout_s: float, on_phase: OnPhase | None
    ) -> list[A]:
        """Send a request to all ranks and return their answers. Raises as `measure`."""
        self.wait_ready()
        deadline_s = time.monotonic() + timeout_s
        answers: dict[int, A] = {}
        failures: list[tuple[int, Unmeasurable]] = []
        with self._killing():
            asked, until_s = {}, math.inf
            for rank, process in enumerate(self._ranks):
                asked[rank] = process.ask(request, deadline_s, None if rank else on_phase, POLL_S)
            while asked and time.monotonic() < until_s:  # each answer raises at the deadline
                self.watch()
                for rank, answer in tuple(asked.items()):
                    try:
                        if (rank_answer := answer()) is None:
                            continue
                        answers[rank] = rank_answer
                        until_s = min(until_s, time.monotonic() + ANSWERS_S)
                    except Unmeasurable as error:
                        failures.append((rank, error))
                        until_s = min(until_s, time.monotonic() + OTHERS_S)
                    del asked[rank]
            late = Unmeasurable(
                "hung", "It did not end when another rank did.", "Read the worker's log."
            )
            if failures := failures or [(rank, late) for rank in asked]:
                raise self._failure(failures)
        return [answers[rank] for rank in sorted(answers)]

    def kill(self) -> None:
        """Kill all ranks at once, and remove the rendezvous."""
        for process in self._ranks:
            process.kill()
        self._ranks = ()
        if self._folder is not None:
            self._temporary.close()
            self._folder = None

    def close(self, timeout_s: float = 5.0) -> None:
        """End all ranks; kill those that still run after `timeout_s`."""
        for process in self._ranks:
            process.close(timeout_s)
        self.kill()

    @contextlib.contextmanager
    def _killing(self) -> Iterator[None]:
        """Kill all ranks if the block raises: the others would wait for the missing one for
        ever.
        """
        try:
            yield
        except BaseException:
            self.kill()
            raise

    def _failure(self, failures: Sequence[tuple[int, Unmeasurable]]) -> Unmeasurable:
        rank, error = min(failures, key=lambda failure: failure[1].reason in _PERHAPS_OF_A_PEER)
        text = f"Rank {rank} of {len(self.card_ids)} on {self.card_ids[rank]}: {error.message}"
        return Unmeasurable(error.reason, text, error.next_step)
