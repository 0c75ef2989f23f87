"""Measured whole models: a forward pass. The built model may wait for its next use."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from farm.benchmark.passes import (
    Offload,
    Pass,
    Passes,
    as_launched,
    check_cards,
    host_steps,
    working_set,
    zero_out,
)
from farm.benchmark.phases.base import Phase
from farm.benchmark.phases.eager import EagerLaunch
from farm.benchmark.phases.order import InOrderReplay, Places, WithoutCollectives
from farm.benchmark.policies import GROUP_WINDOWS, POLICIES, WHOLE_WINDOW_S, WindowPolicy
from farm.benchmark.subjects.base import SubjectKind
from farm.errors import Unmeasurable
from farm.operators.capture import Around, run_with_owners
from farm.operators.captured import CapturedPass
from farm.types.details import Details
from farm.types.protocol import Protocol, Stopping, Subject, Variant
from farm.types.tensor_kinds import bytes_of

if TYPE_CHECKING:
    from farm.operators.profiler import WatchedPass

#: Runs one observed pass. Its argument maps the number of a slot of the capture to a context for
#: the slot's call.
ObservedRun = Callable[[Around], object]
#: A function that compares an observed run with an unobserved run; and the observed run.
Observation = tuple[Callable[..., "WatchedPass"], ObservedRun]


class WholeModel(SubjectKind):
    """A whole model or step. Its windows are longer than those of tuples, because every sum is
    compared with this reading. A card verifies its calls (`farm.benchmark.verification`)."""

    #: A pass may have host steps (`farm.benchmark.host_steps`).
    has_host_steps: ClassVar = True

    def policy(self, protocol: Protocol, stopping: Stopping) -> WindowPolicy:
        return POLICIES["variant"]

    def phases(self, subject: Subject) -> Sequence[Phase]:
        return EagerLaunch(), Places(), WithoutCollectives(), InOrderReplay()

    def stopping(self, stopping: Stopping, ranks: int) -> Stopping:
        longest_s = stopping.maximum_s * (GROUP_WINDOWS if ranks > 1 else 1)
        shortest_s = max(stopping.minimum_s, min(WHOLE_WINDOW_S, stopping.maximum_s / 2))
        return dataclasses.replace(stopping, minimum_s=shortest_s, maximum_s=longest_s)

    @abstractmethod
    def observation(
        self, subject: Subject, protocol: Protocol, device: torch.device
    ) -> Observation:
        """Build the model for a comparison of an observed pass with an unobserved one."""

    def capture_rank(
        self, variant: Variant, protocol: Protocol, device: torch.device
    ) -> CapturedPass:
        """Capture this rank's part of a split model, launched as in the window."""
        raise NotImplementedError(f"{variant} runs on one card")

    def facts(self, subject: Subject, device: torch.device) -> dict[str, Any]:
        """What a capture stores beside the calls."""
        return {}


class ModelVariant(WholeModel):
    """The forward pass of a model."""

    def passes(
        self,
        subject: Subject,
        protocol: Protocol,
        device: torch.device,
        offload: Offload | None = None,
    ) -> Passes:
        return variant_passes(Variant.from_json(subject.spec), protocol, device)

    def observation(
        self, subject: Subject, protocol: Protocol, device: torch.device
    ) -> Observation:
        from farm.operators import profiler

        model, arguments = build_variant(Variant.from_json(subject.spec), device, hand_over=True)
        grad = protocol.grad
        return (
            functools.partial(
                profiler.verify_on_device, model, arguments, device, grad_enabled=grad
            ),
            lambda around: run_with_owners(
                model, arguments, device_type=device.type, grad_enabled=grad, around=around
            ),
        )

    def capture_rank(
        self, variant: Variant, protocol: Protocol, device: torch.device
    ) -> CapturedPass:
        from farm.training.extract import capture_forward

        model, arguments = build_variant(variant, device)
        options: Any = {"grad": protocol.grad, "device_type": device.type}
        with torch.set_grad_enabled(protocol.grad):
            model(*arguments)  # libraries initialize in the first pass
        return as_launched(lambda: capture_forward(model, arguments, **options), protocol, device)


def variant_passes(variant: Variant, protocol: Protocol, device: torch.device) -> Passes:
    """The forward passes of a whole model. Their `details` have its size and, if context is
    measured, `found_again`.
    """
    from farm.operators.capture import capture
    from farm.training.extract import capture_forward

    check_cards(str(variant), variant.cards)
    model, arguments = build_variant(variant, device)
    if protocol.data == "zeros":
        zero_out(arguments)

    run = functools.partial(model, *arguments)
    steps = host_steps(run, protocol, device)

    def observe() -> CapturedPass:
        if variant.cards > 1:
            return capture_forward(model, arguments, grad=protocol.grad, device_type=device.type)
        return capture(model, arguments, device_type=device.type, grad_enabled=protocol.grad)

    def copy(index: int) -> Pass:
        others = tuple(
            entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in arguments
        )
        return steps.around(functools.partial(model, *others))

    return Passes(
        first=steps.around(run),
        copy=copy if protocol.residency == "stream" else None,
        # No copies of weights: each pass of the whole model itself decides which weights the cache
        # still has.
        activation_bytes=bytes_of(entry for entry in arguments if isinstance(entry, torch.Tensor)),
        details=steps.noted(Details(memory=working_set(run, model, protocol, device))),
        order=lambda: as_launched(steps.around(observe), protocol, device),
    )


@dataclass(frozen=True)
class _BuiltVariant:
    """A built model with its inputs, which waits for the next `build_variant`."""

    variant: Variant
    model: torch.nn.Module
    arguments: tuple[Any, ...]
    given: bool  # by a caller: this process cannot build the model itself


# At most one built variant. The verification puts it here if the same process measures next; so
# does a caller whose model is not in the catalog.
_handed_over: dict[tuple[str, str], _BuiltVariant] = {}


def build_variant(
    variant: Variant, device: torch.device, *, hand_over: bool = False
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Build a model variant and its inputs on a device, with seeded random weights.

    If `hand_over` is set, the next call for the same variant and device returns the same objects,
    once. A call for another variant frees them: the same seed builds them again. Raises
    `Unmeasurable` (rejected) if a caller gave a model for another variant (`given_variant`)."""
    key = (variant.id, str(device))
    waiting = _handed_over.pop(key, None)
    if waiting is not None:
        return waiting.model, waiting.arguments

    _free_handed_over(variant)
    from farm.training.split import build

    model, arguments = build(variant, device)
    if hand_over:
        _handed_over[key] = _BuiltVariant(variant, model, arguments, given=False)
    return model, arguments


def _free_handed_over(variant: Variant) -> None:
    """Free what waits for another build. Raises `Unmeasurable` if a caller gave it."""
    for waiting in _handed_over.values():
        if waiting.given:
            raise Unmeasurable(
                "rejected",
                f"The model that was given for {waiting.variant} has not been measured, and "
                f"{variant} is to be built instead.",
                "Measure the given model first.",
            )
    _handed_over.clear()


@contextlib.contextmanager
def given_variant(
    variant: Variant, device: torch.device, model: torch.nn.Module, arguments: tuple[Any, ...]
) -> Iterator[None]:
    """Within the block, the next `build_variant` of this variant on this device returns this model
    and its arguments, once.
    """
    key = (variant.id, str(device))
    _handed_over.clear()
    _handed_over[key] = _BuiltVariant(variant, model, arguments, given=True)
    try:
        yield
    finally:
        _handed_over.pop(key, None)
