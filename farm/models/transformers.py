"""The source transformers: builds models from their configurations (`farm.models.configurations`).

Nothing is downloaded, and weights are random. Names of transformers that change between releases
are used in this file only."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.errors import FarmError, UnsupportedModel, UsageError, error_text
from farm.errors.safe_text import printable
from farm.models import config_file, config_folder, configurations, quantization
from farm.models.configurations import NAME, TABLE, specials_of, vocabulary_of
from farm.models.entry import ModelEntry
from farm.models.source import Source
from farm.models.texts import Specials, token_ids, user_text
from farm.models.torchvision import imported_after_torchvision
from farm.settings import user_models

if TYPE_CHECKING:
    import torch
    from torch import nn

    from farm.types.tokens import Tokens
    from farm.types.variant import Variant

_CHOICES = 2  # choices per sample, for a model with double heads
_MEL_BINS = 80
MOST_NAMED = 12  # ignored keys of a configuration that are named

_REFUSED = {
    "transfo-xl": "Transformer-XL, which transformers 5 no longer has",
    "retribert": "RetriBERT, which transformers 5 no longer has",
}

_log = logging.getLogger(__name__)


def _package() -> Any:
    """The package. It imports torchao, if that is installed."""
    _torchao_without_messages()
    return imported_after_torchvision(NAME)


@functools.cache
def _torchao_without_messages() -> None:
    """Import torchao before transformers does, if it is installed and can be imported."""
    if quantization.is_installed():
        with contextlib.suppress(ImportError):
            quantization.import_quietly()


class Transformers(Source):
    """The models of `farm.models.configurations`. It also makes the user's models that a folder
    describes.
    """

    name = package = NAME
    extra = "language"
    refused = _REFUSED

    def entries(self) -> Mapping[str, ModelEntry]:
        return _entries()

    def make(self, entry: ModelEntry, variant: Variant, device: torch.device) -> nn.Module:
        import torch

        from farm.models.building import Decoding
        from farm.types.replacement import replaced

        architecture = _about(entry)
        made = _class_of(entry)
        if variant.mode == "train" and variant.phase == "encode":  # its training task
            made = getattr(_package(), f"{made.__name__.removesuffix('Model')}ForMaskedLM", made)
        on_meta = device.type == "meta"
        # On meta, weights are not filled: it takes long.
        unfilled = replaced(_package().PreTrainedModel, "initialize_weights", lambda model: None)
        placed = unfilled if on_meta else torch.device(device)
        with _quietly(), _nothing_fetched(), placed:
            model = _built(made, architecture, variant, on_meta=on_meta)
            if variant.phase == "decode":
                growing = architecture["kind"] == "growing"
                if growing:  # the mask for a static cache is always made
                    model.forward = _masked_by_padding_alone(model.forward, padded=False)
                return Decoding(
                    model,
                    variant.batch,
                    variant.cache,
                    entry.depth,
                    variant.tensor_parallel,
                    growing=growing,
                )
        return _called_by_position(model, entry, variant)

    def inputs(self, entry: ModelEntry, variant: Variant, device: torch.device) -> tuple[Any, ...]:
        return tuple(_call(entry, variant, device).values())

    def differences(self, entry: ModelEntry, variant: Variant) -> list[str]:
        if entry.origin == NAME:
            return []
        return config_folder.differences(entry.own_name)

    def tokens_of(self, entry: ModelEntry, variant: Variant, text: Path, tokenizer: Path) -> Tokens:
        if not variant.phase:
            return super().tokens_of(entry, variant, text, tokenizer)
        architecture = _about(entry)
        return user_text.tokenize(
            text,
            tokenizer,
            vocabulary_of(architecture["config"]),
            _rows(entry, variant),
            variant.length,
            padded=variant.padded,
            specials=specials_of(architecture),
            bare=variant.phase == "decode",  # in decode the input is one token of the text
        )

    def tensor_parallel_plan(self, entry: ModelEntry, model: Any, cards: int) -> dict[str, str]:
        module = model.model  # without the wrapper of `make`
        if not getattr(module.config, "base_model_tp_plan", None):
            raise UnsupportedModel(
                f"{entry.name} has no plan for tensor parallelism in transformers "
                f"{_package().__version__}.",
                "Choose another model, such as llama-3.1-8b.",
            )
        _check_heads(entry, module.config.get_text_config(decoder=True), cards)
        plan = {}
        patterns = _parallel_patterns(module)
        for path, _ in module.named_modules():
            for pattern, way in patterns:
                if pattern.fullmatch(path):
                    plan[f"model.{path}"] = way
        return plan


@functools.cache
def _entries() -> Mapping[str, ModelEntry]:
    return {
        name: configurations.entry_of(name, architecture) for name, architecture in TABLE.items()
    }


def _about(entry: ModelEntry) -> dict[str, Any]:
    """The description of a model: a value of `TABLE`, or that of the user's folder."""
    if entry.origin == NAME:
        return TABLE[entry.own_name]
    return config_folder.about(entry.own_name)


