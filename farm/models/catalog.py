"""The catalog of models: finds a model by name, in any source.

A name may include its source (``timm/mobilevit_s``). A name without a source means the model of
torchvision or the user if one exists, otherwise the only model of that name. Finding and listing
needs neither torch nor the packages of the sources. `resolve` returns a `ResolvedModel`, which
builds modules and inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from farm.errors import SettingsError, UnknownModel, UnsupportedModel, UsageError
from farm.models import own, timm, torchvision, transformers
from farm.models.entry import ModelEntry, Source
from farm.models.resolved import ResolvedModel
from farm.types.protocol import Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

#: A name without a source means their model first; a name of the other sources must be unambiguous.
_PREFERRED = cast(tuple[Source, ...], (torchvision, own))
SOURCES = (*_PREFERRED, *cast(tuple[Source, ...], (transformers, timm)))


def _entries(source: Source) -> Mapping[str, ModelEntry]:
    """The models of a source; raises `SettingsError` if a user's model has the name of a model of
    torchvision.
    """
    found = source.entries()
    if source.NAME == own.NAME and (
        same := found.keys() & {**torchvision.entries(), **torchvision.REFUSED}.keys()
    ):
        problem = (
            f"The setting 'models' gives your model the name '{min(same)}', which is a model of "
            "torchvision."
        )
        raise SettingsError(problem, "Choose another name for your model.")
    return found


def source_named(name: str) -> Source:
    """The source with this name. Raises `UsageError` if there is none."""
    known = {source.NAME: source for source in SOURCES}
    if name not in known:
        raise UsageError(
            f"There is no model source '{name}'.", f"Choose one of {', '.join(known)}."
        )
    return known[name]


def names(task: str | None = None, source: str | None = None) -> list[str]:
    """The names of all models that can be measured, sorted; ``task`` and ``source`` select some of
    them.
    """
    chosen = SOURCES if source is None else (source_named(source),)
    found = ((one, entry) for one in chosen for entry in _entries(one).values())
    return sorted(_shortest(one, entry.name) for one, entry in found if task in (None, entry.task))


def _shortest(source: Source, name: str) -> str:
    """The name of a source's model: without the source, unless the short name means another
    model.
    """
    return name if _owner(name) is source else f"{source.NAME}/{name}"


def _owner(name: str) -> Source | None:
    """The source of the model that a short name means; None if no source has the name, or several
    sources have it.
    """
    having = (one for one in SOURCES if name in _entries(one) or name in one.REFUSED)
    first = next(having, None)
    return first if first in _PREFERRED or next(having, None) is None else None


def is_pattern(name: str) -> bool:
    """True if a name is a shell pattern; no model's name has these characters."""
    return any(mark in name for mark in "*?[")


def matching(name: str) -> list[str]:
    """The models that match a pattern such as ``resnet*`` or ``timm/resnet*``; raises
    `UnknownModel` if there are none.

    A plain name matches itself, and the location of a user's function the name under which it is
    registered (`own.register`). Case is ignored. Without a source, a pattern matches models of
    torchvision and the user; if none, of all sources."""
    if not is_pattern(name):
        return [own.register(name)]
    prefix, _, pattern = name.rpartition("/")
    for group in [(source_named(prefix),)] if prefix else [_PREFERRED, SOURCES]:
        entries = [(one, model) for one in group for model in _entries(one)]
        if found := [
            pair for pair in entries if fnmatch.fnmatchcase(pair[1].lower(), pattern.lower())
        ]:
            return sorted(_shortest(*pair) for pair in found)
    raise UnknownModel(f"No model name matches '{name}'.", "List the models with `farm models`.")


def resolve(name: str) -> ResolvedModel:
    """Find a model. Its entry's ``name`` is the name that variants have. Needs no torch. Raises
    `UnknownModel`, with the nearest names, if there is none; `UnsupportedModel`, with the reason,
    if its source refuses the model."""
    prefix, _, bare = name.rpartition("/")
    source = next((one for one in SOURCES if prefix == one.NAME), None) if prefix else _owner(bare)
    if source is None:
        having = [f"{one.NAME}/{name}" for one in SOURCES if name in _entries(one)]
        if len(having) > 1:
            raise UnknownModel(
                f"Several sources have a model '{name}'.", f"Choose {' or '.join(having)}."
            )
        if hint := own.hint(name):
            raise UnknownModel(f"There is no model named '{name}'.", hint)
        raise UnknownModel.named(
            name, names(), bare
        )  # a name of a hub has an owner: microsoft/phi-2
    if bare in (reasons := source.REFUSED):
        raise UnsupportedModel(
            f"{bare} is {reasons[bare]}.", "Choose a model that `farm models` lists."
        )
    if (entry := _entries(source).get(bare)) is None:
        raise UnknownModel.named(name, [f"{prefix}/{one}" for one in _entries(source)])
    named = dataclasses.replace(entry, name=_shortest(source, bare))
    # The folder of a user's model may have a config.json of transformers.
    if source is own and bare in transformers.folders():
        return ResolvedModel(cast(Source, transformers), named)
    return ResolvedModel(source, named)


def resolve_given(name: str) -> ResolvedModel:
    """Find the model that a user names: by its name, or by the location of a function of their own,
    which is registered first. Raises as `resolve`, and as `own.register`."""
    return resolve(own.register(name))


def find(name: str) -> ModelEntry:
    """The entry of a model; see `resolve`."""
    return resolve(name).entry


def known(name: str) -> str:
    """The name of a model of the catalog, or of a user's function given by its location. Raises as
    `resolve_given`.
    """
    return resolve_given(name).entry.name


# ---- the methods of `ResolvedModel`, for callers that have only a name or a variant


def variant(name: str, batch: int = 1, **fields: Any) -> Variant:
    """A variant of a model with the given fields, and the model's defaults for the others.

    Imports torch for a user's model: its dtype is by default that of most of its numbers.

    Args:
        fields: fields of a `Variant`; None means the default. ``text`` (a file) and ``tokenizer``
            (a folder with a `tokenizer.json`) give the input text; this process then stores its ids
            (`farm.models.texts.tokens_of_text`).

    Raises:
        UsageError: the model does not accept or use one of the fields; see
        `farm.models.texts.user_text.tokenize`. UnknownModel, UnsupportedModel: see `resolve`.
    """
    return resolve_given(name).variant(batch, **fields)


def differences(variant: Variant) -> list[str]:
    """See `ResolvedModel.differences`; empty if the catalog does not have the model."""
    with contextlib.suppress(UsageError):  # using the model raises this error again
        return resolve(variant.model).differences(variant)
    return []


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


def meta_inputs(variant: Variant) -> tuple[Any, ...]:
    """See `ResolvedModel.meta_inputs`."""
    return resolve(variant.model).meta_inputs(variant)


def title_of(variant: Variant) -> str:
    """See `ResolvedModel.title_of`."""
    return resolve(variant.model).title_of(variant)
