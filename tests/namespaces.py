"""Several hosts on one machine: network namespaces with separate addresses, on one virtual switch.

    with Network() as network:
        broker_host, worker_host = network.host(), network.host()
        with broker_host:                       # processes started here are on that host
            broker.start()
        worker_host.cut()                       # pull its cable
        worker_host.join()

The namespaces have no names and no processes: file descriptors of this process hold them, so
nothing remains, however the tests end. Namespaces share the file system, so a server on a Unix
socket is reachable from all of them. FARM_HOST, FARM_HOST_ID and separate folders make a process a
host (`Host.environment`)."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType

from tests import setns


def why_not() -> str:
    """Return the reason why this machine cannot have such hosts; empty if it can."""
    if not setns.known():
        return "network namespaces are a matter of Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if not shutil.which("ip"):
        return "the program ip (iproute2) is not installed"
    try:
        with Network() as network:
            network.host()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"this machine does not allow network namespaces: {said}"
    return ""


class Network:
    """A virtual switch and its hosts: 10.77.0.1, 10.77.0.2, ..."""

    subnet = "10.77.0.0/24"

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._switch = _Namespace()
        with self._switch:
            _ip("link", "add", "switch", "type", "bridge")
            _ip("link", "set", "switch", "up")

    def host(self) -> Host:
        """Add a connected host."""
        number = len(self.hosts) + 1
        host = Host(number, self._switch)
        self.hosts.append(host)
        return host

    def close(self) -> None:
        """Release all namespaces; each disappears when its last process has ended."""
        for host in self.hosts:
            host.namespace.close()
        self._switch.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Host:
    """One host. As a context manager it puts the calling thread and its new processes there."""

    def __init__(self, number: int, switch: _Namespace) -> None:
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self.namespace = _Namespace()
        self._switch = switch
        self._port = f"port{number}"
        with switch:
            _ip(
                "link",
                "add",
                self._port,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                self.namespace.path,
            )
            _ip("link", "set", self._port, "master", "switch", "up")
        with self.namespace:
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{self.address}/24", "dev", "eth0")
            _ip("link", "set", "eth0", "up")

    def environment(self, folder: Path) -> dict[str, str]:
        """The settings that make a process a host: its name, card ids, state and locks."""
        return {
            "FARM_HOST": self.name,
            "FARM_HOST_ID": self.name,
            "FARM_STATE_DIR": str(folder / self.name / "state"),
            "FARM_LOCK_DIR": str(folder / self.name / "locks"),
        }

    def cut(self) -> None:
        """Disconnect the host: no packets pass, and connections get no notice."""
        with self._switch:
            _ip("link", "set", self._port, "down")

    def join(self) -> None:
        """Connect the host again."""
        with self._switch:
            _ip("link", "set", self._port, "up")

    def __enter__(self) -> Host:
        self.namespace.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.namespace.__exit__(*error)


class _Namespace:
    """A network namespace, held by a file descriptor; as a context manager the calling thread is in
    it.
    """

    def __init__(self) -> None:
        made: list[int | OSError] = []

        def make() -> None:
            try:
                setns.unshare(setns.NETWORK)
                made.append(setns.own(setns.NETWORK))
            except OSError as error:
                made.append(error)

        thread = threading.Thread(
            target=make
        )  # the new thread changes its namespace; this one does not
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        self._fd = made[0]
        self._before: list[int] = []

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> None:
        before = setns.own(setns.NETWORK)
        try:
            setns.enter(self._fd, setns.NETWORK)
        except OSError:
            os.close(before)
            raise
        self._before.append(before)

    def __exit__(self, *error: object) -> None:
        setns.go_back(self._before.pop(), setns.NETWORK)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
