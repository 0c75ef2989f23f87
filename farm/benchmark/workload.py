"""The thing that is timed: a subject made into rounds of many passes, so that the CPU is never what is measured.

One class for a tuple and for a whole model variant. A *pass* is one run of the subject. A *round* is what is launched
at once and timed as one: a replay of a CUDA graph that holds many passes, or a loop of them. A round lasts a few
milliseconds, long against the clock and the launch, short against a window.

What lies in the cache when a pass begins is the residency policy (docs/method.md). It decides how many copies of a
tuple's tensors the passes walk through.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from farm.benchmark.cache import cache_bytes, found_again
from farm.benchmark.capture_graph import capture_graph
from farm.benchmark.protocol import Launch, Protocol, Subject, Variant
from farm.data_classes import fillings
from farm.errors import TupleRejected, Unmeasurable
from farm.operators.tuple import OperatorTuple

if TYPE_CHECKING:
    from farm.operators.rebuild import Rebuilt

Pass = Callable[[], object]

ROUND_S = 0.003  # CUDA: one graph replay
CPU_ROUND_S = 0.005
LAUNCHED_S = 0.1  # eager passes shorter than this may be launching more than computing
MAX_PASSES = 2000  # nodes of a graph cost time to capture
MAX_COPIES = 512
CACHE_TIMES = 2  # copies of the weights exceed the cache so many times
STREAM_TIMES = 4
CHAIN_LAYERS = 8
MEMORY_SHARE = 0.8  # of what is free, for all copies together


@dataclass(frozen=True)
class Round:
    """What is launched and timed at once."""

    launch: Callable[[], None]
    passes: int


@dataclass
class Workload:
    """Rounds to be launched in rotation. `details` go into the reading."""

    rounds: list[Round]
    device: torch.device
    round_s: float  # first estimate of one round's duration
    single: Pass | None = None  # one pass, launched eagerly: for looking at it outside the window
    inputs: list[torch.Tensor] = field(default_factory=list)  # memory that `single` reads and other operators write
    details: dict[str, Any] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)  # graphs and tensors that must outlive the rounds
    replayed: bool = False  # rounds are replays of graphs, in which the host has no part
    _next: int = 0

    def next_round(self) -> Round:
        chosen = self.rounds[self._next]
        self._next = (self._next + 1) % len(self.rounds)
        return chosen

    def close(self) -> None:
        """Let go of graphs first, then of the tensors that they point to."""
        self.rounds.clear()
        self.single = None
        self.inputs.clear()
        self.keep.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            if torch.cuda.memory_reserved(self.device) > 2**32:
                torch.cuda.empty_cache()


@dataclass
class _Passes:
    """A subject as passes: the first, and how to make a further one that walks through other memory."""

    first: Pass
    copy: Callable[[int], Pass] | None  # None: nothing to copy
    weight_bytes: int
    activation_bytes: int
    details: dict[str, Any] = field(default_factory=dict)
    inputs: list[torch.Tensor] = field(default_factory=list)


def grad_mode(protocol: Protocol) -> contextlib.AbstractContextManager[Any]:
    """The grad mode a subject runs under: the same that it is captured under."""
    return torch.enable_grad() if protocol.grad else torch.no_grad()


@contextlib.contextmanager
def numeric_flags(protocol: Protocol) -> Iterator[None]:
    """TF32 and cuDNN's flags as the protocol says, put back afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic)
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = protocol.tf32
        cudnn.benchmark, cudnn.deterministic = protocol.cudnn_benchmark, protocol.cudnn_deterministic
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = before


