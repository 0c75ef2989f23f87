"""Removes damaged files from the compiler's cache, and the oldest ones of a cache that is too
large. The compiler makes them again.

PyTorch uses a file of its cache if it exists. A library that a full disk or a power failure has cut
off would make each compilation of its model fail. So `remove_damaged` runs before and after each
compilation. It keeps a list of the files with size and time of modification. Code that has changed
since then is removed. A file that is not in the list was written meanwhile: it is checked for
completeness."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LIST = "checked.json"
#: Suffixes of files that the compiler writes once, under a hash of their contents.
CODE = {".so", ".cubin", ".hsaco", ".py"}
ELF = {".so", ".cubin", ".hsaco"}
#: Another process may be writing a file that is younger. Unit: s.
YOUNG_S = 60.0

Stamps = dict[str, list[int]]  # path below the folder -> size in bytes, time of modification in ns


def remove_damaged(folder: Path) -> None:
    """Remove the damaged files of a cache folder, and list the others."""
    listed = _listed(folder)
    sound: Stamps = {}
    for path, status in list(cached_files(folder)):
        if path.name == LIST:
            continue
        name = path.relative_to(folder).as_posix()
        stamp = [status.st_size, status.st_mtime_ns]
        if listed.get(name) == stamp:
            sound[name] = stamp
            continue
        is_changed_code = name in listed and path.suffix in CODE
        if not is_changed_code and _is_complete(path):
            sound[name] = stamp
        elif name in listed or time.time() - status.st_mtime > YOUNG_S:
            with contextlib.suppress(OSError):
                _remove(_entry(path, folder))
    if sound != listed:
        _write_list(folder, sound)


def cached_files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files below a folder that other processes may change."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # another process has removed the file
                yield path, path.stat()


def _listed(folder: Path) -> Stamps:
    try:
        listed = json.loads((folder / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return listed if isinstance(listed, dict) else {}


def _write_list(folder: Path, sound: Stamps) -> None:
    unfinished = folder / f".{LIST}.{os.getpid()}"
    with contextlib.suppress(OSError):  # without the list, the next check looks at all files
        unfinished.write_text(json.dumps(sound), encoding="utf-8")
        unfinished.replace(folder / LIST)
    with contextlib.suppress(OSError):
        unfinished.unlink(missing_ok=True)


def _is_complete(path: Path) -> bool:
    try:
        if path.suffix in ELF:
            return _is_complete_elf(path)
        if path.suffix == ".py":
            return bool(ast.parse(path.read_bytes()).body)
        if path.suffix == ".json":
            json.loads(path.read_bytes())
    except (ValueError, SyntaxError, RecursionError):
        return False
    except OSError:
        return True  # removed meanwhile
    return True


def _is_complete_elf(path: Path) -> bool:
    """True if a library has its table of sections, which is at the end of the file."""
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 64 or not header.startswith(b"\x7fELF"):
        return False
    (sections_at,) = struct.unpack_from("<Q", header, 0x28)
    section_bytes, sections = struct.unpack_from("<HH", header, 0x3A)
    return bool(sections_at + section_bytes * sections <= size)


def limit_size(folder: Path, limit_bytes: int) -> None:
    """Remove the files that were used longest ago until the folder has at most ``limit_bytes``. The
    files of a Triton kernel are used and removed together."""
    uses: dict[Path, float] = {}
    sizes: Counter[Path] = Counter()
    for path, status in cached_files(folder):
        entry = _entry(path, folder)
        uses[entry] = max(uses.get(entry, 0.0), status.st_atime, status.st_mtime)
        sizes[entry] += status.st_size
    total = sizes.total()
    for entry in sorted(uses, key=uses.__getitem__):
        if total <= limit_bytes:
            break
        with contextlib.suppress(OSError):
            _remove(entry)
            total -= sizes[entry]


def _entry(path: Path, folder: Path) -> Path:
    """What is removed with a file: of Triton's kernels, the folder of the kernel, because its files
    refer to each other; else the file alone."""
    return path.parent if path.parent.parent == folder / "triton" else path


def _remove(entry: Path) -> None:
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink()
