"""Measurement files: what to measure, written down in YAML, with every mistake named by file, line and key.

The YAML is walked as nodes rather than as loaded objects, because only nodes know their line. Anchors, aliases and
merge keys (``<<``) work; keys twice in one mapping, which YAML loaders silently accept, are an error here.
``docs/measurement-files.md`` describes the format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from farm.errors import FarmError, MeasurementFileError, did_you_mean
from farm.requests.partial_request import Wish, operator_names
from farm.types.memory_tiers import PLACEMENTS
from farm.types.protocol import LARGEST_NUMBER, Protocol, Stopping, Variant
from farm.types.request import REUSE_CHOICES, Sweep

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_ENTRIES = 10_000
STANDARD_INPUT = "standard input"
MAX_COMBINATIONS = 100_000
LARGEST_SIZE = 2**63 - 1  # that PyTorch takes

# What a key takes: the type it must have, or the words it chooses from.
_WHOLE, _NUMBER, _TEXT, _FLAG = "a whole number", "a number", "text", "true or false"
Kind = str | tuple[str, ...]
_VARIANT_KEYS: dict[str, Kind] = {
    f.name: tuple(filter(None, Variant.CHOICES[f.name])) if f.name in Variant.CHOICES else _WHOLE
    for f in dataclasses.fields(Variant)
    if f.name not in ("model", "text")
} | {"padded": _FLAG, "recompute": _TEXT}
_SIZE_KEYS = ("batch", "input_size", "length", "cache", "layers", "accumulate")
_PATH_KEYS = ("text", "tokenizer")
_ENTRY_KEYS: dict[str, Kind] = {
    **dict.fromkeys(_PATH_KEYS, _TEXT),
    "target": _NUMBER,
    "reuse": REUSE_CHOICES,
    "placements": PLACEMENTS,
}
_PROTOCOL_KEYS: dict[str, Kind] = {
    f.name: Protocol.CHOICES.get(f.name, _FLAG) for f in dataclasses.fields(Protocol) if f.name != "placement"
}
_STOPPING_KEYS: dict[str, Kind] = {f.name: _NUMBER for f in dataclasses.fields(Stopping)}
_COMMON = ("reuse", "placements", "protocol", "stopping")
_MODEL_ENTRY = ("model", *_VARIANT_KEYS, *_PATH_KEYS, "operators", "target", *_COMMON)
_SWEEP_ENTRY = ("sweep", "name", "grid", *_COMMON)
_TOP_LEVEL = ("defaults", "measurements")


def load(paths: Iterable[Path | str], *, check_model: Callable[[str], object] | None = None) -> list[Wish]:
    """All wishes of some measurement files, lists multiplied out, in the order written, equal ones once.

    Args:
        paths: of the files; "-" is standard input.
        check_model: called with each model's name; a `FarmError` it raises is shown with file and line.

    Raises:
        MeasurementFileError: a file cannot be read or is malformed; the message starts with ``file:line: key``.
    """
    wishes: dict[Wish, Wish] = {}
    for path in dict.fromkeys(map(str, paths)):
        for wish in parse(_read(path), STANDARD_INPUT if path == "-" else path, check_model=check_model):
            wishes.setdefault(_without_place(wish), wish)
    return list(wishes.values())


def parse(text: str, name: str, *, check_model: Callable[[str], object] | None = None) -> list[Wish]:
    """The wishes of one measurement file's text; ``name`` is the file's name in messages."""
    return _File(name, check_model).wishes(text)


def _without_place(wish: Wish) -> Wish:
    # A sweep's grid is a dictionary and cannot be hashed; its id stands for it here.
    sweep = wish.sweep.id if wish.sweep else None
    return dataclasses.replace(wish, where="", sweep=sweep)  # type: ignore[arg-type]


def _read(path: str) -> str:
    name = STANDARD_INPUT if path == "-" else path
    step = "Give the path of a measurement file; docs/measurement-files.md shows one."
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            written = file.read(MAX_FILE_BYTES + 1)
        if len(written) > MAX_FILE_BYTES:
            raise MeasurementFileError(f"{name}: the file is larger than {MAX_FILE_BYTES} bytes.", "Split it.")
        return written.decode()
    except OSError as error:
        raise MeasurementFileError(f"{name}: {error.strerror or error}.", step) from error
    except UnicodeDecodeError as error:
        raise MeasurementFileError(f"{name}: the file is not UTF-8 text.", step) from error


class _File:
    """One file being read: knows its name and how to say where something is wrong."""

    def __init__(self, name: str, check_model: Callable[[str], object] | None) -> None:
        self.name = name
        self.check_model = check_model

    def wishes(self, text: str) -> list[Wish]:
        entries = self._compose(text)
        defaults, at = Wish(), ""
        if not isinstance(entries, yaml.SequenceNode):
            what = "a list of measurements, or a mapping with 'measurements'"
            top = self._mapping(entries, "", _TOP_LEVEL, what)
            if "measurements" not in top:
                raise self._error(entries, "", "there is no 'measurements' in this file", "List the entries under it.")
            if "defaults" in top:
                defaults = self._defaults(top["defaults"])
            entries, at = top["measurements"], "measurements"
            if not isinstance(entries, yaml.SequenceNode):
                raise self._error(entries, at, "must be a list", "Begin each entry with '- model: ...'.")
        if not entries.value:
            raise self._error(entries, at, "there is no entry in the list", "Add one, e.g. '- model: resnet50'.")
        found: list[Wish] = []
        for index, node in enumerate(entries.value):
            for wish in self._entry(node, f"{at or 'entries'}[{index}]"):
                found.append(wish.over(defaults if wish.model else _for_sweeps(defaults)))
                if len(found) > MAX_ENTRIES:
                    raise self._error(node, at, f"makes more than {MAX_ENTRIES} jobs", "Shorten the lists.")
        return found

    # -- entries

    def _defaults(self, node: yaml.Node) -> Wish:
        keys = self._mapping(node, "defaults", tuple(key for key in _MODEL_ENTRY if key != "model"), "a mapping")
        values = {}
        for key, child in keys.items():
            if isinstance(child, yaml.SequenceNode) and key != "operators":
                raise self._error(child, f"defaults.{key}", "takes one value", "Write lists in the entries.")
            values.update(self._values(key, child, f"defaults.{key}")[0])
        return Wish(**values)

    def _entry(self, node: yaml.Node, at: str) -> Iterator[Wish]:
        what = "a mapping with 'model' or 'sweep'"
        keys = self._mapping(node, at, None, what)
        if ("model" in keys) == ("sweep" in keys):
            raise self._error(node, at, "needs exactly one of 'model' and 'sweep'", "Write '- model: resnet50', say.")
        if "sweep" in keys:
            yield self._sweep(node, at)
            return
        keys = self._mapping(node, at, _MODEL_ENTRY, what)
        where = f"{self.name}:{_line(node)}"
        lists = [self._values(key, child, f"{at}.{key}") for key, child in keys.items()]
        for combination in itertools.product(*lists):
            yield Wish(where=where, **{name: value for part in combination for name, value in part.items()})

    def _sweep(self, node: yaml.Node, at: str) -> Wish:
        keys = self._mapping(node, at, _SWEEP_ENTRY, "a mapping")
        if "grid" not in keys:
            raise self._error(node, at, "has no 'grid'", "Give the values to go through, e.g. grid: {batch: [1, 32]}.")
        operator = self._scalar(keys["sweep"], f"{at}.sweep", _TEXT)
        grid_at = f"{at}.grid"
        grid = {
            key: tuple(self._grid_values(child, f"{grid_at}.{key}"))
            for key, child in self._mapping(keys["grid"], grid_at, None, "a mapping of names to lists").items()
        }
        name = self._scalar(keys["name"], f"{at}.name", _TEXT) if "name" in keys else ""
        sweep = Sweep(operator, grid, name)
        if sweep.size > MAX_COMBINATIONS:
            raise self._error(
                keys["grid"], grid_at, f"has {sweep.size} combinations, more than {MAX_COMBINATIONS}", "Split it."
            )
        from farm.operators.sweep import check_names

        self._checked(check_names, sweep, keys["grid"], grid_at)
        values: dict[str, Any] = {}
        for key in _COMMON:
            if key in keys:
                values.update(self._values(key, keys[key], f"{at}.{key}")[0])
        return Wish(sweep=sweep, where=f"{self.name}:{_line(node)}", **values)

    def _grid_values(self, node: yaml.Node, at: str) -> list[Any]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not nodes:
            raise self._error(node, at, "is an empty list", "Give at least one value, or leave the name out.")
        return [self._grid_value(child, at) for child in nodes]

    def _grid_value(self, node: yaml.Node, at: str) -> Any:
        if isinstance(node, yaml.SequenceNode):  # a pair such as a kernel of 3 x 5
            return [self._size(child, at) for child in node.value]
        return self._size(node, at)

    def _size(self, node: yaml.Node, at: str) -> Any:
        value = self._plain(node, at)
        if isinstance(value, int) and not -LARGEST_SIZE - 1 <= value <= LARGEST_SIZE:
            raise self._error(node, at, f"is {value}; it must be from {-LARGEST_SIZE - 1} to {LARGEST_SIZE}", "")
        return value

    # -- one key

    def _values(self, key: str, node: yaml.Node, at: str) -> list[dict[str, Any]]:
        """Each value the key takes, as fields of a `Wish`: several where it is a list to be multiplied out."""
        if key == "operators":
            return [{"operators": self._operators(node, at)}]
        if key in ("protocol", "stopping"):
            kinds = _PROTOCOL_KEYS if key == "protocol" else _STOPPING_KEYS
            children = self._mapping(node, at, tuple(kinds), "a mapping")
            return [{name: self._scalar(child, f"{at}.{name}", kinds[name]) for name, child in children.items()}]
        if key == "model":
            kind: Kind = _TEXT
        else:
            kind = _VARIANT_KEYS[key] if key in _VARIANT_KEYS else _ENTRY_KEYS[key]
        listed = isinstance(node, yaml.SequenceNode) and key not in _ENTRY_KEYS
        nodes = node.value if listed else [node]
        if not nodes:
            raise self._error(node, at, "is an empty list", "Give at least one value, or leave the key out.")
        return [{key: self._value(key, child, at, kind)} for child in nodes]

    def _value(self, key: str, node: yaml.Node, at: str, kind: Kind) -> Any:
        value = self._scalar(node, at, kind)
        if key in _SIZE_KEYS and not 1 <= value <= LARGEST_NUMBER:
            raise self._error(node, at, f"is {value}; it must be from 1 to {LARGEST_NUMBER}", "")
        if key == "target" and not 0 < value <= 1:
            raise self._error(node, at, f"is {value}; it must be above 0 and at most 1", "Write target: 0.95, say.")
        if key == "model" and self.check_model is not None:
            self._checked(self.check_model, value, node, at)
        return Path(self.name).parent / value if key in _PATH_KEYS else value

    def _operators(self, node: yaml.Node, at: str) -> tuple[str, ...]:
        if isinstance(node, yaml.SequenceNode):
            text = ",".join(self._scalar(child, at, _TEXT) for child in node.value)
        else:
            text = self._scalar(node, at, _TEXT)
        names: tuple[str, ...] = self._checked(operator_names, text, node, at)
        if not names:
            raise self._error(node, at, "names no operator", "Write all, auto, or names such as [Conv2d, Linear].")
        return names

    # -- YAML

    def _compose(self, text: str) -> yaml.Node:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            problem = error.problem or error.context or "it is malformed"
            raise MeasurementFileError(
                f"{self.name}:{line}: this is not YAML: {problem}.", "Mind the indentation and the quotes."
            ) from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise MeasurementFileError(
                f"{self.name}:1: this is not YAML: {str(error).splitlines()[0]}.", "Save it as plain UTF-8 text."
            ) from error
        finally:
            loader.dispose()
        if root is None:
            raise MeasurementFileError(f"{self.name}:1: the file is empty.", "Add an entry, e.g. '- model: resnet50'.")
        return root

    def _mapping(self, node: yaml.Node, at: str, known: tuple[str, ...] | None, what: str) -> dict[str, yaml.Node]:
        """Key -> node; keys outside ``known`` (where given) are an error, except ``x-...`` at the top."""
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, at, f"must be {what}", "")
        found: dict[str, yaml.Node] = {}
        for key, child in self._merged(node, at, 0):
            if key in found:
                continue  # an own key wins over a merged one; own ones come first
            if known is not None and key not in known:
                if not at and key.startswith("x-"):
                    continue
                near = did_you_mean(key, known)
                place = f"{at}.{key}" if at else key
                raise self._error(child, place, "is unknown", near or f"Known here: {', '.join(known)}.")
            found[key] = child
        return found

    def _merged(self, node: yaml.MappingNode, at: str, depth: int) -> Iterator[tuple[str, yaml.Node]]:
        if depth > 10:
            raise self._error(node, at, "merges itself", "Remove the circle of '<<'.")
        merges: list[yaml.Node] = []
        own: set[str] = set()
        for key_node, child in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                merges += child.value if isinstance(child, yaml.SequenceNode) else [child]
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, at, "has a key that is not a word", "")
            if key_node.value in own:
                raise self._error(key_node, f"{at}.{key_node.value}".lstrip("."), "is there twice", "Keep one of them.")
            own.add(key_node.value)
            yield key_node.value, child
        for merge in merges:
            if not isinstance(merge, yaml.MappingNode):
                raise self._error(merge, at, "merges something that is not a mapping", "Anchor a mapping with &name.")
            yield from self._merged(merge, at, depth + 1)

    def _plain(self, node: yaml.Node, at: str) -> Any:
        """The value of a scalar: None, bool, int, float or text."""
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, at, "must be a single value", "")
        try:
            value = yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise self._error(node, at, f"cannot be read: {str(error).splitlines()[0]}", "") from error
        if value is not None and not isinstance(value, bool | int | float | str):
            raise self._error(node, at, f"is '{node.value}', which YAML reads as {type(value).__name__}", "Quote it.")
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            raise self._error(node, at, f"is {node.value[:24]}; it must be finite", "")
        return value

    def _scalar(self, node: yaml.Node, at: str, kind: Kind) -> Any:
        value = self._plain(node, at)
        if isinstance(kind, tuple):
            if value not in kind:
                near = did_you_mean(str(value), kind)
                raise self._error(node, at, f"is '{node.value}'", near or f"Choose one of {', '.join(kind)}.")
            return value
        fits = {
            _WHOLE: isinstance(value, int) and not isinstance(value, bool),
            _NUMBER: isinstance(value, int | float) and not isinstance(value, bool),
            _TEXT: isinstance(value, str) and bool(value),
            _FLAG: isinstance(value, bool),
        }[kind]
        if not fits:
            raise self._error(node, at, f"is '{node.value}'; it must be {kind}", "")
        return float(value) if kind == _NUMBER else value

    def _checked(self, check: Callable[[Any], Any], value: Any, node: yaml.Node, at: str) -> Any:
        try:
            return check(value)
        except MeasurementFileError:
            raise
        except FarmError as error:
            raise MeasurementFileError(f"{self.name}:{_line(node)}: {at}: {error.message}", error.next_step) from error

    def _error(self, node: yaml.Node, at: str, problem: str, step: str) -> MeasurementFileError:
        place = f"{at} {problem}" if at else problem
        return MeasurementFileError(
            f"{self.name}:{_line(node)}: {place}.", step or "docs/measurement-files.md describes the format."
        )


def _for_sweeps(defaults: Wish) -> Wish:
    """The defaults that mean something for a sweep; its sizes and dtype are in its grid."""
    kept: Mapping[str, Any] = {
        name: getattr(defaults, name) for name in ("reuse", "placements", *_PROTOCOL_KEYS, *_STOPPING_KEYS)
    }
    return Wish(**kept)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
