"""Measured compiled models, and the one compiled model of this process, which has the kernels of
its tuples."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from farm.benchmark.passes import (
    Passes,
    as_launched,
    numeric_flags,
    working_set,
    zero_out,
)
from farm.benchmark.subjects.model_variant import Observation, WholeModelKind, build_variant
from farm.errors import CaptureError, Unmeasurable
from farm.subjects import kernel as kernels
from farm.types.details import Details
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.tensor_kinds import bytes_of, is_plain

if TYPE_CHECKING:
    from farm.operators.compiled import CompiledPass


class CompiledModelKind(WholeModelKind):
    """The forward pass or the training step of a compiled model."""

    has_host_steps = False
    marks_modules = False

    def passes(self, subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
        return compiled_passes(subject, protocol, device)

    def observation(
        self, subject: Subject, protocol: Protocol, device: torch.device
    ) -> Observation:
        from farm.operators.profiler import compare_with_unwatched

        with torch.set_grad_enabled(protocol.grad):
            compiled = compiled_pass(subject, device)
        return Observation(
            functools.partial(
                compare_with_unwatched,
                compiled.run,
                compiled.capture,
                device,
                grad_enabled=protocol.grad,
            ),
            compiled.capture,
        )

    def facts(self, subject: Subject, device: torch.device) -> dict[str, Any]:
        """The choices of autotuning and the graph breaks."""
        return {"compiled": compiled_pass(subject, device).facts()}


def compiled_passes(subject: Subject, protocol: Protocol, device: torch.device) -> Passes:
    """The passes of a compiled model. The graph of its rounds contains the launches of the compiled
    pass.
    """
    compiled = compiled_pass(subject, device, launch=protocol.launch)
    if protocol.data == "zeros":
        zero_out(compiled.inputs)
    model = compiled.model
    return Passes(
        first=compiled.run,
        activation_bytes=bytes_of(compiled.inputs),
        written=list(filter(is_plain, model.parameters())) if model.training else [],
        details=Details(memory=working_set(compiled.run, model, protocol, device)),
        order=lambda: as_launched(compiled.capture, protocol, device),
    )


_compiled: dict[tuple[str, str], CompiledPass] = {}  # at most one compiled variant


def compiled_pass(
    subject: Subject, device: torch.device, *, launch: str = "graph", again: bool = False
) -> CompiledPass:
    """Compile the variant of a subject, or return it if this process has just compiled it.

    Args:
        launch: of a training step, see `farm.training.extract.build_step`.
        again: compile it again, without the compiler's cache, with the choices of the subject.

    Raises:
        CaptureError: the compiler refuses the model.
        UsageError: no compiler is installed.
    """
    from farm.operators.compiled import CompiledPass, CompiledStep

    source = subject.compiled or {}
    variant = subject.built_variant
    assert variant is not None, "a subject of a compiled model names the model"
    key = (variant.id, str(device))
    if again or key not in _compiled:
        _compiled.clear()
        kernels.forget_all()
        how: Any = {"mode": variant.compile, "choices": source.get("choices"), "cached": not again}
        if variant.step:
            from farm.training.extract import build_step

            _compiled[key] = CompiledStep(build_step(variant, device, launch=launch), device, **how)
        else:
            _compiled[key] = CompiledPass(*build_variant(variant, device), device, **how)
    return _compiled[key]


def fill_cache(subject: Subject, protocol: Protocol, device: torch.device) -> None:
    """Compile a variant on fake tensors, with the settings of a measurement on this device. Raises
    `Unmeasurable`: out_of_memory, or raised: the compiler refuses the model, or the model can be
    compiled only on the card, in its item's turn."""
    from farm.benchmark.workload import why_it_raised
    from farm.training import fake_compilation

    variant = subject.built_variant
    assert variant is not None, "a subject of a compiled model names the model"
    if device.type == "cpu":
        torch.set_num_threads(1)  # as a `Bench`
    try:
        with numeric_flags(protocol):
            fake_compilation.compile_on_fakes(variant, device, grad=protocol.grad)
    except CaptureError as error:
        raise Unmeasurable("raised", error.message, error.next_step) from error
    except Exception as error:
        raise why_it_raised(error) from error


def compiled_pass_with(subject: Subject, device: torch.device) -> CompiledPass:
    """As `compiled_pass`, for a tuple. If the cache of the compiler has other kernels, the variant
    is compiled again. Raises `Unmeasurable` (rejected) if the compiler does not generate the kernel
    on this host."""
    compiled = compiled_pass(subject, device)
    if not compiled.runs(subject.id) and compiled.cached:
        compiled = compiled_pass(subject, device, again=True)
    if not compiled.runs(subject.id):
        text = "The compiler on this host does not generate this kernel for the model."
        raise Unmeasurable(
            "rejected",
            text,
            "Measure the model again; another list of kernels is stored for the card.",
        )
    return compiled
