"""Reads a config.json of transformers as data: a bounded file, known keys and bounded values.

`read` needs no other package. `accepted` selects the keys that a configuration class of
transformers knows. Keys that make transformers load code or other weights are refused, wherever
they are. All other keys are ignored."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from farm.errors import SettingsError, UnsupportedModel

MOST_BYTES = 4 * 2**20  # a configuration with the names of 22,000 classes has 2 MB
MOST_ENTRIES = 4096  # of a list or an object
MOST_DEPTH = 8  # of lists and objects inside each other
MOST_CHARACTERS = 1024  # of a text
MOST_NUMBER = 1e12  # the magnitude of a number with a fraction

_BY_FUNCTION = "Write a function that builds the model: farm run my_models.py:net."
_CORRECT = "Correct the config.json."

#: Key -> what it would make transformers load.
_LOADING = {
    "auto_map": "code from its folder",
    "custom_pipelines": "code from its folder",
    "quantization_config": "quantized weights",
    "compression_config": "quantized weights",
}
#: Keys that choose a kernel, and the values that are part of transformers. A value with a slash is
#: the name of a repository, from which transformers would fetch code.
_ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal")
_ATTENTIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2")
_EXPERTS = ("experts_implementation", "_experts_implementation", "_experts_implementation_internal")
_EXPERT_KINDS = ("eager", "batched_mm", "grouped_mm")
_CHOICES = {**dict.fromkeys(_ATTENTION, _ATTENTIONS), **dict.fromkeys(_EXPERTS, _EXPERT_KINDS)}

#: Keys that classes of transformers read without declaring them: older names, and rare variations.
_UNDECLARED_TEXT = """
    attention_head_size conv_act conv_groups conv_kernel_size embedding_size
    global_attn_every_n_layers global_rope_theta head_dim local_rope_theta n_embed norm_rel_ebd
    out_features out_indices output_attentions partial_rotary_factor pooler_hidden_size
    position_buckets rope_local_base_freq rope_scaling rope_theta rotary_emb_base rotary_pct
    segmentation_indices share_att_key sliding_window sliding_window_pattern summary_last_dropout
    talking_head tie_word_embeddings"""
UNDECLARED = frozenset(_UNDECLARED_TEXT.split())
#: Keys that describe the weights, the labels or the origin, and not what the model computes.
_SILENT_TEXT = """
    architectures dtype finetuning_task gradient_checkpointing id2label label2id model_type
    name_or_path num_labels problem_type task_specific_params tokenizer_class torch_dtype
    transformers_version"""
_SILENT = frozenset(_SILENT_TEXT.split())

#: Pattern of a key -> the least and the most whole number. The first pattern that matches decides.
_BOUNDS: tuple[tuple[re.Pattern[str], int, int], ...] = (
    (re.compile(r".*(theta|_base|_freq|factor|scaling|multiplier).*"), 0, 10**12),
    (
        re.compile(
            r".*_(id|ids|index|indices|tokens)|clamp_len|max_relative_positions|position_buckets"
        ),
        -1000,
        2**24,
    ),
    (re.compile(r"(n|num)(_hidden|_encoder|_decoder)?_layers?|(encoder|decoder)_layers"), 1, 1000),
    (re.compile(r"(.*_)?(attention_|n_|num_)heads?|num_(kv|key_value)_heads"), 1, 1024),
    (re.compile(r"(decoder_)?vocab_size"), 1, 2**24),
    (re.compile(r".*_vocab_size"), 0, 2**24),
    (re.compile(r"n_ctx|n_positions|(.*_)?positions?(_.*)?|(.*_)?window(_.*)?"), 0, 2**22),
    (
        re.compile(r"hidden_size|d_model|n_embd|emb_dim|dim|head_dim|d_kv|patch_size|image_size"),
        1,
        2**20,
    ),
    (re.compile(r"n_inner|n_embed"), 1, 2**20),
    (re.compile(r"(n|num|inner)_.*|.*_(layers|groups|types|repeats|sizes|scales)"), 0, 1024),
)
_OTHER_BOUNDS = (0, 2**20)


@dataclass(frozen=True)
class Accepted:
    """The keys of a config.json that the farm uses, and the names of those that it ignores."""

    config: dict[str, Any]
    ignored: tuple[str, ...]


def read(text: str, folder: str) -> dict[str, Any]:
    """The object of a config.json. Raises `SettingsError` if it is none."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it has the value {constant}")

    try:
        config = json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        problem = f"The config.json in '{folder}' has lists or objects that are nested too deeply."
        raise SettingsError(problem, f"Nest at most {MOST_DEPTH}.") from error
    except ValueError as error:
        raise SettingsError(
            f"The config.json in '{folder}' is no JSON object: {error}", _CORRECT
        ) from error
    if not isinstance(config, dict):
        raise SettingsError(f"The config.json in '{folder}' is no JSON object.", _CORRECT)
    return config


def read_text(path: Path) -> str:
    """The text of a config.json. Raises `SettingsError` if it cannot be read, or is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise SettingsError(
                f"'{path}' has more than {MOST_BYTES:,} bytes.", "Name a folder with a config.json."
            )
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(
            f"'{path}' cannot be read: {error}", "Name a folder with a config.json."
        ) from error


def class_named(config: Mapping[str, Any], folder: str) -> str:
    """The first name in ``architectures``."""
    names = config.get("architectures") or ["no class"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise wrong(folder, "architectures", "must be a list of names of classes")
    return names[0][:MOST_CHARACTERS]


def whole_number(config: Mapping[str, Any], key: str, folder: str) -> int:
    """The value of a key that must be a whole number, within its bounds; 0 if it is absent or
    null.
    """
    value = config.get(key)
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(folder, key, f"must be a whole number, not {_shown(value)}")
    _check(value, key, key, folder)
    return value


def inner(config: Mapping[str, Any], key: str, folder: str) -> Mapping[str, Any]:
    """The configuration of a part of the model; empty if it is absent or null."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong(folder, key, f"must be an object, not {_shown(value)}")
    return value


