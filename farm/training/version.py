"""The version of a user's own model: a hash of its calls, its source code and its weights.

Models of other sources have no version: the installed package and PyTorch determine them. Torch is
imported for a user's model only."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from farm.errors import FarmError, Unmeasurable, UsageError
from farm.models import catalog, own, weights
from farm.models.resolved import ResolvedModel
from farm.types.fields import content_id
from farm.types.revision import revision_of
from farm.types.variant import FROM_FILE, Variant


def versioned(variant: Variant, model: ResolvedModel | None = None) -> Variant:
    """The variant with the version of the user's model from its present files. Edited files are
    imported again.

    The source is part of the hash because code between the calls takes time in the whole model. All
    other variants are returned unchanged, even if the catalog does not have their model. ``model``:
    the variant's model, if the caller has found it."""
    if model is None:
        with contextlib.suppress(UsageError):
            model = catalog.resolve(variant.model)
    if model is None or not model.has_versions:
        return variant
    from farm.training.extract import extract, keep_extraction

    model.forget_edited(variant.step)
    plain, calls = dataclasses.replace(variant, version=""), None
    # A rank of a split model cannot extract it: its version is that of its source alone.
    if variant.cards == 1:
        with contextlib.suppress(FarmError):  # using the model raises this error again
            extraction = extract(plain, model=model)
            calls = [
                (call.tuple_id, call.module_path, call.part) for call in extraction.capture.calls
            ]
    parts: list[Any] = [calls, model.code(variant.step)]
    if variant.weights == FROM_FILE:
        parts.append(weights.digest(model.entry.own_name))
    version = content_id(parts)[:12]
    versioned_variant = dataclasses.replace(plain, version=version)
    if calls is not None:
        keep_extraction(versioned_variant, extraction)
    return versioned_variant


def check_version(variant: Variant) -> None:
    """Raise `Unmeasurable` if the version of the user's model on this host differs from that in the
    submitted job.
    """
    if variant.version and (here := versioned(variant).version) != variant.version:
        raise Unmeasurable(
            "rejected",
            f"The source or the weights of {variant.model} on this host have version "
            f"{here or 'none'}; the job was submitted with version {variant.version}.",
            "Copy the files from the submitting host (and use the same PyTorch and Python), "
            "or submit again.",
        )


def model_revision(variant: Variant) -> str | None:
    """The git revision of the source of a user's model that this process has loaded; see
    `farm.types.revision`. None for all other models."""
    source = own.source_of(variant.model) if variant.version else None
    return revision_of(source) if source else None
