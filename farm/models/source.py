"""The contract of a source of models: what the catalog asks of torchvision, transformers, timm and
the user's own models.

`farm.models.catalog` has the table of sources (`SOURCES`). To add a source, write one class, and
add it to the table:

    class Example(Source):
        name = "example"
        package = "example_models"
        extra = "example"

        def entries(self):
            return {"net": ModelEntry("net", "classification", 224, origin=self.name)}

        def make(self, entry, variant, device):
            return example_models.net().to(dtype_of(variant))

        def inputs(self, entry, variant, device):
            return (images(variant, device),)

A source keeps these rules, which `tests/models/test_sources.py` checks for every source of the
table:

- Finding and listing (all methods that have no ``variant``) needs neither torch nor the package of
  the source, and changes neither the environment nor the settings. Exception: for a user's own
  model, what its function returns is known only after the function ran.
- `make` and `inputs` are deterministic: equal random states give equal weights, and inputs are
  equal in every process. Nothing is downloaded.
- ``make(...)(*inputs(...))`` runs a forward pass of the variant.
- An error of the model itself is a `farm.errors.UnsupportedModel` or `farm.errors.SettingsError`
  with a next step. A size that the model does not accept is a `farm.errors.UsageError` of
  `ModelEntry.completed`, before anything is built."""

# ruff: noqa: B027 - a source without versions has nothing to forget

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from farm.errors import UnsupportedModel, UsageError
from farm.models.entry import ModelEntry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.tokens import Tokens
    from farm.types.variant import Variant


class Source(ABC):
    """A source of models. Only `make` and `inputs` need torch."""

    name: ClassVar[str]  # before the slash: timm/mobilevit_s
    package: ClassVar[str] = ""  # that makes its models; "" for the farm itself
    extra: ClassVar[str] = ""  # of pyproject.toml that installs the package; "" if always installed

    #: The models that cannot be measured, by name: the reason, after "NAME is".
    refused: ClassVar[Mapping[str, str]] = {}

    #: True if a name without a source means a model of this source first.
    is_preferred: ClassVar[bool] = False

    #: True if modules that `make` returns in eval mode stay in eval mode while the model trains.
    keeps_modes: ClassVar[bool] = False

    #: True if source code on this host decides what a model computes; False if the installed
    #: packages decide.
    has_versions: ClassVar[bool] = False

    # ---- find a model

    @abstractmethod
    def entries(self) -> Mapping[str, ModelEntry]:
        """The models that can be measured, by name. Raises `SettingsError` if the settings describe
        one wrongly.
        """

    def registered(self, name: str) -> str:
        """The name of the model that a location on this host means ("my_models.py:net"); ``name``
        itself if it is no location. Raises `UsageError` for a wrong location."""
        return name

    def hint(self, name: str) -> str:
        """What a name that no source has probably means, as a next step; "" if unknown."""
        return ""

    # ---- build a model

    def maker(self, entry: ModelEntry) -> Source:
        """The source that builds a model: this one, or one whose classes it uses. The catalog asks
        the maker for everything below but the version."""
        return self

    @abstractmethod
    def make(self, entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
        """The module in the variant's dtype, with random weights from torch's generator. If its
        destination ``device`` is meta, ``torch.empty`` makes meta tensors during this call. The
        module may be made on another device; the caller moves it."""

    @abstractmethod
    def inputs(self, entry: ModelEntry, variant: Variant, device: torch.device) -> tuple[Any, ...]:
        """The positional arguments of the module, such as one tensor of shape (batch, 3, 224,
        224).
        """

    def tokens_of(self, entry: ModelEntry, variant: Variant, text: Path, tokenizer: Path) -> Tokens:
        """The ids of a user's text for a variant. Raises `UsageError` if the model takes no text,
        and as `farm.models.texts.user_text.tokenize`.
        """
        raise UsageError(
            f"{entry.name} takes no tokens and no text.", "Omit --text and --tokenizer."
        )

    def tensor_parallel_plan(self, entry: ModelEntry, model: Any, cards: int) -> Mapping[str, str]:
        """Path of each module of a built model that tensor parallelism splits -> how. Raises
        `UnsupportedModel` if the model has no plan, or its heads cannot be divided."""
        raise UnsupportedModel(
            f"{entry.name} has no plan for tensor parallelism.",
            "Choose a language model of transformers. A model of your own that is distributed "
            "needs only --cards.",
        )

    # ---- what a model brings along

    def example_inputs(self, entry: ModelEntry) -> Sequence[Any] | None:
        """The model's own example inputs; None if the farm makes its inputs."""
        return None

    def usual_batch(self, entry: ModelEntry) -> int:
        """The batch of the model's own example inputs; 0 if it has none."""
        return 0

    def usual_dtype(self, entry: ModelEntry) -> str:
        """The dtype in which the model arrives; "" if a variant's default decides."""
        return ""

    def differences(self, entry: ModelEntry, variant: Variant) -> list[str]:
        """Lines about what differs between the model as it arrives and the measured one."""
        return []

    def hint_about_inputs(self, entry: ModelEntry, variant: Variant) -> str:
        """A next step for a model that raises on its inputs; "" if there is none."""
        if not variant.length or entry.fixed_length:
            return ""
        return (
            f" The input is the farm's own, with a length of {variant.length}; --length gives "
            "another one."
        )

    # ---- the version of a model

    def code(self, entry: ModelEntry, step: str) -> list[str]:
        """The source code that decides what a model computes, if the source `has_versions`.
        ``step``: of the variant; a training step has a loss, too."""
        return []

    def forget_edited(self, entry: ModelEntry, step: str) -> None:
        """Load the model's source code again at its next use, if a file of it changed."""


def is_installed(source: Source) -> bool:
    return not source.extra or importlib.util.find_spec(source.package) is not None


def install_line(source: Source) -> str:
    return f"pip install 'operator-farm[{source.extra}]'"
