"""The kinds of measured subjects, one file each: an operator tuple, a whole model, a training step
and a compiled model. `farm.benchmark.subjects.base` is their interface."""

from __future__ import annotations

import torch

from farm.benchmark.passes import Offload, Passes
from farm.benchmark.subjects.base import SubjectKind
from farm.benchmark.subjects.compiled_model import CompiledModel
from farm.benchmark.subjects.model_variant import ModelVariant, WholeModel
from farm.benchmark.subjects.operator_tuple import MeasuredTuple
from farm.benchmark.subjects.training_step import TrainingStep
from farm.types.protocol import Protocol, Subject, Variant

TUPLE, MODEL, STEP, COMPILED = MeasuredTuple(), ModelVariant(), TrainingStep(), CompiledModel()


def kind_of_subject(subject: Subject) -> SubjectKind:
    """The kind of a subject."""
    return kind_of_variant(Variant.from_json(subject.spec)) if subject.whole else TUPLE


def kind_of_variant(variant: Variant) -> WholeModel:
    """The kind of a whole model or step."""
    if variant.compile:  # also a compiled training step
        return COMPILED
    return STEP if variant.step else MODEL


def passes_of(
    subject: Subject, protocol: Protocol, device: torch.device, offload: Offload | None = None
) -> Passes:
    """Build the passes of a subject. Raises as `SubjectKind.passes`."""
    return kind_of_subject(subject).passes(subject, protocol, device, offload)
