"""The options that `run` and `submit` share, declared once, and how they become wishes.

A verb decorated with `asks` takes an `Asked` as its first argument; its command line has the shared options beside
its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from farm.asking.defaults import Wish

_WHAT, _HOW, _WHERE = "What to measure", "How to measure", "Where, and the verdict"


@dataclass(frozen=True)
class Asked:
    """What was said on the command line of `run` or `submit`; None where nothing was said."""

    models: list[str] | None
    files: list[Path] | None
    batch: int | None
    input_size: int | None
    dtype: str | None
    memory_format: str | None
    mode: str | None
    operators: str | None
    launch: str | None
    residency: str | None
    data: str | None
    tf32: bool | None
    cudnn_benchmark: bool | None
    window: float | None
    quick: bool
    card: list[str] | None
    reuse: str | None
    target: float | None
    check: bool
    as_json: bool

    def wishes(self) -> list[Wish]:
        """One wish per model and per entry of the files; what the command line says wins over a file.

        Raises:
            UsageError: nothing to measure was named.
            UnknownModel, UnsupportedModel, MeasurementFileError: see `farm.models.catalog.find` and
                `farm.asking.measurement_file.load`.
        """
        from farm.asking import measurement_file
        from farm.asking.defaults import QUICK, Wish, operator_names
        from farm.errors import UsageError
        from farm.models.catalog import find

        said = Wish(
            batch=self.batch,
            input_size=self.input_size,
            dtype=self.dtype,
            memory_format=self.memory_format,
            mode=self.mode,
            operators=None if self.operators is None else operator_names(self.operators),
            launch=self.launch,
            residency=self.residency,
            data=self.data,
            tf32=self.tf32,
            cudnn_benchmark=self.cudnn_benchmark,
            reuse=self.reuse,
            target=self.target,
            maximum_s=self.window,
        )
        if said.operators == ():
            raise UsageError("No operators were named.", "Give --operators all, auto, or names such as Conv2d,Linear.")
        if self.quick:
            said = said.over(Wish(**QUICK))
        if not self.models and not self.files:
            raise UsageError(
                "Nothing to measure was named.", "Name a model, e.g. `farm run resnet18`, or a file with -f."
            )
        for name in self.models or ():
            find(name)
        named = [dataclasses.replace(said, model=name) for name in dict.fromkeys(self.models or ())]
        written = measurement_file.load(self.files or (), check_model=find)
        return named + [said.over(wish) for wish in written]


def _shared(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Models by name; `farm models` lists them.")
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="A measurement file (YAML). May be repeated.", rich_help_panel=_WHAT),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("-b", "--batch", help="Batch size. Default: what suits the card.", rich_help_panel=_WHAT),
    ] = None,
    input_size: Annotated[
        int | None,
        typer.Option(help="Height and width of the input. Default: the model's own.", rich_help_panel=_WHAT),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16. Default: float32.", rich_help_panel=_WHAT)
    ] = None,
    memory_format: Annotated[
        str | None,
        typer.Option(help="contiguous or channels_last. Default: contiguous.", rich_help_panel=_WHAT),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="eval or train. Default: eval.", rich_help_panel=_WHAT)] = None,
    operators: Annotated[
        str | None,
        typer.Option(
            help="all, auto (the heaviest types first, until the target is reached), or names such as Conv2d,Linear."
            " Default: all.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            help="graph (CUDA graphs) or eager. Default: graph on a GPU, eager on a CPU.", rich_help_panel=_HOW
        ),
    ] = None,
    residency: Annotated[
        str | None,
        typer.Option(
            help="Which data lies in the cache: resident, reuse, stream or chain. Default: resident.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Values of the inputs: seen (as in the running model; default on GPUs), normal (default on CPUs), zeros.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    tf32: Annotated[
        bool | None, typer.Option("--tf32/--no-tf32", help="Allow TF32 in float32 arithmetic.", rich_help_panel=_HOW)
    ] = None,
    cudnn_benchmark: Annotated[
        bool | None,
        typer.Option("--cudnn-benchmark/--no-cudnn-benchmark", help="Let cuDNN try kernels out.", rich_help_panel=_HOW),
    ] = None,
    window: Annotated[
        float | None, typer.Option(help="Longest window of one reading, in seconds.", rich_help_panel=_HOW)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short windows, wide intervals: a first look.", rich_help_panel=_HOW)
    ] = False,
    card: Annotated[
        list[str] | None,
        typer.Option(
            help="A card: its id, index, host:index, 'cpu', 'gpu', or part of its model name. May be repeated."
            " Default: all cards of one model.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            help="Readings to take from the database: those of the same card model, of the same card, or none."
            " Default: model.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Accuracy and coverage that the verdict needs. Default: 0.95.", rich_help_panel=_WHERE),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 5 unless every verdict passes.", rich_help_panel=_WHERE)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.", rich_help_panel=_WHERE)] = False,
) -> None:
    """Never called: its signature is the shared part of the command line."""


def asks(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the shared options; it receives them as one `Asked`, first."""
    shared = inspect.signature(_shared, eval_str=True).parameters
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]

    def command(**values: Any) -> None:
        asked = Asked(**{name: values.pop(name) for name in shared})
        verb(asked, **values)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*shared.values(), *own]]
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
