"""``farm study``: the questions that the method rests on, each as a command that anyone can repeat on a card."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import opening
from cli.options import AsJson
from cli.output import emit_json, say, show
from farm.study import STUDIES, Study

if TYPE_CHECKING:
    from farm.study.performed import Performed

app = typer.Typer(
    help="Ask a card the questions that the method rests on; each study prints a table and keeps it.",
    no_args_is_help=True,
)
Picture = Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the findings (.png, .svg or .pdf).")]


def _verb(study: Study) -> Callable[..., None]:
    def verb(
        model: Annotated[str, typer.Argument(metavar="[MODEL]", help="The model whose tuples are read.")] = "resnet18",
        batch: Annotated[int | None, typer.Option("-b", "--batch", help="Batch size. Default: as in a job.")] = None,
        dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16. Default: float32.")] = None,
        card: Annotated[
            str | None, typer.Option(help="A card of this host, as in `farm run`. Default: the first.")
        ] = None,
        tuples: Annotated[int | None, typer.Option(min=1, help="Only so many of the model's heaviest tuples.")] = None,
        quick: Annotated[bool, typer.Option("--quick", help="About a minute of card time.")] = False,
        png: Picture = None,
        as_json: AsJson = False,
    ) -> None:
        perform(study, model, batch, dtype, card, tuples, quick, png, as_json)

    verb.__name__, verb.__doc__ = study.name, study.question
    return verb


for _study in STUDIES:
    app.command(_study.name)(_verb(_study))


@app.command("show")
def show_kept(
    study: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The study's id, or its beginning. Default: list all.")
    ] = None,
    png: Picture = None,
    as_json: AsJson = False,
) -> None:
    """List the studies that were made on this host, or show one again."""
    from farm.errors import UsageError
    from farm.pages import plots
    from farm.study import performed

    if png is not None:
        if study is None:
            raise UsageError("There is no study to draw.", "Name one: `farm study show ID --png FILE`.")
        plots.check_path(png)
    if study is not None:
        _give(performed.find_kept(study), png, as_json)
        return
    found = performed.kept(say)
    if as_json:
        keys = ("id", "study", "variant", "card", "quick", "created_at_s")
        emit_json({"studies": [{key: value for key, value in made.to_json().items() if key in keys} for made in found]})
    else:
        from cli import study_table

        show(study_table.kept(found))


def perform(
    study: Study,
    model: str,
    batch: int | None,
    dtype: str | None,
    card: str | None,
    tuples: int | None,
    quick: bool,
    png: Path | None,
    as_json: bool,
) -> None:
    """Choose the card, measure, show."""
    from farm.models.catalog import find
    from farm.pages import plots
    from farm.requests.partial_request import Wish, complete
    from farm.settings import settings
    from farm.store.database import Database
    from farm.study import performing
    from farm.study.laboratory import Plan

    find(model)
    if png is not None:
        plots.check_path(png)
    chosen = opening.chosen_own_cards([card] if card else [])[0]
    request = complete(Wish(model=model, batch=batch, dtype=dtype), chosen.kind, target=settings().target)
    assert request.variant is not None
    neighbours = tuple(
        other
        for other in opening.all_own_cards()
        if other.kind == chosen.kind and other.id != chosen.id and not other.refusal
    )
    plan = Plan(request.variant, quick, tuples, neighbours)
    database = Database(settings().database)
    try:
        database.upgrade()
        made = performing.perform(study, database, chosen, plan, say)
    finally:
        database.close()
    _give(made, png, as_json)


def _give(made: Performed, png: Path | None, as_json: bool) -> None:
    """Print, and draw only then: a drawing that fails costs no findings."""
    if as_json:
        emit_json(made.to_json())
    else:
        from cli import study_table

        show(study_table.table(made))
    if png is not None:
        from farm.pages import plots

        if charts := made.findings.drawable:
            plots.draw_charts(charts, png, made.title)
            say(f"Drawn to {png}")
        else:
            say(f"There is nothing to draw: {png} is not written.")
