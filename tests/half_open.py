"""A TCP proxy whose connections can become half-open, as after a NAT or a load balancer has
forgotten them.

    with HalfOpenProxy(broker.socket) as proxy:
        client = redis.Redis(host=proxy.address, port=proxy.port)
        proxy.freeze()

A frozen connection stays open on both sides and forwards nothing more, not even its end. The kernel
of the proxy still acknowledges packets, so the kernels of both sides notice nothing. New
connections work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self


class HalfOpenProxy:
    """A proxy in a thread of its own. It listens in the network namespace of the thread that enters
    it.

    Args:
        socket: the Unix socket of the server behind the proxy.
        address: on which the proxy listens; the system chooses its `port`.
    """

    def __init__(self, socket: Path, address: str = "127.0.0.1") -> None:
        self.address = address
        self.port = 0
        self._socket = socket
        self._links: list[_Link] = []
        self._listener: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def freeze(self, after_bytes: int = 0) -> int:
        """Make all present connections half-open; return their number. Each still forwards
        ``after_bytes``.
        """
        return int(self._run(self._freeze(after_bytes)))

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._listen())
        return self

    def __exit__(self, *error: object) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, task: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(10)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._connect, self.address, 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _connect(self, requests: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            answers, server = await asyncio.open_unix_connection(self._socket)
        except OSError:
            client.close()
            return
        link = _Link(client, server)
        self._links.append(link)
        await asyncio.gather(link.forward(requests, server), link.forward(answers, client))

    async def _freeze(self, after_bytes: int) -> int:
        alive = [link for link in self._links if link.left is None and not link.ended]
        for link in alive:
            link.left = after_bytes
        return len(alive)

    async def _close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for link in self._links:
            link.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)


class _Link:
    """One connection of a client with the server.

    Attributes:
        left: how many bytes it still forwards; None: it is not frozen.
    """

    def __init__(self, *sides: asyncio.StreamWriter) -> None:
        self.left: int | None = None
        self.ended = False
        self._sides = sides

    async def forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if self.left is not None:
                    data = data[: self.left]
                    self.left -= len(data)
                target.write(data)
                await target.drain()
        except OSError:
            pass
        if self.left is None:
            self.ended = True
            target.close()

    def close(self) -> None:
        for side in self._sides:
            side.transport.abort()
