"""Reports and studies as pages (plotly) and as image files (matplotlib), with one set of colours."""

import os
from pathlib import Path

from farm.errors import UsageError

#: Distinguishable with colour blindness, on white and on black (Okabe and Ito, extended).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f6fc9")
GREY = "#9a9a9a"  # all further series, and reference lines
SHADE = "#dbe9f6"  # a marked range behind the data


def check_file(path: Path) -> None:
    """Check that a path can be that of a new file.

    Raises:
        UsageError: it is a folder, or its folder does not exist.
    """
    if not path.parent.is_dir():
        raise UsageError(f"The folder '{path.parent}' does not exist.", "Create it, or choose an existing folder.")
    if os.path.isdir(path):  # unlike Path.is_dir, also of a name that is too long
        raise UsageError(f"'{path}' is a folder.", "Name a file in it.")
