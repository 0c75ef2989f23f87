"""The git revision of a source file, by the program git."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from farm.errors import UsageError
from farm.types.reading import Revision


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return its output. Raises `UsageError` if git is not installed, or if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise UsageError(f"`git {' '.join(arguments)}` failed in {folder}: {why}") from error
    return done.stdout.strip()


def revision_of(file: Path | None) -> Revision | None:
    """Return the revision of the repository that contains a file; None if there is none, or if git ignores the file."""
    if file is not None:
        with contextlib.suppress(UsageError):
            folder = file.absolute().parent
            if not git(folder, "status", "--porcelain", "--ignored", "--", file.name).startswith("!!"):
                commit, committed_at_s = git(folder, "log", "-1", "--format=%H %ct").split()
                dirty = bool(git(folder, "status", "--porcelain", "--untracked-files=no"))
                return Revision(commit, float(committed_at_s), dirty)
    return None
