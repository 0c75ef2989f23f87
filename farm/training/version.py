"""The version of a user's own model: a hash of its calls and of its source, which decides what its name stands for.

Models of the catalog have none: the installed package and PyTorch decide what they compute. Torch is imported for a
user's model only.
"""

from __future__ import annotations

import contextlib
import dataclasses

from farm.errors import FarmError, Unmeasurable, UsageError
from farm.models import catalog, own
from farm.types.fields import content_id
from farm.types.protocol import Variant


def versioned(variant: Variant) -> Variant:
    """The variant with the version of the user's model as its files are now. Edited files are imported again.

    The source decides beside the calls: code between the calls takes time in the whole model. Other variants are
    returned as they are, also those of models that the catalog does not have.
    """
    entry = None
    with contextlib.suppress(UsageError):
        entry = catalog.find(variant.model)
    if entry is None or entry.origin != own.NAME:
        return variant
    from farm.training.extract import extract

    own.forget_edited(entry.own_name, variant.step)
    plain, calls = dataclasses.replace(variant, version=""), None
    with contextlib.suppress(FarmError):  # who uses the model says what is wrong with it
        calls = [(call.tuple_id, call.module_path, call.part) for call in extract(plain).capture.calls]
    return dataclasses.replace(plain, version=content_id([calls, own.code(entry.own_name, variant.step)])[:12])


def check_version(variant: Variant) -> None:
    """
    Raises:
        Unmeasurable: the files of this host make another version of the user's model than the job was submitted with.
    """
    if variant.version and (here := versioned(variant).version) != variant.version:
        raise Unmeasurable(
            "rejected",
            f"The file of {variant.model} on this host gives version {here or 'none'}, the job was submitted with "
            f"{variant.version}.",
            "Copy the file of the submitting host (same PyTorch and Python), or submit the job again.",
        )
