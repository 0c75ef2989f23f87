"""Models of transformers, made from their own configurations with the sizes of well-known
checkpoints.

``transformers.json`` lists the class, the configuration and the inputs of each name; nothing is
downloaded, and weights are random. The kind of a model decides its inputs:

    encoder, pair            tokens, read at once (for CLIP with an image)           phase encode
    decoder                  a prompt, or one token with a cache                     phases prefill,
    decode growing                  the same; transformers has no static cache for it       phases
    prefill, decode prompt, choices          a prompt; it has no cache of keys and values
    phase prefill both                     a text and as many tokens after it, or the text alone
    phases prefill, encode image, sound, frames     an image, a sound's values at 16 kHz, or its
    spectrum   no phase
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import FarmError, UnsupportedModel, UsageError, error_text
from farm.errors.safe_text import printable
from farm.models import config_file
from farm.models.entry import ModelEntry, costs_of
from farm.models.texts import Specials, token_ids, tokens_of_text, user_text
from farm.models.torchvision import imported_after_torchvision
from farm.settings import settings
from farm.types.fields import adapter

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.protocol import Variant
    from farm.types.tokens import Tokens

NAME = PACKAGE = "transformers"
EXTRA = "language"

_TABLE: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("transformers.json").read_text()
)
#: Kind of a model -> its task, its phases (the default first), and its usual length.
_KINDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("kinds.json").read_text())
_CHOICES = 2  # choices per sample, for a model with double heads
_POSITIONS = ("max_position_embeddings", "n_positions", "max_decoder_position_embeddings")
_SOURCE_POSITIONS = 1500  # of Whisper, if its configuration does not say
_MEL_BINS = 80
MOST_NAMED = 12  # ignored keys of a configuration that are named
#: Keys of a configuration with one entry per layer.
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "attention_window")
_DEPTH = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
)

REFUSED = {
    "transfo-xl": "Transformer-XL, which transformers 5 no longer has",
    "retribert": "RetriBERT, which transformers 5 no longer has",
}

_log = logging.getLogger(__name__)
_package = functools.partial(imported_after_torchvision, NAME)


@functools.cache
def entries() -> Mapping[str, ModelEntry]:
    return {name: _entry(name, **about) for name, about in _TABLE.items()}


def folders() -> dict[str, Path]:
    """The user's models that the setting ``models`` describes by a folder with a config.json, by
    name.
    """
    return {name: Path(target) for name, target in settings().models.items() if ":" not in target}


def entry_of_folder(name: str) -> ModelEntry:
    """The entry of a user's model with a config.json. Raises `SettingsError` or `UnsupportedModel`
    if the file cannot be read, or the farm cannot make a model from it."""
    return dataclasses.replace(
        _entry(name, **_of_config(config_text(name), str(folders()[name]))), origin="user"
    )


def config_text(name: str) -> str:
    """The text of a folder's config.json. Raises `SettingsError` if it cannot be read."""
    return config_file.read_text(folders()[name] / "config.json")


@functools.lru_cache
def _of_config(text: str, folder: str) -> dict[str, Any]:
    """The description of a model from its config.json: like the catalog's model of its class, with
    other sizes.
    """
    config = config_file.read(text, folder)
    config_file.refuse_loading(config, folder)
    like = _like_in_catalog(config_file.class_named(config, folder), folder)
    _check_sizes(like["kind"], config, folder)
    keys = ("class", "kind", "tokenizer", "specials", "whole_layers")
    about: dict[str, Any] = {key: like[key] for key in keys if key in like} | _lengths(
        config, like, folder
    )
    # The vocabulary may be smaller than that of the catalog's model.
    if max(_specials(about).all, default=0) >= _vocabulary(config, folder):
        about.pop("specials", None)
    return {**about, "config": config, "folder": folder}