def _class_of(entry: ModelEntry) -> Any:
    name = _about(entry)["class"]
    made = getattr(_package(), name, None)
    if made is None:
        problem = (
            f"{entry.name} needs the class {name}, which transformers {_package().__version__} "
            "does not have."
        )
        raise UnsupportedModel(problem, "Install another version of transformers.")
    return made


# ---- build a model


def _called_by_position(model: Any, entry: ModelEntry, variant: Variant) -> nn.Module:
    """The module for the inputs of a variant that is not a decode pass."""
    import torch

    from farm.models.building import ByPosition

    model_kind = _about(entry)["kind"]
    if model_kind == "frames" or (model_kind == "both" and variant.phase == "encode"):
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
        config = configurations.cut(config, variant.layers)
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
    lines = error_text(error).strip().splitlines() or [""]
    if len(lines) == 1:
        return f"{type(error).__name__}: {lines[0]}"[:400]
    # The last line of an error of validation has the type of the cause, the key and the value.
    return lines[-1].strip()[:400]


def _accepted(made: Any, config: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The keys of a user's configuration that its class declares. The others are named once, in the
    log.
    """
    how_to_generate = _package().GenerationConfig().to_dict()
    silent = (*how_to_generate, *configurations.SIZE_KEYS)
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


# ---- inputs


def _call(entry: ModelEntry, variant: Variant, device: torch.device) -> dict[str, Any]:
    from farm.models.building import dtype_of, images, random_normal

    architecture = _about(entry)
    model_kind = architecture["kind"]
    dtype = dtype_of(variant)
    if model_kind == "image":
        return {"pixel_values": images(variant, device)}
    if model_kind == "sound":
        return {"input_values": random_normal((variant.batch, variant.length), dtype, device)}
    if model_kind == "frames":
        folder = architecture.get("folder", NAME)
        bins = config_file.whole_number(architecture["config"], "num_mel_bins", folder) or _MEL_BINS
        shape = (variant.batch, bins, variant.length)
        return {"input_features": random_normal(shape, dtype, device)}
    ids, mask = _texts(entry, variant, device)
    if model_kind == "choices":
        return {"input_ids": ids.view(variant.batch, _CHOICES, variant.length)}
    # Clone, because a view of a larger tensor has another layout.
    call: dict[str, Any] = {"input_ids": ids[: variant.batch].clone()}
    if variant.padded:
        call["attention_mask"] = mask[: variant.batch].clone()
    if len(ids) > variant.batch:
        call["decoder_input_ids"] = ids[variant.batch :].clone()
    if variant.phase == "decode":
        return call
    if model_kind == "pair":
        call["pixel_values"] = images(variant, device)
    if variant.phase == "prefill":
        call |= _options_of_prefill(entry, variant)
    return call


def _options_of_prefill(entry: ModelEntry, variant: Variant) -> dict[str, Any]:
    """The options of a model's forward pass that it accepts: fill the cache, and give the logits of
    the last token only; in training neither.
    """
    options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    if variant.mode == "train":
        options = {"use_cache": False}
    accepted = inspect.signature(_class_of(entry).forward).parameters
    return {key: value for key, value in options.items() if key in accepted}


def _rows(entry: ModelEntry, variant: Variant) -> int:
    """The number of rows of tokens; an encoder-decoder needs a second row per sample for its
    decoder.
    """
    model_kind = _about(entry)["kind"]
    if model_kind == "choices":
        return _CHOICES * variant.batch
    if model_kind == "both" and variant.phase != "encode":
        return 2 * variant.batch
    return variant.batch


def _texts(
    entry: ModelEntry, variant: Variant, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask (0 for padding) of the rows of a text, both of shape (rows, length), int64."""
    import torch

    architecture = _about(entry)
    rows = _rows(entry, variant)
    vocabulary = vocabulary_of(architecture["config"])
    if device.type == "meta":
        empty = torch.empty((rows, variant.length), dtype=torch.int64, device=device)
        return empty, empty
    if variant.text:
        tokens: Tokens = user_models.text(variant.text)
        if tokens.length != variant.length or tokens.largest >= vocabulary:
            raise UsageError(
                f"The stored token ids of the text {variant.text} do not fit {variant}: a row has "
                f"{tokens.length} tokens, and the largest id is {tokens.largest}.",
                "Give the text again, with --text and --tokenizer.",
            )
    else:
        tokens = token_ids(
            architecture["tokenizer"],
            vocabulary,
            rows,
            variant.length,
            padded=variant.padded,
            specials=Specials() if variant.phase == "decode" else specials_of(architecture),
        )
    order = [row % tokens.batch for row in range(rows)]  # a larger batch starts the text again
    ids = torch.tensor(tokens.ids[order], device=device)
    return ids, torch.tensor(tokens.mask[order], device=device)


# ---- what is changed in transformers while a model is built or runs


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

        from farm.types.replacement import replaced

        base = _package().PreTrainedModel
        with contextlib.ExitStack() as stack:

            def replace(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(replaced(owner, name, value))

            replace(torch.cuda, "is_current_stream_capturing", lambda: padded)
            replace(base, "warn_if_padding_and_no_attention_mask", lambda *_: None)
            if hasattr(masking_utils, "find_packed_sequence_indices"):
                replace(masking_utils, "find_packed_sequence_indices", lambda _: None)
            for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa"):
                decides = getattr(masking_utils, name, None)
                if not padded and decides:  # the model must not create a mask either
                    replace(masking_utils, name, functools.partial(_without_mask, decides))
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

    from farm.types.replacement import replaced

    with replaced(hub_kernels, "_kernels_enabled", False):
        yield


# ---- tensor parallelism


def _check_heads(entry: ModelEntry, config: Any, cards: int) -> None:
    """Raise `UnsupportedModel` if the heads of a model cannot be divided among the cards."""
    query_heads = config.num_attention_heads
    heads_by_kind = {
        "attention heads": query_heads,
        "key value heads": getattr(config, "num_key_value_heads", None) or query_heads,
    }
    for kind, heads in heads_by_kind.items():
        if heads % cards:
            raise UnsupportedModel(
                f"{entry.name} has {heads} {kind}, not a multiple of {cards}.",
                "Give another number of cards.",
            )


def _parallel_patterns(module: Any) -> list[tuple[re.Pattern[str], str]]:
    """Patterns of the paths of a model's modules that are split, and the name of the way."""
    plan = dict(module.config.base_model_tp_plan)
    if module.base_model is not module:
        plan = {f"{module.base_model_prefix}.{path}": way for path, way in plan.items()}
        plan |= type(module)._tp_plan or {}
    return [(re.compile(re.escape(path).replace(r"\*", r"\d+")), way) for path, way in plan.items()]
