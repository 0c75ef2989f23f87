"""Measurement files: what to measure, in YAML. Every mistake is reported with file, line and key.

PyYAML parses a file into nodes that have line numbers. `_Tree` converts the nodes to plain values
and stores the line of each value. Pydantic models, generated from the declared fields
(`farm.types.fields`), validate the values. Anchors, aliases and merge keys (``<<``) work. A
repeated key in a mapping is an error (YAML loaders accept it silently).
``docs/measurement-files.md`` describes the format."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from farm.errors import FarmError, MeasurementFileError, did_you_mean
from farm.requests.partial_request import (
    JOB,
    PROTOCOL,
    STOPPING,
    VARIANT,
    PartialRequest,
    operator_names,
)
from farm.types import fields
from farm.types.request import Sweep

if TYPE_CHECKING:
    from farm.models.resolved import ResolvedModel

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_ENTRIES = 10_000
STANDARD_INPUT = "standard input"
MAX_COMBINATIONS = 1_000_000
MAX_VALUES = 500_000  # largest number of values in a file; values that aliases repeat count again
LARGEST_SIZE = 2**63 - 1  # the largest integer that PyTorch accepts
_MERGE = "tag:yaml.org,2002:merge"

Location = tuple[str | int, ...]  # keys and indices from the top of the file to a value


# ----- validation, from the declarations


def _list_of(kind: Any) -> Any:
    """The pydantic type of a field that accepts one value or a list of values. Validation always
    returns a list.
    """
    listed = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
    return Annotated[list[kind], listed, Field(min_length=1)]


#: The pydantic type of a number that may have a unit, as in an option of the command line.
_NUMBER = Annotated[
    float,
    BeforeValidator(lambda value: fields.number_of(value) if isinstance(value, str) else value),
]


def _type_of(field: fields.Field) -> Any:
    """The type of the values that a key accepts."""
    if choices := tuple(filter(None, field.choices)):
        return Literal[choices]
    if field.type is int:
        return Annotated[int, Field(ge=max(1, field.minimum or 0), le=fields.LARGEST_NUMBER)]
    if field.type is float:
        return _NUMBER
    return bool if field.type is bool else Annotated[str, Field(min_length=1)]


def _grid_value(value: Any) -> Any:
    """Check a value of a grid: a number, a text, or a list of these, such as a 3 x 5 kernel."""
    if isinstance(value, dict):
        raise ValueError("it must be a single value")
    if isinstance(value, list):
        return [_grid_value(entry) for entry in value]
    if isinstance(value, int) and not -LARGEST_SIZE - 1 <= value <= LARGEST_SIZE:
        raise ValueError(f"it must be from {-LARGEST_SIZE - 1} to {LARGEST_SIZE}")
    return value


def _model_of(
    declared: Mapping[str, fields.Field], *, many: bool = False, **more: Any
) -> type[BaseModel]:
    keys: dict[str, Any] = {
        name: (
            _list_of(_type_of(field)) if many and field.type is not Path else _type_of(field),
            None,
        )
        for name, field in declared.items()
    }
    return create_model("Entry", __config__=ConfigDict(extra="forbid", strict=True), **keys, **more)


@functools.cache
def _entry_models() -> dict[str, type[BaseModel]]:
    """Pydantic models for the keys of a model entry, a sweep entry and the defaults."""
    text = Annotated[str, Field(min_length=1)]
    share = Annotated[_NUMBER, Field(gt=0, le=1)]
    common: dict[str, Any] = {
        **{name: (_type_of(JOB[name]), None) for name in ("reuse", "placements")},
        "protocol": (_model_of(PROTOCOL), None),
        "stopping": (_model_of(STOPPING), None),
    }
    of_a_model: dict[str, Any] = {
        **common,
        "operators": (_list_of(text), None),
        "target": (share, None),
    }
    of_a_model |= {name: (_type_of(JOB[name]), None) for name in ("within", "budget_s")}
    grid = dict[str, _list_of(Annotated[Any, AfterValidator(_grid_value)])]  # type: ignore[misc, valid-type]
    return {
        "model": _model_of(VARIANT, many=True, model=(_list_of(text), ...), **of_a_model),
        "sweep": _model_of({}, sweep=(text, ...), name=(text, ""), grid=(grid, {}), **common),
        "defaults": _model_of(VARIANT, **of_a_model),
    }


# ----- files


def load(paths: Iterable[Path | str], *, locations: bool = False) -> list[PartialRequest]:
    """Read measurement files ("-": standard input). Return their requests in order, without
    duplicates, one for each combination of values, each with its model. ``locations``: accept the
    locations of own functions in place of names. Raises `MeasurementFileError` with ``file:line:
    key`` if a file cannot be read or is malformed, or names a model that does not exist."""
    from farm.models.catalog import resolve, resolve_given

    resolve_model = resolve_given if locations else resolve
    requests: dict[str, PartialRequest] = {}
    for path in dict.fromkeys(map(str, paths)):
        name = STANDARD_INPUT if path == "-" else path
        for request in parse(_read(path), name, resolve_model=resolve_model):
            requests.setdefault(repr(sorted(request.given.items())), request)
    return list(requests.values())


def parse(
    text: str, name: str, *, resolve_model: Callable[[str], ResolvedModel] | None = None
) -> list[PartialRequest]:
    """Parse the text of one measurement file into requests. `name` is the file's name in
    messages.
    """
    return _File(name, text, resolve_model).requests()


def _read(path: str) -> str:
    name = STANDARD_INPUT if path == "-" else path
    step = "Give the path of a measurement file; docs/measurement-files.md shows one."
    # Opening a pipe waits for its writer. A shell's <(...) is a link to /proc whose writer is
    # already open.
    if path != "-" and Path(path).is_fifo() and not Path(path).resolve().is_relative_to("/proc"):
        raise MeasurementFileError(
            f"{name} is a pipe, not a file.", "Read from standard input instead: `-f -`."
        )
    try:
        with (
            contextlib.nullcontext(sys.stdin.buffer)
            if path == "-"
            else Path(path).open("rb") as file
        ):
            written = file.read(MAX_FILE_BYTES + 1)
        if len(written) > MAX_FILE_BYTES:
            raise MeasurementFileError(
                f"{name}: the file is larger than {MAX_FILE_BYTES} bytes.", "Split the file."
            )
        return written.decode()
    except OSError as error:
        raise MeasurementFileError(f"{name}: {error.strerror or error}.", step) from error
    except UnicodeDecodeError as error:
        raise MeasurementFileError(f"{name}: the file is not UTF-8 text.", step) from error


class _Tree:
    """A YAML text as plain values (`value`), and location -> YAML node with its line (`nodes`)."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.nodes: dict[Location, yaml.Node] = {}
        self.loader = yaml.SafeLoader("")  # decides the types of scalars
        self.value = self._value(self._compose(text), ())

    def error(self, location: Location, problem: str, step: str = "") -> MeasurementFileError:
        """Create the error for a location. If the file does not have it, use the nearest location
        above it.
        """
        nearest = self.nearest(location)
        return self._error(self.nodes[nearest], nearest, problem, step)

    def nearest(self, location: Location) -> Location:
        """Return the nearest location at or above this one that is in the file."""
        return next(
            location[:end] for end in range(len(location), -1, -1) if location[:end] in self.nodes
        )

    def _error(
        self, node: yaml.Node, location: Location, problem: str, step: str = ""
    ) -> MeasurementFileError:
        key = ""
        for part in location:
            key += f"[{part}]" if isinstance(part, int) else f".{part}"
        key = key.lstrip(".")
        if key.startswith("["):
            key = f"entries{key}"
        if key and not problem.startswith(":"):
            key += " "
        text = f"{key}{problem}"
        message = f"{self.name}:{node.start_mark.line + 1}: {text.rstrip('.')}."
        return MeasurementFileError(
            message, step or "docs/measurement-files.md describes the format."
        )

    def _compose(self, text: str) -> yaml.Node:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise MeasurementFileError(
                f"{self.name}:{mark.line + 1 if mark else 1}: this is not YAML: "
                f"{error.problem or error.context}.",
                "Check the indentation and the quotes.",
            ) from error
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise MeasurementFileError(
                f"{self.name}:1: this is not YAML: {str(error).splitlines()[0]}.",
                "Save the file as plain UTF-8 text.",
            ) from error
        finally:
            loader.dispose()
        if root is None:
            raise MeasurementFileError(
                f"{self.name}:1: the file is empty.", "Add an entry, e.g. '- model: resnet50'."
            )
        return root

    def _value(self, node: yaml.Node, location: Location) -> Any:
        if any(self.nodes[location[:end]] is node for end in range(len(location))):
            raise self._error(
                node, location, "contains itself", "Remove the alias that refers to its own entry."
            )
        if len(self.nodes) > MAX_VALUES:
            raise self._error(
                node, location[:2], f"has more than {MAX_VALUES} values", "Shorten the lists."
            )
        self.nodes[location] = node
        if isinstance(node, yaml.SequenceNode):
            return [
                self._value(child, (*location, index)) for index, child in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, Any] = {}
            for key, child in self._items(node, location, 0):
                if key not in mapping:  # a mapping's own keys come first and override merged keys
                    mapping[key] = self._value(child, (*location, key))
            return mapping
        try:
            value = self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise self._error(
                node, location, f"cannot be read: {str(error).splitlines()[0]}"
            ) from error
        if value is not None and not isinstance(value, bool | int | float | str):
            message = f"is '{node.value}', which YAML reads as {type(value).__name__}"
            raise self._error(node, location, message, "Put the value into quotes.")
        if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            raise self._error(node, location, f"is {node.value[:24]}; it must be finite")
        return value

    def _items(
        self, node: yaml.MappingNode, location: Location, depth: int
    ) -> Iterator[tuple[str, yaml.Node]]:
        """Yield the own keys of a mapping, then the keys that it merges (``<<``)."""
        if depth > 10:
            raise self._error(
                node, location, "merges itself", "Remove the '<<' that refers to its own mapping."
            )
        merges: list[yaml.Node] = []
        keys: set[str] = set()
        for key, child in node.value:
            if key.tag == _MERGE:
                merges += child.value if isinstance(child, yaml.SequenceNode) else [child]
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, location, "has a key that is not a plain text")
            if key.value in keys:
                raise self._error(
                    key, (*location, key.value), "occurs twice", "Remove one of the two."
                )
            keys.add(key.value)
            yield key.value, child
        for merge in merges:
            if not isinstance(merge, yaml.MappingNode):
                message = "merges ('<<') a value that is not a mapping"
                raise self._error(
                    merge,
                    location,
                    message,
                    "Let '<<' refer to a mapping that is marked with &name.",
                )
            yield from self._items(merge, location, depth + 1)