def _check_sizes(kind: str, config: Mapping[str, Any], folder: str) -> None:
    """Raise `SettingsError` if a size that the inputs of this kind of model need is absent or
    malformed.
    """
    if kind not in ("image", "sound", "frames") and not _vocabulary(config, folder):
        raise config_file.wrong(folder, "vocab_size", "is missing")
    image = config if kind == "image" else config_file.inner(config, "vision_config", folder)
    if kind in ("image", "pair") and not config_file.whole_number(image, "image_size", folder):
        raise config_file.wrong(folder, "image_size", "is missing")


def _like_in_catalog(name: str, folder: str) -> dict[str, Any]:
    """The catalog's model of a class. Raises `UnsupportedModel` if there is none."""
    for class_name in (name, re.sub(r"For\w+$", "Model", name)):
        for about in _TABLE.values():
            if about["class"] == class_name:
                return about
    problem = (
        f"The config.json in '{folder}' names {name} in 'architectures', which no model of the "
        "catalog has."
    )
    raise UnsupportedModel(
        problem, "Write a function that builds the model: farm run my_models.py:net."
    )


def _lengths(config: Mapping[str, Any], like: Mapping[str, Any], folder: str) -> dict[str, int]:
    """The greatest length and the usual one of a folder's model, beside the catalog's model of its
    class.
    """
    if like["kind"] == "frames":  # two frames of a spectrum become one position
        positions = config_file.whole_number(config, "max_source_positions", folder)
        return {"length": 2 * (positions or _SOURCE_POSITIONS)}
    found = {"length": like["length"]} if "length" in like else {}
    own, of_catalog = _positions(config, folder), _positions(like["config"], NAME)
    if own and of_catalog:  # some of the positions are reserved
        found["positions"] = own - of_catalog + like.get("positions", of_catalog)
    elif like.get("positions"):
        found["positions"] = own or like["positions"]
    return found


def _positions(config: Mapping[str, Any], folder: str) -> int:
    """The number of positions of a model's text; 0 if the configuration does not say."""
    for part in (config, config_file.inner(config, "text_config", folder)):
        for key in _POSITIONS:
            number = config_file.whole_number(part, key, folder)
            if number:
                return number
    return 0


def differences(name: str) -> list[str]:
    """A line if the farm measures another class than the config.json of a folder names, or a part
    of it.
    """
    folder = str(folders()[name])
    text = config_text(name)
    about = _of_config(text, folder)
    named = config_file.class_named(config_file.read(text, folder), folder)
    measured = f"the encoder of {about['class']}" if about["kind"] == "frames" else about["class"]
    return (
        []
        if named == measured
        else [f"{name}: the config.json names {named}; the farm measures {measured}."]
    )


def _about(entry: ModelEntry) -> dict[str, Any]:
    if entry.origin == NAME:
        return _TABLE[entry.own_name]
    return _of_config(config_text(entry.own_name), str(folders()[entry.own_name]))


def _entry(
    name: str, kind: str, config: dict[str, Any], folder: str = NAME, **about: Any
) -> ModelEntry:
    of_kind, phases = _KINDS[kind], tuple(_KINDS[kind].get("phases", ()))
    longest = about.get("positions") or _positions(config, folder)
    usual = about.get("length") or of_kind.get("length", 512)
    image = config if kind == "image" else config_file.inner(config, "vision_config", folder)
    return ModelEntry(
        name=name,
        task=of_kind["task"],
        input_size=config_file.whole_number(image, "image_size", folder),
        fixed_size=True,
        origin=NAME,
        length=0 if kind == "image" else min(usual, longest) if longest else usual,
        shortest=_specials(about).around + 1,
        longest=longest,
        fixed_length=kind in ("image", "frames"),
        phases=phases,
        masked=bool(phases)
        and kind not in ("pair", "choices")
        and name not in ("fnet-base", "mamba-130m"),
        **costs_of(NAME).get(name, {}),
        depth=0 if about.get("whole_layers") else _depth(config, folder),
    )


def _depth(config: Mapping[str, Any], folder: str) -> int:
    """The number of layers; 0 if the configuration does not say."""
    for key in _DEPTH:
        if key in config:
            return config_file.whole_number(config, key, folder)
    return 0


