"""Command-line options that several commands share.

The options of a model variant, a protocol and a job are derived from the declarations of their fields
(`farm.types.fields`): `variant_options` adds those of a variant to a command, `request_options` adds all options of
`run` and `submit`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from farm.errors import UsageError
from farm.requests.partial_request import GIVEN, VARIANT
from farm.types.fields import Field

if TYPE_CHECKING:
    from farm.requests.partial_request import PartialRequest

Model = Annotated[str, typer.Argument(help="The model's name; `farm models` lists them.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
Follow = Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")]
Job = Annotated[str, typer.Argument(help="The job's id, or its beginning.")]
Cards = Annotated[
    list[str] | None, typer.Option("--card", help="Part of a card's model, or of its id. May be repeated.")
]
_PANELS = {"What to measure": (*VARIANT, "operators"), "Where, and the verdict": ("reuse", "target")}
_PANEL_OF = {name: panel for panel, names in _PANELS.items() for name in names}
_how, _what, _where = (functools.partial(typer.Option, rich_help_panel=panel) for panel in ("How to measure", *_PANELS))


def _parameter(field: Field, *, of_a_job: bool) -> inspect.Parameter:
    """The parameter of a command for a declared field; None if it is not given.

    Args:
        of_a_job: for `run` and `submit`, where some fields take several values.
    """
    several = of_a_job and field.several
    shown = (
        field
        if several
        else dataclasses.replace(field, several=False, metavar=field.metavar if not field.several else None)
    )
    kind = str if several or field.type is tuple else field.type
    panel = _PANEL_OF.get(field.name, "How to measure") if of_a_job else None
    option = typer.Option(
        *field.option, metavar=shown.metavar, help=shown.help, show_default=False, rich_help_panel=panel
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _with_parameters(
    command: Callable[..., None], verb: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Give a function the name and the text of a verb, and other parameters, which Typer reads."""
    found = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in found}
    return command


def variant_options(*, without: Iterable[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of a model variant to a command, in place of its parameter ``given``: a dict of the given fields.

    Args:
        without: fields that have no option here, or an own one.
    """
    fields = {name: one for name, one in VARIANT.items() if one.option and name not in without}

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            given = {name: value for name in fields if (value := values.pop(name)) is not None}
            verb(given=given, **values)

        parameters: list[inspect.Parameter] = []
        for one in inspect.signature(verb, eval_str=True).parameters.values():
            shared = [_parameter(field, of_a_job=False) for field in fields.values()]
            parameters += shared if one.name == "given" else [one]
        return _with_parameters(command, verb, parameters)

    return decorate


@dataclass(frozen=True)
class CliOptions:
    """The options of `run` and `submit`. `given` has the fields of a request that were given, by name."""

    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL", help="Models by name, or patterns such as 'resnet*'; `farm models` lists them."
        ),
    ] = None
    files: Annotated[
        list[Path] | None,
        _what("-f", "--file", help="A measurement file (YAML), - for standard input. May be repeated."),
    ] = None
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quick: Annotated[bool, _how("--quick", help="Short windows, wide intervals: a first look.")] = False
    card: Annotated[
        list[str] | None,
        _where(
            help="A card: its id, index, host:index, 'cpu', 'gpu', or part of its model name. May be repeated."
            " Default: all cards of one model."
        ),
    ] = None
    dry_run: Annotated[
        bool,
        _where(
            "--dry-run", help="Print what would be measured, how much is known and how long it takes; start nothing."
        ),
    ] = False
    check: Annotated[bool, _where("--check", help="Exit with code 5 unless every verdict passes.")] = False
    as_json: Annotated[bool, _where("--json", help="Print only JSON on stdout.")] = False

    def requests(self) -> list[PartialRequest]:
        """One request per model and per entry of the files, for each combination of the options with several values.

        The command line wins over a file.

        Raises:
            UsageError: nothing to measure was named.
            UnknownModel, UnsupportedModel, MeasurementFileError: see `farm.models.catalog.find` and
                `farm.requests.measurement_file.load`.
        """
        from farm.models.catalog import find, matching
        from farm.requests import measurement_file
        from farm.requests.partial_request import QUICK, PartialRequest, operator_names

        given = {**(QUICK if self.quick else {}), **self.given}
        if "operators" in given:
            given["operators"] = operator_names(given["operators"])
        several = [name for name, one in GIVEN.items() if one.several]
        grid = [
            [(name, number) for number in _numbers(f"--{name}", given.pop(name))] for name in several if name in given
        ]
        if not self.models and not self.files:
            raise UsageError(
                "Nothing to measure was named.", "Name a model, e.g. `farm run resnet18`, or a file with -f."
            )
        models = list(dict.fromkeys(found for name in self.models or () for found in matching(name)))
        for name in models:
            find(name)
        cells = [PartialRequest(**{**given, **dict(cell)}) for cell in itertools.product(*grid)]
        found = [cell.over(PartialRequest(model=name)) for name in models for cell in cells]
        for entry in measurement_file.load(self.files or (), check_model=find):
            found += [cell.over(entry) for cell in (cells if entry.model else cells[:1])]  # a sweep has its own grid
        return found


def _numbers(option: str, text: str) -> list[int]:
    """Split "1,8,64" into numbers, without repetitions."""
    for part in text.split(","):
        if not part.strip().lstrip("-").isdecimal():
            raise UsageError(
                f"{option} needs a whole number, not '{part}'.", f"Separate several by commas: {option} 1,8."
            )
    return list(dict.fromkeys(map(int, text.split(","))))


def request_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `run` and `submit` to a command, which receives them as its first argument, a `CliOptions`."""
    fields = {name: one for name, one in GIVEN.items() if one.option}
    shared = inspect.signature(CliOptions, eval_str=True).parameters
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]

    def command(**values: Any) -> None:
        given = {name: value for name in fields if (value := values.pop(name)) is not None}
        options = CliOptions(given=given, **{name: values.pop(name) for name in shared if name != "given"})
        verb(options, **values)

    parameters: list[inspect.Parameter] = []
    for name, one in shared.items():
        parameters += [_parameter(field, of_a_job=True) for field in fields.values()] if name == "given" else [one]
    return _with_parameters(command, verb, [*parameters, *own])
