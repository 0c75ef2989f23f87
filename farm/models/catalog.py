"""From a model's name to a module and an example input, whatever source it comes from: finds the source and asks it.

A name may carry its source (``timm/mobilevit_s``). One without means torchvision's model or the user's own, where there is
one, and else the only one of that name. To find and to list needs no torch, and none of the sources' packages. Nothing is
ever downloaded: weights are random, seeded, and equal wherever the same torch builds them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from farm.errors import SettingsError, UnknownModel, UnsupportedModel, UsageError
from farm.models import own, timm, torchvision, transformers
from farm.models.entry import ModelEntry, Source, check_installed
from farm.models.texts.known import know
from farm.types.protocol import Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

#: Those of the first two always win a name; below them it must be unambiguous.
_WINNING = cast(tuple[Source, ...], (torchvision, own))
SOURCES = (*_WINNING, *cast(tuple[Source, ...], (transformers, timm)))

_MOST_SIZES = 2  # of a model's own inputs that stand in a title


def _entries(source: Source) -> Mapping[str, ModelEntry]:
    """
    Raises:
        SettingsError: a user's model is malformed, or has the name of a model of torchvision.
    """
    found = source.entries()
    if source.NAME == own.NAME:
        for name in found:
            if name in torchvision.entries() or name in torchvision.refused():
                raise SettingsError(
                    f"The setting 'models' names '{name}', which is a model of torchvision.",
                    "Choose another name for it.",
                )
    return found


def source_named(name: str) -> Source:
    """
    Raises:
        UsageError: there is none of that name.
    """
    for source in SOURCES:
        if name == source.NAME:
            return source
    raise UsageError(
        f"There is no source of models named '{name}'.", f"Choose one of {', '.join(one.NAME for one in SOURCES)}."
    )


def names(task: str | None = None, source: str | None = None) -> list[str]:
    """All models that can be measured, sorted, each as `find` knows it. ``task`` and ``source`` narrow them."""
    chosen = SOURCES if source is None else (source_named(source),)
    found = [(one, entry) for one in chosen for entry in _entries(one).values() if task in (None, entry.task)]
    return sorted(_shortest(one, entry.name) for one, entry in found)


def _shortest(source: Source, name: str) -> str:
    """What a source's model is called: without its source, unless that means another."""
    return name if _owner(name) is source else f"{source.NAME}/{name}"


def _owner(name: str) -> Source | None:
    """The source that a bare name means; None where several have it, or none."""
    having = [one for one in SOURCES if name in _entries(one) or name in one.refused()]
    winning = [one for one in having if one in _WINNING]
    return winning[0] if winning else having[0] if len(having) == 1 else None


def is_pattern(name: str) -> bool:
    """Whether a name stands for several, as in a shell: none of a model holds these marks."""
    return any(mark in name for mark in "*?[")


def matching(name: str) -> list[str]:
    """The models that a pattern such as ``resnet*`` or ``timm/resnet*`` means, whatever the case; what is no pattern means
    itself. Without a source, those of torchvision and the user's own, and of the others where none of these fits.

    Raises:
        UnknownModel: no model's name fits the pattern.
    """
    if not is_pattern(name):
        return [name]
    prefix, _, pattern = name.rpartition("/")
    groups = [(source_named(prefix),)] if prefix else [_WINNING, SOURCES]
    for group in groups:
        entries = [(one, entry.name) for one in group for entry in _entries(one).values()]
        if found := [pair for pair in entries if fnmatch.fnmatchcase(pair[1].lower(), pattern.lower())]:
            return sorted(_shortest(*pair) for pair in found)
    raise UnknownModel(f"No model's name fits '{name}'.", "List the models with `farm models`.")


def _found(name: str) -> tuple[Source, ModelEntry]:
    prefix, _, bare = name.rpartition("/")
    source = next((one for one in SOURCES if prefix == one.NAME), None) if prefix else _owner(bare)
    if source is None:
        having = [f"{one.NAME}/{name}" for one in SOURCES if name in _entries(one)]
        if len(having) > 1:
            raise UnknownModel(f"Several sources have a model '{name}'.", f"Say which: {' or '.join(having)}.")
        raise UnknownModel.named(name, names())
    if bare in (reasons := source.refused()):
        raise UnsupportedModel(f"{bare} is {reasons[bare]}.", "List the models with `farm models`.")
    if (entry := _entries(source).get(bare)) is None:
        raise UnknownModel.named(name, [f"{prefix}/{one}" for one in _entries(source)])
    return source, dataclasses.replace(entry, name=_shortest(source, bare))


def find(name: str) -> ModelEntry:
    """The entry of a model, under the name that its variants have; needs no torch.

    Raises:
        UnknownModel: there is none; the nearest names are suggested.
        UnsupportedModel: a source has it, but it is refused, with the reason.
    """
    return _found(name)[1]


