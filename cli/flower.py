"""``farm flower``: Celery's web monitor on this farm's broker."""

from __future__ import annotations

import typer

from cli.output import say

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def flower(
    port: int | None = typer.Option(None, min=0, max=65535, help="Default: the setting flower_port."),
    address: str = typer.Option("127.0.0.1", help="Address to listen on. Other than loopback needs a password."),
    writable: bool = typer.Option(
        False, "--writable", help="Let it revoke tasks and stop workers. Default: it only looks."
    ),
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
    from tasks.flower import serve

    def listening(taken: int) -> None:
        say(f"Flower on http://{address}:{taken} ({'writable' if writable else 'read-only'}); Ctrl-C ends it.")

    serve(in_force, address, in_force.flower_port if port is None else port, writable=writable, listening=listening)
