"""The program ``farm``: its verbs, and the one place where an error becomes a message and an exit code.

Everything heavy (pydantic, SQLAlchemy, Celery, torch) is imported inside the verbs: ``farm --help`` answers in about
the time that Typer itself takes to load.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from cli import (
    cards,
    compare,
    db,
    doctor,
    estimate,
    export,
    flower,
    glossary,
    importing,
    job_control,
    jobs,
    lazy_help,
    lookup,
    memory,
    models,
    operators,
    predict,
    publish,
    report,
    run,
    settings,
    significant,
    status,
    study,
    submit,
    trace,
    worker,
)
from cli.output import Left, complain, set_quiet
from farm import __version__
from farm.errors import FarmError, Unwritable

INTERRUPTED = 130
HELP_OPTIONS = ("-h", "--help")


class FarmGroup(TyperGroup):
    """Turns what a verb or the parser raises into one message and the exit code of the error."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **options: Any) -> Any:
        if not args or not set(HELP_OPTIONS).isdisjoint(args):
            lazy_help.load()
        with _answered():  # options of `farm` itself are read here
            return super().make_context(info_name, args, *more, **options)

    def invoke(self, ctx: Any) -> Any:
        with _answered(ctx):
            return super().invoke(ctx)


@contextlib.contextmanager
def _answered(ctx: Any = None) -> Iterator[None]:
    debug = ctx is not None and bool(ctx.params.get("debug"))
    try:
        yield
    except FarmError as error:
        _complain_of(error, debug)
        raise typer.Exit(error.exit_code) from error
    except Left as leaving:
        raise typer.Exit(INTERRUPTED) from leaving
    except KeyboardInterrupt as interruption:
        complain("interrupted.", getattr(interruption, "hint", ""))
        raise typer.Exit(INTERRUPTED) from interruption
    except BrokenPipeError:
        raise
    except Exception as error:
        parsers = type(error).__module__.startswith(("typer", "click"))
        # What `farm` alone is answered with is help, and an exit is one: neither is a mistake.
        if parsers and hasattr(error, "ctx") and type(error).__name__ != "NoArgsIsHelpError":
            from cli.usage_errors import explained

            _complain_of(explained(error, ctx), debug)
            raise typer.Exit(error.exit_code) from error  # type: ignore[attr-defined]
        if parsers or ctx is None:
            raise
        _trace(debug)
        complain(
            f"an unexpected {type(error).__name__}: {str(error).strip() or 'no message'}",
            "This is a fault in farm, not in what you asked. `farm --debug ...` shows where.",
        )
        raise typer.Exit(1) from error


def _complain_of(error: FarmError, debug: bool) -> None:
    _trace(debug)
    complain(error.message, error.next_step)


def _trace(debug: bool) -> None:
    if debug:
        import traceback

        traceback.print_exc()


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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Tell results and errors only: no notes, no progress.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Measures what PyTorch operators cost, in time and energy, on real GPUs.

    Start with `farm run resnet18`.
    """
    set_quiet(quiet)


# In the order in which a person meets them.
app.command("run")(run.run)
app.command("submit")(submit.submit)
app.command("worker")(worker.worker)
app.command("status")(status.status)
app.command("report")(report.report)
app.command("publish")(publish.publish)
app.command("jobs")(jobs.jobs)
app.command("resume")(job_control.resume)
app.command("retry")(job_control.retry)
app.command("cancel")(job_control.cancel)
app.command("cards")(cards.cards)
app.command("models")(models.models)
app.command("operators")(operators.operators)
app.command("memory")(memory.memory)
app.command("trace")(trace.trace)
app.command("compare")(compare.compare)
app.command("lookup")(lookup.lookup)
app.command("estimate")(estimate.estimate)
app.command("export")(export.export)
app.command("import")(importing.import_)
app.command("flower")(flower.flower)
app.command("doctor")(doctor.doctor)
app.command("settings")(settings.settings)
app.command("help")(glossary.glossary)
app.add_typer(significant.app, name="significant")
app.add_typer(study.app, name="study")
app.add_typer(predict.app, name="predict")
app.add_typer(db.app, name="db")


def _leave_interrupted() -> NoReturn:
    """End with the exit code of an interruption, all being in order.

    Python itself would end by SIGINT where the interruption passed through an `exec` (modules that load make their
    dataclasses so), whatever was made of it afterwards.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


def main() -> None:
    """The console script."""
    try:
        app()
    except KeyboardInterrupt:  # before a verb began, or while it was ending
        _leave_interrupted()
    except SystemExit as ending:
        if ending.code == INTERRUPTED:
            _leave_interrupted()
        raise
    except BrokenPipeError:
        # The reader (`head`, say) has gone: quiet, but keep Python from flushing into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # no verb had begun: it is the help, or the version, that cannot be written
        lost = Unwritable.because(error)
        complain(lost.message, lost.next_step)
        sys.exit(lost.exit_code)


if __name__ == "__main__":
    main()
