"""A real ``farm flower`` for a test's farm, and its pages."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from tests.farms import Farm

AUTH = "operator:a-secret-word"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Page:
    """Flower's answers on ``port``; ``auth`` is its user:password."""

    def __init__(self, port: int, auth: str) -> None:
        self.port = port
        self.auth = auth

    def get(self, path: str, auth: str | None = "", method: str = "GET") -> tuple[int, str]:
        """Return status and text; with another ``user:password``, or without one (None)."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        if auth is not None:
            request.add_header(
                "Authorization", "Basic " + base64.b64encode((auth or self.auth).encode()).decode()
            )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    def tasks(self) -> dict[str, Any]:
        status, text = self.get("/api/tasks")
        return dict(json.loads(text)) if status == 200 else {}

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.get("/", auth=None)[0] == 401
        return False

    def hears(self) -> bool:
        """True if a worker's heartbeat has arrived: Flower never shows events from before it
        listened.
        """
        status, text = self.get("/workers?json=1")
        return status == 200 and any(worker.get("status") for worker in json.loads(text)["data"])


@contextlib.contextmanager
def flower_of(farm: Farm, auth: str = AUTH) -> Iterator[tuple[subprocess.Popen[bytes], Page]]:
    """Start ``farm flower`` with a farm's settings and wait until it answers; ``auth`` is the
    user:password in these settings."""
    port = free_port()
    process = farm.start("flower", "--port", str(port))
    page = Page(port, auth)
    try:
        farm.wait_for(page.answers)
        yield process, page
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
