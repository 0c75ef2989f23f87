"""The source timm: models of image classification. ``timm.json`` lists their names and sizes, from
timm's registry.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import UnsupportedModel
from farm.models.entry import ModelEntry
from farm.models.source import Source
from farm.models.torchvision import imported_after_torchvision

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.variant import Variant

NAME = "timm"


class Timm(Source):
    name = package = extra = NAME

    def entries(self) -> Mapping[str, ModelEntry]:
        return _entries()

    def make(self, entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
        from farm.models.building import dtype_of

        timm = imported_after_torchvision(NAME)
        if not timm.is_model(entry.own_name):
            problem = f"timm {timm.__version__} does not have the model {entry.name}."
            raise UnsupportedModel(problem, "Install another version of timm.")
        return timm.create_model(entry.own_name, pretrained=False).to(dtype_of(variant))

    def inputs(
        self, entry: ModelEntry, variant: Variant, device: torch.device
    ) -> tuple[torch.Tensor]:
        from farm.models.building import images

        return (images(variant, device),)


@functools.cache
def _entries() -> Mapping[str, ModelEntry]:
    table: dict[str, str] = json.loads(Path(__file__).with_name("timm.json").read_text())
    entries = {}
    for size, names in table.items():
        pixels, _, only = size.partition(" ")
        for name in names.split():
            entries[name] = ModelEntry(
                name, "classification", int(pixels), fixed_size=bool(only), origin=NAME
            )
    return entries
