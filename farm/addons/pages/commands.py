"""``farm publish``: the database as pages."""

from __future__ import annotations

from pathlib import Path

from cli import output
from cli.output import doing, say


def publish(folder: Path) -> None:
    """Write the database as pages that need no server and no network: models, operators, cards."""
    from farm.addons.pages import page

    with output.open_database().read() as session:
        number = page.publish(
            session, folder, lambda name: doing(f"farm publish is working: {name}")
        )
    say(f"{number} pages written; open {folder / 'index.html'}")
