"""The whole of a model in hand, read in this very process; the same `Bench` as everywhere.

A module cannot travel to the benchmark process: that would take a pickle. What it costs: this process gets a context on the
card and keeps it, and whatever else the program does meanwhile is beside the reading. The card's lock is the caller's.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from typing import Any

from farm.api.capture import CapturedModel
from farm.devices.device import Card
from farm.devices.host import open_device
from farm.errors import Unmeasurable
from farm.types.protocol import Protocol, Stopping, Subject
from farm.types.reading import Reading


def measure_whole(
    captured: CapturedModel, card: Card, subject: Subject, protocol: Protocol, stopping: Stopping
) -> Reading:
    """Read the whole on a card of this host, as a copy there.

    Raises:
        Unmeasurable: out_of_memory, raised, not_capturable or not_available (no build of torch for the card, no values).
    """
    from farm.benchmark.measure import Bench
    from farm.benchmark.passes import give_variant
    from farm.benchmark.workload import why_it_raised
    from farm.models.own import by_position

    torch_device = _torch_device(card)
    device = open_device(card)
    try:
        with _as_it_was(), contextlib.redirect_stdout(sys.stderr):
            bench = Bench(device, torch_device)
            try:
                model, values = _copied(captured, torch_device)
            except Exception as error:
                raise why_it_raised(error) from error
            if captured.kwargs:
                model = by_position(model, len(captured.args), tuple(captured.kwargs))
            give_variant(captured.variant, torch_device, model, values)
            return bench.measure(subject, protocol, stopping)
    finally:
        device.close()


def seen_values(captured: CapturedModel) -> Any:
    """What stands in the tensors of each call when the model runs on its inputs, where it is."""
    from farm.operators.seen import watch

    with contextlib.redirect_stdout(sys.stderr):
        return watch(copy.deepcopy(captured.model), captured.args, dict(captured.kwargs))


def _copied(captured: CapturedModel, device: Any) -> tuple[Any, tuple[Any, ...]]:
    import torch
    from torch.utils._pytree import tree_map

    model = copy.deepcopy(captured.model).to(device)
    values = (*captured.args, *captured.kwargs.values())
    return model, tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, values)


def _torch_device(card: Card) -> Any:
    """What torch calls the card in this process.

    Raises:
        Unmeasurable: it does not see it.
    """
    import torch

    if card.kind != "cuda":
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if f"GPU-{torch.cuda.get_device_properties(index).uuid}" == card.id:
            return torch.device("cuda", index)
    raise Unmeasurable(
        "not_available",
        f"PyTorch {torch.__version__} does not see the card {card} in this process.",
        "Start Python without CUDA_VISIBLE_DEVICES, with a build of PyTorch for CUDA that suits the driver.",
    )


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Threads, device and stream as the program had them; a bench sets them for good."""
    import torch

    threads = torch.get_num_threads()
    cuda = torch.cuda.is_available()
    stream = torch.cuda.current_stream() if cuda and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if stream is not None:
            torch.cuda.set_stream(stream)  # and its device
        elif cuda and torch.cuda.is_initialized():
            torch.cuda.set_stream(torch.cuda.default_stream())
