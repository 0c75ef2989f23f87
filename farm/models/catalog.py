"""The catalog of models: builds the module and the example inputs of a model by name, from any
source.

A name may include its source (``timm/mobilevit_s``). A name without a source means the model of
torchvision or the user if one exists, otherwise the only model of that name. Finding and listing
needs neither torch nor the packages of the sources. Nothing is downloaded: weights are random,
seeded, and equal wherever the same torch builds them."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import SettingsError, UnknownModel, UnsupportedModel, UsageError
from farm.models.entry import ModelEntry
from farm.models.own import Own, batched
from farm.models.source import Source, install_line, is_installed
from farm.models.texts import hold_tokens
from farm.models.timm import Timm
from farm.models.torchvision import Torchvision
from farm.models.transformers import Transformers
from farm.types.protocol import Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

_TRANSFORMERS = Transformers()
#: All sources. A name without a source means a model of the first source that `Source.is_preferred`
#: and has it; a name of the other sources must be unambiguous.
SOURCES: tuple[Source, ...] = (Torchvision(), Own(_TRANSFORMERS), _TRANSFORMERS, Timm())
_PREFERRED = tuple(source for source in SOURCES if source.is_preferred)

#: Other names of dtypes.
_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_MOST_SIZES = 2  # number of input sizes in a title


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


def source_and_entry(name: str) -> tuple[Source, ModelEntry]:
    """The source of a model, and its entry. Raises as `find`."""
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
    return source, dataclasses.replace(entries[bare], name=_shortest(source, bare))


def _maker_and_entry(name: str) -> tuple[Source, ModelEntry]:
    """The source that builds a model, and the model's entry. Raises as `find`."""
    source, entry = source_and_entry(name)
    return source.maker(entry), entry


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


def find(name: str) -> ModelEntry:
    """The entry of a model; its ``name`` is the name that variants have. Needs no torch. Raises
    `UnknownModel`, with the nearest names, if there is none; `UnsupportedModel`, with the reason,
    if its source refuses the model."""
    return source_and_entry(name)[1]


def known(name: str) -> str:
    """The name of a model of the catalog, or of a user's function given by its location. Raises as
    `find`.
    """
    return find(_registered(name)).name


# ---- variants


def usual_batch(name: str, default: int) -> int:
    """The batch of a user's own example inputs; ``default`` for all other models. Imports torch for
    a user's model.
    """
    maker, entry = _maker_and_entry(name)
    with contextlib.suppress(SettingsError):  # using the model raises this error again
        return maker.usual_batch(entry) or default
    return default


def variant(name: str, batch: int = 1, **fields: Any) -> Variant:
    """A variant of a model with the given fields, and the model's defaults for the others.

    Imports torch for a user's model: its dtype is by default that of most of its numbers.

    Args:
        fields: fields of a `Variant`; None means the default. ``text`` (a file) and ``tokenizer``
            (a folder with a `tokenizer.json`) give the input text; this process then stores its ids
            (`farm.models.texts.tokens_of_text`).

    Raises:
        UsageError: the model does not accept or use one of the fields; see
        `farm.models.texts.user_text.tokenize`. UnknownModel, UnsupportedModel: see `find`.
    """
    maker, entry = _maker_and_entry(_registered(name))
    given = _with_usual_dtype(maker, entry)
    given |= {key: value for key, value in fields.items() if value is not None}
    for key in ("dtype", "amp"):
        if given.get(key) in _DTYPES:
            given[key] = _DTYPES[given[key]]
    text = given.pop("text", None)
    tokenizer = given.pop("tokenizer", None)
    _check_text(text, tokenizer)
    _check_sizes(maker, entry, given)
    made = Variant(model=entry.name, batch=batch, **entry.completed(given))
    if text is None or tokenizer is None:
        return made
    tokens = maker.tokens_of(entry, made, Path(text), Path(tokenizer))
    return dataclasses.replace(made, text=hold_tokens(tokens))


def _with_usual_dtype(maker: Source, entry: ModelEntry) -> dict[str, Any]:
    """The dtype in which a model arrives, as a field of a variant; empty if it has none."""
    with contextlib.suppress(SettingsError):  # using the model raises this error again
        dtype = maker.usual_dtype(entry)
        return {"dtype": dtype} if dtype else {}
    return {}


def _check_text(text: Any, tokenizer: Any) -> None:
    """Raise `UsageError` if one of the two is given without the other."""
    if (text is None) == (tokenizer is None):
        return
    given, absent = ("--text", "--tokenizer") if tokenizer is None else ("--tokenizer", "--text")
    raise UsageError(
        f"{given} needs {absent}.", "Give both options, or neither to use the farm's own text."
    )


