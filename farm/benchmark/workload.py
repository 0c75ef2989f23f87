"""Arrange the passes of a subject in rounds. A round is so long that the time to launch it does not
matter.

A *pass* is one run of a tuple or a whole model. A *round* is launched and timed as a unit: a replay
of a CUDA graph with many passes, or a loop of passes. It takes a few milliseconds: long compared
with a launch and with the clock's resolution, short compared with a window.

The residency policy (docs/method.md) says which data is in the cache when a pass begins. For this
the passes use several copies of a tuple's tensors in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from farm.benchmark import ranks
from farm.benchmark.host_steps import not_capturable
from farm.benchmark.passes import (
    CHAIN_LAYERS,
    MEMORY_SHARE,
    Pass,
    Passes,
    free_bytes,
)
from farm.benchmark.torch_device import cache_bytes, capture_graph, run_all, synchronize
from farm.errors import Unmeasurable, error_text
from farm.subjects.encoding import tensors_in
from farm.types.details import Details
from farm.types.protocol import Launch, Protocol

ROUND_S = 0.003  # target duration of a round on a GPU
CPU_ROUND_S = 0.005
LAUNCHED_S = 0.1  # if an eager pass is shorter, its launch may take longer than its computation
MAX_PASSES = 2000  # most passes in one graph: more take too long to capture
MAX_COPIES = 512
# `resident`: passes touch this many cache sizes between two uses of the same weights
CACHE_TIMES = 2
STREAM_TIMES = 4  # `stream`: all copies together have this many cache sizes
# sums in 16-bit types may overflow
_ADDED_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
}
_ADDED_IN |= {dtype: dtype for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True)
class WorkloadRound:
    """Passes that are launched and timed as a unit."""

    launch: Callable[[], object]
    passes: int


@dataclass
class Workload:
    """Rounds that are launched in rotation. `details` go into the reading."""

    rounds: list[WorkloadRound]
    device: torch.device
    round_s: float  # first estimate of one round's duration
    passes: Passes | None = None  # the subject, for timing outside of the window
    details: Details = field(default_factory=Details)
    keep: list[Any] = field(default_factory=list)  # graphs and tensors that must outlive the rounds
    replayed: bool = False  # True if rounds are replays of graphs
    not_cold: bool = False  # True if the policy is `stream` and memory allows too few copies
    calls: list[Pass] = field(default_factory=list)  # the passes of the rounds, one of each copy
    # inputs that another operator of a model just wrote
    rewritten: list[torch.Tensor] = field(default_factory=list)
    _next: int = 0

    def next_round(self) -> WorkloadRound:
        chosen = self.rounds[self._next]
        self._next = (self._next + 1) % len(self.rounds)
        return chosen

    def written_sizes(self) -> list[float]:
        """The mean absolute value of each input that the operator or model writes. It should not
        change between passes.

        The list has no tensors with one element: they are counters and do not affect the time.
        """
        return [
            float(torch.linalg.vector_norm(memory.detach(), 1, dtype=_ADDED_IN[memory.dtype]))
            / memory.numel()
            for memory in (self.passes.written if self.passes is not None else ())
            if memory.dtype in _ADDED_IN and memory.numel() > 1
        ]

    def close(self) -> None:
        """Wait for all work on the card, then free the graphs, then the tensors that they use."""
        with contextlib.suppress(RuntimeError):  # an error on the card was already reported
            synchronize(self.device)
        self.rounds.clear()
        self.calls, self.rewritten = [], []
        self.passes = None
        # graphs are at the front; `list.clear` would free the tensors at the back first
        while self.keep:
            self.keep.pop(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            # The ranks of a group keep their contexts while others measure on their cards.
            if torch.cuda.memory_reserved(self.device) > 2**32 or ranks.world() > 1:
                torch.cuda.empty_cache()


def copies_wanted(
    residency: str, weight_bytes: int, activation_bytes: int, output_bytes: int, cache: int
) -> tuple[int, bool]:
    """The number of tensor copies that the passes use in turn, and True if this number is enough
    for the policy.

    `resident`: between two uses of the same weights, the passes touch at least twice the cache size
    (other copies and activations). `stream`: all copies together have four times the cache size.
    `chain`: one per layer. `reuse`: one."""
    if residency == "resident":
        if weight_bytes <= 0:
            return 1, True
        missing = max(0, CACHE_TIMES * cache - activation_bytes - output_bytes)
        copies = 1 + math.ceil(missing / weight_bytes)
        if MAX_COPIES * weight_bytes + activation_bytes + output_bytes < cache:
            # even the largest number of copies fits in the cache: copies have no effect
            return 1, False
    elif residency == "chain":
        return CHAIN_LAYERS, True
    elif residency == "stream":
        copies = max(2, math.ceil(STREAM_TIMES * cache / max(1, weight_bytes + activation_bytes)))
    else:
        return 1, True
    return min(copies, MAX_COPIES), copies <= MAX_COPIES


def prepare_canary(size: int, device: torch.device) -> Workload:
    """The workload of the canary: a product of two square float32 matrices with `size` rows."""
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    out = torch.empty(size, size, device=device)
    passes = Passes(lambda: torch.mm(left, right, out=out), None, 0, left.nbytes + right.nbytes)
    launch: Launch = "graph" if device.type == "cuda" else "eager"
    return arrange(passes, Protocol(launch=launch, residency="reuse"), device)


def out_of_memory(error: BaseException) -> Unmeasurable:
    first_line = error_text(error).split("\n")[0][:300]
    text = f"The card has too little memory for the operator or model: {first_line}"
    return Unmeasurable("out_of_memory", text, "Choose a smaller batch.")


def why_it_raised(error: Exception) -> Unmeasurable:
    """Convert an exception of PyTorch: "out_of_memory" if memory was lacking, else "raised"."""
    text = error_text(error)
    # The CPU allocator, cuBLAS and cuDNN raise RuntimeError if memory is lacking: only the text
    # tells.
    signs = ("can't allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        sign in text for sign in signs
    ):
        return out_of_memory(error)
    return Unmeasurable("raised", f"{type(error).__name__}: {text}".split("\n")[0][:400])


def arrange(passes: Passes, protocol: Protocol, device: torch.device) -> Workload:
    cuda = device.type == "cuda"
    # also loads kernels, picks algorithms
    output_bytes = sum(tensor.nbytes for tensor in tensors_in(passes.first()))
    graph = cuda and protocol.launch == "graph"
    pass_s = _time_pass(passes.first, device, budget_s=0.005 if graph else 0.02)
    # graphs run one after the other, so they can share memory
    pool = torch.cuda.graph_pool_handle() if graph else None
    pool = passes.pool.id if graph and passes.pool is not None else pool
    keep: list[Any] = [] if passes.keep is None else [passes.keep]
    if graph and pass_s < LAUNCHED_S:
        # The eager time of short kernels is mostly launch time: estimate the time of a pass with a
        # small graph.
        few = max(1, min(20, round(2e-3 / pass_s)))
        with _not_capturable():
            small = capture_graph([passes.first] * few, device, pool)
        pass_s = min(pass_s, _time_pass(small.replay, device) / few)
        keep.insert(0, small)
    target_s = ROUND_S if cuda else CPU_ROUND_S
    count = max(1, min(MAX_PASSES, math.ceil(target_s / max(pass_s, 1e-7))))
    copies, reached = _copies(passes, protocol, output_bytes, device)
    shared = copies > max(1, count)
    if shared:
        # several rounds of the same size share the copies
        copies = math.ceil(copies / count) * count
    calls = [
        passes.first,
        *(passes.copy(index) for index in range(1, copies) if passes.copy is not None),
    ]
    synchronize(device)
    if shared:
        groups = [calls[start : start + count] for start in range(0, len(calls), count)]
    else:
        groups = [calls * math.ceil(count / len(calls))]
    keep.append(calls)
    rounds = _rounds_of(groups, keep, device, pool, graph=graph)
    launching = dataclasses.replace(
        passes.details.launching,
        copies=len(calls),
        passes_per_round=len(groups[0]),
        copies_wanted_more=None if reached else True,
    )
    return Workload(
        rounds,
        device,
        round_s=pass_s * len(groups[0]),
        passes=passes,
        details=dataclasses.replace(passes.details, launching=launching),
        keep=keep,
        replayed=graph,
        not_cold=protocol.residency == "stream" and not reached,
        calls=calls,
        rewritten=passes.rewritten,
    )


def _rounds_of(
    groups: Sequence[list[Pass]], keep: list[Any], device: torch.device, pool: Any, *, graph: bool
) -> list[WorkloadRound]:
    """One round for each group of passes. Graphs are put in front of `keep`."""
    rounds: list[WorkloadRound] = []
    for group in groups:
        launch: Callable[[], object] = functools.partial(run_all, group)
        if graph:
            with _not_capturable():
                captured = capture_graph(group, device, pool)
            keep.insert(0, captured)
            launch = captured.replay
        rounds.append(WorkloadRound(launch, len(group)))
    if graph:
        torch.cuda.synchronize(device)
    return rounds


def _copies(
    passes: Passes, protocol: Protocol, output_bytes: int, device: torch.device
) -> tuple[int, bool]:
    if passes.copy is None:
        return 1, True
    copies, reached = copies_wanted(
        protocol.residency,
        passes.weight_bytes,
        passes.activation_bytes,
        output_bytes,
        cache_bytes(device),
    )
    each_bytes = passes.weight_bytes + (
        passes.activation_bytes if protocol.residency == "stream" else 0
    )
    if each_bytes:
        affordable = max(1, int(MEMORY_SHARE * free_bytes(device) / each_bytes / 2))
        affordable = -int(ranks.largest(-affordable))
        copies, reached = min(copies, affordable), reached and copies <= affordable
    return copies, reached


def _time_pass(call: Pass, device: torch.device, budget_s: float = 0.005) -> float:
    """The shortest time of a few calls; of the slowest rank in a group. Unit: s."""
    best = math.inf
    begin_s = time.perf_counter()
    for repeat in range(50):
        synchronize(device)
        start_s = time.perf_counter()
        call()
        synchronize(device)
        now_s = time.perf_counter()
        best = min(best, now_s - start_s)
        if ranks.some(repeat > 0 and now_s - begin_s > budget_s):
            break
    return ranks.largest(best)


@contextlib.contextmanager
def _not_capturable() -> Iterator[None]:
    """Raise `Unmeasurable` if a graph cannot be captured."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise not_capturable(error_text(error).split("\n")[0][:300]) from error
