"""Command-line options that several commands share, and groups of options.

The flags and texts of the parameters of commands are in the file `options.toml` beside the command
or the group. A command takes a group of
options as one
parameter: a dataclass, or a dict of the given fields of a model variant or a request, whose options
are derived from the declarations of the fields (`farm.types.fields`). `flat` gives Typer a function
with one parameter for each option."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from farm.errors import SettingsError, UsageError, did_you_mean
from farm.types.fields import fields_of, number_of
from farm.types.format import few

if TYPE_CHECKING:
    from farm.requests.partial_request import PartialRequest
    from farm.types.fields import Field


_MODEL = (
    "The model's name (`farm models` lists all names), or the location of your own model: "
    "my_models.py:net."
)
Model = Annotated[str, typer.Argument(help=_MODEL)]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Cards = Annotated[
    list[str] | None,
    typer.Option("--card", help="Only cards whose model or id has this text. May be repeated."),
]
#: Words that are a mode if they follow `--compile`. A mode that the farm refuses is among them, for
#: its message.
WITH_MODES = ("default", "max-autotune", "reduce-overhead")
#: A function or a class of a module: its name.
_DEFINED = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
#: The keys of a section: parameters of Typer, and those that `_with_text` reads.
_KEYS = {*inspect.signature(typer.Option).parameters, "flags", "argument"}
_MOST_NAMES = 20
#: The farm's own folders: a test compares the sections of their files, so that no command has to.
_OWN = tuple(Path(__file__).absolute().parents[1] / name for name in ("cli", "farm"))
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_WHAT, _HOW, _WHERE = "What to measure", "How to measure", "Where to measure, and the verdict"


@dataclass(frozen=True)
class Declared:
    """Annotates a dict of given fields: those of a variant, a request or another record, except
    `without`.
    """

    of: Literal["variant", "request"] | type = "variant"
    without: Collection[str] = ()

    def fields(self) -> dict[str, Field]:
        from farm.requests.partial_request import GIVEN, VARIANT

        declared = GIVEN if self.of == "request" else VARIANT
        if isinstance(self.of, type):
            declared = {field.name: field for field in fields_of(self.of)}
        return {
            name: field
            for name, field in declared.items()
            if field.option and name not in self.without
        }


# fields of a variant on several cards
SPLIT = (
    "tensor_parallel",
    "data_parallel",
    "sharding",
    "distributed",
)
NOT_PLAIN = ("compile", *SPLIT)  # fields of a variant that is compiled or on several cards
VariantFields = Annotated[dict[str, Any], Declared()]


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a parameter for each option, in place of its groups of options."""
    name = command.__name__
    parameters = inspect.signature(command, eval_str=True).parameters
    texts = _texts(command, parameters)
    options_by_name = {key: _with_text(texts, option) for key, option in parameters.items()}
    every = list(_flat(options_by_name))
    # A declared field may have an own option, in any group.
    names = {option.name for option in every if isinstance(option, inspect.Parameter)}
    options: list[inspect.Parameter] = []
    for option in every:
        if not isinstance(option, Declared):
            options.append(option.replace(kind=_KEYWORD))
            continue
        for field in option.fields().values():
            if field.name not in names:
                options.append(_parameter(field, option))

    def flattened(**values: Any) -> None:
        command(**_grouped(options_by_name, values))

    flattened.__name__, flattened.__doc__ = name, command.__doc__
    flattened.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flattened.__annotations__ = {option.name: option.annotation for option in options}
    return flattened


def _group(annotation: Any) -> Any:
    """The dataclass or `Declared` of a group of options; None for a single option."""
    if dataclasses.is_dataclass(annotation):
        return annotation
    return next(
        (
            metadata
            for metadata in getattr(annotation, "__metadata__", ())
            if isinstance(metadata, Declared)
        ),
        None,
    )


def _texts(owner: Any, parameters: Collection[str]) -> dict[str, dict[str, Any]]:
    """Parameter -> its option, of a command or a group of options, from the file `options.toml`
    beside its module. Raises `SettingsError` for a parameter that the owner does not have, and
    for a key that an option does not have.
    """
    path = Path(inspect.getfile(owner)).with_name("options.toml")
    name = owner.__name__.rstrip("_")
    texts = texts_at(path).get(name, {})
    _check_sections(path, texts, parameters, f"{name}.")
    for parameter, text in texts.items():
        unknown = text.keys() - _KEYS
        if unknown:
            raise SettingsError(
                f"{path}: the section [{name}.{parameter}] has an unknown key '{min(unknown)}'.",
                did_you_mean(min(unknown), _KEYS) or "Use parameters of `typer.Option`.",
            )
    return texts


