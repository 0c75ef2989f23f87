"""JSON on disk that is there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write_whole(path: Path, data: Any) -> None:
    """Write a JSON file beside its place and move it there; its folder is made if need be.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; nothing is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    try:
        with unfinished.open("w") as file:
            json.dump(data, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
