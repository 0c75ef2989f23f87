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
from typing import TYPE_CHECKING, Any, cast

from farm.errors import SettingsError, UnknownModel, UnsupportedModel, UsageError
from farm.models import own, timm, torchvision, transformers
from farm.models.entry import ModelEntry, Source, install_line, is_installed
from farm.models.texts import hold_tokens
from farm.types.protocol import Variant

if TYPE_CHECKING:
    import torch
    from torch import nn

#: A name without a source means their model first; a name of the other sources must be unambiguous.
_PREFERRED = cast(tuple[Source, ...], (torchvision, own))
SOURCES = (*_PREFERRED, *cast(tuple[Source, ...], (transformers, timm)))

#: Other names of dtypes.
_DTYPES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_MOST_SIZES = 2  # number of input sizes in a title


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


def _found(name: str) -> tuple[Source, ModelEntry]:
    """The source that makes a model, and its entry; see `find`."""
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
    of_folder = (
        source is own and bare in transformers.folders()
    )  # the folder has a config.json of transformers
    return cast(Source, transformers) if of_folder else source, named


def find(name: str) -> ModelEntry:
    """The entry of a model; its ``name`` is the name that variants have. Needs no torch. Raises
    `UnknownModel`, with the nearest names, if there is none; `UnsupportedModel`, with the reason,
    if its source refuses the model."""
    return _found(name)[1]


def usual_batch(name: str, default: int) -> int:
    """The batch of a user's own example inputs; ``default`` for all other models. Imports torch for
    a user's model.
    """
    entry = find(name)
    if entry.origin == own.NAME:
        with contextlib.suppress(SettingsError):  # using the model raises this error again
            return own.own_batch(entry.own_name) or default
    return default


def known(name: str) -> str:
    """The name of a model of the catalog, or of a user's function given by its location. Raises as
    `find`.
    """
    return find(own.register(name)).name


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
    entry = find(own.register(name))
    given = {key: value for key, value in fields.items() if value is not None}
    given = _own_dtype(entry) | given
    given |= {key: _DTYPES[given[key]] for key in ("dtype", "amp") if given.get(key) in _DTYPES}
    text, tokenizer = given.pop("text", None), given.pop("tokenizer", None)
    if (text is None) != (tokenizer is None):
        there, absent = (
            ("--text", "--tokenizer") if tokenizer is None else ("--tokenizer", "--text")
        )
        raise UsageError(
            f"{there} needs {absent}.", "Give both options, or neither to use the farm's own text."
        )
    for key in ("length", "cache", "layers"):
        if given.get(key) == 0:  # in a variant 0 means the default
            raise UsageError(
                f"--{key} is 0; it must be at least 1.", f"Omit --{key} to use the model's default."
            )
    if (
        entry.origin == own.NAME
        and "input_size" in given
        and own.given_inputs(entry.own_name) is not None
    ):
        problem = (
            f"{entry.own_name} defines its own example inputs, and --input-size cannot change them."
        )
        raise UsageError(problem, "Omit --input-size. The option -b changes the batch.")
    made = Variant(model=entry.name, batch=batch, **entry.completed(given))
    if text is None or tokenizer is None:
        return made
    if not made.phase:
        raise UsageError(
            f"{entry.name} takes no tokens and no text.", "Omit --text and --tokenizer."
        )
    return dataclasses.replace(
        made, text=hold_tokens(transformers.tokens_of(entry, made, Path(text), Path(tokenizer)))
    )


def _own_dtype(entry: ModelEntry) -> dict[str, Any]:
    """The dtype of a user's model as its function returned it; empty if it has no decimals, and for
    other models.
    """
    if entry.origin == own.NAME and own.is_function(entry.own_name):
        with contextlib.suppress(SettingsError):  # using the model raises this error again
            dtype = own.built(entry.own_name).dtype
            return {"dtype": dtype} if dtype else {}
    return {}


def differences(variant: Variant) -> list[str]:
    """Lines about what differs between a user's model and the measured one: its dtype, its mode or
    its class.
    """
    with contextlib.suppress(UsageError):  # using the model raises this error again
        entry = find(variant.model)
        if entry.origin == own.NAME and own.is_function(entry.own_name):
            return own.differences(entry.own_name, variant)
        if entry.origin == own.NAME:
            return transformers.differences(entry.own_name)
    return []


