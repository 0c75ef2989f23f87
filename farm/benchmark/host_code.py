"""The code of this host that subjects run besides PyTorch and the farm: it imports libraries of
operators, and checks the versions of the user's models and their weights."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from farm.subjects import libraries
from farm.training.version import check_version, model_revision
from farm.types.reading import Reading
from farm.types.subject import Subject
from farm.types.variant import Variant


def import_libraries() -> None:
    """Import the libraries of the setting `libraries`, and write to stderr which cannot be
    imported: their operators are refused."""
    for library, problem in libraries.load().items():
        if problem:
            sys.stderr.write(f"The library {library} is not available: {problem}\n")


def check_versions(subjects: Iterable[Subject]) -> None:
    """Raise `Unmeasurable` if a user's model that the subjects build has another version on this
    host than in the submitted job."""
    for variant in _built_variants(subjects):
        check_version(variant)


def with_revision(reading: Reading, subjects: Iterable[Subject]) -> Reading:
    """Return the reading with the git revision of the user's model that the last of the subjects
    builds; unchanged if no subject builds a model."""
    variants = _built_variants(subjects)
    if not variants:
        return reading
    return reading.noting(revision=model_revision(variants[-1]))


def _built_variants(subjects: Iterable[Subject]) -> list[Variant]:
    variants = [subject.built_variant for subject in subjects]
    return [variant for variant in variants if variant is not None]
