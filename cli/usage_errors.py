"""What the parser of the command line refuses, in the words and the form of every other error."""

from __future__ import annotations

import re
from typing import Any

from farm.errors import UsageError, did_you_mean

# What pydantic, which reads the options, finds wrong with a number -> what to say instead.
_WANTED = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "a number of at least {ge}",
    "less_than_equal": "a number of at most {le}",
}


def explained(error: Any, outer: Any = None) -> UsageError:
    """A parser's usage error in our words. Typer has its own classes for these, or click's: told by their names.

    Args:
        outer: the context of `farm` itself, for errors that do not say which command they are of.
    """
    kind, context = type(error).__name__, error.ctx
    verb = context.command_path if context else " ".join(["farm", *filter(None, [outer and outer.invoked_subcommand])])
    step = f"`{verb} -h` tells what it takes."
    if wanted := _wanted(error):
        return UsageError(wanted, step)
    if kind == "NoSuchOption":
        known = [name for one in context.command.params for name in (*one.opts, *one.secondary_opts)] if context else []
        return UsageError(f"There is no option '{error.option_name}'.", did_you_mean(error.option_name, known) or step)
    if kind == "MissingParameter" and error.param is not None:
        return UsageError(f"{_name(error.param)} is missing.", step)
    if kind == "BadOptionUsage" and "requires an argument" in error.message:
        return UsageError(f"{error.option_name} needs a value.", step)
    if context and (unknown := re.match(r"No such command '(.*?)'", error.message)):
        near = did_you_mean(unknown[1], context.command.commands)
        return UsageError(
            f"There is no command '{context.command_path} {unknown[1]}'.",
            near or f"`{context.command_path} -h` lists them.",
        )
    if surplus := re.match(r"Got unexpected extra argument\S* \((.*)\)", error.message):
        return UsageError(f"`{verb}` has no place for '{surplus[1]}'.", step)
    first = error.format_message().strip().splitlines()[0]
    return UsageError(f"{first.rstrip('.')}.", step)


def _name(parameter: Any) -> str:
    option = max(parameter.opts, key=len)
    return (
        option if option.startswith("-") else str(parameter.metavar or option.upper()).rstrip(".")
    )  # "JOB..." takes several


def _wanted(error: Any) -> str:
    """What an option wants that got no such number; "" for other mistakes."""
    errors: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    parameter = getattr(error, "param", None)
    if not errors or parameter is None or errors[0]["type"] not in _WANTED:
        return ""
    wanted = _WANTED[errors[0]["type"]].format(**errors[0].get("ctx", {}))
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if errors[0]["type"] in ("greater_than_equal", "less_than_equal") and None not in (least, most):
        wanted = f"a number from {least} to {most}"
    return f"{_name(parameter)} wants {wanted}, not '{errors[0]['input']}'."
