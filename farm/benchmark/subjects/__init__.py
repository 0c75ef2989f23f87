"""The kinds of measured subjects, one file each: an operator tuple (also one with tensors in slow
memory, or of a compiled model), a whole model, a training step and a compiled model.
`farm.benchmark.subjects.base` is their interface."""

from __future__ import annotations

import torch

from farm.benchmark.passes import Offload, Passes
from farm.benchmark.subjects.base import SubjectKind
from farm.benchmark.subjects.compiled_model import CompiledModelKind
from farm.benchmark.subjects.compiled_tuple import CompiledTupleKind
from farm.benchmark.subjects.model_variant import ModelVariantKind, WholeModelKind
from farm.benchmark.subjects.operator_tuple import OperatorTupleKind
from farm.benchmark.subjects.slow_tuple import SlowTupleKind
from farm.benchmark.subjects.training_step import TrainingStepKind
from farm.benchmark.workload import Workload, arrange, out_of_memory
from farm.errors import TupleRejected, Unmeasurable
from farm.types.protocol import Protocol
from farm.types.subject import Subject
from farm.types.variant import Variant

TUPLE, COMPILED_TUPLE = OperatorTupleKind(), CompiledTupleKind()
MODEL, STEP, COMPILED = ModelVariantKind(), TrainingStepKind(), CompiledModelKind()


def kind_of_subject(
    subject: Subject, protocol: Protocol, offload: Offload | None = None
) -> SubjectKind:
    """The kind of a subject under a protocol. ``offload`` puts tensors of a tuple in slow
    memory."""
    if subject.whole:
        return kind_of_variant(subject.variant)
    if subject.compiled:
        return COMPILED_TUPLE
    if protocol.slow_tensors:
        return SlowTupleKind(offload)
    return TUPLE


def kind_of_variant(variant: Variant) -> WholeModelKind:
    """The kind of a whole model or step."""
    if variant.generates_kernels:  # also a compiled training step
        return COMPILED
    return STEP if variant.step else MODEL


def passes_of(
    subject: Subject, protocol: Protocol, device: torch.device, offload: Offload | None = None
) -> Passes:
    """Build the passes of a subject. Raises as `SubjectKind.passes`."""
    return kind_of_subject(subject, protocol, offload).passes(subject, protocol, device)


def prepare(
    subject: Subject, protocol: Protocol, device: torch.device, offload: Offload | None = None
) -> Workload:
    """Build a subject, make the copies that the residency policy requires, warm it up and capture
    its graphs.

    Call this function, and launch the rounds of its result, under `farm.benchmark.passes.applied`;
    on a GPU, do both on one stream that is not the default stream. ``offload`` puts tensors in
    slow memory.

    Raises:
        Unmeasurable: out_of_memory, raised, rejected, not_capturable or not_available.
    """
    if protocol.data == "seen":
        # A job replaces 'seen' by the data classes that it observes in its model. A single subject
        # has no model.
        text = (
            "--data seen needs a model, because it uses the values that occur in the running model."
        )
        raise Unmeasurable("not_available", text, "Use --data normal, or name a value profile.")
    try:
        return arrange(passes_of(subject, protocol, device, offload), protocol, device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory(error) from error
    except TupleRejected as error:
        raise Unmeasurable("rejected", error.message, error.next_step) from error
