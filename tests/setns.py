"""The calls of Linux that make and enter namespaces: what the hosts and the disks of these tests are made with."""

from __future__ import annotations

import ctypes
import os

MOUNTS = 0x00020000  # CLONE_NEWNS
NETWORK = 0x40000000  # CLONE_NEWNET
_FILES = {MOUNTS: "mnt", NETWORK: "net"}
_LIBC = ctypes.CDLL(None, use_errno=True)


def known() -> bool:
    """Whether this system has namespaces at all."""
    return hasattr(_LIBC, "setns")


def unshare(kind: int) -> None:
    """Put the calling thread into a new namespace."""
    _checked(_LIBC.unshare(kind))


def enter(descriptor: int, kind: int) -> None:
    """Put the calling thread into a namespace."""
    _checked(_LIBC.setns(descriptor, kind))


def own(kind: int) -> int:
    """A descriptor of the namespace that the calling thread is in, which keeps it alive until it is closed."""
    return os.open(f"/proc/thread-self/ns/{_FILES[kind]}", os.O_RDONLY | os.O_CLOEXEC)


def go_back(descriptor: int, kind: int) -> None:
    """Enter the namespace that `own` told of, and close the descriptor."""
    try:
        enter(descriptor, kind)
    finally:
        os.close(descriptor)


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
