"""The version of a user's own model: a hash of its calls and of its source code.

Models of other sources have no version: the installed package and PyTorch determine them. Torch is
imported for a user's model only."""

from __future__ import annotations

import contextlib
import dataclasses

from farm.errors import FarmError, Unmeasurable, UsageError
from farm.models import catalog
from farm.types.fields import content_id
from farm.types.protocol import Variant


def versioned(variant: Variant) -> Variant:
    """The variant with the version of the user's model from its present files. Edited files are
    imported again.

    The source is part of the hash because code between the calls takes time in the whole model. All
    other variants are returned unchanged, even if the catalog does not have their model."""
    try:
        source, entry = catalog.source_and_entry(variant.model)
    except UsageError:
        return variant
    if not source.has_versions:
        return variant
    from farm.training.extract import extract, keep_extraction

    source.forget_edited(entry, variant.step)
    plain, calls = dataclasses.replace(variant, version=""), None
    if (
        variant.cards == 1
    ):  # a rank of a split model cannot extract it: its version is that of its source alone
        with contextlib.suppress(FarmError):  # using the model raises this error again
            extraction = extract(plain)
            calls = [
                (call.tuple_id, call.module_path, call.part) for call in extraction.capture.calls
            ]
    found = dataclasses.replace(
        plain, version=content_id([calls, source.code(entry, variant.step)])[:12]
    )
    if calls is not None:
        keep_extraction(found, extraction)
    return found


def check_version(variant: Variant) -> None:
    """Raise `Unmeasurable` if the version of the user's model on this host differs from that in the
    submitted job.
    """
    if variant.version and (here := versioned(variant).version) != variant.version:
        raise Unmeasurable(
            "rejected",
            f"The source of {variant.model} on this host has version {here or 'none'}; the job "
            "was submitted with "
            f"version {variant.version}.",
            "Copy the source file from the submitting host (and use the same PyTorch and Python), "
            "or submit again.",
        )