def free_bytes(device: torch.device) -> int:
    """Memory that may still be allocated, counting what PyTorch's allocator holds unused."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available


def copies_wanted(
    residency: str, weight_bytes: int, activation_bytes: int, output_bytes: int, cache: int
) -> tuple[int, bool]:
    """How many copies of the tensors the passes walk through, and whether that reaches the policy's aim.

    `resident`: between two uses of one copy of the weights at least twice the cache has been touched: by the other
    copies, or by the pass itself where its activations are large. `stream`: everything is copied until it exceeds
    the cache four times. `chain`: so many layers. `reuse`: one.
    """
    if residency == "resident":
        if weight_bytes <= 0:
            return 1, True
        missing = max(0, CACHE_TIMES * cache - activation_bytes - output_bytes)
        wanted = 1 + math.ceil(missing / weight_bytes)
        if MAX_COPIES * weight_bytes + activation_bytes + output_bytes < cache:
            return 1, False  # all copies together would stay in the cache: they would cost time and change nothing
    elif residency == "chain":
        return CHAIN_LAYERS, True
    elif residency == "stream":
        wanted = max(2, math.ceil(STREAM_TIMES * cache / max(1, weight_bytes + activation_bytes)))
    else:
        return 1, True
    return min(wanted, MAX_COPIES), wanted <= MAX_COPIES


def prepare(subject: Subject, protocol: Protocol, device: torch.device) -> Workload:
    """Make a subject ready to be timed: built, copied as the residency asks, warmed up, captured.

    Call it, and launch what it returns, under `numeric_flags` and `grad_mode`, and on a GPU on one stream that is not
    the default one.

    Raises:
        Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
    """
    if protocol.data == "seen":
        # A job resolves it to classes of data; whoever measures a subject by itself has no model to look into.
        raise Unmeasurable("not_available", "'seen' names no data of its own.", "Use --data normal, or a class.")
    try:
        passes = (
            _operator(subject, protocol, device) if subject.kind == "operator" else _variant(subject, protocol, device)
        )
        return _arrange(passes, subject, protocol, device)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error
    except MemoryError as error:
        raise out_of_memory(error) from error
    except TupleRejected as error:
        raise Unmeasurable("rejected", error.message, error.next_step) from error


def prepare_canary(size: int, device: torch.device) -> Workload:
    """A product of two square matrices in single precision as a workload: the reference that is read again and again."""
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, generator=generator) for _ in range(2))
    out = torch.empty(size, size, device=device)
    passes = _Passes(lambda: torch.mm(left, right, out=out), None, 0, left.nbytes + right.nbytes)
    launch: Launch = "graph" if device.type == "cuda" else "eager"
    return _arrange(passes, Subject("operator", "canary", {}), Protocol(launch=launch, residency="reuse"), device)


def out_of_memory(error: BaseException) -> Unmeasurable:
    first_line = str(error).split("\n")[0][:300]
    return Unmeasurable("out_of_memory", f"It does not fit on the card: {first_line}", "Choose a smaller batch.")


def why_it_raised(error: Exception) -> Unmeasurable:
    """What PyTorch raised as the item's reason. Its CPU allocator, cuBLAS and cuDNN have no class for a lack of memory."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in text for sign in _MEMORY_SIGNS):
        return out_of_memory(error)
    return Unmeasurable("raised", f"{type(error).__name__}: {text}".split("\n")[0][:400])


_MEMORY_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "STATUS_ALLOC_FAILED")


def _operator(subject: Subject, protocol: Protocol, device: torch.device) -> _Passes:
    from farm.operators.rebuild import rebuild

    spec = OperatorTuple.from_json(subject.spec)
    _guard(_tuple_bytes(spec), device)
    rebuilt = rebuild(spec, device)
    _set_values(rebuilt, protocol.data)
    if protocol.residency == "chain":
        return _chain(rebuilt)
    stream = protocol.residency == "stream"
    copies_weights = bool(rebuilt.weights)

    def copy(index: int) -> Pass:
        return rebuilt.replica(weights=copies_weights, activations=stream, index=index).run  # of equal values

    return _Passes(
        first=rebuilt.run,
        copy=copy,
        weight_bytes=rebuilt.weight_bytes,
        activation_bytes=rebuilt.activation_bytes,
        inputs=rebuilt.activation_memory,
    )


def _chain(rebuilt: Rebuilt) -> _Passes:
    """Equal layers, each with weights of its own, that feed each other; after the last, the first again."""
    first_argument = rebuilt.spec.arguments[0] if rebuilt.spec.arguments else None
    start = (
        rebuilt.tensors[first_argument["tensor"]]
        if isinstance(first_argument, dict) and "tensor" in first_argument
        else None
    )
    output = rebuilt.run() if start is not None and not rebuilt.in_place else None
    if (
        start is None
        or not isinstance(output, torch.Tensor)
        or (output.shape, output.dtype, output.stride()) != (start.shape, start.dtype, start.stride())
    ):
        raise Unmeasurable(
            "not_available",
            "This operator cannot be chained: what it returns is not what it takes.",
            "Use --residency resident.",
        )
    passed_on = [start]

    def layer(number: int) -> Pass:
        one = rebuilt if number == 0 else rebuilt.replica(weights=True)

        def run() -> object:
            passed_on[0] = one.run_on(start if number == 0 else passed_on[0])
            return passed_on[0]

        return run

    return _Passes(
        first=layer(0), copy=layer, weight_bytes=rebuilt.weight_bytes, activation_bytes=rebuilt.activation_bytes
    )


