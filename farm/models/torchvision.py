"""torchvision's models: classification, segmentation and video, and the reasons why the others are
refused.

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

from farm.models.entry import ModelEntry, costs_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.protocol import Variant

NAME = PACKAGE = "torchvision"
EXTRA = ""

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("torchvision.json").read_text())
_TORCHVISION = {
    name: ModelEntry(name, **group["about"], **costs_of(NAME).get(name, {}))
    for group in _TABLE["models"]
    for name in group["names"].split()
}
REFUSED = {name: reason for reason, names in _TABLE["refused"].items() for name in names.split()}


def entries() -> Mapping[str, ModelEntry]:
    return _TORCHVISION


def make(entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
    from farm.models.building import dtype_of

    backbone = {"weights_backbone": None} if entry.task == "segmentation" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # googlenet and inception_v3 announce a change of a default
        return (
            torchvision_models()
            .get_model(variant.model, weights=None, **backbone)
            .to(dtype_of(variant))
        )


def inputs(entry: ModelEntry, variant: Variant, device: torch.device) -> tuple[torch.Tensor]:
    """Images, or clips of shape (batch, 3, 16, size, size)."""
    from farm.models.building import dtype_of, images, random_normal

    if entry.task != "video":
        return (images(variant, device),)
    return (
        random_normal(
            (variant.batch, 3, 16, variant.input_size, variant.input_size),
            dtype_of(variant),
            device,
        ),
    )


@functools.cache
def torchvision_models() -> Any:
    """Imports ``torchvision.models``, even if torchvision lacks its compiled operators.

    A torchvision from the package index fails on import with a CPU build of torch, because
    ``torchvision::nms`` does not exist. In that case this function defines the schemas of the two
    missing operators; no model here calls them."""
    import torch

    try:
        import torchvision.models as models
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)  # the definitions live as long as it
        import torchvision.models as models
    return models


_libraries: list[Any] = []


def imported_after_torchvision(package: str) -> Any:
    """Imports a package that imports torchvision; applies the fix of `torchvision_models` first."""
    torchvision_models()
    return importlib.import_module(package)
