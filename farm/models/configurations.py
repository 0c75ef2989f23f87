"""Models of transformers as data: their configurations, and what follows from them for the catalog.

``transformers.json`` lists the class, the configuration and the inputs of each name, with the sizes
of well-known checkpoints. The kind of a model (``kinds.json``) decides its inputs:

    encoder, pair            tokens, read at once (for CLIP with an image)           phase encode
    decoder                  a prompt, or one token with a cache                     phases prefill,
                                                                                     decode
    growing                  the same; transformers has no static cache for it       phases prefill,
                                                                                     decode
    prompt, choices          a prompt; it has no cache of keys and values            phase prefill
    both                     a text and as many tokens after it, or the text alone   phases prefill,
                                                                                     encode
    image, sound, frames     an image, a sound's values at 16 kHz, or its spectrum   no phase"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.models import config_file
from farm.models.entry import ModelEntry, costs_of
from farm.models.texts import Specials
from farm.types.fields import adapter

NAME = "transformers"

#: Name -> class, kind, configuration and further facts of a model of the catalog.
TABLE: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("transformers.json").read_text()
)
#: Kind of a model -> its task, its phases (the default first), and its usual length.
KINDS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("kinds.json").read_text())

_POSITIONS = ("max_position_embeddings", "n_positions", "max_decoder_position_embeddings")
_DEPTH = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
)
#: Keys of a configuration with one entry per layer.
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "attention_window")
#: Keys with sizes that the farm reads itself.
SIZE_KEYS = _POSITIONS

_USUAL_LENGTH = 512
#: Models and kinds that take no mask for padding.
_UNMASKED = ("fnet-base", "mamba-130m")
_UNMASKED_KINDS = ("pair", "choices")


def entry_of(name: str, about: Mapping[str, Any], origin: str = NAME) -> ModelEntry:
    """The entry of a model from its description, a value of `TABLE`."""
    model_kind = about["kind"]
    config = about["config"]
    folder = about.get("folder", NAME)
    facts = KINDS[model_kind]
    phases = tuple(facts.get("phases", ()))
    longest = about.get("positions") or positions(config, folder)
    image = config if model_kind == "image" else config_file.inner(config, "vision_config", folder)
    costs = costs_of(NAME).get(name, {})
    return ModelEntry(
        name=name,
        task=facts["task"],
        input_size=config_file.whole_number(image, "image_size", folder),
        fixed_size=True,
        origin=origin,
        parameters=costs.get("parameters"),
        flops=costs.get("flops"),
        length=_usual_length(about, longest),
        shortest=specials_of(about).around + 1,
        longest=longest,
        fixed_length=model_kind in ("image", "frames"),
        phases=phases,
        masked=bool(phases) and model_kind not in _UNMASKED_KINDS and name not in _UNMASKED,
        depth=0 if about.get("whole_layers") else _depth(config, folder),
    )


def _usual_length(about: Mapping[str, Any], longest: int) -> int:
    if about["kind"] == "image":
        return 0
    usual = about.get("length") or KINDS[about["kind"]].get("length", _USUAL_LENGTH)
    return min(usual, longest) if longest else usual


def positions(config: Mapping[str, Any], folder: str) -> int:
    """The number of positions of a model's text; 0 if the configuration does not say."""
    for part in (config, config_file.inner(config, "text_config", folder)):
        for key in _POSITIONS:
            number = config_file.whole_number(part, key, folder)
            if number:
                return number
    return 0


def _depth(config: Mapping[str, Any], folder: str) -> int:
    """The number of layers; 0 if the configuration does not say."""
    for key in _DEPTH:
        if key in config:
            return config_file.whole_number(config, key, folder)
    return 0


def cut(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """A configuration for the first layers of its model, also in its lists with one entry per
    layer.
    """
    shorter = dict(config)
    for key in _DEPTH:
        if key in config:
            shorter[key] = layers
    for key in _LAYER_LISTS:
        if isinstance(config.get(key), list):
            shorter[key] = config[key][:layers]
    return shorter


def specials_of(about: Mapping[str, Any]) -> Specials:
    """The special ids of a model: ids that are not text."""
    specials: Specials = adapter(Specials).validate_python(about.get("specials", {}))
    return specials


def vocabulary_of(config: Mapping[str, Any], folder: str = NAME) -> int:
    """The number of token ids; 0 for a model without text."""
    text_config = config_file.inner(config, "text_config", folder)
    number = config_file.whole_number(config, "vocab_size", folder)
    return number or config_file.whole_number(text_config, "vocab_size", folder)
