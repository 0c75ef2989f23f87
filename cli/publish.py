"""``farm publish``: the database as a folder of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli import opening
from cli.output import say


def publish(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; an earlier site there is renewed.")],
) -> None:
    """Write the whole database as pages that need no server and no network: models, operators, cards."""
    from farm.pages import site

    with opening.open_database().read() as session:
        number = site.publish(session, folder)
    say(f"{number} pages written; open {folder / 'index.html'}")
