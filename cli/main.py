"""The program ``farm``: its commands, and the one place that turns an error into a message and an
exit code.

A command is imported and built when it is used, and heavy modules (pydantic, SQLAlchemy, Celery,
torch) inside the
commands: ``farm --help`` takes about the time that Typer needs to load.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from cli.commands import (
    all_commands,
    command_named,
    missing_add_on,
    step_about_unnamed_add_ons,
    with_joined_name,
)
from cli.options import flat, step_after_compile, with_compile_mode
from cli.output import Left, complain, noted, say, set_quiet
from cli.streams import discard_stdout, keep_results_apart, stdout_is_writable
from farm.errors import FarmError, UnknownModel, Unwritable, did_you_mean, error_text
from farm.errors.safe_text import without_secrets
from farm.extensions import at
from farm.types.add_on import Command
from farm.types.fields import A_NUMBER
from farm.types.release import __version__

INTERRUPTED = 130
MOST_CHARACTERS = 200  # of the name of a file in a message
HELP_OPTIONS = ("-h", "--help")
_WORDS = "farm.words"  # the key of the words of the command line in the context of Typer
_SERVERS = ("worker", "flower")  # they run until they are stopped


@functools.cache
def built(command: Command) -> Any:
    """The command of Typer."""
    implementation, parent = at(command.place), typer.Typer()
    example = f"Example: {command.example}"
    if isinstance(implementation, typer.Typer):
        parent.add_typer(implementation, name=command.name, epilog=example)
        registered = implementation.registered_commands
    else:
        parent.command(command.name)(implementation)
        registered = parent.registered_commands
    for entry in registered:
        entry.epilog = entry.epilog or example
        entry.short_help = _first_paragraph(entry.callback)
        entry.callback = flat(entry.callback)  # type: ignore[arg-type]
    return typer.main.get_group(parent).commands[command.name]


class _Commands(Mapping[str, Any]):
    """The commands by name, each built when it is used."""

    def __getitem__(self, name: str) -> Any:
        command = command_named(name)
        if command is None:
            raise KeyError(name)
        return built(command)

    def __iter__(self) -> Iterator[str]:
        return iter(all_commands())

    def __len__(self) -> int:
        return len(all_commands())


def _help_of(command: Command) -> str:
    implementation = at(command.place)
    if isinstance(implementation, typer.Typer):
        return str(implementation.info.help)
    return _first_paragraph(implementation)


def _first_paragraph(implementation: Any) -> str:
    """Return the first paragraph of a docstring on one line: a table of commands keeps the ends of
    lines.
    """
    text = inspect.getdoc(implementation) or ""
    return " ".join(text.partition("\n\n")[0].split())


class FarmGroup(TyperGroup):
    """Turns an exception of a command or of the parser into one message and the exit code of the
    error.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": _Commands()})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """List the commands without building them."""
        listed = copy.copy(self)
        listed.commands = {
            name: TyperCommand(name, help=_help_of(command), rich_help_panel=command.group)
            for name, command in all_commands().items()
        }
        super(FarmGroup, listed).format_help(ctx, formatter)

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **options: Any
    ) -> Any:
        words = tuple(args)
        if not args or not set(HELP_OPTIONS).isdisjoint(args):
            load_help()
        with reported_errors():  # the options of `farm` itself are parsed here
            context = super().make_context(info_name, with_compile_mode(args), *more, **options)
        context.meta[_WORDS] = words
        return context

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, with_joined_name(args))

    def invoke(self, ctx: Any) -> Any:
        with reported_errors(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def reported_errors(ctx: Any = None) -> Iterator[None]:
    def failure(message: str, next_step: str, exit_code: int) -> typer.Exit:
        if ctx is not None and ctx.params.get("debug"):
            import traceback

            sys.stderr.write(without_secrets(traceback.format_exc()))
        complain(message, next_step)
        return typer.Exit(exit_code)

    try:
        yield
    except UnknownModel as error:
        step = _with_step_after_compile(error.next_step, error.message, ctx)
        raise failure(error.message, step, error.exit_code) from error
    except FarmError as error:
        raise failure(error.message, error.next_step, error.exit_code) from error
    except Left as leaving:
        raise typer.Exit(INTERRUPTED) from leaving
    except KeyboardInterrupt as interruption:
        complain("interrupted.", *interruption.args)
        raise typer.Exit(INTERRUPTED) from interruption
    except BrokenPipeError:
        raise
    except Exception as error:
        parsers = type(error).__module__.startswith(("typer", "click"))
        # `farm` without a command shows its help; that and an exit are not errors.
        if parsers and hasattr(error, "ctx") and type(error).__name__ != "NoArgsIsHelpError":
            raise failure(*_usage_error(error, ctx), error.exit_code) from error  # type: ignore[attr-defined]
        if parsers or ctx is None:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name:
            step = (
                "Install the farm with its dependencies: `pip install operator-farm`, or `make` "
                "in a clone."
            )
            raise failure(f"The package '{error.name}' is not installed.", step, 1) from error
        if isinstance(error, OSError):
            raise failure(*_refused(error), 1) from error
        message = (
            f"an unexpected {type(error).__name__}: {error_text(error).strip() or 'no message'}"
        )
        raise failure(
            message, "This is a bug in farm. `farm --debug ...` shows the traceback.", 1
        ) from error


def _refused(error: OSError) -> tuple[str, str]:
    """Message and next step for an error of the operating system that no command expects."""
    if not stdout_is_writable():  # help is not written by this program itself
        discard_stdout()
        lost = Unwritable.because(error)
        return lost.message, lost.next_step
    name = str(error.filename or "")
    file = f": '{name[:MOST_CHARACTERS]}'" if name else ""
    message = (
        f"The operating system refused an operation ({error.strerror or error_text(error)}){file}."
    )
    return message, "Check names, rights and free space. `farm --debug ...` shows the traceback."


def load_help() -> None:
    """Import the module that prints the help without Rich's Markdown and tracebacks, a third of its
    time.
    """
    unused = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
    missing = [name for name in unused if name not in sys.modules]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], unused[name], object)
    try:
        import typer.rich_utils  # noqa: F401
    finally:
        for name in missing:
            del sys.modules[name]


#: Error of pydantic, which parses numbers -> the required value.
_REQUIRED = {
    **dict.fromkeys(("int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    "float_parsing": "a number",
    "value_error": A_NUMBER,
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
}


def _usage_error(error: Any, outer: Any = None) -> tuple[str, str]:
    """Message and next step for an error of the parser, whose classes (Typer's or click's) are
    known by name.
    """
    error_type, context, parameter = type(error).__name__, error.ctx, getattr(error, "param", None)
    verb = (
        context.command_path
        if context
        else " ".join(["farm", *filter(None, [outer and outer.invoked_subcommand])])
    )
    step = f"`{verb} -h` describes its arguments and options."
    if required := _required_value(error):
        return required, step
    if error_type == "NoSuchOption":
        names: list[str] = []
        for option in context.command.params if context else ():
            names += [text for text in (*option.opts, *option.secondary_opts) if text[:1] == "-"]
        return f"There is no option '{error.option_name}'.", did_you_mean(
            error.option_name, names
        ) or step
    if error_type == "MissingParameter" and parameter is not None:
        return f"{_name(parameter)} is missing.", step
    if error_type == "BadOptionUsage" and "requires an argument" in error.message:
        return f"{error.option_name} needs a value.", step
    if context and (unknown := re.match(r"No such command '(.*?)'", error.message)):
        name = unknown[1]
        near = did_you_mean(name, context.command.commands)
        step = missing_add_on(name) if verb == "farm" else near
        step = step or " ".join(filter(None, (near, step_about_unnamed_add_ons())))
        return (
            f"There is no command '{verb} {name}'.",
            step or f"`{verb} -h` lists the commands.",
        )
    if surplus := re.match(r"Got unexpected extra argument\S* \((.*)\)", error.message):
        message = f"`{verb}` does not take the argument '{surplus[1]}'."
        return message, _with_step_after_compile(step, message, outer)
    return f"{error.format_message().strip().splitlines()[0].rstrip('.')}.", step


def _with_step_after_compile(step: str, message: str, ctx: Any) -> str:
    """The next step of a message about an argument, and that of a wrong mode of `--compile`."""
    words = ctx.meta[_WORDS] if ctx is not None else ()
    return " ".join(filter(None, (step, step_after_compile(words, message))))


def _name(parameter: Any) -> str:
    option = max(parameter.opts, key=len)
    # The metavar of an argument that may be repeated is "JOB...".
    return (
        option if option.startswith("-") else str(parameter.metavar or option.upper()).rstrip(".")
    )


def _required_value(error: Any) -> str:
    """The value that an option requires, if it got something else than such a number; "" for other
    errors.
    """
    errors: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    parameter = getattr(error, "param", None)
    if not errors or parameter is None or (error_type := errors[0]["type"]) not in _REQUIRED:
        return ""
    required = _REQUIRED[error_type].format(**errors[0].get("ctx", {}))
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if error_type in ("greater_than_equal", "less_than_equal") and None not in (least, most):
        required = f"a number from {least} to {most}"
    return f"{_name(parameter)} needs {required}, not '{errors[0]['input']}'."


app = typer.Typer(
    name="farm",
    cls=FarmGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP_OPTIONS)},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"farm {__version__}")
        raise typer.Exit


@app.callback()
def farm(
    context: typer.Context,
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    quiet: bool = typer.Option(
        False, "--quiet", "-q", help="Print only results and errors: no notes, no progress."
    ),
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Measures the time and energy of PyTorch operators on real GPUs.

    Start with `farm run resnet18`.
    """
    set_quiet(quiet)
    from farm.settings import misspelt_variables

    for name, setting in misspelt_variables().items():
        say(f"warning: {name} is not a setting. Did you mean {setting}?")
    if (command := context.invoked_subcommand) not in _SERVERS:
        keep_results_apart()
        context.with_resource(noted(f"farm {command} is working"))


def _leave_interrupted() -> NoReturn:
    """End with the exit code of an interruption; Python would end by SIGINT after one inside an
    `exec`.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


def main() -> None:
    """The console script."""
    try:
        app()
    except KeyboardInterrupt:  # before a verb starts, or while it ends
        _leave_interrupted()
    except SystemExit as ending:
        if ending.code == INTERRUPTED:
            _leave_interrupted()
        raise
    except BrokenPipeError:
        # The reader (such as `head`) has ended. Keep Python from flushing into the closed pipe at
        # exit.
        discard_stdout()
        sys.exit(141)
    except OSError as error:  # no verb has started: the help or the version cannot be written
        discard_stdout()
        lost = Unwritable.because(error)
        complain(lost.message, lost.next_step)
        sys.exit(lost.exit_code)


if __name__ == "__main__":
    main()
