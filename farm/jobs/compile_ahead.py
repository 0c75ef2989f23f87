"""Compile the models of a card's coming items while the card measures other items.

The worker of a card looks in the database for open items whose variant is compiled. It compiles
these variants in processes of the host's processor, on fake tensors
(`farm.training.fake_compilation`). They fill the compiler's cache; the item then finds its code
there in its own turn.

- An item whose model is being compiled is put off, and published again at the end of the
  compilation. If nothing else waits for the card, and the compilation has not begun or is paused,
  the item is published at once and compiles its model itself.
- If the compiler refuses the model on fake tensors, or its share of the memory is too small, the
  item compiles its model in its turn, and one line says so. If the compiler crashes or takes too
  long, it would do so again: the item fails with the reason.
- All workers of a host share `compile_processes` places (`farm.devices.quiet`). A worker takes its
  share of them, and fewer if memory is short.
- All compilations of the host stop while a time that depends on the host is measured.
- max-autotune times kernels on the card, and a training step on a GPU needs a CUDA context. They
  are compiled in their turn only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psutil
from sqlmodel import col, func, select

from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import CompileRequest
from farm.devices.quiet import COMPILING, QUIET, HostGate, free_slot
from farm.errors import FarmError, Unmeasurable
from farm.jobs import items
from farm.jobs.items import Claim, ComingModel
from farm.settings import settings
from farm.store.database import Database
from farm.store.tables import CardRow, CardState
from farm.types.card_kind import is_gpu_id

log = logging.getLogger("farm.worker")

#: The memory that must be free for each compilation that begins.
FREE_BYTES = 3 << 30
#: The share of the host's memory that all compilations together may use.
MEMORY_SHARE = 0.5
#: Time between two looks at the database, and at the gates of the host. Unit: s.
LOOK_EVERY_S, GUARD_EVERY_S = 2.0, 0.05
#: Longest wait for an answer; the guard ends a compilation sooner, without its pauses. Unit: s.
LONGEST_S = 86_400.0


@dataclass
class Compilation:
    """A model that is being compiled."""

    model: ComingModel
    process: BenchmarkProcess
    ran_s: float = 0.0  # without pauses
    paused: bool = False
    needed: bool = True  # False if no job needs the model any more

    def send(self, signal_number: int) -> None:
        """Send a signal to the process and to all processes that it has started."""
        pid = self.process.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal_number)

    def pause(self, paused: bool) -> None:
        if paused is not self.paused:
            self.paused = paused
            self.send(signal.SIGSTOP if paused else signal.SIGCONT)


class CompileAhead:
    """Compiles the coming models of one card. Any thread may use it."""

    def __init__(
        self,
        database: Database,
        card_id: str,
        publish: Callable[[Iterable[int]], None],
        program: str = "farm.benchmark_process.server",
    ) -> None:
        """
        Args:
            publish: publishes items that were put off.
            program: the module that compiles.
        """
        self.database, self.card_id, self._publish = database, card_id, publish
        self._program = program
        self._lock = threading.Lock()
        self._waiting: dict[str, ComingModel] = {}  # id of a variant -> the model
        self._running: dict[str, Compilation] = {}
        self._put_off: dict[str, set[int]] = {}  # id of a variant -> its items without a message
        self._crashed: dict[str, Unmeasurable] = {}  # id of a variant -> how its compiler ended
        self._done: set[str] = set()  # variants that were compiled, or whose turn has come
        self._threads: set[threading.Thread] = set()
        self._guard_thread: threading.Thread | None = None  # pauses compilations
        self._in_turn = False  # True while an item lists the kernels of its model in its turn
        self._looked_s = float("-inf")
        self._closing = threading.Event()

    def turn_of(self, claimed: Claim) -> bool:
        """True if a claimed item may be measured now; False if it must be put off, because its
        model is being compiled. Also begins the compilations of coming items. Raises `Unmeasurable`
        (crashed or hung) if the compiler of the model ended so.
        """
        variant_id = claimed.variant_id
        self.end_turn()
        if self._closing.is_set() or settings().compile_processes == 0:
            return True
        self._look(variant_id)
        if not variant_id:
            return True
        with self._lock:
            crashed = self._crashed.pop(variant_id, None)
            if crashed is not None:
                self._done.discard(variant_id)  # if it is asked for again, it is compiled again
        if crashed is not None:
            raise crashed
        may_run = self._may_run(claimed, variant_id)
        if may_run and claimed.lists_kernels:
            # This takes a minute, and the jobs behind it may be submitted meanwhile.
            self._in_turn = True
            with self._lock:
                self._start_guard()
        return may_run

    def _may_run(self, claimed: Claim, variant_id: str) -> bool:
        others = items.others_wait(self.database, self.card_id)
        with self._lock:
            running, waits = self._running.get(variant_id), variant_id in self._waiting
            is_compiling = running is not None and not running.paused
            if is_compiling or (others and (running is not None or waits)):
                self._put_off.setdefault(variant_id, set()).add(claimed.item_id)
                self._start_guard()
                return False
            self._waiting.pop(variant_id, None)
            self._done.add(variant_id)
            return True

    def end_turn(self) -> None:
        """The item whose turn it was has ended."""
        self._in_turn = False

    def close(self) -> None:
        """End all compilations."""
        self._closing.set()
        with self._lock:
            self._waiting.clear()
            running, threads = list(self._running.values()), list(self._threads)
            if self._guard_thread is not None:
                threads.append(self._guard_thread)
        for compilation in running:
            compilation.send(signal.SIGKILL)
        for thread in threads:
            thread.join(5.0)

    # ---------------------------------------------------------------- the coming models

    def _look(self, present: str = "") -> None:
        """Look for coming models in the database, and begin to compile them. ``present``: the
        variant of the item whose turn it is.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        coming = {
            model.variant.id: model for model in items.coming_models(self.database, self.card_id)
        }
        places = self._places() if coming else 0
        with self._lock:
            for variant_id in [name for name in self._waiting if name not in coming]:
                del self._waiting[variant_id]
            cancelled = [self._running[name] for name in self._running if name not in coming]
            for compilation in cancelled:
                compilation.needed = False
            for variant_id, model in coming.items():
                begun = variant_id in self._done or variant_id in self._running
                if model.waits and not begun and variant_id != present and self._takes(model):
                    self._waiting.setdefault(variant_id, model)
            number = min(places, len(self._running) + len(self._waiting))
            new = [self._thread() for _ in range(number - len(self._threads))]
        for compilation in cancelled:
            compilation.send(signal.SIGKILL)
        for thread in new:
            thread.start()
        self._publish_idle()

    def _publish_idle(self) -> None:
        """If nothing else waits for the card, publish the items whose models nobody is compiling:
        each compiles its model itself.
        """
        with self._lock:
            idle = [
                variant_id
                for variant_id in self._put_off
                if variant_id not in self._running or self._running[variant_id].paused
            ]
        if idle and not items.others_wait(self.database, self.card_id):
            for variant_id in idle:
                self._publish_put_off(variant_id)

    def _publish_put_off(self, variant_id: str) -> None:
        with self._lock:
            item_ids = self._put_off.pop(variant_id, None)
        if item_ids and not self._closing.is_set():
            self._publish(item_ids)

    def _takes(self, model: ComingModel) -> bool:
        """True if the model can be compiled without its card."""
        variant = model.variant
        on_gpu = is_gpu_id(self.card_id)
        return (
            variant.compile == "default"
            and variant.cards == 1
            and not (on_gpu and (variant.step or model.protocol.grad))
        )

    def _places(self) -> int:
        """How many compilations of this worker may run now."""
        with self.database.read() as session:
            host = select(CardRow.host).where(CardRow.id == self.card_id).scalar_subquery()
            on_host = select(func.count()).where(
                col(CardRow.host) == host,
                col(CardRow.state).in_([CardState.IDLE, CardState.BUSY]),
                CardRow.worker != "",
            )
            workers = session.exec(on_host).one()
        by_memory = psutil.virtual_memory().available // FREE_BYTES
        share = -(-settings().compile_processes // max(1, workers))
        return int(min(share, by_memory + len(self._running)))

    # ---------------------------------------------------------------- the compilations

    def _thread(self) -> threading.Thread:
        """A thread that compiles waiting models, one after the other. The lock is held."""
        self._start_guard()
        thread = threading.Thread(target=self._compile_waiting, name="compile-ahead", daemon=True)
        self._threads.add(thread)
        return thread

    def _compile_waiting(self) -> None:
        process = BenchmarkProcess(
            self.card_id,
            self._environment(),
            verify_apart=False,
            verifier=True,
            program=self._program,
            start_timeout_s=LONGEST_S,
        )
        try:
            while (slot := self._slot()) is not None:
                with contextlib.closing(slot):
                    compilation = self._next(process)
                    if compilation is not None:
                        self._compile(compilation)
        finally:
            process.kill()
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _environment(self) -> dict[str, str]:
        """Each compilation gets its share of the cores."""
        cores = os.cpu_count() or 1
        threads = max(1, cores // max(1, len(self._running) + len(self._waiting)))
        return {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}

    def _slot(self) -> HostGate | None:
        """A place for the next compilation; None if no model waits any more."""
        while not self._closing.is_set():
            with self._lock:
                if not self._waiting:
                    return None
            slot = free_slot(settings().lock_dir, settings().compile_processes)
            if slot is not None:
                return slot
            self._closing.wait(4 * GUARD_EVERY_S)
        return None

    def _next(self, process: BenchmarkProcess) -> Compilation | None:
        with self._lock:
            if not self._waiting or self._closing.is_set():
                return None
            variant_id = next(iter(self._waiting))
            compilation = Compilation(self._waiting.pop(variant_id), process)
            self._running[variant_id] = compilation
            return compilation

    def _compile(self, compilation: Compilation) -> None:
        model, began_s = compilation.model, time.monotonic()
        most_bytes = int(
            MEMORY_SHARE * psutil.virtual_memory().total / settings().compile_processes
        )
        request = CompileRequest(model.subject, model.protocol, max(most_bytes, FREE_BYTES))
        crashed = None
        try:
            answer = compilation.process.call(request, timeout_s=LONGEST_S)
        except Unmeasurable as error:
            if compilation.needed and not self._closing.is_set():
                crashed = self._ended(compilation, error)
        except OSError as error:  # no process could be started
            log.warning("%s is compiled in its turn: %s", model.variant, error)
        else:
            context = ", with a CUDA context" if answer.has_context else ""
            took_s = time.monotonic() - began_s
            log.info("%s was compiled ahead in %.1f s%s", model.variant, took_s, context)
        finally:
            with self._lock:
                if crashed is not None:
                    self._crashed[model.variant.id] = crashed
                if compilation.needed:
                    self._done.add(model.variant.id)
                del self._running[model.variant.id]
            self._publish_put_off(model.variant.id)

    def _ended(self, compilation: Compilation, error: Unmeasurable) -> Unmeasurable | None:
        """Say how a compilation ended without a result. Return the error of its item; None if the
        item compiles its model in its turn.
        """
        variant, message = compilation.model.variant, error.message.partition("\n")[0]
        if error.reason != "crashed":
            text = "%s is compiled in its turn, because its compilation ahead ended (%s): %s"
            log.warning(text, variant, error.reason, message)
            return None
        reason, limit_s = error.reason, settings().item_timeout_s
        if compilation.ran_s > limit_s:
            reason, message = "hung", f"It took longer than {limit_s:g} s."
        log.warning("%s fails: its compiler ended (%s): %s", variant, reason, message)
        return Unmeasurable(
            reason,
            f"The compiler of the model ended ahead of its turn: {message}",
            "Set FARM_COMPILE_PROCESSES=0 to compile the model in its turn.",
        )

    # ---------------------------------------------------------------- pauses

    def _guard(self) -> None:
        """Pause the compilations while a time that depends on the host is measured, end those that
        take too long or are not needed any more, and look for new ones. Runs while there are
        compilations or items that were put off, and while an item compiles its model.
        """
        try:
            quiet = HostGate(QUIET, settings().lock_dir)
            compiling = HostGate(COMPILING, settings().lock_dir)
        except OSError:
            with self._lock:
                self._guard_thread = None
            return  # no place is free either
        looked_s = at_s = time.monotonic()
        with contextlib.closing(quiet), contextlib.closing(compiling):
            while self._goes_on():
                self._pause_or_go_on(quiet, compiling)
                self._closing.wait(GUARD_EVERY_S)
                now_s = time.monotonic()
                self._count(now_s - at_s)
                at_s = now_s
                if now_s - looked_s > LOOK_EVERY_S and not self._closing.is_set():
                    looked_s = now_s
                    with contextlib.suppress(FarmError):
                        self._look()

    def _start_guard(self) -> None:
        """Start the guard unless it runs. The lock is held."""
        if self._guard_thread is None and not self._closing.is_set():
            thread = threading.Thread(target=self._guard, name="compile-guard", daemon=True)
            self._guard_thread = thread
            thread.start()

    def _goes_on(self) -> bool:
        """False if the guard has nothing to do any more; the next compilation starts another."""
        with self._lock:
            waits = bool(self._put_off) or self._in_turn
            goes_on = bool(self._threads) or (waits and not self._closing.is_set())
            if not goes_on:
                self._guard_thread = None
            return goes_on

    def _pause_or_go_on(self, quiet: HostGate, compiling: HostGate) -> None:
        with self._lock:
            running = list(self._running.values())
        with quiet.alone() as nobody_measures:
            if nobody_measures:
                compiling.hold()
            for compilation in running:
                compilation.pause(not nobody_measures)
        if not nobody_measures:
            compiling.release()

    def _count(self, passed_s: float) -> None:
        with self._lock:
            running = list(self._running.values())
        for compilation in running:
            if not compilation.paused:
                compilation.ran_s += passed_s
            if compilation.ran_s > settings().item_timeout_s:
                compilation.send(signal.SIGKILL)
