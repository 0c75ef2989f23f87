"""The user's models that a folder with a config.json of transformers describes.

The farm makes such a model like the catalog's model of the same class, with the sizes of the
config.json (`farm.models.config_file` reads it as data)."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farm.errors import UnsupportedModel
from farm.models import config_file
from farm.models.configurations import (
    NAME,
    TABLE,
    entry_of,
    positions,
    specials_of,
    vocabulary_of,
)
from farm.models.entry import ModelEntry
from farm.settings import user_models

_SOURCE_POSITIONS = 1500  # of Whisper, if its configuration does not say
#: What a folder's model has from the catalog's model of its class.
_FROM_CATALOG = ("class", "kind", "tokenizer", "specials", "whole_layers")


def is_file(path: Path) -> bool:
    """True if a file is there; False for a name that no file can have."""
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def folders() -> dict[str, Path]:
    """The folders of the user's models, by name of the model."""
    targets = user_models.targets()
    return {name: Path(target) for name, target in targets.items() if ":" not in target}


def is_folder(name: str) -> bool:
    """True for a user's model with a config.json, False for one that a function builds."""
    return name in folders()


def entry(name: str) -> ModelEntry:
    """The entry of a user's model with a config.json. Raises `SettingsError` or `UnsupportedModel`
    if the file cannot be read, or the farm cannot make a model from it."""
    return entry_of(name, about(name), origin="user")


def text(name: str) -> str:
    """The text of a folder's config.json. Raises `SettingsError` if it cannot be read."""
    return config_file.read_text(folders()[name] / "config.json")


def about(name: str) -> dict[str, Any]:
    """The description of a folder's model: as `farm.models.configurations.TABLE`, and ``folder``.
    Raises as `entry`.
    """
    return _described(text(name), str(folders()[name]))


@functools.lru_cache
def _described(config_text: str, folder: str) -> dict[str, Any]:
    """The description of a model from its config.json: like the catalog's model of its class, with
    other sizes.
    """
    config = config_file.read(config_text, folder)
    config_file.refuse_loading(config, folder)
    like = _like_in_catalog(config_file.class_named(config, folder), folder)
    _check_sizes(like["kind"], config, folder)
    described = {key: like[key] for key in _FROM_CATALOG if key in like}
    described |= _lengths(config, like, folder)
    # The vocabulary may be smaller than that of the catalog's model.
    if max(specials_of(described).all, default=0) >= vocabulary_of(config, folder):
        described.pop("specials", None)
    described["config"] = config
    described["folder"] = folder
    return described


def _check_sizes(model_kind: str, config: Mapping[str, Any], folder: str) -> None:
    """Raise `SettingsError` if a size that the inputs of this kind of model need is absent or
    malformed.
    """
    if model_kind not in ("image", "sound", "frames") and not vocabulary_of(config, folder):
        raise config_file.wrong(folder, "vocab_size", "is missing")
    image = config if model_kind == "image" else config_file.inner(config, "vision_config", folder)
    if model_kind in ("image", "pair") and not config_file.whole_number(
        image, "image_size", folder
    ):
        raise config_file.wrong(folder, "image_size", "is missing")


def _like_in_catalog(name: str, folder: str) -> dict[str, Any]:
    """The catalog's model of a class. Raises `UnsupportedModel` if there is none."""
    for class_name in (name, re.sub(r"For\w+$", "Model", name)):
        for described in TABLE.values():
            if described["class"] == class_name:
                return described
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
        source_positions = config_file.whole_number(config, "max_source_positions", folder)
        return {"length": 2 * (source_positions or _SOURCE_POSITIONS)}
    lengths = {"length": like["length"]} if "length" in like else {}
    in_folder = positions(config, folder)
    in_catalog = positions(like["config"], NAME)
    if in_folder and in_catalog:  # some of the positions are reserved
        lengths["positions"] = in_folder - in_catalog + like.get("positions", in_catalog)
    elif like.get("positions"):
        lengths["positions"] = in_folder or like["positions"]
    return lengths


def differences(name: str) -> list[str]:
    """A line if the farm measures another class than the config.json of a folder names, or a part
    of it.
    """
    described = about(name)
    named = config_file.class_named(described["config"], described["folder"])
    measured = described["class"]
    if described["kind"] == "frames":
        measured = f"the encoder of {measured}"
    if named == measured:
        return []
    return [f"{name}: the config.json names {named}; the farm measures {measured}."]
