"""The name of an embedded farm, the one that a `farm run` has for itself: jobs and claims carry it."""

from __future__ import annotations

from pathlib import Path


def name_of(host: str, pid: int, tag: str) -> str:
    """What the farm of the command in this process is called."""
    return f"{beginning(host)}{pid}:{tag}"


def beginning(host: str) -> str:
    """What the names of all embedded farms of a host begin with."""
    return f"embedded:{host}:"


def is_gone(farm: str, host: str) -> bool:
    """Whether the farm was of a command on this host that has ended; False also where that cannot be told."""
    if not farm.startswith(beginning(host)):
        return False
    pid = farm.removeprefix(beginning(host)).partition(":")[0]
    return pid.isdigit() and Path("/proc/self").exists() and not Path(f"/proc/{pid}").exists()
