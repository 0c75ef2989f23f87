"""Tuples with tensors in the memory of another GPU, on a host with two NVIDIA cards. Skipped
without them.

With -s the times are printed: all fast, in the other GPU's memory and in the host's.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks.studies import STUDIES, results
from benchmarks.studies.in_situ import changes_of, time_changes, together
from benchmarks.studies.laboratory import StudyOptions
from benchmarks.studies.peer_memory import PeerMemory
from farm.addons.memory import memory_tier
from farm.addons.memory.memory_tier import PinnedMemory, SlowMemory
from farm.addons.memory.offload import offload
from farm.benchmark.passes import Passes, numeric_flags
from farm.benchmark.subjects import passes_of
from farm.benchmark.torch_device import capture_graph
from farm.benchmark_process.client import BenchmarkProcess
from farm.benchmark_process.requests import MeasureRequest
from farm.devices.device import Card
from farm.devices.host import discover
from farm.errors import Unmeasurable
from farm.operators.capture import capture
from farm.settings import settings
from farm.subjects.encoding import tensors_in
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.variant import Variant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA cards"),
]
CARD, PEER = torch.device("cuda", 0), torch.device("cuda", 1)
REUSED = Protocol(residency="reuse")
_DEVICE_ORDINAL = 9  # CUpointer_attribute


class Add(nn.Module):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.add(left, right)


class Known(PeerMemory):
    """Knows what it handed out."""

    def holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(
            there.data_ptr() < address < there.data_ptr() + there.nbytes for there in self._held
        )


#: module, inputs, storages it is given, whether a pool is needed for its output
TUPLES: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...], int, bool]] = {
    "add": (Add(), ((32, 256, 56, 56), (32, 256, 56, 56)), 2, False),
    "linear": (nn.Linear(4096, 4096), ((1024, 4096),), 3, False),
    "conv2d": (nn.Conv2d(64, 64, 3, padding=1), ((32, 64, 56, 56),), 3, False),
    "layer_norm": (nn.LayerNorm(1024), ((8192, 1024),), 3, True),
}


def subject_of(name: str) -> Subject:
    module, shapes, *_ = TUPLES[name]
    inputs = [torch.ones(shape, device=CARD) for shape in shapes]
    with torch.no_grad():
        (spec,) = capture(module.eval().to(CARD), inputs, device_type="cuda").tuples.values()
    return Subject("operator", spec.id, spec.to_json())


def all_of(name: str) -> str:
    return f"in0-{TUPLES[name][2] - 1}+out0"


def card_of(tensor: torch.Tensor) -> int:
    """The GPU whose memory a tensor lies in, as the driver says."""
    found = ctypes.c_int(-1)
    error = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(
        ctypes.byref(found), _DEVICE_ORDINAL, ctypes.c_uint64(tensor.data_ptr())
    )
    assert error == 0, f"CUDA error {error}"
    return found.value


def time_us(run: Callable[[], object], times: int = 20) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        run()
    begin.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize(CARD)
    return begin.elapsed_time(end) * 1e3 / times


def replayed(passes: Passes) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    results: list[object] = []
    graph = capture_graph(
        [lambda: results.append(passes.first())], CARD, passes.pool.id if passes.pool else None
    )
    return graph, next(tensors_in(results))


@pytest.fixture(autouse=True)
def on_one_stream() -> Iterator[None]:
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the two cards have no peer access")
    with torch.no_grad(), numeric_flags(Protocol()), torch.cuda.stream(torch.cuda.Stream(CARD)):
        yield
    torch.cuda.synchronize()


def test_what_it_hands_out_lies_on_the_other_gpu_and_is_given_back() -> None:
    torch.cuda.synchronize(PEER)
    before = torch.cuda.memory_allocated(PEER)
    free_bytes, _ = torch.cuda.mem_get_info(PEER)
    memory = Known(CARD)
    values = torch.randn(64 * 2**20, device=CARD)
    slow = memory.copied(values)
    assert (slow.device, card_of(values), card_of(slow)) == (CARD, 0, 1)
    assert memory.holds(slow)
    assert torch.cuda.memory_allocated(PEER) - before >= slow.nbytes
    print("free on the other GPU:", free_bytes, "->", torch.cuda.mem_get_info(PEER)[0])
    torch.testing.assert_close(slow + 1, values + 1, rtol=0, atol=0)  # a kernel reads it
    slow.mul_(2)  # and writes it
    torch.testing.assert_close(slow.cpu(), 2 * values.cpu(), rtol=0, atol=0)
    torch.cuda.synchronize(CARD)
    del slow, memory
    gc.collect()
    assert torch.cuda.memory_allocated(PEER) == before


def test_access_is_enabled_more_than_once_without_harm_and_for_memory_that_is_taken_later() -> None:
    for size in (16, 2**20, 3 * 2**20, 2**28):
        memory = PeerMemory(CARD)
        slow = memory.like(torch.empty(size, dtype=torch.uint8, device=CARD))
        assert card_of(slow) == 1
        assert int(slow.fill_(3).sum()) == 3 * size


def test_more_than_the_other_gpu_has_is_out_of_memory() -> None:
    with pytest.raises(Unmeasurable, match="cannot be allocated on the other GPU") as refused:
        PeerMemory(CARD).storage(2**50)
    assert refused.value.reason == "out_of_memory"


@pytest.mark.parametrize("name", TUPLES)
@pytest.mark.parametrize("which", ["in0", "in1", "out0", "all"])
def test_what_is_slow_is_read_and_written_on_the_other_gpu_and_a_graph_replays_it(
    name: str, which: str
) -> None:
    subject, slow = subject_of(name), Known(CARD)
    placement = all_of(name) if which == "all" else which
    wanted = next(tensors_in(passes_of(subject, REUSED, CARD).first())).clone()
    passes = passes_of(
        subject,
        Protocol(residency="reuse", placement=placement),
        CARD,
        partial(offload, memory=slow),
    )
    assert passes.details.memory.slow_memory == "memory of another GPU"
    assert (passes.pool is not None) == (TUPLES[name][3] and "out0" in placement)
    if (
        which == "all" or placement == f"in{TUPLES[name][2] - 1}"
    ):  # a module's own tensors come before what it is given
        assert card_of(passes.inputs[-1]) == 1
    found = next(tensors_in(passes.first()))
    torch.testing.assert_close(found, wanted)
    assert card_of(found) == int("out0" in placement)
    assert slow.holds(found) == ("out0" in placement)
    del found
    graph, found = replayed(passes)
    assert card_of(found) == int("out0" in placement)
    for _ in range(2):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize(CARD)
        torch.testing.assert_close(found, wanted)
    del found, graph, passes
    gc.collect()
    torch.cuda.empty_cache()  # a pool that is gone gives its memory back


@pytest.mark.parametrize("name", TUPLES)
def test_it_takes_longer_than_all_fast(name: str) -> None:
    subject = subject_of(name)

    def took_us(placement: str, memory: SlowMemory | None) -> float:
        passes = passes_of(
            subject,
            Protocol(residency="reuse", placement=placement),
            CARD,
            partial(offload, memory=memory),
        )
        graph, _ = replayed(passes)
        return time_us(graph.replay)

    words = [*(f"in{number}" for number in range(TUPLES[name][2])), "out0", all_of(name)]
    fast_us = took_us("", None)
    there = {word: took_us(word, PeerMemory(CARD)) for word in words}
    here = {word: took_us(word, PinnedMemory(CARD)) for word in words}
    print(f"\n{name}: all fast {fast_us:.1f} us")
    for word in words:
        print(f"  {word:12} other GPU {there[word]:9.1f} us  host {here[word]:9.1f} us")
    assert there[all_of(name)] > fast_us
    if name == "add":
        assert min(there["in0"], there["in1"], there["out0"]) > 1.2 * fast_us


def test_calls_are_timed_where_they_stand() -> None:
    model = (
        nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.Sigmoid())
        .to(CARD)
        .eval()
    )
    seen = capture(model, (torch.randn(512, 2048, device=CARD),), device_type="cuda")
    changes = changes_of(seen, "each")
    found = time_changes(seen, together(seen, changes), lambda: PeerMemory(CARD), CARD)
    for change, one in found.found.items():
        print(change, one)
    print(found.left_out)
    assert len(found.found) > len(changes) / 2
    assert all(one.time_us > 0 for one in found.found.values())


@pytest.fixture
def pair() -> tuple[Card, Card]:
    own, other, *_ = discover(settings())
    return own, other


def test_a_benchmark_process_with_a_peer_measures_its_own_card_and_takes_slow_memory_from_the_other(
    pair: tuple[Card, Card],
) -> None:
    subject = subject_of("add")
    times = {}
    other = {"also_visible": (pair[1].id,), "program": "benchmarks.studies.peer_process"}
    for options, name in (({}, "pinned host memory"), (other, "memory of another GPU")):
        with BenchmarkProcess(pair[0].id, verify_apart=False, **options) as process:
            process.wait_ready()
            assert (process.card.id, process.unhealthy) == (pair[0].id, "")
            for word in ("", "in0", "out0"):
                reading = process.measure(
                    MeasureRequest(subject, Protocol(placement=word), Stopping(0.1, 0.2, 0.4))
                ).reading
                assert reading.details.memory.slow_memory == (name if word else None)
                times[name, word] = reading.time_median_us
                print(name, word or "all fast", f"{reading.time_median_us:.1f} us", reading.flags)
    for word in ("in0", "out0"):
        assert times["memory of another GPU", word] > 1.2 * times["memory of another GPU", ""]
    assert times["memory of another GPU", ""] == pytest.approx(
        times["pinned host memory", ""], rel=0.1
    )


def test_the_study_reads_both_memories(database, pair: tuple[Card, Card]) -> None:  # type: ignore[no-untyped-def]
    before = memory_tier.of_gpu
    plan = StudyOptions(Variant("resnet18", 8, 224), True, 2, (pair[1],))
    made = results.perform(STUDIES["peer"], database, pair[0], plan, print)
    for row in made.rows:
        print(row)
    print(*made.notes, made.unmeasured, sep="\n")
    assert made.rows
    assert made.drawable
    assert any(row["change_host"] is not None for row in made.rows)
    assert memory_tier.of_gpu is before  # it is the process's, not this one's
