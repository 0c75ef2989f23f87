"""Measured whole models: a forward pass. The built model may wait for its next use."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch

from farm.benchmark.passes import (
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
from farm.operators.capture import Around, run_with_owners
from farm.operators.captured import CapturedPass
from farm.types.details import Details
from farm.types.protocol import Protocol, Stopping
from farm.types.subject import Subject
from farm.types.tensor_kinds import bytes_of
from farm.types.variant import Variant

if TYPE_CHECKING:
    from farm.operators.profiler import WatchedPass

#: Runs one observed pass. Its argument maps the number of a slot of the capture to a context for
#: the slot's call.
ObservedRun = Callable[[Around], object]


class Observation(NamedTuple):
    """A built model or step that can be observed.

    ``compare(record=None)`` observes a pass, and compares it with an unobserved one. With
    ``record``, both are runs that it makes of a function, such as a graph. ``run`` is an observed
    pass."""

    compare: Callable[..., WatchedPass]
    run: ObservedRun


class WholeModelKind(SubjectKind):
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
        """Build the model, so that a pass of it can be observed."""

    def capture_rank(
        self, variant: Variant, protocol: Protocol, device: torch.device
    ) -> CapturedPass:
        """Capture this rank's part of a split model, launched as in the window."""
        raise NotImplementedError(f"{variant} runs on one card")

    def facts(self, subject: Subject, device: torch.device) -> dict[str, Any]:
        """What a capture stores beside the calls."""
        return {}


class ModelVariantKind(WholeModelKind):
    """The forward pass of a model."""

    def passes(self, subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
        """As `SubjectKind.passes`. `details` has the size of the model and, if context is measured,
        `found_again`.
        """
        from farm.operators.capture import capture
        from farm.training.extract import capture_forward

        variant = subject.variant
        check_cards(str(variant), variant.cards)
        if isinstance(subject, GivenModel):
            model, arguments = subject.module, subject.arguments
        else:
            model, arguments = build_variant(variant, device)
        if protocol.data == "zeros":
            zero_out(arguments)

        run = functools.partial(model, *arguments)
        steps = host_steps(run, protocol, device)

        def observe() -> CapturedPass:
            if variant.cards > 1:
                return capture_forward(
                    model, arguments, grad=protocol.grad, device_type=device.type
                )
            return capture(model, arguments, device_type=device.type, grad_enabled=protocol.grad)

        def copy(index: int) -> Pass:
            others = tuple(
                entry.clone() if isinstance(entry, torch.Tensor) else entry for entry in arguments
            )
            return steps.around(functools.partial(model, *others))

        return Passes(
            first=steps.around(run),
            copy=copy if protocol.residency == "stream" else None,
            # No copies of weights: each pass of the whole model itself decides which weights the
            # cache still has.
            activation_bytes=bytes_of(
                entry for entry in arguments if isinstance(entry, torch.Tensor)
            ),
            details=steps.noted(Details(memory=working_set(run, model, protocol, device))),
            order=lambda: as_launched(steps.around(observe), protocol, device),
        )

    def observation(
        self, subject: Subject, protocol: Protocol, device: torch.device
    ) -> Observation:
        from farm.operators import profiler

        model, arguments = build_variant(subject.variant, device, hand_over=True)
        grad = protocol.grad
        return Observation(
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


@dataclass(frozen=True)
class GivenModel(Subject):
    """A model that a caller gives: this process cannot build it, because its variant is not in the
    catalog.
    """

    module: Any = None  # a `torch.nn.Module` on the device
    arguments: tuple[Any, ...] = ()  # its inputs, by position, on the device

    @classmethod
    def of(cls, subject: Subject, module: torch.nn.Module, arguments: tuple[Any, ...]) -> Self:
        return cls(**vars(subject), module=module, arguments=arguments)


#: The built variant of the last verification, with its inputs: the same process may measure next.
_handed_over: dict[tuple[str, str], tuple[torch.nn.Module, tuple[Any, ...]]] = {}


def build_variant(
    variant: Variant, device: torch.device, *, hand_over: bool = False
) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """Build a model variant and its inputs on a device, with seeded random weights.

    If `hand_over` is set, the next call for the same variant and device returns the same objects,
    once. A call for another variant frees them: the same seed builds them again."""
    key = (variant.id, str(device))
    waiting = _handed_over.pop(key, None)
    if waiting is not None:
        return waiting

    _handed_over.clear()
    from farm.training.split import build

    built = build(variant, device)
    if hand_over:
        _handed_over[key] = built
    return built