@functools.cache
def texts_at(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The texts of a file: command or group of options -> parameter -> its option.

    Raises `SettingsError` if the file is not TOML, or if that of another distribution has a section
    that is neither a function nor a class of a module beside it."""
    if not path.is_file():
        return {}
    try:
        texts = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{path} is not TOML: {error}.", "Correct the file.") from None
    if not any(path.is_relative_to(folder) for folder in _OWN):
        _check_sections(path, texts, _owners_beside(path))
    return texts


def _owners_beside(path: Path) -> set[str]:
    """The names of the public functions and classes of the modules beside a file."""
    owners: set[str] = set()
    for module in path.parent.glob("*.py"):
        names = _DEFINED.findall(module.read_text(encoding="utf-8"))
        owners.update(name.rstrip("_") for name in names if not name.startswith("_"))
    return owners


def _check_sections(
    path: Path, sections: Mapping[str, Any], existing: Collection[str], owner: str = ""
) -> None:
    """Raise `SettingsError` if a section of a file, or of its section `owner`, has another name
    than the existing ones, or is no table.
    """
    for name, content in sections.items():
        if name not in existing or not isinstance(content, dict):
            names = f"The names that exist: {few(sorted(existing), _MOST_NAMES)}."
            raise SettingsError(
                f"{path}: there is nothing of the name of the section [{owner}{name}].",
                f"{did_you_mean(name, existing)} {names}".lstrip(),
            )


def _with_text(texts: dict[str, dict[str, Any]], one: inspect.Parameter) -> inspect.Parameter:
    """The parameter of a command or a group, with its option if `texts` has one."""
    if not (text := dict(texts.get(one.name, {}))):
        return one
    made = typer.Argument if text.pop("argument", False) else typer.Option
    text |= {"parser": number_of} if one.annotation == float | None else {}
    return one.replace(annotation=Annotated[one.annotation, made(*text.pop("flags", ()), **text)])


def _members(group: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a dataclass of options."""
    members, hints = {}, get_type_hints(group, include_extras=True)
    texts = _texts(group, hints)
    for field in dataclasses.fields(group):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        of = {"default": default, "annotation": hints[field.name]}
        members[field.name] = _with_text(texts, inspect.Parameter(field.name, _KEYWORD, **of))
    return members


def _flat(parameters: Mapping[str, inspect.Parameter]) -> Iterator[inspect.Parameter | Declared]:
    for parameter in parameters.values():
        group = _group(parameter.annotation)
        if group is None or isinstance(group, Declared):
            yield group or parameter
        else:
            yield from _flat(_members(group))


def _grouped(parameters: Mapping[str, inspect.Parameter], values: dict[str, Any]) -> dict[str, Any]:
    """The values of parameters. Declared fields come last: one that has an own option is not in
    their dict.
    """
    arguments: dict[str, Any] = {}
    groups = {name: _group(parameter.annotation) for name, parameter in parameters.items()}
    for name, group in sorted(
        groups.items(), key=lambda item: (isinstance(item[1], Declared), item[1] is not None)
    ):
        if group is None:
            arguments[name] = values.pop(name)
        elif isinstance(group, Declared):
            pairs = ((field, values.pop(field, None)) for field in group.fields())
            arguments[name] = {field: value for field, value in pairs if value is not None}
        else:
            arguments[name] = group(**_grouped(_members(group), values))
    return arguments


def _parameter(field: Field, group: Declared) -> inspect.Parameter:
    """The parameter of a command for a declared field. Some fields of a request take several
    values.
    """
    from farm.requests.partial_request import VARIANT

    several, panel = group.of == "request" and field.several, None
    if group.of == "request":
        panel = _HOW
        if field.name in VARIANT or field.name == "operators":
            panel = _WHAT
        elif field.name in ("reuse", "target"):
            panel = _WHERE
    number = {"parser": number_of} if field.type is float else {}
    metavar = None
    if several or not field.several:
        metavar = field.metavar or ("NUMBER" if number else None)
    option = typer.Option(
        *field.option,
        **number,  # type: ignore[arg-type]
        metavar=metavar,
        help=dataclasses.replace(field, several=several).help,
        show_default=False,
        rich_help_panel=panel,
    )
    kind = str if several or field.type is tuple else field.type
    return inspect.Parameter(
        field.name, _KEYWORD, default=None, annotation=Annotated[kind | None, option]
    )


@dataclass(frozen=True)
class CliOptions:
    """The options of `run` and `submit` (texts: `options.toml`). `given`: names of the given fields
    of a request.
    """

    models: list[str] | None = None
    files: list[Path] | None = None
    given: Annotated[Mapping[str, Any], Declared("request")] = dataclasses.field(
        default_factory=dict
    )
    quick: bool = False
    card: list[str] | None = None
    dry_run: bool = False
    check: bool = False
    as_json: bool = False

    def requests(self, *, locations: bool = True) -> list[PartialRequest]:
        """One request per model and per entry of the files, for each combination of the options
        with several values.

        The command line wins over a file.

        Args:
            locations: accept the locations of own functions, such as my_models.py:net, beside
                names.

        Raises:
            UsageError: nothing to measure was named.
            UnknownModel, UnsupportedModel, MeasurementFileError: see `farm.models.catalog.find` and
                `farm.requests.measurement_file.load`.
        """
        from farm.requests import measurement_file
        from farm.requests.partial_request import PartialRequest
        from farm.types.variant import FROM_FILE, Variant

        if not self.models and not self.files:
            raise UsageError(
                "There is nothing to measure: no model and no file is given.",
                "Give a model, e.g. `farm run resnet18`, or a measurement file with -f.",
            )
        cells = self._cells()
        weights = self.given.get("weights", Variant.weights)
        if not locations and weights not in (Variant.weights, FROM_FILE):
            raise UsageError(
                "`farm submit` accepts no file of weights: the workers' hosts have other files.",
                "Name the file in the setting `weights` of every host and give --weights "
                f"{FROM_FILE}, or use `farm run`.",
            )
        requests = []
        for partial in PartialRequest.of_models(self.models or (), locations=locations):
            requests += [cell.over(partial) for cell in cells]
        if not self.files:
            return requests
        entries = measurement_file.load(self.files, locations=locations)
        of_sweeps = cells[:1]  # a sweep has its own grid
        if self.models or any(entry.model for entry in entries):
            # Among models, --within and --budget are about the sums of these.
            of_sweeps = [_without_precision(cells[0])]
        for entry in entries:
            if self.quick:
                entry = _without_precision(entry)
            cells_of_entry = cells if entry.model else of_sweeps
            requests += [cell.over(entry) for cell in cells_of_entry]
        return requests

    def _cells(self) -> list[PartialRequest]:
        """The given fields of a request, for each combination of the options with several
        values.
        """
        from farm.requests.partial_request import GIVEN, PartialRequest, operator_names
        from farm.types.protocol import QUICK

        options = {**(QUICK if self.quick else {}), **self.given}
        if "operators" in options:
            options["operators"] = operator_names(options["operators"])
        several = [name for name, field in GIVEN.items() if field.several and name in options]
        grid = [
            [(name, value) for value in _several_values(GIVEN[name], options.pop(name))]
            for name in several
        ]
        return [PartialRequest(**{**options, **dict(cell)}) for cell in itertools.product(*grid)]


def _several_values(field: Field, text: str) -> Sequence[int | str | None]:
    """The values of an option that accepts several: sizes, or words; `none` is the default. Raises
    `UsageError` for an unknown word."""
    if field.type is int:
        return sizes(f"--{field.name}", text)
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise UsageError(
            f"--{field.name} '{text}' has an empty name.", "Separate names by one comma each."
        )
    chosen = ["" if word == "none" else word for word in words]
    for word in chosen:
        field.check_choice(word)
    return chosen


def _without_precision(request: PartialRequest) -> PartialRequest:
    """The request without the precision of a sum: --quick replaces it, and a sweep has no sum."""
    from farm.requests.partial_request import PartialRequest

    fields = {**request.given, "within": None, "budget_s": None}
    return PartialRequest(where=request.where, resolved=request.resolved, **fields)


def options_of_run(text: str) -> CliOptions:
    """Parse a text with arguments and options of `farm run`, such as "resnet50 -b 32 --dtype
    bfloat16". Raises `UsageError` if a quotation mark is missing, and Typer's errors if an option
    is wrong."""
    run_options: list[CliOptions] = []

    def run(options: CliOptions) -> None:
        run_options.append(options)

    program = typer.Typer(add_completion=False)
    program.command()(flat(run))
    try:
        words = shlex.split(text)
    except ValueError:
        raise UsageError(
            f"A quotation mark is missing: {text}", "Quote a value with blanks."
        ) from None
    typer.main.get_command(program).main(
        with_compile_mode(words), prog_name="farm run", standalone_mode=False
    )
    return run_options[0]


def with_compile_mode(words: list[str]) -> list[str]:
    """Insert the mode `default` after each `--compile` without a mode: Typer has no options with an
    optional value.
    """
    completed: list[str] = []
    for word, following in itertools.zip_longest(words, words[1:]):
        completed.append(word)
        if word == "--compile" and following not in WITH_MODES:
            completed.append("default")
    return completed


def step_after_compile(words: Sequence[str], message: str) -> str:
    """The next step if a message rejects the word that follows `--compile`, which may be meant as a
    mode; else "". ``words``: of the command line."""
    from farm.types.variant import COMPILE_MODES

    for word, following in itertools.pairwise(words):
        if word == "--compile" and f"'{following}'" in message:
            modes = " and ".join(filter(None, COMPILE_MODES))
            return f"If '{following}' should be a mode: the modes of --compile are {modes}."
    return ""


def sizes(flag: str, text: str | None) -> list[int | None]:
    """Parse sizes: `32`, `1,8,32`, or `1..256` (1, 2, 4, ... 256); without a text, the usual size
    (None). Raises `UsageError` for any other text."""
    if text is None:
        return [None]
    numbers: list[int | None] = []
    with contextlib.suppress(ValueError):
        first, dots, last = text.partition("..")
        if not dots:
            numbers = [int(part) for part in text.split(",")]
        elif 0 < int(first) <= int(last):
            doubled = (int(first) << number for number in range(64))
            numbers = [*itertools.takewhile(lambda size: size < int(last), doubled), int(last)]
    if not numbers:
        step = f"Give one number, a list or a range: {flag} 32, {flag} 1,8,32 or {flag} 1..256."
        raise UsageError(f"{flag} '{text}' is not a size.", step)
    return list(dict.fromkeys(numbers))
