"""Reports and studies as pages (plotly) and as image files (matplotlib), with one set of
colours.
"""

import os
from pathlib import Path

from farm.errors import UsageError

#: Colours that colour-blind people can distinguish, on white and on black (Okabe and Ito,
#: extended).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#7f6fc9")
GREY = "#9a9a9a"  # for reference lines, and for series after the last colour
SHADE = "#dbe9f6"  # for a marked range behind the data


def check_file(path: Path) -> None:
    """Check that a new file can be created at a path: raise `UsageError` if it is a folder or has
    no parent folder.
    """
    if not path.parent.is_dir():
        raise UsageError(
            f"The folder '{path.parent}' does not exist.",
            "Create it, or choose an existing folder.",
        )
    if os.path.isdir(path):  # unlike Path.is_dir, accepts a name that is too long
        raise UsageError(f"'{path}' is a folder.", "Name a file in this folder.")