def make(entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
    import torch

    from farm.models.building import Decoding, replaced

    made, about = _class_of(entry), _about(entry)
    if variant.mode == "train" and variant.phase == "encode":  # its training task
        made = getattr(_package(), f"{made.__name__.removesuffix('Model')}ForMaskedLM", made)
    unfilled = replaced(
        _package().PreTrainedModel, "initialize_weights", lambda model: None
    )  # on meta: it takes long
    with (
        _quietly(),
        _nothing_fetched(),
        unfilled if device.type == "meta" else torch.device(device),
    ):
        model = _built(made, about, variant, on_meta=device.type == "meta")
        if variant.phase == "decode":
            size, cards = (variant.batch, variant.cache), variant.tensor_parallel
            growing = about["kind"] == "growing"
            if growing:  # the mask for a static cache is always made
                model.forward = _masked_by_padding_alone(model.forward, padded=False)
            return Decoding(model, *size, entry.depth, cards, growing=growing)
    return _called_by_position(model, entry, variant)


def _called_by_position(model: Any, entry: ModelEntry, variant: Variant) -> nn.Module:
    """The module for the inputs of a variant that is not a decode pass."""
    import torch

    from farm.models.building import ByPosition

    kind = _about(entry)["kind"]
    if kind == "frames" or (kind == "both" and variant.phase == "encode"):
        model = model.get_encoder()
    model.forward = _masked_by_padding_alone(model.forward, variant.padded)
    return ByPosition(model, 0, tuple(_call(entry, variant, torch.device("meta"))))


def _built(made: Any, about: Mapping[str, Any], variant: Variant, *, on_meta: bool) -> Any:
    """The model of a class of transformers. Raises `UnsupportedModel` if its class refuses a user's
    configuration.
    """
    from farm.models.building import dtype_of

    folder = about.get("folder")
    config = about["config"] if folder is None else _accepted(made, about["config"], folder)
    if variant.layers:
        config = _cut(config, variant.layers)
    try:
        return made._from_config(made.config_class.from_dict(config), dtype=dtype_of(variant))
    except Exception as error:
        # Every model is built on meta first. On other devices an error can be a lack of memory.
        if folder is None or not on_meta or isinstance(error, FarmError):
            raise
        problem = (
            f"transformers cannot build a model from the config.json in '{folder}': "
            f"{_reason(error, config)}"
        )
        raise UnsupportedModel(problem, "Correct the config.json.") from error


def _reason(error: Exception, config: Mapping[str, Any]) -> str:
    """Why transformers refuses a configuration, in one line."""
    if isinstance(error, KeyError) and error.args:
        for key in config_file.keys_with(config, error.args[0]):
            return f"it does not know the value '{error.args[0]}' of '{key}'."
    first, *others = error_text(error).strip().splitlines() or [""]
    # The last line of an error of validation has the type of the cause, the key and the value.
    return f"{others[-1].strip() if others else f'{type(error).__name__}: {first}'}"[:400]


def _accepted(made: Any, config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The keys of a user's configuration that its class declares. The others are named once, in the
    log.
    """
    silent = (
        *_package().GenerationConfig().to_dict(),
        *_POSITIONS,
    )  # how to generate; what the farm reads itself
    accepted = config_file.accepted(config, made.config_class, folder, silent=silent)
    _note_ignored(accepted.ignored, folder)
    return accepted.config


@functools.lru_cache
def _note_ignored(keys: tuple[str, ...], folder: str) -> None:
    if keys:
        more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
        names = printable(", ".join(key[:60] for key in keys[:MOST_NAMED]))
        _log.warning(
            "The farm ignores these keys of the config.json in %s: %s%s.", folder, names, more
        )


def _cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A configuration for the first layers of its model, also in its lists with one entry per
    layer.
    """
    depths = {key: layers for key in _DEPTH if key in config}
    lists = {key: config[key][:layers] for key in _LAYER_LISTS if isinstance(config.get(key), list)}
    return {**config, **depths, **lists}


def _one_line(error: Exception) -> str:
    text = " ".join(error_text(error).split())
    return f"{type(error).__name__}: {text}"[:400]


def inputs(entry: ModelEntry, variant: Variant, device: torch.device) -> tuple[Any, ...]:
    return tuple(_call(entry, variant, device).values())


def _call(entry: ModelEntry, variant: Variant, device: torch.device) -> dict[str, Any]:
    from farm.models.building import dtype_of, images, random_normal

    about, dtype = _about(entry), dtype_of(variant)
    kind = about["kind"]
    if kind == "image":
        return {"pixel_values": images(variant, device)}
    if kind == "sound":
        return {"input_values": random_normal((variant.batch, variant.length), dtype, device)}
    if kind == "frames":
        bins = (
            config_file.whole_number(about["config"], "num_mel_bins", about.get("folder", NAME))
            or _MEL_BINS
        )
        return {
            "input_features": random_normal((variant.batch, bins, variant.length), dtype, device)
        }
    ids, mask = _texts(entry, variant, device)
    if kind == "choices":
        return {"input_ids": ids.view(variant.batch, _CHOICES, variant.length)}
    # Clone, because a view of a larger tensor has another layout.
    call: dict[str, Any] = {"input_ids": ids[: variant.batch].clone()}
    if variant.padded:
        call["attention_mask"] = mask[: variant.batch].clone()
    if len(ids) > variant.batch:
        call["decoder_input_ids"] = ids[variant.batch :].clone()
    if variant.phase == "decode":
        return call
    if kind == "pair":
        call["pixel_values"] = images(variant, device)
    if variant.phase == "prefill":
        accepted = inspect.signature(_class_of(entry).forward).parameters
        options = (
            {"use_cache": False}
            if variant.mode == "train"
            else {"use_cache": True, "logits_to_keep": 1}
        )
        call |= {key: value for key, value in options.items() if key in accepted}
    return call


def _specials(about: Mapping[str, Any]) -> Specials:
    """The special ids of a model: ids that are not text."""
    return adapter(Specials).validate_python(about.get("specials", {}))  # type: ignore[no-any-return]


def _vocabulary(config: Mapping[str, Any], folder: str = NAME) -> int:
    """The number of token ids; 0 for a model without text."""
    text_config = config_file.inner(config, "text_config", folder)
    number = config_file.whole_number(config, "vocab_size", folder)
    return number or config_file.whole_number(text_config, "vocab_size", folder)


def tokens_of(entry: ModelEntry, variant: Variant, text: Path, tokenizer: Path) -> Tokens:
    """The ids of a user's text for a variant. Raises as `farm.models.texts.user_text.tokenize`."""
    about, bare = (
        _about(entry),
        variant.phase == "decode",
    )  # in decode the input is one token of the text
    sizes = _vocabulary(about["config"]), _rows(entry, variant), variant.length
    return user_text.tokenize(
        text, tokenizer, *sizes, padded=variant.padded, specials=_specials(about), bare=bare
    )


def _rows(entry: ModelEntry, variant: Variant) -> int:
    """The number of rows of tokens; an encoder-decoder needs a second row per sample for its
    decoder.
    """
    kind = _about(entry)["kind"]
    each = (
        _CHOICES if kind == "choices" else 2 if kind == "both" and variant.phase != "encode" else 1
    )
    return each * variant.batch


def _texts(
    entry: ModelEntry, variant: Variant, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (0 for padding) of the rows of a text, both of shape (rows, length), int64."""
    import torch

    about = _about(entry)
    rows, vocabulary = _rows(entry, variant), _vocabulary(about["config"])
    if device.type == "meta":
        return (torch.empty((rows, variant.length), dtype=torch.int64, device=device),) * 2
    if variant.text:
        found = tokens_of_text(variant.text)
        if found.length != variant.length or found.largest >= vocabulary:
            raise UsageError(
                f"The stored token ids of the text {variant.text} do not fit {variant}: a row has "
                f"{found.length} tokens, and the largest id is {found.largest}.",
                "Give the text again, with --text and --tokenizer.",
            )
    else:
        specials = Specials() if variant.phase == "decode" else _specials(about)
        kind, padded = about["tokenizer"], variant.padded
        found = token_ids(kind, vocabulary, rows, variant.length, padded=padded, specials=specials)
    order = [row % found.batch for row in range(rows)]  # a larger batch starts a user's text again
    return torch.tensor(found.ids[order], device=device), torch.tensor(
        found.mask[order], device=device
    )


def _masked_by_padding_alone(forward: Callable[..., Any], padded: bool) -> Callable[..., Any]:
    """Wraps ``forward`` to use a mask only if there is padding, even while a CUDA graph is
    recorded.

    A model of transformers reads its mask to check whether it needs one, and in training its
    positions, to check whether a row contains several texts. While a graph is recorded it cannot
    read values: it then uses a mask and a slower attention than an eager pass. This function knows
    the values, so the model need not read them. Nor need it read the first and the last ids to warn
    about padding."""

    @functools.wraps(forward)
    def without_reading(*args: Any, **kwargs: Any) -> Any:
        import torch
        from transformers import masking_utils

        from farm.models.building import replaced

        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(torch.cuda, "is_current_stream_capturing", lambda: padded))
            base = _package().PreTrainedModel
            stack.enter_context(
                replaced(base, "warn_if_padding_and_no_attention_mask", lambda *_: None)
            )
            if hasattr(masking_utils, "find_packed_sequence_indices"):
                stack.enter_context(
                    replaced(masking_utils, "find_packed_sequence_indices", lambda _: None)
                )
            for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
                if not padded and (decides := getattr(masking_utils, name, None)):
                    without_mask = functools.partial(
                        _without_mask, decides
                    )  # the model must not create one either
                    stack.enter_context(replaced(masking_utils, name, without_mask))
            return forward(*args, **kwargs)

    return without_reading


def _without_mask(decides: Callable[..., bool], mask: Any, *args: Any, **kwargs: Any) -> bool:
    return decides(None, *args, **kwargs)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Hide warnings about configurations: nothing is generated with these models."""
    logging = _package().logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _nothing_fetched() -> Iterator[None]:
    """While active, transformers fetches no kernels from repositories, even if the package
    `kernels` is installed.
    """
    from transformers.integrations import hub_kernels

    from farm.models.building import replaced

    with replaced(hub_kernels, "_kernels_enabled", False):
        yield


def tensor_parallel_plan(entry: ModelEntry, model: Any, cards: int) -> dict[str, str]:
    """Path of each module of a built model that tensor parallelism splits -> the name of the way.
    Names of transformers are used here only: they change between releases. Raises as
    `farm.models.catalog.tensor_parallel_plan`."""
    own = model.model  # without the wrapper of `make`
    config = own.config.get_text_config(decoder=True)
    base = getattr(own.config, "base_model_tp_plan", None)
    if not base:
        raise UnsupportedModel(
            f"{entry.name} has no plan for tensor parallelism in transformers "
            f"{_package().__version__}.",
            "Choose another model, such as llama-3.1-8b.",
        )
    for kind in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, kind, None) or config.num_attention_heads) % cards:
            text = (
                f"{entry.name} has {heads} {kind.removeprefix('num_').replace('_', ' ')}, not a "
                f"multiple of {cards}."
            )
            raise UnsupportedModel(text, "Give another number of cards.")
    prefix = own.base_model_prefix
    patterns = {
        f"{prefix}.{path}" if own.base_model is not own else path: how for path, how in base.items()
    }
    patterns |= type(own)._tp_plan or {} if own.base_model is not own else {}
    regexes = {
        re.compile(re.escape(path).replace(r"\*", r"\d+")): how for path, how in patterns.items()
    }
    return {
        f"model.{path}": how
        for path, _ in own.named_modules()
        for pattern, how in regexes.items()
        if pattern.fullmatch(path)
    }


def _class_of(entry: ModelEntry) -> Any:
    name = _about(entry)["class"]
    if (found := getattr(_package(), name, None)) is None:
        problem = (
            f"{entry.name} needs the class {name}, which transformers {_package().__version__} "
            "does not have."
        )
        raise UnsupportedModel(problem, "Install another version of transformers.")
    return found
