"""Run Flower in this process, on the farm's broker, for ``farm flower``.

Flower's own command is not used: it would import modules of the current folder (Celery's ``-A``),
run a file ``flowerconfig.py`` there, print a traceback if the port is in use, and not stop while
its broker is unreachable."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from flower.app import Flower
from flower.command import apply_env_options, extract_settings, setup_logging
from flower.options import options
from flower.urls import settings as handler_settings
from tornado.log import enable_pretty_logging

from farm.errors import UsageError
from farm.errors.safe_text import without_secrets
from farm.settings import Settings
from farm.settings.shared_files import why_not_own
from tasks.app import app


def serve(
    current: Settings,
    address: str,
    port: int,
    *,
    writable: bool,
    listening: Callable[[int], object] = lambda port: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then end this process. Flower keeps its history in the state
    folder. Call ``listening`` with the port when the server listens: if ``port`` is 0, the system
    chooses a free one. Raises `UsageError` if the address or the port cannot be used."""
    apply_env_options()
    chosen: dict[str, Any] = {
        "address": address,
        "port": port,
        "persistent": True,
        "db": str(current.state_dir / "flower"),
        "state_save_interval": 10_000,
        "read_only": not writable,
        "tasks_columns": "name,args,state,runtime,worker,exception,received,uuid",
    }
    if current.flower_basic_auth:
        chosen["basic_auth"] = current.flower_basic_auth.split(",")
    for name, value in chosen.items():
        setattr(options, name, value)
    enable_pretty_logging(options)
    setup_logging()
    for handler in logging.getLogger().handlers:
        handler.addFilter(_without_secrets)
    extract_settings()
    _check_folder(current)
    served = Flower(capp=app, options=options, **handler_settings)
    try:
        listening(served.start_http_server())
    except OSError as error:
        why, step = error.strerror or error, "Choose another --address or --port."
        if error.errno == errno.EADDRINUSE:
            why, step = (
                "another program uses this port",
                "Choose another port with --port; 0 takes a free port.",
            )
        raise UsageError(f"Flower cannot listen on {address}:{port}: {why}.", step) from error
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    try:
        served.start()
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        served.stop()
    # A normal exit would wait for Flower's threads, which wait for the broker without a time limit.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _check_folder(current: Settings) -> None:
    """Create the state folder. Raises `UsageError` if other users can change its files: Flower's
    history can contain code."""
    folder = current.state_dir
    try:
        problem = why_not_own(folder)
    except OSError as error:
        text = f"The state folder {folder} cannot be created: {error.strerror or error}."
        raise UsageError(
            text, "Set FARM_STATE_DIR to a folder that this user may write to."
        ) from error
    if problem:
        raise UsageError(
            f"Another user can write to the folder of Flower's history, {folder}, which can "
            f"contain code: {problem}.",
            f"Run `chmod go-w {folder}`, or set FARM_STATE_DIR to a folder of your own.",
        )


def _without_secrets(record: logging.LogRecord) -> bool:
    """A log filter that removes secrets from each record and rejects none. Flower replaces the
    farm's formatter, which would remove them."""
    record.msg, record.args = without_secrets(record.getMessage()), ()
    if record.exc_info:
        record.exc_text = without_secrets(logging.Formatter().formatException(record.exc_info))
    return True
