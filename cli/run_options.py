"""The options that `run` and `submit` share, declared once, and how they become wishes.

A verb decorated with `asks` takes an `Asked` as its first argument; its command line has the shared options beside
its own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from farm.requests.partial_request import PartialRequest

_what = functools.partial(typer.Option, rich_help_panel="What to measure")
_how = functools.partial(typer.Option, rich_help_panel="How to measure")
_where = functools.partial(typer.Option, rich_help_panel="Where, and the verdict")


@dataclass(frozen=True)
class Asked:
    """What was said on the command line of `run` or `submit`; None where nothing was said.

    A field that a `PartialRequest` has too, by the same name, is what the person wishes.
    """

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
    batch: Annotated[
        str | None,
        _what("-b", "--batch", metavar="N,...", help="Batch size. Default: what suits the card. Several: a job each."),
    ] = None
    input_size: Annotated[int | None, _what(help="Height and width of the input. Default: the model's own.")] = None
    length: Annotated[
        str | None,
        _what(metavar="N,...", help="Tokens in each sequence. Default: the model's own. Several: a job each."),
    ] = None
    padded: Annotated[
        bool | None, _what("--padded", help="Sequences of unequal length, filled up and masked.", show_default=False)
    ] = None
    phase: Annotated[
        str | None,
        _what(help="encode, prefill (a prompt) or decode (one token beside a cache). Default: the model's first."),
    ] = None
    cache: Annotated[
        str | None, _what(metavar="N,...", help="Tokens that decode is beside. Default: 1024. Several: a job each.")
    ] = None
    layers: Annotated[int | None, _what(help="Keep so many of the model's layers. Default: all.")] = None
    text: Annotated[
        Path | None, _what(metavar="FILE", help="A text that language models read. Default: the farm's own.")
    ] = None
    tokenizer: Annotated[
        Path | None,
        _what(metavar="FOLDER", help="With --text: the folder of the tokenizer.json that makes it into ids."),
    ] = None
    dtype: Annotated[
        str | None,
        _what(
            help="float32, float16 or bfloat16. Default: on a GPU bfloat16 where the model generates text, else float32."
        ),
    ] = None
    memory_format: Annotated[str | None, _what(help="contiguous or channels_last. Default: contiguous.")] = None
    mode: Annotated[str | None, _what(help="eval or train. Default: eval.")] = None
    step: Annotated[
        str | None,
        _what(help="training: one iteration, with loss, backward and optimizer. Default: the forward alone."),
    ] = None
    optimizer: Annotated[
        str | None,
        _what(help="Of a step: sgd, adam or adamw, with -foreach or -fused behind it if wanted. Default: sgd."),
    ] = None
    amp: Annotated[
        str | None, _what(help="Of a step: bfloat16 or float16, what autocast computes in. Default: none.")
    ] = None
    accumulate: Annotated[int | None, _what(help="Of a step: passes before the optimizer. Default: 1.")] = None
    recompute: Annotated[
        str | None,
        _what(
            metavar="blocks|PATH,...",
            help="Of a step: modules that are run anew in the backward instead of keeping what they computed.",
        ),
    ] = None
    operators: Annotated[
        str | None,
        _what(
            help="all, auto (the heaviest types first, until the target is reached), or names such as Conv2d,Linear."
            " Default: all."
        ),
    ] = None
    launch: Annotated[
        str | None, _how(help="graph (CUDA graphs) or eager. Default: graph on a GPU, eager on a CPU.")
    ] = None
    residency: Annotated[
        str | None, _how(help="Which data lies in the cache: resident, reuse, stream or chain. Default: resident.")
    ] = None
    data: Annotated[
        str | None,
        _how(
            help="Values of the inputs: seen (as in the running model; default on GPUs), normal (default on CPUs), zeros."
        ),
    ] = None
    tf32: Annotated[bool | None, _how("--tf32/--no-tf32", help="Allow TF32 in float32 arithmetic.")] = None
    cudnn_benchmark: Annotated[
        bool | None, _how("--cudnn-benchmark/--no-cudnn-benchmark", help="Let cuDNN try kernels out.")
    ] = None
    maximum_s: Annotated[float | None, _how("--window", help="Longest window of one reading, in seconds.")] = None
    quick: Annotated[bool, _how("--quick", help="Short windows, wide intervals: a first look.")] = False
    card: Annotated[
        list[str] | None,
        _where(
            help="A card: its id, index, host:index, 'cpu', 'gpu', or part of its model name. May be repeated."
            " Default: all cards of one model."
        ),
    ] = None
    reuse: Annotated[
        str | None,
        _where(
            help="Readings to take from the database: those of the same card model (model), of the same card (card), of the same card model also"
            " from other farms (imported), or none."
            " Default: model."
        ),
    ] = None
    placements: Annotated[
        str | None,
        _how(
            help="Read tuples also with tensors in slow memory: all configurations (all), each tensor alone and all (each), or"
            " none. Default: none."
        ),
    ] = None
    target: Annotated[float | None, _where(help="Accuracy and coverage that the verdict needs. Default: 0.95.")] = None
    dry_run: Annotated[
        bool,
        _where("--dry-run", help="Say what would be measured, how much is known and how long it takes; begin nothing."),
    ] = False
    check: Annotated[bool, _where("--check", help="Exit with 5 unless every verdict passes.")] = False
    as_json: Annotated[bool, _where("--json", help="Print only JSON on stdout.")] = False

    def wishes(self) -> list[PartialRequest]:
        """One wish per model and per entry of the files, for each combination of the lists that the command line says; what it
        says wins over a file.

        Raises:
            UsageError: nothing to measure was named.
            UnknownModel (of a pattern: it fits no name), UnsupportedModel, MeasurementFileError: see `farm.models.catalog.find` and
                `farm.requests.measurement_file.load`.
        """
        from farm.errors import UsageError
        from farm.models.catalog import find, matching
        from farm.requests import measurement_file
        from farm.requests.partial_request import QUICK, PartialRequest, operator_names

        wished = {f.name: getattr(self, f.name) for f in dataclasses.fields(PartialRequest) if hasattr(self, f.name)}
        grid = {name: _numbers(f"--{name}", wished.pop(name)) for name in _GRID}
        said = PartialRequest(
            **{**wished, "operators": None if self.operators is None else operator_names(self.operators)}
        )
        if said.operators == ():
            raise UsageError("No operators were named.", "Give --operators all, auto, or names such as Conv2d,Linear.")
        if self.quick:
            said = said.over(PartialRequest(**QUICK))
        if not self.models and not self.files:
            raise UsageError(
                "Nothing to measure was named.", "Name a model, e.g. `farm run resnet18`, or a file with -f."
            )
        models = list(dict.fromkeys(found for name in self.models or () for found in matching(name)))
        for name in models:
            find(name)
        cells: list[dict[str, Any]] = [
            dict(zip(_GRID, cell, strict=True)) for cell in itertools.product(*grid.values())
        ]
        named = [dataclasses.replace(said, model=name, **cell) for name in models for cell in cells]
        for wish in measurement_file.load(self.files or (), check_model=find):
            of_it = cells if wish.model else cells[:1]  # a sweep has a grid of its own
            named += [dataclasses.replace(said, **cell).over(wish) for cell in of_it]
        return named


#: What may be several numbers on the command line.
_GRID = ("batch", "length", "cache")


def _numbers(option: str, text: str | None) -> tuple[int | None, ...]:
    """ "1,8,64" as numbers; one None where nothing was said."""
    from farm.errors import UsageError

    if text is None:
        return (None,)
    for part in text.split(","):
        if not part.strip().lstrip("-").isdecimal():
            raise UsageError(
                f"{option} wants a whole number, not '{part}'.", f"Several are separated by commas: {option} 1,8."
            )
    return tuple(dict.fromkeys(map(int, text.split(","))))


def asks(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the shared options; it receives them as one `Asked`, first."""
    shared = inspect.signature(Asked, eval_str=True).parameters
    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]

    def command(**values: Any) -> None:
        asked = Asked(**{name: values.pop(name) for name in shared})
        verb(asked, **values)

    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*shared.values(), *own]]
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
