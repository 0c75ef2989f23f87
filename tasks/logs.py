"""Logging of the farm's processes: the same format in all of them, plain or JSON.

Celery would configure its own format in every pool process. Importing this module prevents that
(`setup_logging`)."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import textwrap
import threading
from types import TracebackType
from typing import Any

from celery.signals import setup_logging

from farm.errors.safe_text import printable, without_secrets
from tasks.app import CARD_VARIABLE

#: Environment variable of worker processes; if set, they log JSON. The supervisor sets it; it is
#: not a setting.
JSON_VARIABLE = "FARM_WORKER_JSON_LOGS"


class JsonLines(logging.Formatter):
    """One JSON object per line: time_s, level, logger, message; also card and traceback if they
    exist.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
        }
        line |= {"logger": record.name, "message": without_secrets(record.getMessage())}
        if card := os.environ.get(CARD_VARIABLE):
            line["card"] = card
        if record.exc_info:
            line["traceback"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(line)


class PlainLines(logging.Formatter):
    """One line per record. Control characters are escaped: text from a message must not look like a
    record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s  %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(without_secrets(super().formatMessage(record)))

    def formatException(self, exc_info: Any) -> str:
        return textwrap.indent(
            printable(without_secrets(super().formatException(exc_info)), keep="\n"), "    "
        )


def set_up(as_json: bool | None = None) -> None:
    """Log to standard error: all loggers, Python's warnings and uncaught exceptions. Without
    ``as_json``, the environment variable `JSON_VARIABLE` decides the format."""
    as_json = bool(os.environ.get(JSON_VARIABLE)) if as_json is None else as_json
    formatter = JsonLines() if as_json else PlainLines()
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    import celery.apps.worker  # only a worker's process needs it

    celery.apps.worker.safe_say = functools.partial(_say, formatter)


@setup_logging.connect(weak=False)
def _instead_of_celery(**_: Any) -> None:
    set_up()


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger("farm").critical(
        "%s: %s", kind.__name__, error, exc_info=(kind, error, trace)
    )


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is not SystemExit and arguments.exc_value is not None:
        _log_uncaught(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)


def _say(formatter: logging.Formatter, message: Any, _stream: Any = None) -> None:
    """Write a message of Celery's shutdown. A signal handler calls this, so it must not wait for a
    lock.
    """
    record = logging.LogRecord("celery.worker", logging.INFO, "", 0, str(message), None, None)
    with contextlib.suppress(OSError):
        os.write(2, f"{formatter.format(record)}\n".encode())
