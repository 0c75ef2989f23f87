"""What an add-on adds to the farm: its description, which imports nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Command:
    """A command of `farm`.

    Its module may import `cli.options`, `cli.output` and `cli.tables`. A file `options.toml` beside
    the module has the flags and help of the command's options.
    """

    name: str  # one word, or two for a command below `farm cards`: "cards check"
    place: str  # of a function or a `typer.Typer`
    example: str
    group: str = "Add-ons"  # the heading in `farm --help`


@dataclass(frozen=True)
class AddOn:
    """What an add-on adds to the farm. A place is written as ``module:attribute``, so that the
    description imports nothing.

    Example:
        >>> command = Command("carbon", "farm_carbon.commands:carbon", "farm carbon JOB")
        >>> ADD_ON = AddOn("carbon", commands=(command,))
    """

    name: str
    commands: tuple[Command, ...] = ()
    #: A module -> the names of ``import farm`` that it defines, separated by blanks.
    public: Mapping[str, str] = field(default_factory=dict)
    #: The place of a tuple of `farm.benchmark_process.handlers.Handler`.
    handlers: str = ""
    #: The place of a function that puts tensors in slow memory: `farm.benchmark.passes.Offload`.
    offload: str = ""
    #: A module that is a `farm.report.pages.ResultPages`.
    pages: str = ""
    #: A module that is a `farm.jobs.card_checks.CardChecks`.
    card_checks: str = ""
    #: The place of a function that shows the history of a card, given its name, the file of a page
    #: or None, and whether as JSON.
    card_history: str = ""
