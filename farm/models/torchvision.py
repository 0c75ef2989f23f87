"""The source torchvision: models of classification, segmentation and video, and the reasons why the
others are refused.

``torchvision.json`` lists the names and sizes; a test compares the list with torchvision.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.models.card_questions import without_context
from farm.models.entry import ModelEntry, costs_of
from farm.models.source import Source

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.variant import Variant

NAME = "torchvision"

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("torchvision.json").read_text())
#: Name of a refused model -> the reason.
_REFUSED: dict[str, str] = {}
for _reason, _names in _TABLE["refused"].items():
    _REFUSED |= dict.fromkeys(_names.split(), _reason)


class Torchvision(Source):
    name = package = NAME
    refused = _REFUSED
    is_preferred = True

    def entries(self) -> Mapping[str, ModelEntry]:
        return _entries()

    def make(self, entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
        from farm.models.building import dtype_of

        backbone = {"weights_backbone": None} if entry.task == "segmentation" else {}
        models = torchvision_models()
        with warnings.catch_warnings():
            # googlenet and inception_v3 announce a change of a default
            warnings.simplefilter("ignore")
            model = models.get_model(variant.model, weights=None, **backbone)
        return model.to(dtype_of(variant))

    def inputs(
        self, entry: ModelEntry, variant: Variant, device: torch.device
    ) -> tuple[torch.Tensor]:
        """Images, or clips of shape (batch, 3, 16, size, size)."""
        from farm.models.building import dtype_of, images, random_normal

        if entry.task != "video":
            return (images(variant, device),)
        shape = (variant.batch, 3, 16, variant.input_size, variant.input_size)
        return (random_normal(shape, dtype_of(variant), device),)


@functools.cache
def _entries() -> Mapping[str, ModelEntry]:
    entries = {}
    for group in _TABLE["models"]:
        for name in group["names"].split():
            costs = costs_of(NAME).get(name, {})
            entries[name] = ModelEntry(name, **group["about"], **costs)
    return entries


def all_names() -> frozenset[str]:
    """The names of all models of torchvision, also of those that the farm refuses."""
    return frozenset(_entries()) | frozenset(_REFUSED)


@functools.cache
def torchvision_models() -> Any:
    """Imports ``torchvision.models``, even if torchvision lacks its compiled operators.

    A torchvision from the package index fails on import with a CPU build of torch, because
    ``torchvision::nms`` does not exist. In that case this function defines the schemas of the two
    missing operators; no model here calls them."""
    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _missing_operators()
    return importlib.import_module("torchvision.models")


@functools.cache
def _missing_operators() -> Any:
    """The schemas of operators that torchvision lacks. They exist as long as the returned library,
    which the cache keeps.
    """
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def imported_after_torchvision(package: str) -> Any:
    """Imports a package that imports torchvision; applies the fix of `torchvision_models` first."""
    torchvision_models()
    with without_context():
        return importlib.import_module(package)