def _variant(subject: Subject, protocol: Protocol, device: torch.device) -> _Passes:
    model, arguments = build_variant(Variant.from_json(subject.spec), device)
    if protocol.data == "zeros":
        _zero(arguments)
    tensors = [entry for entry in arguments if isinstance(entry, torch.Tensor)]
    parameter_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))

    def copy(index: int) -> Pass:
        others = tuple(entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in arguments)
        return lambda: model(*others)

    return _Passes(
        first=lambda: model(*arguments),
        copy=copy if protocol.residency == "stream" else None,
        # The weights of a whole model are as cold as the model leaves them: there is nothing to copy.
        weight_bytes=0,
        activation_bytes=sum(tensor.nbytes for tensor in tensors),
        details={
            "parameter_bytes": parameter_bytes,
            **_working_set(lambda: model(*arguments), parameter_bytes, device),
        },
    )


def _working_set(run: Pass, weight_bytes: int, device: torch.device) -> dict[str, Any]:
    """What one pass of a model goes through, and how much of that the cache still holds when the next pass comes."""
    if device.type != "cuda":
        return {}
    run()  # libraries take their workspaces the first time
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    share = found_again(weight_bytes + activation_bytes, device)
    return {
        "activation_peak_bytes": activation_bytes,
        "found_again": None if share is None else round(share, 3),
    }


# One built variant on its way from the verification to the measurement that follows it, where one process does both.
_handed_over: dict[tuple[str, str], tuple[torch.nn.Module, tuple[Any, ...]]] = {}


