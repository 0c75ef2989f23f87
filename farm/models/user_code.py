"""Runs code of users, such as a model's module and its forward pass, without its effects on this
process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from farm.errors import CaptureError, told
from farm.models.card_questions import without_context

_OF_THE_FARM = ("farm", "tasks", "cli")


class EndsProcess(SystemExit):
    """User code called ``os._exit``, or raised an exception that nothing handles."""


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """A context for user code: what it prints goes to stderr, and ``os._exit`` raises
    `EndsProcess`. Its questions about the card's capability create no CUDA context.

    A child process that user code forks may call ``os._exit``, and so may the farm.
    """
    with contextlib.redirect_stdout(sys.stderr), _without_exit(), without_context():
        try:
            yield
        except (Exception, SystemExit, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            raise EndsProcess(told(error)) from error


@contextlib.contextmanager
def captured_code() -> Iterator[None]:
    """As `user_code`, for a capture: raises `CaptureError` if the code would end this process, and
    restores the settings of PyTorch that it changes."""
    from farm.types.torch_settings import restored

    try:
        with user_code(), restored():
            yield
    except SystemExit as error:
        problem = f"The model ends the process that runs it: {told(error)}"
        raise CaptureError(problem, "Remove this call from the model.") from error


@contextlib.contextmanager
def _without_exit() -> Iterator[None]:
    exit_at_once = os._exit
    process, thread = os.getpid(), threading.get_ident()

    def refuse(status: int) -> NoReturn:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if os.getpid() != process or caller.partition(".")[0] in _OF_THE_FARM:
            exit_at_once(status)
        if threading.get_ident() != thread:  # an exception would end this thread only
            os.write(2, b"error: The code of the model called os._exit in a thread.\n")
            exit_at_once(status or 1)
        raise EndsProcess(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_at_once
