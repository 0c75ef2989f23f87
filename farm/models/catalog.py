"""The catalog of models: finds a model by name, in any source.

A name may include its source (``timm/mobilevit_s``). A name without a source means the model of
torchvision or the user if one exists, otherwise the only model of that name. Finding and listing
needs neither torch nor the packages of the sources. `resolve` returns a `ResolvedModel`, which
builds modules and inputs."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from farm.errors import UnknownModel, UnsupportedModel, UsageError
from farm.models.entry import ModelEntry
from farm.models.own import Own
from farm.models.resolved import ResolvedModel
from farm.models.source import Source
from farm.models.timm import Timm
from farm.models.torchvision import Torchvision
from farm.models.transformers import Transformers
from farm.types.variant import Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

_TRANSFORMERS = Transformers()
#: All sources. A name without a source means a model of the first source that `Source.is_preferred`
#: and has it; a name of the other sources must be unambiguous.
SOURCES: tuple[Source, ...] = (Torchvision(), Own(_TRANSFORMERS), _TRANSFORMERS, Timm())
_PREFERRED = tuple(source for source in SOURCES if source.is_preferred)


# ---- names


def source_named(name: str) -> Source:
    """The source with this name. Raises `UsageError` if there is none."""
    for source in SOURCES:
        if source.name == name:
            return source
    names = ", ".join(source.name for source in SOURCES)
    raise UsageError(f"There is no model source '{name}'.", f"Choose one of {names}.")


def names(task: str | None = None, source: str | None = None) -> list[str]:
    """The names of all models that can be measured, sorted; ``task`` and ``source`` select some of
    them.
    """
    names = []
    for chosen in SOURCES if source is None else [source_named(source)]:
        for entry in chosen.entries().values():
            if task in (None, entry.task):
                names.append(_shortest(chosen, entry.name))
    return sorted(names)


def _shortest(source: Source, name: str) -> str:
    """The name of a source's model: without the source, unless the short name means another
    model.
    """
    return name if _owner(name) is source else f"{source.name}/{name}"


def _owner(name: str) -> Source | None:
    """The source of the model that a short name means; None if no source has the name, or several
    sources have it.
    """
    first: Source | None = None
    for source in SOURCES:
        if name not in source.entries() and name not in source.refused:
            continue
        if source.is_preferred:
            return source
        if first is not None:
            return None
        first = source
    return first


def is_pattern(name: str) -> bool:
    """True if a name is a shell pattern; no model's name has these characters."""
    return any(mark in name for mark in "*?[")


def matching(name: str) -> list[str]:
    """The models that match a pattern such as ``resnet*`` or ``timm/resnet*``; raises
    `UnknownModel` if there are none.

    A plain name matches itself, and the location of a user's function the name under which it is
    registered (`Source.registered`). Case is ignored. Without a source, a pattern matches models of
    torchvision and the user; if none, of all sources."""
    if not is_pattern(name):
        return [_registered(name)]
    prefix, _, pattern = name.rpartition("/")
    for sources in [(source_named(prefix),)] if prefix else [_PREFERRED, SOURCES]:
        matches = _matches(sources, pattern.lower())
        if matches:
            return sorted(matches)
    raise UnknownModel(f"No model name matches '{name}'.", "List the models with `farm models`.")


def _matches(sources: Sequence[Source], pattern: str) -> list[str]:
    matches = []
    for source in sources:
        for name in source.entries():
            if fnmatch.fnmatchcase(name.lower(), pattern):
                matches.append(_shortest(source, name))
    return matches


def _registered(name: str) -> str:
    """The name of a model that may be given by its location on this host."""
    for source in SOURCES:
        name = source.registered(name)
    return name


# ---- find a model


def resolve(name: str) -> ResolvedModel:
    """Find a model. Its entry's ``name`` is the name that variants have. Needs no torch. Raises
    `UnknownModel`, with the nearest names, if there is none; `UnsupportedModel`, with the reason,
    if its source refuses the model."""
    prefix, _, bare = name.rpartition("/")
    if prefix:
        source = next((source for source in SOURCES if source.name == prefix), None)
    else:
        source = _owner(bare)
    if source is None:
        raise _unknown(name, bare)
    if bare in source.refused:
        raise UnsupportedModel(
            f"{bare} is {source.refused[bare]}.", "Choose a model that `farm models` lists."
        )
    entries = source.entries()
    if bare not in entries:
        raise UnknownModel.named(name, [f"{prefix}/{other}" for other in entries])
    entry = dataclasses.replace(entries[bare], name=_shortest(source, bare))
    return ResolvedModel(source, entry)


def _unknown(name: str, bare: str) -> UnknownModel:
    """The error of a name that no source has, or several sources have."""
    candidates = [f"{source.name}/{name}" for source in SOURCES if name in source.entries()]
    if len(candidates) > 1:
        return UnknownModel(
            f"Several sources have a model '{name}'.", f"Choose {' or '.join(candidates)}."
        )
    for source in SOURCES:
        hint = source.hint(name)
        if hint:
            return UnknownModel(f"There is no model named '{name}'.", hint)
    return UnknownModel.named(name, names(), bare)  # a name of a hub has an owner: microsoft/phi-2


def resolve_given(name: str) -> ResolvedModel:
    """Find the model that a user names: by its name, or by its location on this host, which is
    registered first. Raises as `resolve`, and `UsageError` for a wrong location."""
    return resolve(_registered(name))


def find(name: str) -> ModelEntry:
    """The entry of a model; see `resolve`."""
    return resolve(name).entry


# ---- the methods of `ResolvedModel`, for callers that have only a name or a variant


def variant(name: str, batch: int = 1, **fields: Any) -> Variant:
    """A variant of a model with the given fields, and the model's defaults for the others.

    Imports torch for a user's model: its dtype is by default that of most of its numbers.

    Args:
        fields: fields of a `Variant`; None means the default. ``text`` (a file) and ``tokenizer``
            (a folder with a `tokenizer.json`) give the input text; this process then stores its ids
            (`farm.settings.UserModels.add_text`).

    Raises:
        UsageError: the model does not accept or use one of the fields; see
        `farm.models.texts.user_text.tokenize`. UnknownModel, UnsupportedModel: see `resolve`.
    """
    return resolve_given(name).variant(batch, **fields)


def build(model: Variant | str, **options: Any) -> nn.Module:
    """Build the module of a variant; a model's name means its default variant. ``options`` and
    errors: see `ResolvedModel.build`."""
    chosen = variant(model) if isinstance(model, str) else model
    return resolve(chosen.model).build(chosen, **options)


def example_inputs(model: Variant | str, *, device: str | torch.device = "meta") -> tuple[Any, ...]:
    """Positional arguments of the module that `build` returns; see
    `ResolvedModel.example_inputs`.
    """
    chosen = variant(model) if isinstance(model, str) else model
    return resolve(chosen.model).example_inputs(chosen, device=device)