def build_variant(
    variant: Variant, device: torch.device, *, hand_over: bool = False
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A model variant and its inputs on a device, with seeded random weights.

    With `hand_over` the next call for the same variant gets the same objects, once.
    """
    from farm import catalog

    key = (variant.id, str(device))
    known = _handed_over.pop(key, None)
    _handed_over.clear()
    if known is not None:
        return known
    model = catalog.build(
        variant.model,
        weights=variant.weights,
        device=device,
        dtype=variant.dtype,
        memory_format=variant.memory_format,
        mode=variant.mode,
    )
    arguments = catalog.example_inputs(
        variant.model,
        variant.batch,
        variant.input_size,
        dtype=variant.dtype,
        device=device,
        memory_format=variant.memory_format,
    )
    if hand_over:
        _handed_over[key] = (model, tuple(arguments))
    return model, tuple(arguments)


def _zero(tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.detach().zero_()


def _set_values(rebuilt: Rebuilt, data: str) -> None:
    """Bring the activations of a rebuilt operator into a class of data, where it may choose them freely."""
    if data == "normal":
        return
    if data == "zeros":
        return _zero(rebuilt.activations)
    from farm.operators.rebuild import written_inputs
    from farm.operators.values import fill_of, impose

    spec = rebuilt.spec
    written = written_inputs(spec)
    indices = [index for index, tensor in enumerate(spec.tensors) if tensor.role == "activation"]
    try:
        wanted = fillings(data, len(indices))
    except ValueError as error:
        raise Unmeasurable("rejected", f"{error}.") from error
    generator = torch.Generator(device=rebuilt.device).manual_seed(1)
    done: set[int] = set()
    for index, filling in zip(indices, wanted, strict=True):
        storage = spec.tensors[index].storage
        memory = rebuilt.memory(index)
        # What an operator writes, divides by or looks up stays as it was filled.
        free = index not in written and fill_of(spec, index, written).form == "normal"
        if free and storage not in done and memory.is_floating_point():
            done.add(storage)
            with torch.no_grad():
                impose(memory, filling.zeros, filling.positive, filling.channels, generator)
    return None


def _tuple_bytes(spec: OperatorTuple) -> int:
    storages: dict[int, int] = {}
    for tensor in spec.tensors:
        size = (tensor.extent + tensor.offset) * tensor.itemsize_bytes
        storages[tensor.storage] = max(storages.get(tensor.storage, 0), size)
    return sum(storages.values())


def _guard(needed_bytes: int, device: torch.device) -> None:
    # Before anything is allocated: on a CPU the kernel would rather end a process than refuse it memory.
    if needed_bytes > MEMORY_SHARE * free_bytes(device):
        raise Unmeasurable(
            "out_of_memory",
            f"Its inputs need {needed_bytes / 2**30:.1f} GiB and {free_bytes(device) / 2**30:.1f} GiB are free.",
            "Choose a smaller batch.",
        )


def _output_bytes(output: object) -> int:
    if isinstance(output, torch.Tensor):
        return output.nbytes
    if isinstance(output, (tuple, list)):
        return sum(_output_bytes(entry) for entry in output)
    if isinstance(output, dict):
        return sum(_output_bytes(entry) for entry in output.values())
    return 0


def _arrange(passes: _Passes, subject: Subject, protocol: Protocol, device: torch.device) -> Workload:
    cuda = device.type == "cuda"
    output_bytes = _output_bytes(passes.first())  # also loads kernels and picks algorithms
    pass_s = _time_pass(passes.first, device)
    graph = cuda and protocol.launch == "graph"
    pool = torch.cuda.graph_pool_handle() if graph else None  # replayed one after the other, so they may share memory
    keep: list[Any] = []
    if graph and pass_s < LAUNCHED_S:
        # Launched one by one, short kernels measure the launch, in a tuple and in a whole model alike.
        few = max(1, min(20, round(2e-3 / pass_s)))
        with _captured(subject):
            small = capture_graph([passes.first] * few, device, pool)
        pass_s = min(pass_s, _time_pass(small.replay, device, budget_s=0.005) / few)
        keep.append(small)
    target_s = ROUND_S if cuda else CPU_ROUND_S
    count = max(1, min(MAX_PASSES, math.ceil(target_s / max(pass_s, 1e-7))))
    copies, reached = _copies(passes, protocol, output_bytes, device)
    if copies > 1 and count < copies:
        copies = math.ceil(copies / count) * count  # several rounds of one size share the copies
        calls = _make_copies(passes, copies, device)
        groups = [calls[start : start + count] for start in range(0, len(calls), count)]
    else:
        calls = _make_copies(passes, copies, device)
        groups = [calls * math.ceil(count / len(calls))]
    details = {**passes.details, "copies": len(calls), "passes_per_round": len(groups[0])}
    if not reached:
        details["copies_wanted_more"] = True
    keep.append(calls)
    rounds: list[Round] = []
    if graph:
        with _captured(subject):
            for group in groups:
                captured = capture_graph(group, device, pool)
                keep.insert(0, captured)
                rounds.append(Round(captured.replay, len(group)))
        torch.cuda.synchronize(device)
    else:
        rounds = [Round(_loop(group), len(group)) for group in groups]
    round_s = pass_s * len(groups[0])
    return Workload(rounds, device, round_s, passes.first, list(passes.inputs), details, keep, replayed=graph)


def _copies(passes: _Passes, protocol: Protocol, output_bytes: int, device: torch.device) -> tuple[int, bool]:
    if passes.copy is None:
        return 1, True
    copies, reached = copies_wanted(
        protocol.residency, passes.weight_bytes, passes.activation_bytes, output_bytes, cache_bytes(device)
    )
    each_bytes = passes.weight_bytes + (passes.activation_bytes if protocol.residency == "stream" else 0)
    if each_bytes:
        affordable = max(1, int(MEMORY_SHARE * free_bytes(device) / each_bytes / 2))
        copies, reached = min(copies, affordable), reached and copies <= affordable
    return copies, reached


def _make_copies(passes: _Passes, copies: int, device: torch.device) -> list[Pass]:
    calls = [passes.first]
    if passes.copy is not None:
        calls += [passes.copy(index) for index in range(1, copies)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return calls


def _loop(calls: list[Pass]) -> Callable[[], None]:
    def launch() -> None:
        for call in calls:
            call()

    return launch


def _time_pass(call: Pass, device: torch.device, least: int = 2, budget_s: float = 0.02) -> float:
    """Seconds of one call, the shortest of a few."""
    best = math.inf
    begin_s = time.perf_counter()
    for repeat in range(50):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now_s = time.perf_counter()
        best = min(best, now_s - start_s)
        if repeat + 1 >= least and now_s - begin_s > budget_s:
            break
    return best


@contextlib.contextmanager
def _captured(subject: Subject) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first_line = str(error).split("\n")[0][:300]
        raise Unmeasurable(
            "not_capturable", f"No CUDA graph can be made of it: {first_line}", "Measure it with --launch eager."
        ) from error
