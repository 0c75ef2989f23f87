"""A TLS proxy for a real server on a Unix socket, because the servers from wheels are built without
TLS.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType

_POSTGRES_SSL_REQUEST = bytes.fromhex("0000000804d2162f")


class TlsProxy:
    """Listens on a free port of 127.0.0.1 and passes every connection on to ``socket_path``,
    decrypted.
    """

    def __init__(
        self, socket_path: Path, certificate: Path, key: Path, *, postgres: bool = False
    ) -> None:
        self._target = str(socket_path)
        self._postgres = postgres
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with contextlib.suppress(OSError), raw:
            if self._postgres:
                if raw.recv(8, socket.MSG_WAITALL) != _POSTGRES_SSL_REQUEST:
                    return
                raw.sendall(b"S")
            with (
                self._context.wrap_socket(raw, server_side=True) as client,
                socket.socket(socket.AF_UNIX) as server,
            ):
                server.connect(self._target)
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()

    def __enter__(self) -> TlsProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            sink.sendall(chunk)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
