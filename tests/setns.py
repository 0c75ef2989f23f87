"""The Linux system calls that create and enter namespaces, for the hosts and disks of the tests."""

from __future__ import annotations

import ctypes
import os

MOUNTS = 0x00020000  # CLONE_NEWNS
NETWORK = 0x40000000  # CLONE_NEWNET
_FILES = {MOUNTS: "mnt", NETWORK: "net"}
_LIBC = ctypes.CDLL(None, use_errno=True)


def known() -> bool:
    """True if this system has namespaces."""
    return hasattr(_LIBC, "setns")


def unshare(kind: int) -> None:
    """Put the calling thread into a new namespace."""
    _checked(_LIBC.unshare(kind))


def enter(descriptor: int, kind: int) -> None:
    """Put the calling thread into a namespace."""
    _checked(_LIBC.setns(descriptor, kind))


def own(kind: int) -> int:
    """Return a descriptor of the calling thread's namespace, which keeps the namespace alive until
    it is closed.
    """
    return os.open(f"/proc/thread-self/ns/{_FILES[kind]}", os.O_RDONLY | os.O_CLOEXEC)


def go_back(descriptor: int, kind: int) -> None:
    """Enter the namespace of a descriptor from `own`, and close the descriptor."""
    try:
        enter(descriptor, kind)
    finally:
        os.close(descriptor)


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