def hint_about_inputs(variant: Variant) -> str:
    """A next step for a model that raises on an input of the farm; "" for a user's own example
    inputs.
    """
    entry = find(variant.model)
    if entry.origin == own.NAME and own.is_function(entry.own_name):
        if own.built(entry.own_name).dtype not in ("", variant.dtype):
            return " Or omit --dtype, to measure it in its own dtype."
        if own.given_inputs(entry.own_name) is not None:
            return ""
        return (
            " The input is an image; return a pair of the model and its example inputs for "
            "another one."
        )
    if variant.length and not entry.fixed_length:
        return (
            f" The input is the farm's own, with a length of {variant.length}; --length gives "
            "another one."
        )
    return ""


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

    chosen, source, entry = _installed(model)
    device = torch.device(device)
    on_meta = device.type == "meta"
    with contextlib.ExitStack() as stack:
        if on_meta:
            stack.enter_context(EmptyOnMeta())
        else:
            stack.enter_context(
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
            )
            torch.manual_seed(seed)
        module = source.make(entry, chosen, device)
    if not (real_buffers and on_meta):
        module = placed(module, device)
    if chosen.memory_format != Variant.memory_format and entry.task != "video":
        module = module.to(memory_format=memory_format_of(chosen))  # type: ignore[call-overload]
    if source is own and chosen.mode == "train" and module.training:
        return module  # modules that the user has frozen stay in eval mode
    return module.train(chosen.mode == "train")


def _installed(model: Variant | str) -> tuple[Variant, Source, ModelEntry]:
    """The variant, its source and entry; raises `UnsupportedModel` if the source's package is not
    installed.
    """
    chosen = variant(model) if isinstance(model, str) else model
    source, entry = _found(chosen.model)
    if not is_installed(source):
        problem = f"{chosen.model} is a model of {source.PACKAGE}, which is not installed."
        raise UnsupportedModel(problem, f"Install it: {install_line(source)}")
    return chosen, source, entry


def example_inputs(model: Variant | str, *, device: str | torch.device = "meta") -> tuple[Any, ...]:
    """Positional arguments of the module that `build` returns. Raises `UsageError` for a size that
    does not fit.

    For an image model, these are standard normal images of shape (batch, 3, size, size) or clips of
    shape (batch, 3, 16, size, size). If a user's model has its own inputs, the input size is
    ignored."""
    import torch

    chosen, source, entry = _installed(model)
    entry.completed(chosen.to_json())
    return source.inputs(entry, chosen, torch.device(device))


def meta_inputs(variant: Variant) -> tuple[Any, ...]:
    """As `example_inputs` on meta, but integer tensors (token ids, masks) have values: a model may
    read them.
    """
    import torch

    found = example_inputs(variant)
    integer = [isinstance(value, torch.Tensor) and not value.is_floating_point() for value in found]
    real = example_inputs(variant, device="cpu") if any(integer) else found
    return tuple(
        value if use else empty for use, value, empty in zip(integer, real, found, strict=True)
    )


def tensor_parallel_plan(variant: Variant, model: nn.Module) -> Mapping[str, str]:
    """Path of each module of a built model that tensor parallelism splits -> how. Raises
    `UnsupportedModel` if the model has no plan, or its heads cannot be divided among the cards."""
    source, entry = _found(variant.model)
    if source is not transformers:
        raise UnsupportedModel(
            f"{variant.model} has no plan for tensor parallelism.",
            "Choose a language model of transformers. A model of your own that is distributed "
            "needs only --cards.",
        )
    return transformers.tensor_parallel_plan(entry, model, variant.tensor_parallel)


def title_of(variant: Variant) -> str:
    """The title of a variant. For a user's model with its own inputs it shows the input sizes:
    'bert 8x128 float32'.

    Imports torch for a user's model only.
    """
    entry = find(variant.model)
    given = own.given_inputs(entry.own_name) if entry.origin == own.NAME else None
    return str(variant) if given is None else titled_by(variant, own.batched(given, variant.batch))


def titled_by(variant: Variant, inputs: Sequence[Any]) -> str:
    shapes = map(shape_of, inputs)
    sizes = ["x".join(map(str, shape)) for shape in shapes if shape]
    shown = list(dict.fromkeys(sizes))
    more = ["…"] if len(shown) > _MOST_SIZES else []
    return variant.titled("+".join(shown[:_MOST_SIZES] + more) or str(variant.batch))


def shape_of(value: Any) -> tuple[int, ...]:
    """The shape of an input; () if it is no tensor, or a nested one, which has no single shape."""
    if getattr(value, "is_nested", False):
        return ()
    tensor = value.data if hasattr(value, "batch_sizes") else value  # a packed sequence
    return tuple(getattr(tensor, "shape", ()))