def refuse_loading(config: Mapping[str, Any], folder: str) -> None:
    """Raise `UnsupportedModel` if a key would make transformers load code or other weights."""
    for key, loaded in _LOADING.items():
        if config.get(key) is not None:
            problem = (
                f"The model in '{folder}' needs {loaded} ({key}), which the farm does not use."
            )
            raise UnsupportedModel(problem, _BY_FUNCTION)
    for key, choices in _CHOICES.items():
        if (value := config.get(key)) is not None:
            _check_choice(key, value, choices, folder)


def _check_choice(key: str, value: Any, choices: tuple[str, ...], folder: str) -> None:
    if value not in choices:
        problem = (
            f"'{key}' in the config.json in '{folder}' is {_shown(value)}. This is no part of "
            "transformers."
        )
        raise UnsupportedModel(problem, f"Choose one of {', '.join(choices)}, or remove the key.")
    # Without the package, transformers would fetch this kernel from a repository.
    if value == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        problem = (
            f"'{key}' in the config.json in '{folder}' needs the package flash_attn, which is not "
            "installed."
        )
        raise UnsupportedModel(problem, "Install it, or choose sdpa.")


def accepted(
    config: Mapping[str, Any], declaring: Any, folder: str, *, silent: Iterable[str] = ()
) -> Accepted:
    """The keys of a configuration that its class knows, with checked values.

    Args:
        declaring: the configuration class of transformers. It knows the keys that it declares,
            their other names, and what an object of it has by default.
        silent: further keys that are ignored, but not named.

    Raises:
        UnsupportedModel: a key would load code or other weights.
        SettingsError: a value is out of its bounds; the error names the key and the bound.
    """
    return _accepted(config, declaring, folder, "", _SILENT.union(silent))


def _accepted(
    config: Mapping[str, Any], declaring: Any, folder: str, prefix: str, silent: frozenset[str]
) -> Accepted:
    refuse_loading(config, folder)
    usable = _keys_of(declaring)
    accepted: dict[str, Any] = {}
    ignored: list[str] = []
    for key, value in config.items():
        name = f"{prefix}{key}"
        part = declaring.sub_configs.get(key.removesuffix("_dict"))
        if key in _CHOICES:
            accepted[key.removeprefix("_").removesuffix("_internal")] = value
        elif key in _SILENT:
            continue
        elif part is not None and isinstance(value, dict):
            within = _accepted(value, part, folder, f"{name}.", silent)
            accepted[key] = within.config
            ignored += within.ignored
        elif key in usable:
            _check(value, key, name, folder)
            accepted[key] = value
        elif key not in silent and not key.startswith("_"):
            ignored.append(name)
    return Accepted(accepted, tuple(ignored))


@functools.cache
def _keys_of(declaring: Any) -> frozenset[str]:
    declared = {field.name for field in dataclasses.fields(declaring)}
    by_default = {key for key in vars(declaring()) if not key.startswith("_")}
    return UNDECLARED.union(declared, by_default, declaring.attribute_map)


def _check(value: Any, key: str, name: str, folder: str, depth: int = 1) -> None:
    """Raise `SettingsError` if a value, or a value inside it, is out of its bounds.

    The values of a list have the bounds of its key.
    """
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        least, most = bounds_of(key)
        if not least <= value <= most:
            raise wrong(folder, name, f"must be from {least:,} to {most:,}, not {_shown(value)}")
    elif isinstance(value, float):
        if not math.isfinite(value) or abs(value) > MOST_NUMBER:
            raise wrong(
                folder, name, f"must be a number of at most {MOST_NUMBER:g}, not {_shown(value)}"
            )
    elif isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            raise wrong(
                folder,
                name,
                f"must have at most {MOST_CHARACTERS:,} characters, not {len(value):,}",
            )
    elif len(value) > MOST_ENTRIES:
        raise wrong(folder, name, f"must have at most {MOST_ENTRIES:,} entries, not {len(value):,}")
    elif depth > MOST_DEPTH:
        raise wrong(
            folder, name, f"must have at most {MOST_DEPTH} lists or objects inside each other"
        )
    elif isinstance(value, list):
        for entry in value:
            _check(entry, key, name, folder, depth + 1)
    else:
        for inner_key, entry in value.items():
            _check(entry, inner_key, f"{name}.{inner_key}", folder, depth + 1)


def bounds_of(key: str) -> tuple[int, int]:
    """The least and the most whole number for a key."""
    for pattern, least, most in _BOUNDS:
        if pattern.fullmatch(key):
            return least, most
    return _OTHER_BOUNDS


def keys_with(config: Mapping[str, Any], value: object) -> Iterator[str]:
    """The keys that have a value, also within objects."""
    for key, present in config.items():
        if isinstance(present, dict):
            yield from (f"{key}.{inside}" for inside in keys_with(present, value))
        elif present == value:
            yield key


def wrong(folder: str, name: str, problem: str) -> SettingsError:
    """The error of a key of a config.json."""
    return SettingsError(f"'{name[:100]}' in the config.json in '{folder}' {problem}.", _CORRECT)


def _shown(value: Any) -> str:
    """A short form of a value."""
    if isinstance(value, int) and value.bit_length() > 200:
        return "a number with more than 60 digits"
    text = json.dumps(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."