class _File:
    """One measurement file."""

    def __init__(
        self, name: str, text: str, resolve_model: Callable[[str], ResolvedModel] | None
    ) -> None:
        self.tree = _Tree(name, text)
        self.folder = Path(name).parent
        self.resolve_model = resolve_model

    def requests(self) -> list[PartialRequest]:
        """The requests of all entries, each over the defaults of the file."""
        entries, location, defaults = self._sections()
        error = self.tree.error
        if not isinstance(entries, list):
            what = "must be a list of measurements, or a mapping with 'measurements'"
            if location:
                what = "must be a list"
            raise error(location, what, "Begin each entry with '- model: ...'.")
        if not entries:
            raise error(
                location, "the list has no entry", "Add an entry, e.g. '- model: resnet50'."
            )
        # Sweeps ignore the default sizes and dtype: these are in the sweep's grid.
        of_sweeps = PartialRequest(**defaults.among(["reuse", "placements", *PROTOCOL, *STOPPING]))
        requests: list[PartialRequest] = []
        for index, entry in enumerate(entries):
            location_of_entry = (*location, index)
            for request in self._entry(entry, location_of_entry):
                requests.append(request.over(defaults if request.model else of_sweeps))
                if len(requests) > MAX_ENTRIES:
                    problem = f"makes more than {MAX_ENTRIES} jobs"
                    raise error(location_of_entry, problem, "Shorten the lists.")
        return requests

    def _sections(self) -> tuple[Any, Location, PartialRequest]:
        """Return the entries, which are not checked yet, their location, and the defaults. A file
        is a list of entries, or a mapping with `measurements` and perhaps `defaults`.
        """
        top, error = self.tree.value, self.tree.error
        if not isinstance(top, dict):
            return top, (), PartialRequest()
        sections = ("defaults", "measurements")
        for key in top:
            if key not in sections and not key.startswith("x-"):
                similar = did_you_mean(key, sections)
                step = similar or "The keys of a file are defaults and measurements."
                raise error((key,), "is unknown", step)
        if "measurements" not in top:
            problem = "the key 'measurements' is missing"
            raise error((), problem, "List the entries under 'measurements:'.")
        defaults = PartialRequest()
        if "defaults" in top:
            keys = self._validated("defaults", top["defaults"], ("defaults",))
            defaults = PartialRequest(**next(self._combinations(keys, ("defaults",))))
        return top["measurements"], ("measurements",), defaults

    def _entry(self, entry: Any, location: Location) -> Iterator[PartialRequest]:
        """Yield the requests of one entry, one for each combination of values."""
        if not isinstance(entry, dict):
            raise self.tree.error(location, "must be a mapping with 'model' or 'sweep'")
        if ("model" in entry) == ("sweep" in entry):
            step = "Write, for example, '- model: resnet50'."
            raise self.tree.error(location, "needs exactly one of 'model' and 'sweep'", step)
        keys = self._validated("model" if "model" in entry else "sweep", entry, location)
        if "sweep" in keys:
            keys["sweep"] = self._sweep(keys, location)
        models: dict[str, ResolvedModel] = {}
        if self.resolve_model is not None:
            for index, name in enumerate(keys.get("model", ())):
                with self._located((*location, "model", index)):
                    models[name] = self.resolve_model(name)
        line = self.tree.nodes[location].start_mark.line + 1
        for values in self._combinations(keys, location):
            model = models.get(values.get("model", ""))
            yield PartialRequest(where=f"{self.tree.name}:{line}", resolved=model, **values)

    def _sweep(self, keys: dict[str, Any], location: Location) -> Sweep:
        """Build the sweep of an entry; take its grid and name out of ``keys``."""
        from farm.subjects.sweep import check_names

        grid = {name: tuple(values) for name, values in keys.pop("grid", {}).items()}
        sweep = Sweep(keys["sweep"], grid, keys.pop("name", ""))
        if sweep.size > MAX_COMBINATIONS:
            message = f"has {sweep.size} combinations, more than {MAX_COMBINATIONS}"
            raise self.tree.error(
                (*location, "grid"), message, "Split the sweep into several entries."
            )
        with self._located((*location, "grid")):
            check_names(sweep)
        return sweep

    def _combinations(self, keys: dict[str, Any], location: Location) -> Iterator[dict[str, Any]]:
        """Yield the fields of one request for each combination of list values. Changes ``keys``:
        operators become a tuple, paths become relative to the file's folder.
        """
        if "operators" in keys:
            with self._located((*location, "operators")):
                keys["operators"] = operator_names(",".join(keys["operators"]))
        fixed = {**keys.pop("protocol", {}), **keys.pop("stopping", {})}
        for name, value in keys.items():
            if name in VARIANT and VARIANT[name].type is Path:
                keys[name] = self.folder / value
        lists = [value if isinstance(value, list) else [value] for value in keys.values()]
        for combination in itertools.product(*lists):
            yield {**dict(zip(keys, combination, strict=True)), **fixed}

    def _validated(self, section: str, entry: Any, location: Location) -> dict[str, Any]:
        """Validate an entry and return its keys. The error names the first wrong key and its
        line.
        """
        try:
            values = _entry_models()[section].model_validate(entry).model_dump(exclude_unset=True)
            return {key: values[key] for key in entry}
        except ValidationError as error:
            raise self._explained(error.errors(include_url=False)[0], section, location) from None

    def _explained(self, problem: Any, section: str, location: Location) -> MeasurementFileError:
        """Convert a problem that Pydantic found to an error."""
        at, value = self.tree.nearest((*location, *problem["loc"])), problem["input"]
        if problem["type"] == "extra_forbidden":
            fields = _entry_models()[section].model_fields
            for key in problem["loc"][:-1]:
                fields = getattr(fields[key].annotation, "model_fields", fields)
            near = did_you_mean(str(at[-1]), fields)
            return self.tree.error(
                at, "is unknown", near or f"The keys here are {', '.join(fields)}."
            )
        if problem["type"] == "missing":
            key = problem["loc"][-1]
            return self.tree.error(location, f"has no '{key}'", f"Add '{key}:' to the entry.")
        if problem["type"] == "too_short":
            return self.tree.error(
                at, "is an empty list", "Give at least one value, or omit the key."
            )
        if isinstance(value, list) and section == "defaults":
            return self.tree.error(
                at, "needs a single value under 'defaults'", "Write a list in the entries instead."
            )
        needed = (
            problem["msg"].removeprefix("Value error, ").replace("Input should be", "it must be")
        )
        needed = re.sub("an? (valid )?integer", "a whole number", needed).replace("valid ", "")
        node = self.tree.nodes[at]
        if not isinstance(node, yaml.ScalarNode):
            return self.tree.error(
                at, "must be a mapping" if "dictionary" in needed else "must be a single value"
            )
        shown = node.value[:24] if type(value) in (int, float) else f"'{node.value}'"
        choices = [
            word.strip(" '")
            for word in re.split(",| or ", problem.get("ctx", {}).get("expected", ""))
        ]
        return self.tree.error(at, f"is {shown}; {needed}", did_you_mean(str(value), choices))

    @contextlib.contextmanager
    def _located(self, location: Location) -> Iterator[None]:
        """Add file, line and key to any `FarmError` that the block raises."""
        try:
            yield
        except MeasurementFileError:
            raise
        except FarmError as error:
            raise self.tree.error(location, f": {error.message}", error.next_step) from error
