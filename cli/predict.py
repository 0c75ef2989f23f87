"""``farm predict``: what was never measured, from what was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import opening
from cli.options import AsJson
from cli.output import emit, emit_json

if TYPE_CHECKING:
    from farm.prediction.dataset import Dataset

app = typer.Typer(
    help="Predict time, power and energy of operators that nobody has read, and say how well.", no_args_is_help=True
)
Card = Annotated[str, typer.Option(help="Part of the card's model. Default: the only one with readings.")]
Torch = Annotated[str, typer.Option(help="Readings of this version, e.g. 2.11. Default: those that are most.")]


def chosen(card: str, torch: str) -> Dataset:
    """The readings of one's own database, or those that come with the package."""
    from farm.report.learnt_from import dataset_of

    return opening.first_that_knows(lambda session: dataset_of(session, card, torch), lambda _: True)


@app.command()
def dataset(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="A .parquet or .csv file.")],
    card: Card = "",
    torch: Torch = "",
    as_json: AsJson = False,
) -> None:
    """Write the readings as predictors learn from them: one row a tuple."""
    from farm.report.learnt_from import write_dataset

    found = chosen(card, torch)
    write_dataset(found, target)
    if as_json:
        emit_json({"file": str(target), "rows": len(found), "key": found.key, **found.circumstances.to_json()})
    else:
        emit(f"{target}  {len(found)} tuples of {found.card.model}, torch {found.circumstances.software.torch}")
