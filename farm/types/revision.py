"""The git revision of a source file, by the program git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from farm.errors import UsageError


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return its output. Raises `UsageError` if git is not installed, or if
    it fails.

    The caller puts data behind ``--end-of-options`` or ``--``. Paths have no special characters.
    """
    command = ["git", "--literal-pathspecs", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        problem = f"`git {' '.join(arguments)}` failed in {folder}: {why}"
        raise UsageError(problem, "Install git, and name an existing revision.") from error
    return done.stdout.strip()


def revision_of(file: Path) -> str | None:
    """Return the commit, its time in s, and dirty or clean. None: no repository has the file, or
    git ignores it.
    """
    folder = file.absolute().parent
    try:
        if git(folder, "status", "--porcelain", "--ignored", "--", file.name).startswith("!!"):
            return None
        dirty = git(folder, "status", "--porcelain", "--untracked-files=no")
        return f"{git(folder, 'log', '-1', '--format=%H %ct')} {'dirty' if dirty else 'clean'}"
    except UsageError:
        return None