def _check_sizes(maker: Source, entry: ModelEntry, given: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a size of 0, and for an input size if the model has its own inputs."""
    for key in ("length", "cache", "layers"):
        if given.get(key) == 0:  # in a variant 0 means the default
            raise UsageError(
                f"--{key} is 0; it must be at least 1.", f"Omit --{key} to use the model's default."
            )
    if "input_size" in given and maker.example_inputs(entry) is not None:
        problem = (
            f"{entry.own_name} defines its own example inputs, and --input-size cannot change them."
        )
        raise UsageError(problem, "Omit --input-size. The option -b changes the batch.")


def differences(variant: Variant) -> list[str]:
    """Lines about what differs between a user's model and the measured one: its dtype, its mode or
    its class.
    """
    with contextlib.suppress(UsageError):  # using the model raises this error again
        maker, entry = _maker_and_entry(variant.model)
        return maker.differences(entry, variant)
    return []


def hint_about_inputs(variant: Variant) -> str:
    """A next step for a model that raises on an input of the farm; "" for a user's own example
    inputs.
    """
    maker, entry = _maker_and_entry(variant.model)
    return maker.hint_about_inputs(entry, variant)


# ---- modules and inputs


def build(
    model: Variant | str,
    *,
    device: str | torch.device = "meta",
    seed: int = 0,
    real_buffers: bool = False,
) -> nn.Module:
    """Builds the module of a variant; a model's name means its default variant.

    On meta the module has shapes and no memory; ``real_buffers`` keeps the values of tensors that
    are not made by ``torch.empty`` (caches, masks). On other devices it has random weights, equal
    for equal seeds. Raises `UnknownModel` or `UnsupportedModel` if the model is not in the catalog,
    or its package is not installed."""
    import torch

    from farm.models.building import EmptyOnMeta, memory_format_of
    from farm.models.tensor_kinds import placed

    chosen, maker, entry = _installed(model)
    device = torch.device(device)
    on_meta = device.type == "meta"
    with contextlib.ExitStack() as stack:
        if on_meta:
            stack.enter_context(EmptyOnMeta())
        else:
            cards = [device] if device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=cards))
            torch.manual_seed(seed)
        module = maker.make(entry, chosen, device)
    if not (real_buffers and on_meta):
        module = placed(module, device)
    if chosen.memory_format != Variant.memory_format and entry.task != "video":
        module = module.to(memory_format=memory_format_of(chosen))  # type: ignore[call-overload]
    trains = chosen.mode == "train"
    if maker.keeps_modes and trains and module.training:
        return module
    return module.train(trains)


def _installed(model: Variant | str) -> tuple[Variant, Source, ModelEntry]:
    """The variant, the source that makes it, and its entry; raises `UnsupportedModel` if the
    source's package is not installed.
    """
    chosen = variant(model) if isinstance(model, str) else model
    maker, entry = _maker_and_entry(chosen.model)
    if not is_installed(maker):
        problem = f"{chosen.model} is a model of {maker.package}, which is not installed."
        raise UnsupportedModel(problem, f"Install it: {install_line(maker)}")
    return chosen, maker, entry


def example_inputs(model: Variant | str, *, device: str | torch.device = "meta") -> tuple[Any, ...]:
    """Positional arguments of the module that `build` returns. Raises `UsageError` for a size that
    does not fit.

    For an image model, these are standard normal images of shape (batch, 3, size, size) or clips of
    shape (batch, 3, 16, size, size). If a user's model has its own inputs, the input size is
    ignored."""
    import torch

    chosen, maker, entry = _installed(model)
    entry.completed(chosen.to_json())
    return maker.inputs(entry, chosen, torch.device(device))


def meta_inputs(variant: Variant) -> tuple[Any, ...]:
    """As `example_inputs` on meta, but integer tensors (token ids, masks) have values: a model may
    read them.
    """
    import torch

    inputs = list(example_inputs(variant))
    integers = [
        place
        for place, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and not value.is_floating_point()
    ]
    if integers:
        real = example_inputs(variant, device="cpu")
        for place in integers:
            inputs[place] = real[place]
    return tuple(inputs)


def tensor_parallel_plan(variant: Variant, model: nn.Module) -> Mapping[str, str]:
    """Path of each module of a built model that tensor parallelism splits -> how. Raises
    `UnsupportedModel` if the model has no plan, or its heads cannot be divided among the cards."""
    maker, entry = _maker_and_entry(variant.model)
    return maker.tensor_parallel_plan(entry, model, variant.tensor_parallel)


# ---- titles


def title_of(variant: Variant) -> str:
    """The title of a variant. For a user's model with its own inputs it shows the input sizes:
    'bert 8x128 float32'.

    Imports torch for a user's model only.
    """
    maker, entry = _maker_and_entry(variant.model)
    inputs = maker.example_inputs(entry)
    return str(variant) if inputs is None else titled_by(variant, batched(inputs, variant.batch))


def titled_by(variant: Variant, inputs: Sequence[Any]) -> str:
    shapes = map(shape_of, inputs)
    sizes = list(dict.fromkeys("x".join(map(str, shape)) for shape in shapes if shape))
    if len(sizes) > _MOST_SIZES:
        sizes = [*sizes[:_MOST_SIZES], "…"]
    return variant.titled("+".join(sizes) or str(variant.batch))


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an input; () if it is no tensor, or a nested one, which has no single shape."""
    if getattr(value, "is_nested", False):
        return ()
    tensor = value.data if hasattr(value, "batch_sizes") else value  # a packed sequence
    return tuple(getattr(tensor, "shape", ()))
