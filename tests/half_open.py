"""A TCP proxy whose connections can become half-open, as after a NAT or a load balancer has forgotten them.

A frozen connection stays open on both sides and forwards nothing more, not even its end. The proxy's kernel still
acknowledges packets, so neither side's kernel notices anything. New connections work.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self


class HalfOpenProxy:
    """A proxy in a thread of its own. It listens in the network namespace of the thread that enters it.

    Args:
        host, port: of the server behind the proxy.
        address: on which the proxy listens; its `port` is free to choose for the system.
    """

    def __init__(self, host: str, port: int, address: str = "127.0.0.1") -> None:
        self.address = address
        self.port = 0
        self._server = (host, port)
        self._links: set[_Link] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def freeze(self) -> int:
        """Make all present connections half-open; return their number."""
        return self._in_loop(self._freeze())

    def open_links(self) -> int:
        """Return the number of connections that still forward."""
        return self._in_loop(self._count())

    def __enter__(self) -> Self:
        self._thread.start()
        self.port = self._in_loop(self._listen())
        return self

    def __exit__(self, *error: object) -> None:
        self._in_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _in_loop(self, doing):
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(10)

    async def _listen(self) -> int:
        self._listener = await asyncio.start_server(self._connect, self.address, 0)
        return self._listener.sockets[0].getsockname()[1]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection(*self._server)
        except OSError:
            writer.close()
            return
        link = _Link(writer, requests)
        self._links.add(link)
        await asyncio.gather(link.forward(reader, requests), link.forward(answers, writer))
        if not link.frozen:
            self._links.discard(link)

    async def _freeze(self) -> int:
        frozen = 0
        for link in self._links:
            frozen += not link.frozen
            link.frozen = True
        return frozen

    async def _count(self) -> int:
        return sum(not link.frozen for link in self._links)

    async def _close(self) -> None:
        self._listener.close()
        for link in self._links:
            link.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


class _Link:
    """One connection: a client, and the server behind the proxy."""

    def __init__(self, *writers: asyncio.StreamWriter) -> None:
        self.frozen = False
        self._writers = writers

    async def forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if not self.frozen:
                    target.write(data)
                    await target.drain()
        except OSError:
            pass
        if not self.frozen:
            target.close()

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