def variant(name: str, batch: int = 1, **said: Any) -> Variant:
    """A variant of a model with what was said of it, and what the model takes by itself. Imports torch for a user's model
    that was given a size.

    Args:
        said: fields of a variant; None is not said. ``text``, a file, and ``tokenizer``, a folder with a `tokenizer.json`, make
            it read that text: its ids are at hand in this process (`farm.models.texts.known`).

    Raises:
        UsageError: the model does not take one of them, or has no use for it; see `farm.models.texts.given.of_a_user`.
        UnknownModel, UnsupportedModel: see `find`.
    """
    entry = find(name)
    given = {key: value for key, value in said.items() if value is not None}
    text, tokenizer = given.pop("text", None), given.pop("tokenizer", None)
    if (text is None) != (tokenizer is None):
        there, absent = ("--text", "--tokenizer") if tokenizer is None else ("--tokenizer", "--text")
        raise UsageError(f"{there} means nothing without {absent}.", "Give both, or neither for the farm's own text.")
    for key in ("length", "cache", "layers"):
        if given.get(key) == 0:  # in a variant it means that nothing was said
            raise UsageError(f"--{key} is 0; it must be at least 1.", f"Leave --{key} away for the model's own.")
    if entry.origin == own.NAME and "input_size" in given:
        own.refuse_size(entry.own_name)
    made = Variant(model=entry.name, batch=batch, **entry.completed(given))
    if text is None or tokenizer is None:
        return made
    if not made.phase:
        raise UsageError(f"{entry.name} takes no tokens, and so no text.", "Leave --text and --tokenizer away.")
    return dataclasses.replace(made, text=know(transformers.tokens_of(entry, made, Path(text), Path(tokenizer))))


# ------------------------------------------------------------------------------------------------- building


def build(
    wanted: Variant | str, *, device: str | torch.device = "meta", seed: int = 0, real_buffers: bool = False
) -> nn.Module:
    """A variant's module; a name alone is its variant of default size. On meta it has shapes and no memory; elsewhere its
    weights are random by ``seed``.

    With ``real_buffers`` what a model on meta makes other than by ``torch.empty`` (caches, masks) stays as it is made.

    Raises:
        UnknownModel, UnsupportedModel: it is not in the catalog, or what makes it is not installed.
    """
    import torch

    from farm.models.tensors import EmptyOnMeta, memory_format_of

    wanted = variant(wanted) if isinstance(wanted, str) else wanted
    source, entry = _found(wanted.model)
    check_installed(source, wanted.model)
    device = torch.device(device)
    on_meta = device.type == "meta"
    with contextlib.ExitStack() as stack:
        if on_meta:
            stack.enter_context(EmptyOnMeta())
        else:
            stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            torch.manual_seed(seed)
        model = source.make(entry, wanted, device)
    if not (real_buffers and on_meta):
        model = model.to(device=device)
    if wanted.memory_format != Variant.memory_format and entry.task != "video":
        model = model.to(memory_format=memory_format_of(wanted))  # type: ignore[call-overload]
    return model.train(wanted.mode == "train")


def example_inputs(wanted: Variant | str, *, device: str | torch.device = "meta", seed: int = 0) -> tuple[Any, ...]:
    """Positional arguments for what `build` returns: of an image model, images of shape (batch, 3, size, size), or clips of
    16 frames, standard normal by ``seed``.

    A user's model may bring its own inputs: the input size is then ignored.

    Raises:
        UsageError: a size that the model does not take.
    """
    import torch

    wanted = variant(wanted) if isinstance(wanted, str) else wanted
    source, entry = _found(wanted.model)
    check_installed(source, wanted.model)
    entry.completed(wanted.to_json())
    return source.inputs(entry, wanted, torch.device(device), seed)


def meta_inputs(wanted: Variant) -> tuple[Any, ...]:
    """As `example_inputs` on meta, but integers (token ids, masks) have their values: a model may read them."""
    import torch

    def is_integer(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not value.is_floating_point()

    found = example_inputs(wanted)
    if not any(map(is_integer, found)):
        return found
    real = example_inputs(wanted, device="cpu")
    return tuple(value if is_integer(value) else empty for value, empty in zip(real, found, strict=True))


def title_of(wanted: Variant) -> str:
    """What people call a variant. A user's model that brings its own inputs is titled by their sizes: 'bert 8x128 float32'.

    Imports torch for a user's model alone.
    """
    entry = find(wanted.model)
    given = own.given_inputs(entry.own_name) if entry.origin == own.NAME else None
    return str(wanted) if given is None else titled_by(wanted, own.batched(given, wanted.batch))


def titled_by(wanted: Variant, inputs: Sequence[Any]) -> str:
    """What people call a variant that has inputs of its own: by the sizes of these."""
    sizes = ["x".join(map(str, value.shape)) for value in inputs if getattr(value, "shape", ())]
    shown = list(dict.fromkeys(sizes))
    more = ["…"] if len(shown) > _MOST_SIZES else []
    return wanted.titled("+".join(shown[:_MOST_SIZES] + more) or str(wanted.batch))
