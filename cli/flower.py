"""``farm flower``: Celery's web monitor on this farm's broker."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from cli.output import say

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def flower(
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Default: the setting flower_port.")] = None,
    address: Annotated[
        str, typer.Option(help="Address to listen on. Other than loopback needs a password.")
    ] = "127.0.0.1",
    writable: Annotated[
        bool, typer.Option("--writable", help="Let it revoke tasks and stop workers. Default: it only looks.")
    ] = False,
) -> None:
    """Show queues, workers and tasks in the browser."""
    from farm.errors import UsageError
    from farm.settings import settings
    from tasks.app import check_broker

    in_force = settings()
    check_broker(in_force)
    if address not in LOOPBACK and not in_force.flower_basic_auth:
        # Flower's /metrics stays open even so; a reverse proxy has to close it.
        raise UsageError(
            f"Flower would be open to everyone who reaches {address}.",
            "Set FARM_FLOWER_BASIC_AUTH=user:password, or leave --address out.",
        )
    in_force.state_dir.mkdir(parents=True, exist_ok=True)
    chosen_port = in_force.flower_port if port is None else port
    # By the environment, where process listings do not show it.
    environment = {
        **os.environ,
        "FLOWER_ADDRESS": address,
        "FLOWER_PORT": str(chosen_port),
        "FLOWER_PERSISTENT": "true",
        "FLOWER_DB": str(in_force.state_dir / "flower"),
        "FLOWER_STATE_SAVE_INTERVAL": "10000",
        "FLOWER_READ_ONLY": "false" if writable else "true",
        "FLOWER_TASKS_COLUMNS": "name,args,state,runtime,worker,exception,received,uuid",
    }
    if in_force.flower_basic_auth:
        environment["FLOWER_BASIC_AUTH"] = in_force.flower_basic_auth
    say(f"Flower on http://{address}:{chosen_port} ({'writable' if writable else 'read-only'}); Ctrl-C ends it.")
    sys.stderr.flush()
    command = [sys.executable, "-m", "celery", "-A", "tasks.app", "flower"]
    os.execve(command[0], command, environment)
